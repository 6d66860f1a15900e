"""Which conversation a request belongs to when nobody says: the one whose messages it continues.

A request continues the longest message chain that was the end of an earlier request; a first request is known by the
digest of its head, in which volatile text (clocks, ids) is masked. Two conversations with one head are told apart as
soon as their messages differ.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from homeport.fingerprint import Identity

MAX_ENDS = 20_000
"""Chain ends remembered, the oldest forgotten first: about 400 bytes each, 8 MB in all."""


class Conversations:
    """Message chains seen, and the conversation of each. Safe to use from several threads."""

    def __init__(self, max_ends: int = MAX_ENDS) -> None:
        self._max_ends = max_ends
        self._lock = threading.Lock()
        # chain end -> the conversations that had it, by head; the youngest last
        self._ends: OrderedDict[bytes, dict[bytes, str]] = OrderedDict()

    def of(self, identity: Identity) -> str:
        """The conversation of a request, as a hexadecimal name, and remember its chain."""
        with self._lock:
            name = self._continued(identity) or identity.head.hex()
            if identity.chain:
                ends = self._ends.setdefault(identity.chain[-1], {})
                ends.pop(identity.head, None)
                ends[identity.head] = name
                self._ends.move_to_end(identity.chain[-1])
                if len(ends) > 64:
                    del ends[next(iter(ends))]
            while len(self._ends) > self._max_ends:
                self._ends.popitem(last=False)
            return name

    def _continued(self, identity: Identity) -> str | None:
        for length in range(len(identity.chain), 0, -1):
            ends = self._ends.get(identity.chain[length - 1])
            if not ends:
                continue
            if identity.head in ends:
                return ends[identity.head]
            # the same first words under another system prompt are another agent, not a continuation: only a chain with
            # an answer of the model in it says whose it is, and only when one conversation has it
            if length >= 2 and length < len(identity.chain) and len(set(ends.values())) == 1:
                return next(iter(ends.values()))
        return None
