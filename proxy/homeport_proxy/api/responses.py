"""OpenAI's Responses."""

from __future__ import annotations

from homeport_proxy.api.base import ClientApi, at, fix_inclusive, inclusive_usage, parse
from homeport_proxy.exchange import TokenUsage

_WHOLE = ("response.completed", "response.incomplete", "response.cancelled")
_FAILED = ("response.failed", "error")


def _kind(event: bytes, data: bytes) -> str:
    return event.decode("latin-1") or str(parse(data).get("type", ""))


def has_token(event: bytes, data: bytes) -> bool:
    """A delta, or the end; ``response.created`` and ``in_progress`` come before the prefill."""
    kind = _kind(event, data)
    return kind.endswith(".delta") or kind in _WHOLE


def ends(event: bytes, data: bytes) -> bool:
    """The final event of a response."""
    return _kind(event, data) in (*_WHOLE, *_FAILED) or data == b"[DONE]"


def fails(event: bytes, data: bytes) -> bool:
    """A failed response, or an error in place of one."""
    return _kind(event, data) in _FAILED


def fix_usage(data: bytes, cached: int | None) -> bytes:
    """True cached tokens in ``usage.input_tokens_details``, of the answer itself or of the event's ``response``."""
    fixed = fix_inclusive(data, cached, ("response", "usage"), "input_tokens_details")
    return fixed if fixed is not data else fix_inclusive(data, cached, ("usage",), "input_tokens_details")


def read_usage(data: bytes) -> TokenUsage | None:
    """The counts of an answer, or of the event that carries it."""
    usage = at(data, ("response", "usage"), ("usage",))
    return inclusive_usage(usage, "input_tokens", "output_tokens", "input_tokens_details") if usage else None


RESPONSES = ClientApi("responses", True, has_token, ends, fails, fix_usage, read_usage)
