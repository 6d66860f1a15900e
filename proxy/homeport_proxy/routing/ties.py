"""Rendezvous hashing: the same choice among equals in every proxy, and the fewest moves when the set changes."""

from __future__ import annotations

import xxhash


def rank(session: str, place: str) -> int:
    """A session's liking of a place; the highest wins."""
    return xxhash.xxh3_64_intdigest(f"{session}\0{place}".encode())
