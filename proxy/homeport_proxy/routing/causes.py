"""Where a prompt's uncached tokens come from: each booked to exactly one cause."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec

CAUSES: Mapping[str, str] = {
    "new": "not sent before in this conversation",
    "caller": "sent before, but the caller changed the prompt ahead of it",
    "template": "rendered differently, or a last block that was not full",
    "routed_elsewhere": "cached at another place than the one it ran at",
    "evicted": "dropped by the engine to make room",
    "expired": "idle for too long",
    "cold_backend": "lost when the engine started anew",
    "unknown": "not told by the engine",
}
"""Every cause, and what it says of the tokens booked to it; ``unknown`` also where none of the others holds."""

_SAMPLES = 32
_ENOUGH_BLOCKS = 8
_LOW_BITS = (1 << 32) - 1


@lru_cache(4096)
def _positions(blocks: int) -> tuple[int, ...]:
    """Which blocks of a prompt are remembered: evenly spread, the last one among them."""
    samples = min(_SAMPLES, blocks)
    return tuple((index + 1) * blocks // samples - 1 for index in range(samples))


class PromptTrace:
    """A prompt remembered by a few of its chained block keys, 32 bits of each: enough to tell how far the next repeats
    it (a wrong key passes once in four thousand million). All keys are kept until ``condense``, which is for when the
    prompt's request is over: its caller has them as long anyway."""

    __slots__ = ("_blocks", "_condensed", "_keys", "tokens")

    def __init__(self, keys: Sequence[int], tokens: int) -> None:
        self._blocks = len(keys)
        self.tokens = tokens
        self._keys = keys
        self._condensed = False

    def condense(self) -> None:
        """Keep only what is remembered."""
        if not self._condensed:
            self._keys = array("I", [self._keys[position] & _LOW_BITS for position in _positions(self._blocks)])
            self._condensed = True

    def continued_tokens(self, keys: Sequence[int]) -> int | None:
        """Tokens of a later prompt that continues this one, at this one's tokens per block; None when it does not."""
        if self._blocks < _ENOUGH_BLOCKS or not self._continued_by(keys):
            return None
        return self.tokens + round((len(keys) - self._blocks) * self.tokens / (self._blocks + 0.5))

    def shared_tokens(self, keys: Sequence[int], tokens: int) -> int:
        """Tokens of a later prompt (``keys``, ``tokens``) that repeat this one's head, to a 32nd of its length."""
        if not self._blocks:
            return 0
        if self._continued_by(keys):
            return min(self.tokens, tokens)  # a plain continuation: the unfinished last block is repeated as well
        self.condense()
        depth = 0
        for position, key in zip(_positions(self._blocks), self._keys, strict=True):
            if position >= len(keys) or keys[position] & _LOW_BITS != key:
                break
            depth = position + 1
        return min(self.tokens * depth // self._blocks, tokens)

    def _continued_by(self, keys: Sequence[int]) -> bool:
        return len(keys) >= self._blocks and (keys[self._blocks - 1] ^ self._keys[-1]) & _LOW_BITS == 0


class Sight(msgspec.Struct, frozen=True):
    """What was known when the request was bound; tokens.

    ``previous``: the session's last prompt (0: first request). ``shared``: how much of this prompt repeats it.
    ``expected``: index figure at the chosen place; ``elsewhere``: the best index figure at any other place.
    ``same_place``: bound where the session's last request ran. ``cold``: the place lost or never had a cache since.
    ``idle``: the session was idle beyond its expected residency. ``block``: the engine's block size.
    """

    previous: int
    shared: int
    expected: int
    elsewhere: int
    same_place: bool
    cold: bool
    idle: bool
    block: int


def book(prompt_tokens: int | None, cached_tokens: int | None, sight: Sight | None) -> dict[str, int]:
    """Uncached tokens by cause; with ``cached_tokens`` they sum to ``prompt_tokens``."""
    if prompt_tokens is None:
        return {}
    if cached_tokens is None:
        return {"unknown": prompt_tokens} if prompt_tokens else {}
    left = max(prompt_tokens - cached_tokens, 0)
    causes: dict[str, int] = {}

    def take(cause: str, tokens: int) -> None:
        nonlocal left
        tokens = min(max(tokens, 0), left)
        if tokens:
            causes[cause] = causes.get(cause, 0) + tokens
            left -= tokens

    if sight is None:
        take("unknown", left)
        return causes
    known = sight.shared if sight.previous else max(sight.expected, sight.elsewhere)
    known = min(known, prompt_tokens)
    repeated = min(max(sight.previous, known), prompt_tokens)
    take("new", prompt_tokens - max(repeated, cached_tokens))
    take("caller", repeated - max(known, cached_tokens))
    lost = known - cached_tokens
    if lost <= 0:
        take("unknown", left)
        return causes
    if lost <= sight.block:
        take("template", lost)
    elif sight.cold:
        take("cold_backend", lost)
    elif not sight.same_place and sight.elsewhere > max(sight.expected, cached_tokens):
        take("routed_elsewhere", min(sight.elsewhere, known) - cached_tokens)
        take("evicted" if sight.previous else "unknown", left)
    elif sight.idle:
        take("expired", lost)
    elif sight.same_place or sight.expected > cached_tokens:
        take("evicted", lost)
    take("unknown", left)
    return causes
