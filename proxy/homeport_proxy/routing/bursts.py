"""Which prefills an engine computed together: the first tokens of one step tell its speed only by their sum."""

from __future__ import annotations


class Burst:
    """Prefills that ended together, and since when the engine had worked on nothing else.

    ``parts``: (uncached, cached) tokens by request. ``whole``: the one it had begun with is among them, so that nothing
    else was computed in that time but what waits behind.
    """

    __slots__ = ("began_s", "ended_s", "parts", "told", "whole")

    def __init__(self, began_s: float) -> None:
        self.began_s = self.ended_s = began_s
        self.parts: dict[int, tuple[int, int]] = {}
        self.whole = False
        self.told = False


class Bursts:
    """One engine's prefills as they end. An engine that takes several prompts into one step ends them all at once: the
    first would look slow and the others instant."""

    __slots__ = ("_burst",)

    def __init__(self) -> None:
        self._burst = Burst(0.0)

    def begin(self, now_s: float) -> None:
        """The engine begins: it was idle, or what it worked on was called off."""
        self._burst = Burst(now_s)

    def end(self, work_s: float, at_head: bool, now_s: float) -> Burst:
        """A prefill of ``work_s`` predicted seconds ended; ``at_head``: it had waited longest. Returns what it is part
        of: of the burst before, when it came after that in less than a quarter of its own time."""
        burst = self._burst
        if burst.whole and now_s - burst.ended_s >= work_s / 4:
            burst = self._burst = Burst(burst.ended_s)
        burst.ended_s = now_s
        burst.whole |= at_head
        return burst
