"""Edits to a JSON object's bytes by span: what is not named stays byte for byte what it was.

A body dumped again in another key order, number form or escape style is another prompt to a prefix cache, so nothing
here ever serialises a value it was not asked to set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from homeport.fingerprint import JsonValue

_WS = re.compile(rb"[ \t\n\r]*")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(rb"[^,\]} \t\n\r]+")
_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


class NotAnObjectError(ValueError):
    """The bytes are not one JSON object; the text says why."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member of an object: byte offsets of its key and of its value."""

    key: str
    key_start: int
    value_start: int
    value_end: int


def raw_members(body: bytes | memoryview) -> dict[str, msgspec.Raw]:
    """The object's members as undecoded values (the last one wins, as in every common parser).

    Raises :class:`NotAnObjectError` when the bytes are not a JSON object.
    """
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = str(error)
    # half a surrogate pair (a client cut a string in an emoji) and NaN: engines take what Python's parser takes
    data = bytes(body)
    try:
        if not isinstance(json.loads(data), dict):
            raise NotAnObjectError(why)
        return {member.key: msgspec.Raw(data[member.value_start : member.value_end]) for member in _scan(data)}
    except (ValueError, RecursionError):
        raise NotAnObjectError(why) from None


def document_of(body: bytes) -> dict[str, JsonValue]:
    """The whole object decoded. Raises :class:`NotAnObjectError`."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise NotAnObjectError(str(error)) from None
    if not isinstance(value, dict):
        raise NotAnObjectError("not an object")
    return value


def members(body: bytes, raws: Mapping[str, msgspec.Raw] | None = None) -> list[Member]:
    """Every member with its span, in the order they stand, duplicates included."""
    raws = raw_members(body) if raws is None else raws
    return _walk(body, raws) or _scan(body)


def _walk(body: bytes, raws: Mapping[str, msgspec.Raw]) -> list[Member] | None:
    """Spans without looking inside the values: the decoder already knows each value's length.

    Every value is compared with the bytes at its place, so a walk that reaches the end is a parse of the whole
    object, and JSON has only one. Duplicate keys make it fail; the caller then scans.
    """
    found: list[Member] = []
    position = _after(body, _skip(body, 0), b"{")
    while position is not None:
        key_start = _skip(body, position)
        match = _STRING.match(body, key_start)
        if match is None:
            return found if not raws and body[key_start : key_start + 1] == b"}" else None
        key = msgspec.json.decode(match.group(), type=str)
        colon = _after(body, _skip(body, match.end()), b":")
        raw = raws.get(key)
        if raw is None or colon is None:
            return None
        value_start = _skip(body, colon)
        value = memoryview(raw)
        value_end = value_start + len(value)
        if not body.startswith(value, value_start):  # memoryviews compare byte by byte: a hundred times slower
            return None
        found.append(Member(key, key_start, value_start, value_end))
        end = _skip(body, value_end)
        if body[end : end + 1] == b"}":
            return found if _skip(body, end + 1) == len(body) else None
        position = _after(body, end, b",")
    return None


def _scan(body: bytes) -> list[Member]:
    """Spans by stepping over every string and bracket; the body is known to be a valid object."""
    found: list[Member] = []
    position = _skip(body, 0) + 1
    while True:
        key_start = _skip(body, position)
        match = _STRING.match(body, key_start)
        if match is None:
            return found
        value_start = _skip(body, _skip(body, match.end()) + 1)
        value_end = _value_end(body, value_start)
        key = json.loads(match.group())
        found.append(Member(key, key_start, value_start, value_end))
        position = _skip(body, value_end)
        if body[position : position + 1] != b",":
            return found
        position += 1


def _value_end(body: bytes, start: int) -> int:
    first = body[start : start + 1]
    if first == b'"':
        match = _STRING.match(body, start)
        return match.end() if match else len(body)
    if first not in (b"{", b"["):
        match = _SCALAR.match(body, start)
        return match.end() if match else len(body)
    depth = 0
    for token in _STRUCTURE.finditer(body, start):
        mark = body[token.start()]
        if mark in b"{[":
            depth += 1
        elif mark in b"}]":
            depth -= 1
            if depth == 0:
                return token.end()
    return len(body)


def _skip(body: bytes, position: int) -> int:
    match = _WS.match(body, position)
    return match.end() if match else position


def _after(body: bytes, position: int, mark: bytes) -> int | None:
    return position + 1 if body[position : position + 1] == mark else None


def edit(
    body: bytes,
    put: Mapping[str, object],
    drop: Collection[str] = (),
    raws: Mapping[str, msgspec.Raw] | None = None,
) -> bytes:
    """``body`` with the members in ``put`` set and those in ``drop`` removed.

    A member that stands is replaced in its place (duplicates of it are removed), a new one is appended. Values may be
    ``msgspec.Raw`` to be copied as they are. Returns the same bytes object when nothing changes.
    """
    raws = raw_members(body) if raws is None else raws
    if all(key not in raws for key in drop) and all(key not in raws for key in put):
        return _append(body, put, empty=not raws) if put else body
    pieces: list[bytes | memoryview] = []
    view = memoryview(body)
    spans = members(body, raws)
    last = {member.key: index for index, member in enumerate(spans)}
    kept = 0
    for index, member in enumerate(spans):
        if member.key in drop or (member.key in put and last[member.key] != index):
            continue
        if kept:
            pieces.append(view[spans[index - 1].value_end : member.key_start])
        else:
            pieces.append(view[: spans[0].key_start])
        kept += 1
        if member.key in put:
            pieces.append(view[member.key_start : member.value_start])
            pieces.append(msgspec.json.encode(put[member.key]))
        else:
            pieces.append(view[member.key_start : member.value_end])
    if not kept:
        pieces.append(view[: spans[0].key_start] if spans else view[: _skip(body, 0) + 1])
    tail = view[spans[-1].value_end :] if spans else view[_skip(body, 0) + 1 :]
    added = {key: value for key, value in put.items() if key not in last}
    if added:
        pieces.append(_rendered(added, leading_comma=kept > 0))
    pieces.append(tail)
    return b"".join(pieces)


def _append(body: bytes, put: Mapping[str, object], *, empty: bool) -> bytes:
    end = body.rindex(b"}")
    return b"".join((memoryview(body)[:end], _rendered(put, leading_comma=not empty), memoryview(body)[end:]))


def _rendered(put: Mapping[str, object], *, leading_comma: bool) -> bytes:
    text = b",".join(msgspec.json.encode(key) + b":" + msgspec.json.encode(value) for key, value in put.items())
    return b"," + text if leading_comma else text


def edit_at(body: bytes, path: Sequence[str], put: Mapping[str, object], drop: Collection[str] = ()) -> bytes:
    """:func:`edit` applied to the object that ``path`` leads to; the same bytes when there is no such object."""
    if not path:
        return edit(body, put, drop)
    raws = raw_members(body)
    inner = raws.get(path[0])
    if inner is None or bytes(memoryview(inner)[:1]) != b"{":
        return body
    before = bytes(inner)
    after = edit_at(before, path[1:], put, drop)
    return body if after is before else edit(body, {path[0]: msgspec.Raw(after)}, (), raws)
