"""A JSON object parsed once, with the place of every top-level member, so that an edit leaves the rest byte for byte.

Only the standard library's decoder is used; it yields value and end in one step, so the spans cost nothing extra. Of a
conversation's next request only what is new is parsed: values that stand in the request before in the same words are
taken over from it.
"""

from __future__ import annotations

import json
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]  # the only way to read a key with its end
from typing import NamedTuple, cast

from homeport.fingerprint import JsonValue

_scan = cast("Callable[[str, int], tuple[JsonValue, int]]", json.JSONDecoder().scan_once)  # type: ignore[attr-defined]
_SPACE = re.compile(r"[ \t\n\r]*")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_LISTS = frozenset({"messages", "input", "tools", "functions", "system"})
"""Members whose items are told apart: those that grow with a conversation, and those that are edited item by item."""

_CLOSED = '{["'
"""What begins a value that ends with a mark of its own: the same text is the same value, whatever follows."""


class _Span(NamedTuple):
    start: int
    end: int


class _Items(NamedTuple):
    """Where a list begins, and each of its items counted from there."""

    at: int
    starts: list[int]
    ends: list[int]


class Document:
    """One JSON object: ``body`` as plain values (the last of doubled keys wins), and edits to its text."""

    def __init__(self, text: str, before: Document | None = None) -> None:
        """``before``: the conversation's earlier request; nobody may change the values of either.

        Raises ValueError when the text is not exactly one JSON object."""
        self._text = text
        self._spans: dict[str, _Span] = {}
        self._items: dict[str, _Items] = {}
        self.body: dict[str, JsonValue] = {}
        self.parsed_chars = 0
        """Characters of values that were parsed: all of them without a document before, else what is new."""
        try:
            self._parse(before)
        except (StopIteration, IndexError) as error:
            raise ValueError("not a JSON object") from error

    def _parse(self, before: Document | None) -> None:
        text = self._text
        at = self._after(0, "{")
        if text[self._skip(at)] == "}":
            at = self._skip(at)
        else:
            while True:
                key, at = scanstring(text, self._after(at, '"'), True)
                start = self._skip(self._after(at, ":"))
                self.body[key], at = self._member(key, start, before)
                self._spans[key] = _Span(start, at)
                at = self._skip(at)
                if text[at] == "}":
                    break
                at = self._after(at, ",")
        self._close = at
        if text[at + 1 :].strip(" \t\n\r"):
            raise ValueError("there is more after the JSON object")

    def _member(self, key: str, at: int, before: Document | None) -> tuple[JsonValue, int]:
        self._items.pop(key, None)  # of a doubled key only the last counts
        if key in _LISTS and self._text[at] == "[":
            return self._list(key, at, before)
        if before is None or key not in before.body:
            return self._value(at)
        return self._taken(at, before, before.body[key], before._spans[key])

    def _list(self, key: str, first: int, before: Document | None) -> tuple[JsonValue, int]:
        text = self._text
        values, starts, ends = self._repeated(key, first, before)
        self._items[key] = _Items(first, starts, ends)
        at = self._skip(first + ends[-1] if ends else first + 1)
        if not ends and text[at] == "]":
            return values, at + 1
        while not ends or text[at] != "]":
            if ends:
                at = self._skip(self._after(at, ","))
            value, end = _scan(text, at)
            values.append(value)
            starts.append(at - first)
            ends.append(end - first)
            self.parsed_chars += end - at
            at = self._skip(end)
        return values, at + 1

    def _repeated(self, key: str, at: int, before: Document | None) -> tuple[list[JsonValue], list[int], list[int]]:
        """The items with which a list begins as the earlier document's did: values, starts, ends."""
        known = None if before is None else before._items.get(key)
        if before is None or known is None or not known.ends:
            return [], [], []
        shared = _common_chars(self._text, at, before._text, known.at, known.ends[-1])
        count = bisect_left(known.ends, shared)  # with whatever follows: a number might go on
        if count < len(known.ends) and known.ends[count] == shared:
            count += before._text[known.at + known.starts[count]] in _CLOSED
        values = before.body[key]
        assert isinstance(values, list)
        return values[:count], known.starts[:count], known.ends[:count]

    def _value(self, at: int) -> tuple[JsonValue, int]:
        value, end = _scan(self._text, at)
        self.parsed_chars += end - at
        return value, end

    def _taken(self, at: int, before: Document, value: JsonValue, span: _Span) -> tuple[JsonValue, int]:
        """The earlier value when its very text stands here."""
        raw = before._text[span.start : span.end]
        if raw[0] in _CLOSED and self._text.startswith(raw, at):
            return value, at + len(raw)
        return self._value(at)

    def _skip(self, at: int) -> int:
        if self._text[at] not in " \t\n\r":
            return at
        match = _SPACE.match(self._text, at)
        return match.end() if match else at

    def _after(self, at: int, mark: str) -> int:
        at = self._skip(at)
        if self._text[at] != mark:
            raise ValueError(f"expected {mark} at character {at}")
        return at + 1

    @property
    def text_bytes(self) -> int:
        """Memory that the text takes: up to four bytes a character."""
        return sys.getsizeof(self._text)

    def with_members(self, members: Mapping[str, JsonValue]) -> str:
        """The text with these members set: in their place where they stand, else appended.

        Of a list, only the items that are other objects than those of :attr:`body` are written anew.
        """
        cuts: list[tuple[_Span, str]] = []
        added: list[str] = []
        for name, value in members.items():
            span = self._spans.get(name)
            if span is None:
                added.append(f"{_encode(name)}:{_encode(value)}")
            elif value is not self.body[name]:
                items = self._item_cuts(name, value)
                cuts += [(span, _encode(value))] if items is None else items
        if added:
            text = ",".join(added)
            cuts.append((_Span(self._close, self._close), f",{text}" if self._spans else text))
        return self._cut(cuts)

    def _item_cuts(self, name: str, after: JsonValue) -> list[tuple[_Span, str]] | None:
        """Cuts of single list items; None when items came or went, or most of the list is new."""
        before, items = self.body[name], self._items.get(name)
        if items is None or not isinstance(before, list) or not isinstance(after, list) or len(before) != len(after):
            return None
        changed = [index for index, (one, other) in enumerate(zip(before, after, strict=True)) if one is not other]
        if len(changed) * 2 > len(after):
            return None
        spans = [_Span(items.at + items.starts[index], items.at + items.ends[index]) for index in changed]
        return [(span, _encode(after[index])) for span, index in zip(spans, changed, strict=True)]

    def _cut(self, cuts: list[tuple[_Span, str]]) -> str:
        pieces: list[str] = []
        at = 0
        for span, text in sorted(cuts):
            pieces += (self._text[at : span.start], text)
            at = span.end
        return "".join([*pieces, self._text[at:]])


def _common_chars(text: str, at: int, other: str, start: int, most: int) -> int:
    """How many characters, at most ``most``, two texts share from these places on (by halves: slices compare at memory
    speed)."""
    if text.startswith(other[start : start + most], at):
        return most
    low, high = 0, most - 1
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(other[start + low : start + middle], at + low):
            low = middle
        else:
            high = middle - 1
    return low
