"""OpenTelemetry attributes by the GenAI conventions, on the span that is current when a request is made, if any."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Protocol, cast

from homeport.failures import failed
from homeport.usage import Usage


class _Span(Protocol):
    def is_recording(self) -> bool: ...

    def set_attribute(self, key: str, value: str | int) -> None: ...


def span_now() -> _Span | None:
    """The recording span of this context; None without OpenTelemetry or outside a trace."""
    trace = sys.modules.get("opentelemetry.trace")  # a program that traces has imported it
    if trace is None:
        return None
    span = cast("_Span", trace.get_current_span())
    return span if span.is_recording() else None


def usage_attributes(span: object, usage: Usage, conversation: str, headers: Mapping[str, str]) -> None:
    """Put usage and route on a span; what is not reported is left out. Harmless on a span that has ended."""
    if span is None:
        return
    try:
        recording = cast("_Span", span)
        if not recording.is_recording():
            return
        values: dict[str, str | int | None] = {
            "gen_ai.conversation.id": conversation,
            "gen_ai.usage.input_tokens": usage.input_tokens,
            "gen_ai.usage.output_tokens": usage.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.cache_creation.input_tokens": usage.cache_write_tokens,
            "homeport.backend": headers.get("x-homeport-backend"),
            "homeport.decision": headers.get("x-homeport-decision"),
        }
        for name, value in values.items():
            if value is not None:
                recording.set_attribute(name, value)
    except Exception as error:
        failed("trace", error)
