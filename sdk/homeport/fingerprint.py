"""A request as segments in the order the model sees them, each with a chained digest and a size."""

from __future__ import annotations

from typing import Literal, TypeAlias

Api = Literal["chat", "completions", "responses", "messages"]
"""The client APIs whose prompts Homeport reads."""

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
