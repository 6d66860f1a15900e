"""Reading trace files: agentic block traces, Mooncake's, recorded requests. Plain or gzip, one JSON object a line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from homeport_proxy.simulate.workload import Call, Conversation, Lane, Workload

_MASK = (1 << 63) - 1


class TraceError(ValueError):
    """A trace that cannot be read; the text names file, line and field."""


class BlockRequest(msgspec.Struct):
    """A request of an agentic block trace (seconds, tokens; ``blocks`` are runs ``[first id, count]``)."""

    input_tokens: int = msgspec.field(name="in")
    output_tokens: int = msgspec.field(name="out")
    blocks: list[tuple[int, int]]
    t: float = 0.0
    lane: int = 0
    think: float | None = None
    api: float | None = None


class BlockSession(msgspec.Struct):
    """A session of an agentic block trace."""

    session: str
    block_size: int
    requests: list[BlockRequest]
    tool_tokens: int = 0
    system_tokens: int = 0


class MooncakeRequest(msgspec.Struct):
    """A request of a Mooncake trace (milliseconds, tokens; ``hash_ids`` name chained 512-token blocks globally)."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


MOONCAKE_BLOCK_TOKENS = 512


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered non-empty lines of a plain or gzip file. Raises :class:`TraceError`."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{path}: {error}") from error


def sniff(path: Path) -> str:
    """Which kind of trace a file is: ``blocks``, ``mooncake``, ``recorded`` or ``messages``."""
    for number, line in lines(path):
        try:
            first = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: not JSON: {error}") from error
        if isinstance(first, dict):
            if "requests" in first and "block_size" in first:
                return "blocks"
            if "hash_ids" in first:
                return "mooncake"
            if "body" in first:
                return "recorded"
            if "messages" in first:
                return "messages"
        raise TraceError(
            f"{path}, line {number}: not a trace; expected agentic sessions (`requests`, `block_size`), Mooncake "
            "requests (`hash_ids`), recorded requests (`body`) or conversations (`messages`)"
        )
    raise TraceError(f"{path}: empty")


def load(
    path: Path,
    *,
    block_tokens: int = 512,
    think_cap_s: float = 600,
    max_start_tokens: int = 150_000,
    max_context_tokens: int = 200_000,
    copies: int = 1,
) -> Workload:
    """Read any trace. Sizes in tokens; see the cluster file's ``sessions`` for the cuts on agentic sessions.

    ``copies``: agentic sessions are read so many times, each copy with content of its own but for the shared head.
    """
    kind = sniff(path)
    if kind == "mooncake":
        return _mooncake(path)
    if kind == "blocks":
        return _blocks(path, block_tokens, think_cap_s, max_start_tokens, max_context_tokens, copies)
    from homeport_proxy.simulate.recorded import load_recorded

    return load_recorded(path, kind, block_tokens, think_cap_s)


