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
from typing import NamedTuple

import msgspec

from homeport import fingerprint
from homeport.fingerprint import Api, JsonValue
from homeport_proxy.document import PROMPT_HEAD, Document, decoded, is_system

LAST_MESSAGES = 4
"""How many of the newest messages may change (moved cache marks) without starting over."""
KEPT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where the text stood after so many messages (``at``: the digest of their bytes): whole blocks, and the characters
    after the last of them."""

    messages: int
    at: int
    blocks: int
    rest: str


@dataclass(slots=True)
class _Known:
    head: int
    blocks: array[int]
    marks: list[_Mark]

    @property
    def size_bytes(self) -> int:
        return 8 * len(self.blocks) + 2_600 * LAST_MESSAGES


class Prefixes:
    """Remembers sessions up to :data:`KEPT_BYTES`; the longest unused makes room."""

    def __init__(self, block_chars: int, kept_bytes: int = KEPT_BYTES) -> None:
        self._block_chars = block_chars
        self._kept_bytes = kept_bytes
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self.size_bytes = 0

    def blocks(self, api: Api, session: str, body: Mapping[str, JsonValue]) -> Sequence[int]:
        """Chained digests of the canonical text, as ``fingerprint.text_blocks``. Raises what that raises."""
        history = history_of(api, body)
        if history is None:
            return fingerprint.text_blocks(api, body, self._block_chars)
        head = _head_digest(api, history.body)
        turn = _Turn(api, history, self._block_chars)
        known = self._known.pop(session, None)
        if known is not None:
            self.size_bytes -= known.size_bytes
        mark = turn.last_mark(known) if known is not None and known.head == head else None
        if known is None or mark is None or not turn.may_follow(mark.messages):
            known = _Known(head, array("Q"), [])
            turn.begin(known)
        else:
            turn.go_on(known, mark)
        self._keep(session, known)
        return known.blocks

    def _keep(self, session: str, known: _Known) -> None:
        self._known[session] = known
        self.size_bytes += known.size_bytes
        while self.size_bytes > self._kept_bytes and len(self._known) > 1:
            _, gone = self._known.popitem(last=False)
            self.size_bytes -= gone.size_bytes


class History(NamedTuple):
    """A body whose messages follow one another in the prompt as they stand, and so may be read one by one."""

    body: Document
    name: str
    items: Sequence[msgspec.Raw]
    ids: bool
    """Whether the model's template renders tool-call ids."""


def history_of(api: Api, body: Mapping[str, JsonValue]) -> History | None:
    """The messages of a body; None where they are no list, or the model's template moves parts of the prompt about."""
    if not isinstance(body, Document) or api == "completions":
        return None
    name = "input" if api == "responses" else "messages"
    layout = fingerprint.resolve("default", api, body)
    if layout.gathers_system or layout.order not in ("tools_first", "system_first"):
        return None
    items = body.items_of(name)
    return None if items is None else History(body, name, items, layout.renders_call_ids is True)


class _Turn:
    """One request being followed."""

    def __init__(self, api: Api, history: History, block_chars: int) -> None:
        self._api = api
        self._body, self._name, self._items, self._ids = history
        self._chain = self._body.chain_of(self._name)
        self._block_chars = block_chars

    def last_mark(self, known: _Known) -> _Mark | None:
        """The furthest mark whose messages all stand unchanged."""
        for mark in reversed(known.marks):
            if mark.messages <= len(self._chain) and mark.at == self._at(mark.messages):
                return mark
        return None

    def _at(self, messages: int) -> int:
        return self._chain[messages - 1] if messages else 0

    def may_follow(self, messages: int) -> bool:
        """Whether the messages after these are rendered behind them: system text at the head may not grow."""
        return messages >= len(self._items) or not is_system(decoded(self._items[messages]))

    def begin(self, known: _Known) -> None:
        """Everything at once but the newest messages, which are marked one by one."""
        first = max(0, len(self._items) - LAST_MESSAGES)
        while first < len(self._items) and not self.may_follow(first):
            first += 1
        whole = {name: self._body[name] for name in self._body if name != self._name}
        whole = dict(fingerprint.as_engines_read(self._api, whole))
        whole[self._name] = [decoded(item) for item in islice(self._items, first)]
        self._add(known, _Mark(0, 0, 0, ""), self._text(whole), first)
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
        rest = text[len(found) * self._block_chars :]
        known.marks.append(_Mark(messages, self._at(messages), len(known.blocks), rest))


def _head_digest(api: Api, body: Document) -> int:
    """Of all that stands before the messages, as far as an engine renders it."""
    if "system" not in body:
        return body.digest_of(PROMPT_HEAD)
    system = {"system": body["system"]}
    read = fingerprint.as_engines_read(api, system)
    if read is system:
        return body.digest_of(PROMPT_HEAD)
    rest = tuple(name for name in PROMPT_HEAD if name != "system")
    return hash((body.digest_of(rest), msgspec.json.encode(read["system"])))
