"""Prefix keys of a growing conversation, where a turn costs only what is new.

A session's messages are compared by the digests of their raw bytes; what stands unchanged since the last request is
neither decoded nor rendered again. The result is always that of ``fingerprint.text_blocks``.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
from xxhash import xxh3_64_intdigest

from homeport import fingerprint
from homeport.fingerprint import Api, JsonValue
from homeport_proxy.document import Document, decoded

LAST_MESSAGES = 4
"""How many of the newest messages may change (moved cache marks) without starting over."""
KEPT_BYTES = 64 * 1024 * 1024
_HEAD = (
    "model",
    "system",
    "instructions",
    "tools",
    "functions",
    "chat_template",
    "chat_template_kwargs",
    "reasoning",
    "reasoning_effort",
)


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where the text stood after so many messages: whole blocks, and the characters after the last of them."""

    messages: int
    blocks: int
    rest: str


@dataclass(slots=True)
class _Known:
    head: int
    messages: array[int]
    blocks: array[int]
    marks: list[_Mark]

    @property
    def size_bytes(self) -> int:
        return 8 * (len(self.messages) + len(self.blocks)) + 2_600 * LAST_MESSAGES


class Prefixes:
    """Remembers sessions up to :data:`KEPT_BYTES`; the longest unused makes room."""

    def __init__(self, block_chars: int, kept_bytes: int = KEPT_BYTES) -> None:
        self._block_chars = block_chars
        self._kept_bytes = kept_bytes
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self.size_bytes = 0

    def blocks(self, api: Api, session: str, body: Mapping[str, JsonValue]) -> Sequence[int]:
        """Chained digests of the canonical text, as ``fingerprint.text_blocks``. Raises what that raises."""
        name = "input" if api == "responses" else "messages"
        items = body.items_of(name) if isinstance(body, Document) and api != "completions" else None
        layout = fingerprint.resolve("default", api, body)
        if items is None or layout.gathers_system or layout.order not in ("tools_first", "system_first"):
            return fingerprint.text_blocks(api, body, self._block_chars)
        assert isinstance(body, Document)
        hashes = array("Q", [xxh3_64_intdigest(memoryview(item)) for item in items])
        head = xxh3_64_intdigest(b"\0".join(name.encode() + bytes(body.raws[name]) for name in _HEAD if name in body))
        turn = _Turn(api, name, body, items, layout.renders_call_ids is True, self._block_chars)
        known = self._known.pop(session, None)
        if known is not None:
            self.size_bytes -= known.size_bytes
        mark = _last_mark(known, hashes) if known is not None and known.head == head else None
        if known is None or mark is None or not turn.may_follow(mark.messages):
            known = _Known(head, hashes, array("Q"), [])
            turn.begin(known)
        else:
            known.messages = hashes
            turn.go_on(known, mark)
        self._keep(session, known)
        return known.blocks

    def _keep(self, session: str, known: _Known) -> None:
        self._known[session] = known
        self.size_bytes += known.size_bytes
        while self.size_bytes > self._kept_bytes and len(self._known) > 1:
            _, gone = self._known.popitem(last=False)
            self.size_bytes -= gone.size_bytes


class _Turn:
    """One request being followed."""

    def __init__(
        self, api: Api, name: str, body: Document, items: Sequence[msgspec.Raw], ids: bool, block_chars: int
    ) -> None:
        self._api = api
        self._name = name
        self._body = body
        self._items = items
        self._ids = ids
        self._block_chars = block_chars

    def may_follow(self, messages: int) -> bool:
        """Whether the messages after these are rendered behind them: system text at the head may not grow."""
        return messages >= len(self._items) or not _is_system(decoded(self._items[messages]))

    def begin(self, known: _Known) -> None:
        """Everything at once but the newest messages, which are marked one by one."""
        first = max(0, len(self._items) - LAST_MESSAGES)
        while first < len(self._items) and not self.may_follow(first):
            first += 1
        whole = {name: self._body[name] for name in self._body if name != self._name}
        whole[self._name] = [decoded(item) for item in islice(self._items, first)]
        self._add(known, _Mark(0, 0, ""), self._text(whole), first)
        self._rest(known, first)

    def go_on(self, known: _Known, mark: _Mark) -> None:
        """From a mark of the last request."""
        del known.blocks[mark.blocks :]
        known.marks = [old for old in known.marks if old.messages <= mark.messages]
        self._rest(known, mark.messages)

    def _rest(self, known: _Known, first: int) -> None:
        for index in range(first, len(self._items)):
            message: dict[str, JsonValue] = {self._name: [decoded(self._items[index])]}
            if "model" in self._body:
                message["model"] = self._body["model"]
            self._add(known, known.marks[-1], self._text(message), index + 1)
        known.marks = known.marks[-LAST_MESSAGES - 1 :]

    def _text(self, body: Mapping[str, JsonValue]) -> str:
        return "".join([piece.text for piece in fingerprint.render(self._api, body, ids=self._ids)])

    def _add(self, known: _Known, before: _Mark, text: str, messages: int) -> None:
        text = before.rest + text
        found = fingerprint.chain_blocks(text, self._block_chars, known.blocks[-1] if known.blocks else 0)
        known.blocks.extend(found)
        known.marks.append(_Mark(messages, len(known.blocks), text[len(found) * self._block_chars :]))


def _last_mark(known: _Known, hashes: array[int]) -> _Mark | None:
    """The furthest mark whose messages all stand unchanged."""
    for mark in reversed(known.marks):
        if mark.messages <= len(hashes) and known.messages[: mark.messages] == hashes[: mark.messages]:
            return mark
    return None


def _is_system(message: JsonValue) -> bool:
    return isinstance(message, dict) and message.get("role") in ("system", "developer")
