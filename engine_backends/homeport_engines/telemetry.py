"""Engine telemetry by engine family."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from homeport_engines.base import EngineStats
from homeport_engines.sglang import telemetry as sglang
from homeport_engines.vllm import telemetry as vllm

READERS: Mapping[str, Callable[[str], Mapping[int, EngineStats]]] = {"vllm": vllm.read, "sglang": sglang.read}


def read(engine: str, text: str) -> Mapping[int, EngineStats]:
    """An engine's metrics text as stats by data-parallel rank. Raises ValueError when it cannot be understood."""
    reader = READERS.get(engine)
    if reader is None:
        raise ValueError(f"nothing is known of the metrics of {engine}")
    return reader(text)
