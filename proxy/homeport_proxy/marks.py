"""What tells a conversation apart, where a turn costs only what is new.

A message's place in the chain is looked up by a digest of all bytes up to it; only messages that were never seen behind
these are decoded and rendered. The result is always that of ``fingerprint.identity``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b, sha256
from typing import NamedTuple

import msgspec

from homeport import fingerprint
from homeport.fingerprint import DIGEST_BYTES, Api, JsonValue
from homeport_proxy.bounded import Bounded
from homeport_proxy.document import MOST_MESSAGES, PROMPT_HEAD, Document, decoded, first_spoken, messages_of
from homeport_proxy.prefix import History, history_of

KEPT = 200_000
"""Messages remembered, about 250 bytes each."""
SYSTEMS_KEPT = 20_000
_SYSTEM_MEMBERS = frozenset({"system", "instructions"})


class _System(NamedTuple):
    """A conversation's system text: the digests of what it was read from (the list up to ``end``, the first message
    included, and the members that hold system text), and its own."""

    end: int
    head: int
    members: int
    digest: bytes


class Marks:
    """Remembers messages by the bytes up to them, at most ``kept``; the oldest make room."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._known: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        self._systems: Bounded[bytes, _System] = Bounded(SYSTEMS_KEPT)

    def __len__(self) -> int:
        return len(self._known)

    def of(self, api: Api, body: Mapping[str, JsonValue]) -> fingerprint.Identity:
        """As ``fingerprint.identity``. Raises what that raises."""
        history = history_of(api, body)
        items = history.body.items_of(history.name) if history is not None else None
        if history is None or not items:
            whole = fingerprint.identity(api, body)
            return fingerprint.Identity(whole.head, whole.chain)  # without its messages: digests travel, text does not
        first = first_spoken(items)
        return fingerprint.Identity(
            self._head(api, history, items[: first + 1]), self._chain(api, history, items, first)
        )

    def system(self, key: bytes | None, api: str, body: Document) -> bytes:
        """A digest of the system prompt as the client wrote it, the same in every process; empty when there is none.

        ``key``: the session it belongs to, where that is known; then text that stands unchanged is not read again.
        """
        name = messages_of(api)
        known = self._systems.get(key) if key is not None else None
        members = body.digest_of(_SYSTEM_MEMBERS)
        stands = known is not None and known.members == members and body.is_list(name)
        if known is not None and stands and body.list_of(name).begins(known.end, known.head):
            return known.digest
        parts = [bytes(body.raws[member]) for member in ("system", "instructions") if body.holds(member)]
        items = body.items_of(name) or []
        count = first_spoken(items)
        parts += [bytes(item) for item in items[:count]]
        digest = blake2b(b"\0".join(parts), digest_size=DIGEST_BYTES).digest() if parts else b""
        if key is not None and count < len(items):
            messages = body.list_of(name)
            end = messages.next_ends(items[: count + 1], 1)[-1]
            self._systems.put(key, _System(end, messages.digest(end), members, digest))
        return digest

    def _chain(self, api: Api, history: History, items: Sequence[msgspec.Raw], first: int) -> tuple[bytes, ...]:
        """One chained digest per message after the ``first`` ones, which are system text; of the first many."""
        links: list[bytes] = []
        link = bytes(DIGEST_BYTES)
        places = history.body.chain_of(history.name)
        for index in range(first, min(len(places), first + MOST_MESSAGES)):
            place = (api, first, places[index])
            known = self._known.get(place)
            if known is None:
                message: dict[str, JsonValue] = {history.name: [decoded(items[index])]}
                text = "".join([piece.text for piece in fingerprint.render(api, message, ids=False)])
                known = sha256(link + text.encode("utf-8", "surrogatepass")).digest()[:DIGEST_BYTES]
                self._keep(place, known)
            links.append(known)
            link = known
        return tuple(links)

    def _head(self, api: Api, history: History, items: Sequence[msgspec.Raw]) -> bytes:
        """Tools, system text and the first message, with which ``items`` end."""
        body = history.body
        place = (f"{api} head", body.digest_of(PROMPT_HEAD), body.chain_of(history.name)[len(items) - 1])
        known = self._known.get(place)
        if known is None:
            head: dict[str, JsonValue] = {member: body[member] for member in PROMPT_HEAD if member in body}
            head[history.name] = [decoded(item) for item in items]
            known = fingerprint.identity(api, head).head
            self._keep(place, known)
        return known

    def _keep(self, place: tuple[str, int, int], digest: bytes) -> None:
        self._known[place] = digest
        if len(self._known) > self._kept:
            self._known.popitem(last=False)
