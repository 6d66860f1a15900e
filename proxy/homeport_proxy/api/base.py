"""What the data plane must know of a client API: where a stream's first token is, how it ends, how its usage reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from homeport.usage import Usage
from homeport_proxy.exchange import ApiName, TokenUsage
from homeport_proxy.splice import edit, edit_at, raw_members
from homeport_proxy.sse import data_of, event_of

INTERNAL_MEMBERS = frozenset(
    {
        "kv_transfer_params",
        "disaggregated_params",
        "ec_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
    }
)
"""Engines' own members: never taken from a client, never shown to one."""


def is_internal(member: str) -> bool:
    """Whether a body member is the engines' own."""
    return member in INTERNAL_MEMBERS or member.startswith("bootstrap_")


def holds_internal(body: bytes) -> bool:
    """Whether the bytes may hold an engine's own member (a quick look before a careful one)."""
    return b"_params" in body or b"bootstrap_" in body


@dataclass(frozen=True, slots=True)
class ClientApi:
    """One API. ``has_token(event, data)`` says whether an SSE frame carries generated output (the stream's end
    counts); ``ends(event, data)`` whether it is the frame that ends the stream; ``fails(event, data)`` whether it is
    the engine's own report of a failure; ``fix_usage(data, cached)`` puts the true cached tokens into a JSON document
    or frame that carries usage (None: not known, so none is claimed), and ``read_usage(data)`` takes the counts out
    of one."""

    name: ApiName
    generates: bool
    has_token: Callable[[bytes, bytes], bool]
    ends: Callable[[bytes, bytes], bool]
    fails: Callable[[bytes, bytes], bool]
    fix_usage: Callable[[bytes, int | None], bytes]
    read_usage: Callable[[bytes], TokenUsage | None]
    usage_in_stream_options: bool = False
    """Streams report usage only when ``stream_options.include_usage`` asks for it."""


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object, or an empty one when the bytes are something else (never raises)."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def frame_parts(frame: bytes) -> tuple[bytes, bytes]:
    """(event, data) of an SSE frame."""
    return event_of(frame), data_of(frame)


def without_internal(document: bytes) -> bytes:
    """A JSON object without the engines' own members; any other bytes as they are."""
    try:
        raws = raw_members(document)
    except ValueError:
        return document
    drop = [name for name in raws if is_internal(name)]
    return edit(document, {}, drop, raws) if drop else document


def fix_inclusive(
    data: bytes, cached: int | None, path: tuple[str, ...], details: str = "prompt_tokens_details"
) -> bytes:
    """OpenAI's counting: cached tokens are a part of the prompt tokens and stand in ``details``."""
    usage = at(data, path)
    if usage is None:
        return data
    known = usage.get(details)
    if isinstance(known, Mapping):
        if known.get("cached_tokens") == cached:
            return data
        return edit_at(data, (*path, details), {"cached_tokens": cached})
    return data if cached is None else edit_at(data, path, {details: {"cached_tokens": cached}})


def fix_additive(data: bytes, cached: int | None, path: tuple[str, ...]) -> bytes:
    """Anthropic's counting: ``input_tokens`` leaves out what was read from the cache, so the sum stays the prompt."""
    usage = at(data, path)
    if usage is None or not isinstance(usage.get("input_tokens"), int):
        return data
    read = usage.get("cache_read_input_tokens") or 0
    prompt = usage["input_tokens"] + read
    if cached is None:
        return edit_at(data, path, {"input_tokens": prompt}, {"cache_read_input_tokens"}) if read else data
    cached = min(cached, prompt)
    if read == cached and "cache_read_input_tokens" in usage:
        return data
    return edit_at(data, path, {"input_tokens": prompt - cached, "cache_read_input_tokens": cached})


_COUNTED = frozenset(
    {
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
        "prompt_tokens_details",
        "completion_tokens_details",
        "input_tokens",
        "output_tokens",
        "input_tokens_details",
        "output_tokens_details",
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
    }
)


def inclusive_usage(usage: Mapping[str, Any], prompt: str, output: str, details: str) -> TokenUsage:
    """Counts of a usage object in OpenAI's counting; a dialect with members of its own goes the SDK's long way."""
    if not _COUNTED.issuperset(usage):
        known = Usage.parse({"usage": usage})
        return TokenUsage(known.input_tokens, known.cached_tokens, known.output_tokens)
    found = usage.get(details)
    cached = found.get("cached_tokens") if isinstance(found, dict) else None
    return TokenUsage(count(usage.get(prompt)), count(cached), count(usage.get(output)))


def additive_usage(usage: Mapping[str, Any]) -> TokenUsage:
    """Counts of a usage object in Anthropic's counting: what was read from or written to the cache is added."""
    fresh, read = count(usage.get("input_tokens")), count(usage.get("cache_read_input_tokens"))
    written = count(usage.get("cache_creation_input_tokens")) or 0
    prompt = None if fresh is None else fresh + (read or 0) + written
    return TokenUsage(prompt, read, count(usage.get("output_tokens")))


def count(value: object) -> int | None:
    """A token count, or None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def no_usage(data: bytes) -> TokenUsage | None:
    """For APIs that report none."""
    return None


class _WithUsage(msgspec.Struct):
    usage: Any = None


_WITH_USAGE = msgspec.json.Decoder(_WithUsage)


def usage_of(data: bytes) -> Mapping[str, Any] | None:
    """The object ``usage`` at the top of a document; the rest of it is not decoded."""
    try:
        usage = _WITH_USAGE.decode(data).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return usage if isinstance(usage, dict) else None


def at(data: bytes, *paths: tuple[str, ...]) -> Mapping[str, Any] | None:
    """The object at the first of these paths that leads to one."""
    document = parse(data)
    for path in paths:
        node: Any = document
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        if isinstance(node, dict):
            return node
    return None


def never(event: bytes, data: bytes) -> bool:
    """For APIs without a stream of their own."""
    return False


def unchanged(data: bytes, cached: int | None) -> bytes:
    """For APIs whose usage holds no cached tokens."""
    return data
