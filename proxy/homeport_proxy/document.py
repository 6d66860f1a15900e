"""A request's JSON object whose members are decoded only when somebody asks for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import cast

import msgspec

from homeport.fingerprint import JsonValue
from homeport_proxy.splice import NotAnObjectError

_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


class Document(Mapping[str, JsonValue]):
    """The members of a body by name, each decoded once. Raises :class:`NotAnObjectError` for one that cannot be."""

    __slots__ = ("_decoded", "_items", "raws")

    def __init__(self, raws: Mapping[str, msgspec.Raw]) -> None:
        self.raws = raws
        self._decoded: dict[str, JsonValue] = {}
        self._items: dict[str, list[msgspec.Raw]] = {}

    def __getitem__(self, name: str) -> JsonValue:
        if name in self._decoded:
            return self._decoded[name]
        value = self._decoded[name] = decoded(self.raws[name])
        return value

    def __contains__(self, name: object) -> bool:
        return name in self.raws

    def __iter__(self) -> Iterator[str]:
        return iter(self.raws)

    def __len__(self) -> int:
        return len(self.raws)

    def items_of(self, name: str) -> list[msgspec.Raw] | None:
        """The undecoded items of a member that is a list; None when it is none."""
        if name in self._items:
            return self._items[name]
        raw = self.raws.get(name)
        if raw is None or bytes(memoryview(raw)[:1]) != b"[":
            return None
        try:
            items = self._items[name] = _ITEMS.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return items


def decoded(raw: msgspec.Raw) -> JsonValue:
    """One value; what only Python's own parser takes (half a surrogate pair, NaN) is taken too."""
    try:
        return cast("JsonValue", msgspec.json.decode(raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return cast("JsonValue", json.loads(bytes(raw)))
    except (ValueError, RecursionError) as error:
        raise NotAnObjectError(str(error)) from None


def listed(body: Mapping[str, JsonValue], name: str) -> Iterator[JsonValue]:
    """The items of a list member one by one, decoding no more of them than are taken."""
    items = body.items_of(name) if isinstance(body, Document) else None
    if items is not None:
        yield from map(decoded, items)
        return
    value = body.get(name)
    if isinstance(value, list):
        yield from value
