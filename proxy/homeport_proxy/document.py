"""A request's JSON object whose members are decoded only when somebody asks for them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import cast

import msgspec
from xxhash import xxh3_64

from homeport.fingerprint import JsonValue
from homeport_proxy.splice import NotAnObjectError

PROMPT_HEAD = frozenset(
    {
        "model",
        "system",
        "instructions",
        "tools",
        "functions",
        "chat_template",
        "chat_template_kwargs",
        "reasoning",
        "reasoning_effort",
    }
)
"""Members of a body that stand before its messages in the prompt, or decide how these are rendered."""
MOST_MESSAGES = 10_000
"""What is read of a conversation: more than any model's context holds, and half a second's work at most."""
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_LONGEST_EMPTY = 16
_SPACE = b" \t\n\r"
_BETWEEN = _SPACE + b","
_OPENS_LIST = ord("[")
# the digests below stay in this process: a seed of its own keeps anybody from making two conversations look alike
SEED = secrets.randbits(64)


class RawList:
    """A JSON list as bytes. Its head is compared by digests of its first bytes, in one pass over them; only what stands
    behind is taken apart. An ``end`` is the offset just behind an item; 1 stands before the first."""

    __slots__ = ("_at", "_digest", "_digests", "_items", "_view")

    def __init__(self, raw: msgspec.Raw) -> None:
        self._view = memoryview(raw)
        self._items: list[msgspec.Raw] | None = None
        self._digest = xxh3_64(seed=SEED)
        self._digests: dict[int, int] = {}
        self._at = 0

    def items(self, end: int = 1) -> list[msgspec.Raw]:
        """The undecoded items behind ``end``. Raises NotAnObjectError when they cannot be told apart."""
        if end == 1:
            if self._items is None:
                self._items = self._decode(self._view)
            return self._items
        rest = bytes(self._view[end:]).lstrip(_SPACE)
        return [] if rest.startswith(b"]") else self._decode(b"[" + rest[1:])

    def digest(self, end: int) -> int:
        """Of the first ``end`` bytes. Cheapest when asked for in rising order."""
        known = self._digests.get(end)
        if known is None:
            if end < self._at:
                self._digest.reset()
                self._at = 0
            self._digest.update(self._view[self._at : end])
            self._at = end
            known = self._digests[end] = self._digest.intdigest()
        return known

    def begins(self, end: int, digest: int) -> bool:
        """Whether its first ``end`` bytes have that digest and an item ends there."""
        view, place = self._view, end
        if end == 1:
            return True
        if end >= len(view) or self.digest(end) != digest:
            return False
        while view[place] in _SPACE:
            place += 1
        return view[place] in b",]"

    def next_ends(self, items: Sequence[msgspec.Raw], end: int) -> list[int]:
        """The ends of ``items``, which stand behind ``end``."""
        ends = []
        for item in items:
            while self._view[end] in _BETWEEN:
                end += 1
            end += len(memoryview(item))
            ends.append(end)
        return ends

    def last_ends(self, items: Sequence[msgspec.Raw], count: int) -> list[int]:
        """The ends of the last ``count`` of all its ``items``, and before these the end of the one before them."""
        end = len(self._view) - 1
        ends = []
        for number in range(len(items) - 1, len(items) - count - 2, -1):
            while self._view[end - 1] in _BETWEEN:
                end -= 1
            ends.append(end if number >= 0 else 1)
            end -= len(memoryview(items[number])) if number >= 0 else 0
        return ends[::-1]

    @staticmethod
    def _decode(data: bytes | memoryview) -> list[msgspec.Raw]:
        try:
            return _ITEMS.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NotAnObjectError(str(error)) from None


class Document(Mapping[str, JsonValue]):
    """The members of a body by name, each decoded once. Raises :class:`NotAnObjectError` for one that cannot be."""

    __slots__ = ("_chains", "_decoded", "_lists", "known_bytes", "raws")

    def __init__(self, raws: Mapping[str, msgspec.Raw], known_bytes: int = 0) -> None:
        self.raws = raws
        self.known_bytes = known_bytes
        """So many bytes in front were known and not looked into."""
        self._decoded: dict[str, JsonValue] = {}
        self._lists: dict[str, RawList] = {}
        self._chains: dict[str, list[int]] = {}

    def __getitem__(self, name: str) -> JsonValue:
        if name in self._decoded:
            return self._decoded[name]
        value = self._decoded[name] = decoded(self.raws[name])
        return value

    def get(self, name: str, default: JsonValue = None) -> JsonValue:  # type: ignore[override]
        """As of any mapping, whose own way costs an exception for each member that is not there."""
        return self[name] if name in self.raws else default

    def __contains__(self, name: object) -> bool:
        return name in self.raws

    def __iter__(self) -> Iterator[str]:
        return iter(self.raws)

    def __len__(self) -> int:
        return len(self.raws)

    def items_of(self, name: str) -> list[msgspec.Raw] | None:
        """The undecoded items of a member that is a list; None when it is none."""
        if not self.is_list(name):
            return None
        try:
            return self.list_of(name).items()
        except NotAnObjectError:
            return None

    def is_list(self, name: str) -> bool:
        """Whether a member is there and a list."""
        return name in self._lists or (name in self.raws and memoryview(self.raws[name])[0] == _OPENS_LIST)

    def list_of(self, name: str) -> RawList:
        """A member that is a list, as bytes."""
        known = self._lists.get(name)
        if known is None:
            known = self._lists[name] = RawList(self.raws[name])
        return known

    def holds(self, name: str) -> bool:
        """Whether a member is there and not empty, without decoding a long one."""
        raw = self.raws.get(name)
        return raw is not None and (len(memoryview(raw)) > _LONGEST_EMPTY or bool(self[name]))

    def chain_of(self, name: str) -> list[int]:
        """Per item of a list member a digest of its bytes and of all before it; empty when it is no list."""
        known = self._chains.get(name)
        if known is None:
            known = self._chains[name] = []
            digest = xxh3_64(seed=SEED)
            for item in self.items_of(name) or ():
                digest.update(item)
                known.append(digest.intdigest())
        return known

    def digest_of(self, names: Set[str]) -> int:
        """A digest of the bytes of these members, those that are there."""
        present = names & self.raws.keys()
        if not present:
            return 0
        digest = xxh3_64(seed=SEED)
        for name in sorted(present):
            digest.update(name.encode())
            digest.update(self.raws[name])
        return digest.intdigest()


def messages_of(api: str) -> str:
    """The member in which an API's requests carry their messages."""
    return "input" if api == "responses" else "messages"


def is_system(message: JsonValue) -> bool:
    """Whether a message is system text."""
    return isinstance(message, dict) and message.get("role") in ("system", "developer")


def first_spoken(items: Sequence[msgspec.Raw], start: int = 0) -> int:
    """The first of the messages from ``start`` on that is no system text; their number when all are."""
    while start < len(items) and is_system(decoded(items[start])):
        start += 1
    return start


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
