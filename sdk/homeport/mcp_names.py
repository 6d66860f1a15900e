"""Names of tools that came from MCP servers, with their origin: what the stabiliser cannot see in a name."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

_MAX_NAMES = 8_192
_lock = threading.Lock()
_names: dict[str, tuple[str, str]] = {}


def register_names(names: Iterable[tuple[str, str, str]]) -> None:
    """Remember (name as the model sees it, server, tool)."""
    global _names
    with _lock:
        merged = {**_names, **{name: (server, tool) for name, server, tool in names}}
        while len(merged) > _MAX_NAMES:
            del merged[next(iter(merged))]
        _names = merged  # replaced, never modified: readers hold a snapshot


def known_names() -> Mapping[str, tuple[str, str]]:
    """Name to (server, tool); a snapshot."""
    return _names
