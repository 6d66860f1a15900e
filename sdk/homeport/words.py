"""Words for counts."""

from __future__ import annotations


def plural(noun: str, count: int | None) -> str:
    """A noun as it stands behind a count: one session, two sessions; several where the count is not known."""
    return noun if count == 1 else f"{noun}s"
