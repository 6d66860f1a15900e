"""OpenAI's chat completions."""

from __future__ import annotations

from homeport_proxy.api.base import ClientApi, fix_inclusive, inclusive_usage, parse, usage_of
from homeport_proxy.exchange import TokenUsage

_SPEAKS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call", "audio")


def has_token(event: bytes, data: bytes) -> bool:
    """A delta with content; the first one, which only names the role, is no token."""
    if data == b"[DONE]":
        return True
    for choice in parse(data).get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("finish_reason") or any(delta.get(part) for part in _SPEAKS):
            return True
    return False


def ends(event: bytes, data: bytes) -> bool:
    """Only ``[DONE]`` ends the stream."""
    return data == b"[DONE]"


def fails(event: bytes, data: bytes) -> bool:
    """An error object in place of choices: the status line, 200, was out before the engine failed."""
    fields = parse(data)
    return bool(fields.get("error")) and not fields.get("choices")


def fix_usage(data: bytes, cached: int | None) -> bytes:
    """True cached tokens in ``usage.prompt_tokens_details``."""
    return fix_inclusive(data, cached, ("usage",))


def read_usage(data: bytes) -> TokenUsage | None:
    """The counts of an answer, or of a stream's usage chunk."""
    usage = usage_of(data)
    return inclusive_usage(usage, "prompt_tokens", "completion_tokens", "prompt_tokens_details") if usage else None


CHAT = ClientApi("chat", True, has_token, ends, fails, fix_usage, read_usage, usage_in_stream_options=True)
