"""What tells a conversation apart, where a turn costs only what is new.

A message's place in the chain is looked up by a digest of all bytes up to it; only messages that were never seen behind
these are decoded and rendered. The result is always that of ``fingerprint.identity``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import sha256

from homeport import fingerprint
from homeport.fingerprint import DIGEST_BYTES, Api, JsonValue
from homeport_proxy.document import PROMPT_HEAD, decoded, is_system
from homeport_proxy.prefix import History, history_of

KEPT = 200_000
"""Messages remembered, about 250 bytes each."""


class Marks:
    """Remembers messages by the bytes up to them, at most ``kept``; the oldest make room."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._known: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, api: Api, body: Mapping[str, JsonValue]) -> fingerprint.Identity:
        """As ``fingerprint.identity``. Raises what that raises."""
        history = history_of(api, body)
        if history is None or not history.items:
            whole = fingerprint.identity(api, body)
            return fingerprint.Identity(whole.head, whole.chain)
        first = 0
        while first < len(history.items) and is_system(decoded(history.items[first])):
            first += 1
        return fingerprint.Identity(self._head(api, history, first + 1), self._chain(api, history, first))

    def _chain(self, api: Api, history: History, first: int) -> tuple[bytes, ...]:
        """One chained digest per message after the ``first`` ones, which are system text."""
        links: list[bytes] = []
        link = bytes(DIGEST_BYTES)
        places = history.body.chain_of(history.name)
        for index in range(first, len(places)):
            place = (api, first, places[index])
            known = self._known.get(place)
            if known is None:
                message: dict[str, JsonValue] = {history.name: [decoded(history.items[index])]}
                text = "".join([piece.text for piece in fingerprint.render(api, message, ids=False)])
                known = sha256(link + text.encode("utf-8", "surrogatepass")).digest()[:DIGEST_BYTES]
                self._keep(place, known)
            links.append(known)
            link = known
        return tuple(links)

    def _head(self, api: Api, history: History, messages: int) -> bytes:
        """Tools, system text and the first message: all up to so many messages."""
        body, items = history.body, history.items[:messages]
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
