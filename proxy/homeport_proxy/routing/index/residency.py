"""How much of a prompt lies where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Residency(NamedTuple):
    """Tokens of a prompt that should be cached, by place: ``everywhere`` at least (a head that all share), ``more`` at
    the places named there, whose figure replaces the other."""

    everywhere: int
    more: Mapping[str, int]

    def at(self, place: str) -> int:
        """The figure of one place."""
        return self.more.get(place, self.everywhere)


NOWHERE = Residency(0, {})
