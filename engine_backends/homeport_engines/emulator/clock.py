"""Emulated time: real time, faster or slower by a factor."""

from __future__ import annotations

import asyncio
import time


class Clock:
    """Counts emulated seconds; ``scale`` emulated seconds pass in one real second."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def now(self) -> float:
        """Emulated seconds since an arbitrary beginning."""
        return time.monotonic() * self.scale

    def real_s(self, emulated_s: float) -> float:
        """How long an emulated duration takes in real seconds."""
        return emulated_s / self.scale

    async def sleep_until(self, moment: float) -> None:
        """Wait for an emulated moment; always lets other tasks run once."""
        await asyncio.sleep(max(0.0, (moment - self.now()) / self.scale))
