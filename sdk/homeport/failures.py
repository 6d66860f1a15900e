"""Faults inside Homeport, counted and logged, never raised into the caller's request."""

from __future__ import annotations

import logging
import threading
from collections import Counter

_log = logging.getLogger("homeport")
_lock = threading.Lock()
_counts: Counter[str] = Counter()


def failed(where: str, error: Exception) -> None:
    """Count a fault in the part of Homeport named ``where``; the first one of each part is logged with its trace."""
    with _lock:
        _counts[where] += 1
        first = _counts[where] == 1
    if first:
        _log.warning(
            "homeport: a fault in %s; the request went on without it (%s)", where, type(error).__name__, exc_info=error
        )


def failures() -> dict[str, int]:
    """How often each part of Homeport failed in this process: ``request``, ``response``, ``stream``, ``hide``,
    ``encoding`` (an answer compressed in a way that cannot be read here), ``books``, ``explain``, ``trace``,
    ``finish``, ``mcp``, ``litellm``. Empty when all is well."""
    with _lock:
        return dict(_counts)


def reset_failures() -> None:
    """Start counting anew."""
    with _lock:
        _counts.clear()
