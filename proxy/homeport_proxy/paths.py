"""Request targets: normalised before anything is decided by them, so that no spelling slips past a rule."""

from __future__ import annotations

import fnmatch
import posixpath
import re
from functools import lru_cache
from urllib.parse import quote, unquote_to_bytes, urlsplit

_PLAIN = re.compile(r"(?:/[A-Za-z0-9_:@-][A-Za-z0-9_:@.-]*)+")
_SAFE = "/:@!$&'()*+,;=~-._"


def split_target(target: str) -> tuple[str, str]:
    """(normalised path, query with its ``?`` or empty) of a request line's target, absolute form included."""
    if not target.startswith("/"):
        parts = urlsplit(target)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    path, mark, query = target.partition("?")
    return normalise(path), mark + query


def normalise(path: str) -> str:
    """Percent-encoding undone, dot segments and empty segments resolved; decoded, without a trailing slash."""
    if _PLAIN.fullmatch(path):
        return path
    decoded = unquote_to_bytes(path).decode("utf-8", "replace").replace("\\", "/")
    return posixpath.normpath("/" + decoded.lstrip("/"))


def on_the_wire(path: str) -> str:
    """A normalised path as it is sent to an engine."""
    return path if _PLAIN.fullmatch(path) else quote(path, safe=_SAFE)


@lru_cache(maxsize=64)
def denied(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether a normalised path below ``/v1/`` matches a pattern of the deny-list."""
    return any(fnmatch.fnmatchcase(path.removeprefix("/v1/"), pattern) for pattern in patterns)
