"""When a change of a prompt costs nothing: nothing of it is cached yet, or it is cold by now.

Homeport's proxy says with each answer what the request found cached: ``x-homeport-cache: warm; keep=240`` (it stays
warm for so many seconds after this answer if nobody comes back to it) or ``cold``. Either way the answer has just
warmed the prompt; so a cold word alone is no free moment, a pause that outlasts the warmth is.
"""

from __future__ import annotations

import re

KEEP_S = 240.0
"""After a cold answer, while no other has said how long warmth lasts."""

_KEEP = re.compile(r"(?:^|;)\s*keep\s*=\s*(\d+(?:\.\d+)?)\s*s?\s*(?:;|$)")


def keep_of(word: str | None, before_s: float | None) -> float | None:
    """How long the prompt stays warm after an answer with this ``x-homeport-cache``, in seconds; ``before_s``: after
    the answer before it. None: no Homeport proxy has said anything."""
    if word is None:
        return before_s
    match = _KEEP.search(word)
    return float(match[1]) if match else KEEP_S if before_s is None else before_s


def is_free(answered_at: float | None, keep_s: float | None, now: float) -> bool:
    """Whether a prompt may change now at no cost; times in Unix seconds. ``answered_at``: the last answer's end, None
    before the first. Without a word from a proxy nobody knows, and a prompt that may be warm is left alone."""
    return answered_at is None or (keep_s is not None and now - answered_at > keep_s)
