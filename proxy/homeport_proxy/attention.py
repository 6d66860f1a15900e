"""Deadlines on others that heed our own loop: what came while it stood still has not been heard yet."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

BEAT_S = 0.1
"""How often a waiting alarm looks whether the loop still runs."""
LATE_S = 0.02
"""A beat that comes later than this says that the loop stood still."""
MOST_LATE_IN_A_ROW = 5
"""After so many late beats the loop is not held up for once but always: deadlines then hold as they are."""
LISTEN_S = 0.05
"""At least this long is listened after the loop stood still, before anybody is given up."""

Ring = Callable[[float, float], float]


class Alarm:
    """One timer that notices when the loop stood still: for a long callback, or because the machine gave it no time.

    ``ring(now_s, lost_s)`` is called at the time that was set, and at every beat until then; it says when to ring
    next (infinity: no more). ``lost_s`` is how long the loop may have run nothing: all of a late beat. What others did
    in that time is read only afterwards, so they get it back. Times are the loop's, in seconds.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._late_in_a_row = 0
        self._armed_s = 0.0
        self._beat_s = math.inf

    def set(self, at_s: float) -> None:
        """Ring at ``at_s`` at the latest."""
        now_s = asyncio.get_running_loop().time()
        if min(at_s, now_s + BEAT_S) < self._beat_s:
            self._arm(at_s, now_s)

    def off(self) -> None:
        """Ring no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._beat_s = None, math.inf

    def _arm(self, at_s: float, now_s: float) -> None:
        self.off()
        self._armed_s = now_s
        self._beat_s = min(at_s, now_s + BEAT_S)
        self._timer = asyncio.get_running_loop().call_at(self._beat_s, self._beat)

    def _beat(self) -> None:
        now_s = asyncio.get_running_loop().time()
        late = now_s - self._beat_s > LATE_S
        self._timer, self._beat_s = None, math.inf
        self._late_in_a_row = self._late_in_a_row + 1 if late else 0
        lost_s = now_s - self._armed_s if 0 < self._late_in_a_row <= MOST_LATE_IN_A_ROW else 0.0
        next_s = self._ring(now_s, lost_s)
        if next_s < math.inf:
            self._arm(next_s, now_s)


def given_back(due_s: float, now_s: float, lost_s: float) -> float:
    """The deadline after the loop lost ``lost_s``."""
    return max(due_s + lost_s, now_s + LISTEN_S) if lost_s else due_s


@asynccontextmanager
async def within(limit_s: float) -> AsyncIterator[None]:
    """``asyncio.timeout`` for an answer of somebody else. Raises TimeoutError."""
    async with asyncio.timeout(None) as limit:
        due_s = asyncio.get_running_loop().time() + limit_s

        def ring(now_s: float, lost_s: float) -> float:
            nonlocal due_s
            due_s = given_back(due_s, now_s, lost_s)
            if now_s < due_s:
                return due_s
            limit.reschedule(now_s)
            return math.inf

        alarm = Alarm(ring)
        alarm.set(due_s)
        try:
            yield
        finally:
            alarm.off()
