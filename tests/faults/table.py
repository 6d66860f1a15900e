"""The table of docs/faults.md as test cases."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    fleet: str
    who: str
    what: str
    when: str
    whole: str
    streamed: str

    @property
    def slow(self) -> bool:
        """Rows that wait for a deadline; the fast tier runs few of them."""
        return self.what in ("hangs", "swallows connections") and (self.fleet, self.who) != ("two engines", "home")


def rows(fleets: Collection[str]) -> list[Row]:
    """The page's lines for these fleets."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    found = [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines[1:]]
    return [row for row in found if row.fleet in fleets]


def cases(*fleets: str) -> list[Any]:
    """Rows, streamed and not; the fast tier runs every row in one of the two ways."""
    found = []
    for number, row in enumerate(rows(fleets)):
        for stream in (False, True):
            outcome, other = (row.streamed, row.whole) if stream else (row.whole, row.streamed)
            if outcome == "-":
                continue
            name = f"{row.fleet}-{row.who} {row.what} {row.when}-{'streamed' if stream else 'whole'}"
            later = row.slow or (other != "-" and stream == bool(number % 2))
            found.append(pytest.param(row, stream, id=name, marks=[pytest.mark.long] * later))
    return found
