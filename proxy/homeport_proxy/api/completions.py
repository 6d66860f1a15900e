"""OpenAI's text completions."""

from __future__ import annotations

from homeport_proxy.api.base import ClientApi, parse
from homeport_proxy.api.chat import ends, fails, fix_usage, read_usage


def has_token(event: bytes, data: bytes) -> bool:
    """A choice with text."""
    if data == b"[DONE]":
        return True
    return any(choice.get("text") or choice.get("finish_reason") for choice in parse(data).get("choices") or ())


COMPLETIONS = ClientApi(
    "completions", True, has_token, ends, fails, fix_usage, read_usage, usage_in_stream_options=True
)
