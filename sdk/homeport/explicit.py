"""Explicit prompt caches (Anthropic, Bedrock, DashScope): marks, how far they look back, and from what size they work.

A request writes the prompt up to each of its marks and reads the longest prefix that an earlier request wrote and that
ends at most 20 blocks before one of its marks. At most 4 marks are allowed. Sources: the vendors' documentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from homeport.fingerprint import JsonValue
from homeport.prompt import Body, Prompt

MAX_MARKS = 4
LOOKBACK_BLOCKS = 20
TTL_S = {"5m": 300.0, "1h": 3600.0}

# shortest cacheable prefix in tokens; the first pattern that fits the model's name holds
_MINIMUMS: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile(pattern), tokens)
    for pattern, tokens in (
        (r"(opus|fable|mythos)-?5", 512),
        (r"haiku-?4[-.]5|opus-?4[-.][56]", 4096),
        (r"haiku-?3|3[-.]5-?haiku|3-haiku", 2048),
    )
)
_DEFAULT_MINIMUM = 1024


def minimum_tokens(model: str) -> int:
    """The shortest prefix that a model behind an explicit cache stores, in tokens."""
    return next((tokens for pattern, tokens in _MINIMUMS if pattern.search(model.lower())), _DEFAULT_MINIMUM)


@dataclass(frozen=True, slots=True)
class Mark:
    """One cache mark: on which block (counted over tools, system text and messages), where, and how long it keeps."""

    block: int
    pointer: str
    ttl_s: float


def marks(body: Body) -> list[Mark]:
    """Every mark of a body in order, those of frameworks and the automatic one (on the request itself) included."""
    found: list[Mark] = []
    last = (-1, "")
    for index, (pointer, block) in enumerate(_blocks(body)):
        last = (index, pointer)
        ttl_s = _mark_ttl(block)
        if ttl_s is not None:
            found.append(Mark(index, pointer, ttl_s))
    automatic = _ttl(body.get("cache_control"))
    if automatic is not None and last[0] >= 0 and not (found and found[-1].block == last[0]):
        found.append(Mark(*last, automatic))
    return found


def count_marks(body: Body) -> int:
    """How many marks the provider counts."""
    return len(marks(body))


def _blocks(body: Body) -> Iterator[tuple[str, JsonValue]]:
    """(pointer, block) in the order of the prompt; Bedrock's ``cachePoint`` counts as a mark on the block before it."""
    pending: tuple[str, JsonValue] | None = None
    for pointer, block in _raw_blocks(body):
        if isinstance(block, dict) and "cachePoint" in block:
            if pending is not None:
                pending = (pending[0], {"cache_control": block["cachePoint"]})
            continue
        if pending is not None:
            yield pending
        pending = (pointer, block)
    if pending is not None:
        yield pending


def _raw_blocks(body: Body) -> Iterator[tuple[str, JsonValue]]:
    config = body.get("toolConfig")
    yield from _items(body.get("tools"), "/tools")
    yield from _items(config.get("tools") if isinstance(config, dict) else None, "/toolConfig/tools")
    yield from _items(body.get("system"), "/system")
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            yield f"/messages/{index}", message
            continue
        content = list(_items(message.get("content"), f"/messages/{index}/content"))
        if "cache_control" in message and content:  # some gateways take the mark on the message
            content[-1] = (content[-1][0], {"cache_control": message["cache_control"]})
        yield from content
        yield from _items(message.get("tool_calls"), f"/messages/{index}/tool_calls")


def _items(value: JsonValue, pointer: str) -> Iterator[tuple[str, JsonValue]]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield f"{pointer}/{index}", item
    elif value:
        yield pointer, value


def _mark_ttl(block: JsonValue) -> float | None:
    if not isinstance(block, dict):
        return None
    function = block.get("function")
    inner = function.get("cache_control") if isinstance(function, dict) else None
    return _ttl(block.get("cache_control") or inner)


def _ttl(control: JsonValue) -> float | None:
    if not isinstance(control, dict):
        return None
    ttl = control.get("ttl")
    return TTL_S.get(ttl, TTL_S["5m"]) if isinstance(ttl, str) else TTL_S["5m"]


@dataclass(frozen=True, slots=True)
class Reach:
    """What a request can read of what the one before wrote, in characters of the common prompt.

    ``written``: up to where the earlier request wrote; ``readable``: up to where this request's marks find it;
    ``earlier``: the entry before that, which is read when the readable one is gone (0: none); ``too_far``: the mark
    that would find the rest if it looked back further; ``ttl_s``: how long the readable entry lives.
    """

    written: int
    readable: int
    earlier: int
    too_far: Mark | None
    ttl_s: float


def reach(before: Prompt, after: Prompt) -> Reach | None:
    """None when either request has no mark."""
    old, new = marks(before.body), marks(after.body)
    if not old or not new:
        return None
    readable = [mark for mark in old if any(0 <= reader.block - mark.block <= LOOKBACK_BLOCKS for reader in new)]
    furthest = old[-1]
    too_far = None
    if furthest not in readable:
        too_far = next((reader for reader in new if reader.block - furthest.block > LOOKBACK_BLOCKS), None)
    best = readable[-1] if readable else None
    return Reach(
        written=before.end_of(furthest.pointer),
        readable=before.end_of(best.pointer) if best else 0,
        earlier=before.end_of(readable[-2].pointer) if len(readable) > 1 else 0,
        too_far=too_far,
        ttl_s=(best or furthest).ttl_s,
    )