def _mooncake(path: Path) -> Workload:
    decoder = msgspec.json.Decoder(MooncakeRequest)
    sessions: dict[int, Conversation] = {}
    conversations: list[Conversation] = []
    for number, line in lines(path):
        try:
            request = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        full = request.hash_ids[: request.input_length // MOONCAKE_BLOCK_TOKENS]
        call = Call(request.input_length, request.output_length, tuple(full), request.timestamp / 1000)
        conversation = _continued(sessions, request.hash_ids)
        if conversation is None:
            conversation = Conversation(f"s{len(conversations)}", [Lane(f"s{len(conversations)}")])
            conversations.append(conversation)
        conversation.lanes[0].calls.append(call)
        # the prompt's last full block names the conversation from now on
        if len(full) > 1:
            sessions[full[-1]] = conversation
    return Workload(conversations, closed=False, block_tokens=MOONCAKE_BLOCK_TOKENS)


def _continued(sessions: dict[int, Conversation], ids: Sequence[int]) -> Conversation | None:
    """The conversation whose last prompt this one continues: the deepest block that ended a prompt."""
    for block in reversed(ids):
        found = sessions.get(block)
        if found is not None:
            return found
    return None


def _blocks(
    path: Path, block_tokens: int, think_cap_s: float, max_start_tokens: int, max_context_tokens: int, copies: int
) -> Workload:
    decoder = msgspec.json.Decoder(BlockSession)
    conversations = []
    for number, line in lines(path):
        try:
            session = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        if block_tokens % session.block_size:
            raise TraceError(
                f"{path}, line {number}: blocks of {session.block_size} tokens do not make up {block_tokens}; "
                "set block_tokens of the cluster file to a multiple"
            )
        if not session.requests or session.requests[0].input_tokens > max_start_tokens:
            continue
        name = session.session
        for copy in range(copies):
            session.session = f"{name}#{copy}" if copy else name
            conversations.append(_conversation(session, block_tokens, think_cap_s, max_context_tokens))
    return Workload(conversations, closed=True, block_tokens=block_tokens)


def _conversation(
    session: BlockSession, block_tokens: int, think_cap_s: float, max_context_tokens: int
) -> Conversation:
    group = block_tokens // session.block_size
    digests = _Digests(session, group)
    lanes: dict[int, Lane] = {}
    ended: set[int] = set()
    ends: list[float] = []
    for request in session.requests:
        if request.lane in ended:
            continue
        if request.input_tokens > max_context_tokens:
            ended.add(request.lane)  # it outgrew the model's window
            continue
        think_s = min(request.think or 0.0, think_cap_s)
        lane = lanes.get(request.lane)
        if lane is None:
            name = session.session if request.lane == 0 else f"{session.session}/{request.lane}"
            lane = lanes[request.lane] = Lane(name)
            if request.lane != 0:
                before = [index for index, end in enumerate(ends) if end <= request.t]
                if before:
                    lane.after = before[-1]
                    think_s = min(max(request.t - ends[before[-1]], 0.0), think_cap_s)
                else:
                    think_s = min(max(request.t, 0.0), think_cap_s)
        keys = digests.keys(request.lane, request.blocks, request.input_tokens)
        lane.calls.append(Call(request.input_tokens, max(1, request.output_tokens), keys, think_s))
        if request.lane == 0:
            ends.append(request.t + (request.api or 0.0))
    ordered = [lanes[number] for number in sorted(lanes)]
    return Conversation(session.session, ordered)


class _Digests:
    """Chained digests of a session's prompts, new work only for what a lane's prompt did not share with its last."""

    def __init__(self, session: BlockSession, group: int) -> None:
        self._group = group
        self._block_tokens = session.block_size
        shared = (session.tool_tokens + session.system_tokens) // session.block_size
        first = _expand(session.requests[0].blocks)[:shared]
        head = hash((session.tool_tokens, session.system_tokens)) & _MASK
        # sessions with the same tools and system prompt share its blocks; all else is the session's own
        self._shared = {block: hash((head, index)) & _MASK for index, block in enumerate(first)}
        self._own = hash(tuple(session.session.encode())) & _MASK
        self._last: dict[int, tuple[list[int], tuple[int, ...]]] = {}

    def keys(self, lane: int, runs: Sequence[tuple[int, int]], tokens: int) -> tuple[int, ...]:
        ids = _expand(runs)
        group = self._group
        whole = min(len(ids) // group, tokens // (group * self._block_tokens))
        ids = ids[: whole * group]
        before, known = self._last.get(lane, ([], ()))
        same = _common(before, ids) // group
        keys = list(known[:same])
        parent = keys[-1] if keys else 1
        for position in range(same, whole):
            blocks = tuple(
                self._shared.get(block) or (self._own, block)
                for block in ids[position * group : (position + 1) * group]
            )
            parent = hash((parent, blocks)) & _MASK
            keys.append(parent)
        result = tuple(keys)
        self._last[lane] = (ids, result)
        return result


def _expand(runs: Sequence[tuple[int, int]]) -> list[int]:
    ids: list[int] = []
    for first, count in runs:
        ids.extend(range(first, first + count))
    return ids


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix (binary search over slices: list equality runs in C)."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high:
        middle = (low + high) // 2
        if left[low : middle + 1] == right[low : middle + 1]:
            low = middle + 1
        else:
            high = middle
    return low
