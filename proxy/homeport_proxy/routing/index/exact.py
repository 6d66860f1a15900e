"""The exact index: block books fed by KV event streams, with what is on its way to an engine counted as held."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from homeport_engines.vllm.kv import AllBlocksCleared, BlockRemoved, BlockStored, KvBatch
from homeport_proxy.routing.index.book import BYTES_PER_BLOCK, BlockBook, Resident
from homeport_proxy.routing.index.stream import EventStream, Step, StreamState


class _Held:
    """One place's book, its stream, and prompts sent whose blocks were not told of yet."""

    __slots__ = ("book", "pending", "stream")

    def __init__(self) -> None:
        self.book = BlockBook()
        self.stream = EventStream()
        self.pending: dict[int, Sequence[int]] = {}


class ExactIndex:
    """Books by place. Pure: batches come in by ``take`` and ``replayed``, from whoever reads the sockets."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def follow(self, place: str) -> None:
        """A place's events are subscribed to from now on."""
        self._held.setdefault(place, _Held())

    def drop(self, place: str) -> None:
        """A place left, or its events are off."""
        self._held.pop(place, None)

    def state(self, place: str) -> StreamState | None:
        """The stream's state; None when the place has no events."""
        held = self._held.get(place)
        return None if held is None else held.stream.state

    @property
    def places(self) -> Collection[str]:
        """Places whose events are followed."""
        return self._held.keys()

    def block_tokens(self, place: str) -> int | None:
        """The engine's block size as its events tell it."""
        held = self._held.get(place)
        return None if held is None else held.book.block_tokens

    def take(self, place: str, batch: KvBatch) -> int | None:
        """A live batch; returns the sequence to replay from when some are missing."""
        held = self._held.setdefault(place, _Held())
        return self._apply(held, held.stream.take(batch))

    def replayed(self, place: str, batches: Sequence[KvBatch]) -> int | None:
        """The answer to a replay request."""
        held = self._held.setdefault(place, _Held())
        return self._apply(held, held.stream.replayed(batches))

    def resident(self, place: str, keys: Sequence[int]) -> Resident:
        """Leading blocks held on the device and in any tier; prompts on their way there count as on the device."""
        held = self._held[place]
        found = held.book.resident(keys)
        coming = max((_common(keys, prompt) for prompt in held.pending.values()), default=0)
        if coming <= found.device_blocks:
            return found
        return Resident(coming, max(coming, found.any_blocks))

    def lost(self, place: str, block: int) -> bool:
        """Whether the place's events, all of them heard, say that it does not hold a block."""
        held = self._held.get(place)
        return held is not None and held.stream.state == "whole" and not held.book.resident([block]).any_blocks

    def sent(self, place: str, key: int, keys: Sequence[int]) -> None:
        """A prompt with these block hashes is on its way to ``place`` under ``key``."""
        held = self._held.get(place)
        if held is not None:
            held.pending[key] = keys

    def settled(self, place: str, key: int) -> None:
        """It was prefilled or called off: the events tell what became of it."""
        held = self._held.get(place)
        if held is not None:
            held.pending.pop(key, None)

    def forget(self, place: str) -> None:
        """The engine was away: its next batch is checked anew, what it held is unknown."""
        held = self._held.get(place)
        if held is not None:
            held.stream.reset()
            held.book.cleared()
            held.pending.clear()

    @property
    def blocks(self) -> int:
        """Blocks held over all places."""
        return sum(len(held.book) for held in self._held.values())

    @property
    def bytes(self) -> int:
        """Estimated memory, bytes."""
        return self.blocks * BYTES_PER_BLOCK

    def _apply(self, held: _Held, step: Step) -> int | None:
        book = held.book
        if step.clear:
            book.cleared()
        for batch in step.batches:
            for event in batch.events:
                if isinstance(event, BlockStored):
                    book.stored(event.hashes, event.parent, event.medium, event.group, event.block_tokens)
                elif isinstance(event, BlockRemoved):
                    book.removed(event.hashes, event.medium, event.group)
                elif isinstance(event, AllBlocksCleared):
                    book.cleared()
        return step.replay_from


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Common head of two chains of block hashes: equal at a position means equal before it."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high) // 2
        if left[middle] == right[middle]:
            low = middle + 1
        else:
            high = middle
    return low
