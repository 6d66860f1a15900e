"""Anthropic's messages."""

from __future__ import annotations

from homeport_proxy.api.base import ClientApi, additive_usage, at, fix_additive, parse
from homeport_proxy.exchange import TokenUsage


def _kind(event: bytes, data: bytes) -> str:
    return event.decode("latin-1") or str(parse(data).get("type", ""))


def has_token(event: bytes, data: bytes) -> bool:
    """A content delta, or what comes after the last; ``message_start`` and ``ping`` are no tokens."""
    return _kind(event, data) in ("content_block_delta", "message_delta", "message_stop")


def ends(event: bytes, data: bytes) -> bool:
    """``message_stop``, or the engine's own error."""
    return _kind(event, data) in ("message_stop", "error")


def fails(event: bytes, data: bytes) -> bool:
    """The API's own error event."""
    return _kind(event, data) == "error"


def fix_usage(data: bytes, cached: int | None) -> bytes:
    """True ``cache_read_input_tokens`` in the answer, in ``message_start`` or in ``message_delta``."""
    fixed = fix_additive(data, cached, ("message", "usage"))
    return fixed if fixed is not data else fix_additive(data, cached, ("usage",))


def read_usage(data: bytes) -> TokenUsage | None:
    """The counts of an answer, of ``message_start``, or of ``message_delta``."""
    usage = at(data, ("message", "usage"), ("usage",))
    return additive_usage(usage) if usage else None


MESSAGES = ClientApi("messages", True, has_token, ends, fails, fix_usage, read_usage)
