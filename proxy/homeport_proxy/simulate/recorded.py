"""Traces with text: recorded requests and whole conversations, as calls whose blocks are digests of canonical text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from homeport.fingerprint import Api, JsonValue, text_blocks
from homeport_proxy.simulate.traces import TraceError, lines
from homeport_proxy.simulate.workload import Call, Conversation, Lane, Workload

CHARS_PER_TOKEN = 4
"""Without a tokenizer; block sizes in tokens become characters by it."""

_DEFAULT_OUTPUT_TOKENS = 200
_DEFAULT_THINK_S = 2.0
_APIS: tuple[tuple[str, Api], ...] = (
    ("/chat/completions", "chat"),
    ("/completions", "completions"),
    ("/responses", "responses"),
    ("/messages", "messages"),
)


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One request with its body; ``think_s`` after the answer before it in its session."""

    session: str
    api: Api
    body: Mapping[str, JsonValue]
    think_s: float
    output_tokens: int
    prompt_tokens: int | None = None


def read_requests(path: Path, kind: str, think_cap_s: float) -> Iterator[TextRequest | None]:
    """Requests of a ``recorded`` or ``messages`` trace, in file order; None for one that was answered with an error.

    Raises :class:`TraceError`.
    """
    ends: dict[str, float] = {}
    for number, line in lines(path):
        try:
            item = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(item, dict):
            raise TraceError(f"{path}, line {number}: a line is a JSON object")
        if kind == "messages":
            yield from _turns(item, f"{path}, line {number}")
        elif _refused(item):
            yield None
        else:
            yield _recorded(item, f"{path}, line {number}", ends, think_cap_s)


def load_recorded(path: Path, kind: str, block_tokens: int, think_cap_s: float) -> Workload:
    """A trace with text as a closed-loop workload."""
    conversations: dict[str, Conversation] = {}
    block_chars = block_tokens * CHARS_PER_TOKEN
    left_out = 0
    for request in read_requests(path, kind, think_cap_s):
        if request is None:
            left_out += 1
            continue
        keys, chars = _keys(request, block_chars)
        tokens = request.prompt_tokens or max(1, chars // CHARS_PER_TOKEN)
        call = Call(tokens, request.output_tokens, keys[: tokens // block_tokens], request.think_s)
        conversation = conversations.get(request.session)
        if conversation is None:
            conversation = conversations[request.session] = Conversation(request.session, [Lane(request.session)])
        conversation.lanes[0].calls.append(call)
    if not conversations:
        why = ": all in it were answered with an error" if left_out else ""
        raise TraceError(f"{path}: holds no request to replay{why}")
    return Workload(list(conversations.values()), closed=True, block_tokens=block_tokens, left_out=left_out)


def _refused(item: Mapping[str, JsonValue]) -> bool:
    """Whether a recorded request was answered with an error: no engine computed it."""
    status = item.get("status")
    return isinstance(status, int) and status >= 400


def _turns(item: dict[str, JsonValue], where: str) -> Iterator[TextRequest]:
    """The requests that led to each assistant message of a conversation."""
    messages = item.get("messages")
    if not isinstance(messages, list):
        raise TraceError(f"{where}, messages: must be a list")
    session = str(item.get("session_id") or item.get("session") or where)
    for position, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "assistant" and position:
            answer = len(json.dumps(message)) // CHARS_PER_TOKEN
            body: dict[str, JsonValue] = {"messages": messages[:position]}
            if item.get("tools"):
                body["tools"] = item["tools"]
            yield TextRequest(session, "chat", body, _DEFAULT_THINK_S, max(1, answer))


def _recorded(item: dict[str, JsonValue], where: str, ends: dict[str, float], think_cap_s: float) -> TextRequest:
    body = item.get("body")
    if not isinstance(body, dict):
        raise TraceError(f"{where}, body: must be an object")
    session = str(item.get("session") or where)
    start = item.get("ts")
    elapsed = item.get("elapsed_s") or item.get("ttft_s")
    think_s = _DEFAULT_THINK_S
    if isinstance(start, int | float):
        if session in ends:
            think_s = min(max(start - ends[session], 0.0), think_cap_s)
        ends[session] = start + (elapsed if isinstance(elapsed, int | float) else 0.0)
    usage = item.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    output = _count(counts, "output_tokens", "completion_tokens")
    prompt = _count(counts, "input_tokens", "prompt_tokens")
    url = str(item.get("url") or "")
    path = url.split("?")[0]
    api: Api = next((name for ending, name in _APIS if path.endswith(ending)), "chat")
    return TextRequest(session, api, body, think_s, output or _DEFAULT_OUTPUT_TOKENS, prompt)


def _count(counts: Mapping[str, JsonValue], *names: str) -> int | None:
    for name in names:
        value = counts.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _keys(request: TextRequest, block_chars: int) -> tuple[list[int], int]:
    """Chained block digests and characters of a prompt, with its text or recorded as digests without it."""
    units = list(_units(cast("JsonValue", dict(request.body))))
    chars = sum(size for _, size in units)
    if not any(digest for digest, _ in units):
        return [key >> 1 for key in text_blocks(request.api, request.body, block_chars)], chars
    keys: list[int] = []
    chain, filled = hashlib.blake2b(digest_size=8), 0
    for digest, size in units:
        chain.update(digest or b"-")
        filled += size
        while filled >= block_chars:
            keys.append(int.from_bytes(chain.digest(), "big") >> 1)
            chain.update(b"|")
            filled -= block_chars
    return keys, chars


def _units(value: JsonValue) -> Iterator[tuple[bytes, int]]:
    """(digest or empty, characters) of a body's strings, in order; a recorded body names its text by digests."""
    if isinstance(value, str):
        yield b"", len(value)
    elif isinstance(value, list):
        for item in value:
            yield from _units(item)
    elif isinstance(value, dict):
        blocks, chars = value.get("$blocks"), value.get("chars")
        if isinstance(blocks, list) and isinstance(chars, int):
            for position, block in enumerate(blocks):
                yield str(block).encode(), min(256, chars - 256 * position)
            return
        for item in value.values():
            yield from _units(item)
