"""Prefix keys of a growing conversation, where a turn costs only what is new.

A session's messages are compared as the bytes they are: what stands unchanged since the last request is hashed once
in one go, and neither taken apart nor decoded nor rendered again. The result is always that of
``fingerprint.text_blocks``.
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
from homeport_proxy.document import MOST_MESSAGES, PROMPT_HEAD, Document, decoded, first_spoken, is_system, messages_of
from homeport_proxy.splice import NotAnObjectError

LAST_MESSAGES = 4
"""How many of the newest messages may change (moved cache marks) without starting over."""
KEPT_BYTES = 64 * 1024 * 1024


class _Mark(NamedTuple):
    """Where the text stood after so many messages: whole blocks, and the characters after the last of them. The raw
    list's first ``end`` bytes hold these messages; ``digest`` is theirs."""

    messages: int
    end: int
    digest: int
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
        known = self._known.pop(session, None)
        if known is not None:
            self.size_bytes -= known.size_bytes
        turn = _Turn(api, history, self._block_chars)
        try:
            if known is None or known.head != head or not turn.go_on(known):
                known = _Known(head, array("Q"), [])
                turn.begin(known)
        except NotAnObjectError:  # its messages cannot be told apart as they stand
            return fingerprint.text_blocks(api, body, self._block_chars)
        self._keep(session, known)
        return known.blocks[:]  # the next request of the session may come while this one still waits

    def stands(self, session: str) -> int:
        """The end, within the list, of a session's messages but for its newest few; 1 when there are none."""
        known = self._known.get(session)
        return known.marks[0].end if known is not None and known.marks else 1

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
    ids: bool
    """Whether the model's template renders tool-call ids."""


def history_of(api: Api, body: Mapping[str, JsonValue]) -> History | None:
    """The messages of a body; None where they are no list, or the model's template moves parts of the prompt about."""
    if not isinstance(body, Document) or api == "completions":
        return None
    name = messages_of(api)
    layout = fingerprint.resolve("default", api, body)
    if layout.gathers_system or layout.order not in ("tools_first", "system_first") or not body.is_list(name):
        return None
    return History(body, name, layout.renders_call_ids is True)


class _Turn:
    """One request being followed."""

    def __init__(self, api: Api, history: History, block_chars: int) -> None:
        self._api = api
        self._body, self._name, self._ids = history
        self._list = self._body.list_of(self._name)
        self._block_chars = block_chars

    def begin(self, known: _Known) -> None:
        """Everything at once but the newest messages, which are marked one by one."""
        items = self._list.items()
        if len(items) > MOST_MESSAGES:
            raise ValueError(f"more than {MOST_MESSAGES} messages")
        # system text is rendered at the head, not behind the message before it
        first = first_spoken(items, max(0, len(items) - LAST_MESSAGES))
        whole = {name: self._body[name] for name in self._body if name != self._name}
        whole = dict(fingerprint.as_engines_read(self._api, whole))
        whole[self._name] = [decoded(item) for item in islice(items, first)]
        ends = self._list.last_ends(items, len(items) - first)
        self._add(known, self._text(whole), first, ends[0])
        self._rest(known, items[first:], ends[1:])

    def go_on(self, known: _Known) -> bool:
        """Continue from the furthest mark whose messages all stand unchanged; False when there is none."""
        stand = [place for place, mark in enumerate(known.marks) if self._list.begins(mark.end, mark.digest)]
        if not stand:
            return False
        place = stand[-1]
        mark = known.marks[place]
        items = self._list.items(mark.end)
        if items and is_system(decoded(items[0])):
            return False
        del known.marks[place + 1 :], known.blocks[mark.blocks :]
        self._rest(known, items, self._list.next_ends(items, mark.end))
        return True

    def _rest(self, known: _Known, items: Sequence[msgspec.Raw], ends: Sequence[int]) -> None:
        messages = known.marks[-1].messages
        for item, end in zip(items, ends, strict=True):
            messages += 1
            message: dict[str, JsonValue] = {self._name: [decoded(item)]}
            if "model" in self._body:
                message["model"] = self._body["model"]
            self._add(known, self._text(message), messages, end)
        known.marks = known.marks[-LAST_MESSAGES - 1 :]

    def _text(self, body: Mapping[str, JsonValue]) -> str:
        return "".join([piece.text for piece in fingerprint.render(self._api, body, ids=self._ids)])

    def _add(self, known: _Known, text: str, messages: int, end: int) -> None:
        if known.marks:
            text = known.marks[-1].rest + text
        found = fingerprint.chain_blocks(text, self._block_chars, known.blocks[-1] if known.blocks else 0)
        known.blocks.extend(found)
        rest = text[len(found) * self._block_chars :]
        known.marks.append(_Mark(messages, end, self._list.digest(end), len(known.blocks), rest))


def _head_digest(api: Api, body: Document) -> int:
    """Of all that stands before the messages, as far as an engine renders it."""
    if "system" not in body:
        return body.digest_of(PROMPT_HEAD)
    system = {"system": body["system"]}
    read = fingerprint.as_engines_read(api, system)
    if read is system:
        return body.digest_of(PROMPT_HEAD)
    return hash((body.digest_of(PROMPT_HEAD - {"system"}), msgspec.json.encode(read["system"])))
