"""A sequence of KV event batches made whole: gaps, doubles, reordering, restarts. Pure: batches in, batches out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from homeport_engines.vllm.kv import KvBatch

StreamState = Literal["waiting", "whole", "gap", "partial"]
"""``waiting``: nothing heard. ``whole``: every batch since the engine's start was applied. ``gap``: batches are missing
and asked for. ``partial``: some are lost for good, so that blocks may be held that nobody told of."""

_LATE_BATCHES = 4096


@dataclass(frozen=True, slots=True)
class Step:
    """What to do with the book: clear it, apply batches in order; ``replay_from``: ask for what is missing."""

    clear: bool = False
    batches: Sequence[KvBatch] = ()
    replay_from: int | None = None


class EventStream:
    """Follows one publisher. A batch is told from a doubled one by its timestamp: a restarted engine counts from 0."""

    def __init__(self) -> None:
        self.state: StreamState = "waiting"
        self._next = 0
        self._ts = float("-inf")
        self._late: dict[int, KvBatch] = {}
        self._asked = False

    def take(self, batch: KvBatch) -> Step:
        """A live batch arrived."""
        if batch.seq < self._next:
            if batch.ts <= self._ts:
                return Step()  # a double
            return self._restarted(batch)
        if batch.seq == self._next:
            return Step(batches=self._advance(batch))
        if len(self._late) < _LATE_BATCHES:
            self._late[batch.seq] = batch
        if self.state != "partial":
            self.state = "gap"
        if self._asked:
            return Step()
        self._asked = True
        return Step(replay_from=self._next)

    def replayed(self, batches: Sequence[KvBatch]) -> Step:
        """The publisher's answer to a replay request, in order; empty when it has nothing or did not answer."""
        self._asked = False
        done: list[KvBatch] = []
        for batch in sorted(batches, key=lambda batch: batch.seq):
            if batch.seq == self._next:
                done += self._advance(batch)
            elif batch.seq > self._next:
                self._late.setdefault(batch.seq, batch)
        if not self._late:
            return Step(batches=done)
        # what is still missing is gone for good: go on with what there is
        lost = done + self._skip()
        return Step(batches=lost)

    def reset(self) -> None:
        """The engine was away: it may have restarted, so nothing heard before counts. Clear the book."""
        self.state = "waiting"
        self._next = 0
        self._ts = float("-inf")
        self._late.clear()
        self._asked = False

    @property
    def next_seq(self) -> int:
        """The batch that should come next."""
        return self._next

    def _advance(self, batch: KvBatch) -> list[KvBatch]:
        done = [batch]
        self._next = batch.seq + 1
        while self._next in self._late:
            done.append(self._late.pop(self._next))
            self._next += 1
        self._ts = max(self._ts, max(item.ts for item in done))
        if not self._late:
            self._asked = False
            if self.state != "partial":
                self.state = "whole"
        return done

    def _skip(self) -> list[KvBatch]:
        self.state = "partial"
        first = min(self._late)
        return self._advance(self._late.pop(first))

    def _restarted(self, batch: KvBatch) -> Step:
        self.reset()
        step = self.take(batch)
        return Step(clear=True, batches=step.batches, replay_from=step.replay_from)
