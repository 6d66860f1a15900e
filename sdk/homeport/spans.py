"""A JSON object parsed once, with the place of every top-level member, so that an edit leaves the rest byte for byte.

Only the standard library's decoder is used; it yields value and end in one step, so the spans cost nothing extra.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]  # the only way to read a key with its end
from typing import NamedTuple, cast

from homeport.fingerprint import JsonValue

_scan = cast("Callable[[str, int], tuple[JsonValue, int]]", json.JSONDecoder().scan_once)  # type: ignore[attr-defined]
_SPACE = re.compile(r"[ \t\n\r]*")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class _Span(NamedTuple):
    start: int
    end: int


class Document:
    """One JSON object: ``body`` as plain values (the last of doubled keys wins), and edits to its text."""

    def __init__(self, text: str) -> None:
        """Raises ValueError when the text is not exactly one JSON object."""
        self._text = text
        self._spans: dict[str, _Span] = {}
        self.body: dict[str, JsonValue] = {}
        try:
            self._parse()
        except (StopIteration, IndexError) as error:
            raise ValueError("not a JSON object") from error

    def _parse(self) -> None:
        text = self._text
        at = self._after(0, "{")
        if text[self._skip(at)] == "}":
            at = self._skip(at)
        else:
            while True:
                key, at = scanstring(text, self._after(at, '"'), True)
                start = self._skip(self._after(at, ":"))
                self.body[key], at = _scan(text, start)
                self._spans[key] = _Span(start, at)
                at = self._skip(at)
                if text[at] == "}":
                    break
                at = self._after(at, ",")
        self._close = at
        if self._skip(at + 1) != len(text):
            raise ValueError("there is more after the JSON object")

    def _skip(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        return match.end() if match else at

    def _after(self, at: int, mark: str) -> int:
        at = self._skip(at)
        if self._text[at] != mark:
            raise ValueError(f"expected {mark} at character {at}")
        return at + 1

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
                items = self._item_cuts(span, self.body[name], value)
                cuts += [(span, _encode(value))] if items is None else items
        if added:
            text = ",".join(added)
            cuts.append((_Span(self._close, self._close), f",{text}" if self._spans else text))
        return self._cut(cuts)

    def _item_cuts(self, span: _Span, before: JsonValue, after: JsonValue) -> list[tuple[_Span, str]] | None:
        """Cuts of single list items; None when items came or went, or most of the list is new."""
        if not isinstance(before, list) or not isinstance(after, list) or len(before) != len(after):
            return None
        changed = [index for index, (one, other) in enumerate(zip(before, after, strict=True)) if one is not other]
        if len(changed) * 2 > len(after):
            return None
        if not changed:
            return []
        cuts: list[tuple[_Span, str]] = []
        at = span.start + 1
        for index in range(changed[-1] + 1):
            start = self._skip(at)
            _, end = _scan(self._text, start)
            if index in changed:
                cuts.append((_Span(start, end), _encode(after[index])))
            at = self._skip(end) + 1
        return cuts

    def _cut(self, cuts: list[tuple[_Span, str]]) -> str:
        pieces: list[str] = []
        at = 0
        for span, text in sorted(cuts):
            pieces += (self._text[at : span.start], text)
            at = span.end
        return "".join([*pieces, self._text[at:]])
