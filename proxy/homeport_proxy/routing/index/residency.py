"""How much of a prompt lies where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Residency(NamedTuple):
    """Tokens of a prompt that should be cached: ``mostly`` at most places (a head that they share), another figure at
    the places in ``other``."""

    mostly: int
    other: Mapping[str, int]

    def at(self, place: str) -> int:
        """The figure of one place."""
        return self.other.get(place, self.mostly)


NOWHERE = Residency(0, {})
