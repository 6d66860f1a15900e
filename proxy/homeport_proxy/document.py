"""A request's JSON object whose members are decoded only when somebody asks for them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import cast

import msgspec
from xxhash import xxh3_64

from homeport.fingerprint import JsonValue
from homeport_proxy.splice import NotAnObjectError

PROMPT_HEAD = (
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
"""Members of a body that stand before its messages in the prompt, or decide how these are rendered."""
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_LONGEST_EMPTY = 16
# the digests below stay in this process: a seed of its own keeps anybody from making two conversations look alike
_SEED = secrets.randbits(64)


class Document(Mapping[str, JsonValue]):
    """The members of a body by name, each decoded once. Raises :class:`NotAnObjectError` for one that cannot be."""

    __slots__ = ("_chains", "_decoded", "_items", "raws")

    def __init__(self, raws: Mapping[str, msgspec.Raw]) -> None:
        self.raws = raws
        self._decoded: dict[str, JsonValue] = {}
        self._items: dict[str, list[msgspec.Raw]] = {}
        self._chains: dict[str, list[int]] = {}

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

    def holds(self, name: str) -> bool:
        """Whether a member is there and not empty, without decoding a long one."""
        raw = self.raws.get(name)
        return raw is not None and (len(memoryview(raw)) > _LONGEST_EMPTY or bool(self[name]))

    def chain_of(self, name: str) -> list[int]:
        """Per item of a list member a digest of its bytes and of all before it; empty when it is no list."""
        known = self._chains.get(name)
        if known is None:
            known = self._chains[name] = []
            digest = xxh3_64(seed=_SEED)
            for item in self.items_of(name) or ():
                digest.update(memoryview(item))
                known.append(digest.intdigest())
        return known

    def digest_of(self, names: tuple[str, ...]) -> int:
        """A digest of the bytes of these members, those that are there."""
        digest = xxh3_64(seed=_SEED)
        for name in names:
            if (raw := self.raws.get(name)) is not None:
                digest.update(name.encode())
                digest.update(memoryview(raw))
        return digest.intdigest()


def is_system(message: JsonValue) -> bool:
    """Whether a message is system text."""
    return isinstance(message, dict) and message.get("role") in ("system", "developer")


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
