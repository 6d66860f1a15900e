"""Any server with OpenAI's HTTP surface: no hand-off, no telemetry, nothing assumed."""

from __future__ import annotations

from homeport_engines.base import EngineKind

OPENAI = EngineKind(name="openai", transfers={}, health_path="/v1/models", metrics_path=None)
