"""OpenAI's Responses."""

from __future__ import annotations

from homeport_proxy.api.base import ClientApi, fix_inclusive, parse

_LAST = ("response.completed", "response.incomplete", "response.failed", "response.cancelled", "error")


def _kind(event: bytes, data: bytes) -> str:
    return event.decode("latin-1") or str(parse(data).get("type", ""))


def has_token(event: bytes, data: bytes) -> bool:
    """A delta, or the end; ``response.created`` and ``in_progress`` come before the prefill."""
    kind = _kind(event, data)
    return kind.endswith(".delta") or kind in _LAST


def ends(event: bytes, data: bytes) -> bool:
    """The final event of a response."""
    return _kind(event, data) in _LAST or data == b"[DONE]"


def fix_usage(data: bytes, cached: int | None) -> bytes:
    """True cached tokens in ``usage.input_tokens_details``, of the answer itself or of the event's ``response``."""
    fixed = fix_inclusive(data, cached, ("response", "usage"), "input_tokens_details")
    return fixed if fixed is not data else fix_inclusive(data, cached, ("usage",), "input_tokens_details")


RESPONSES = ClientApi("responses", True, has_token, ends, fix_usage)
