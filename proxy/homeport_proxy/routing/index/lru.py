"""A prefix cache's content as a leaf-first LRU over chained block keys: what an engine's block pool keeps."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

_PARENT, _CHILDREN, _USED = 0, 1, 2

BYTES_PER_BLOCK = 320
"""Memory of one block in CPython, rounded up: 169 measured for key and node (bench/decide.py), 257 with its holders."""


class PrefixLru:
    """Blocks of chained keys, evicted leaf first by last use; ``capacity_blocks`` bounds it.

    A key covers all keys before it, so a chain is held up to some depth and not beyond: looking it up is a binary
    search. A use is noted at the chain's end only; a parent inherits the last use of its children as they go, which
    gives the order of a full LRU (a parent is never older than its children) at the price of the new blocks alone.
    """

    __slots__ = ("_clock", "_leaves", "_nodes", "capacity_blocks", "gone")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._nodes: dict[int, list[int]] = {}
        self._leaves: list[tuple[int, int]] = []
        self._clock = 0
        self.gone: list[int] | None = None
        """Where to note evicted keys, for whoever tells others of them."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: int) -> bool:
        return key in self._nodes

    def match(self, keys: Sequence[int]) -> int:
        """How many leading ``keys`` are held."""
        nodes = self._nodes
        if not keys or keys[0] not in nodes:
            return 0
        low, high = 1, len(keys)
        if keys[high - 1] in nodes:
            return high
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in nodes:
                low = middle + 1
            else:
                high = middle
        return low

    def use(self, keys: Sequence[int]) -> int:
        """Note one use of the chain ``keys`` and keep all of it; returns how many blocks were evicted."""
        self.add(keys)
        return self.shrink(self.capacity_blocks)

    def add(self, keys: Sequence[int]) -> int:
        """The same without eviction, which a later ``shrink`` makes up for; returns how many blocks are new."""
        if not keys:
            return 0
        depth = self.match(keys)
        self._clock += 1
        clock = self._clock
        nodes = self._nodes
        parent = keys[depth - 1] if depth else 0
        if depth:
            nodes[parent][_USED] = clock
        fresh = keys[depth:]
        if fresh:
            if depth:
                nodes[parent][_CHILDREN] += 1
            nodes.update({key: [before, 1, clock] for key, before in zip(fresh, (parent, *fresh), strict=False)})
            parent = fresh[-1]
            nodes[parent][_CHILDREN] = 0
        if not nodes[parent][_CHILDREN]:
            heappush(self._leaves, (clock, parent))
        return len(fresh)

    def shrink(self, blocks: int) -> int:
        """Evict until at most ``blocks`` are held; returns how many went."""
        evicted = 0
        nodes, leaves = self._nodes, self._leaves
        while len(nodes) > blocks and leaves:
            used, key = heappop(leaves)
            node = nodes.get(key)
            if node is None or node[_CHILDREN] or node[_USED] != used:
                continue  # gone, grown or used since it was noted
            del nodes[key]
            evicted += 1
            if self.gone is not None:
                self.gone.append(key)
            parent = nodes.get(node[_PARENT])
            if parent is not None:
                parent[_CHILDREN] -= 1
                if parent[_USED] < used:
                    parent[_USED] = used
                if not parent[_CHILDREN]:
                    heappush(leaves, (parent[_USED], node[_PARENT]))
        if len(leaves) > 64 + 4 * len(nodes):
            self._leaves = sorted((node[_USED], key) for key, node in nodes.items() if not node[_CHILDREN])
        return evicted

    def clear(self) -> None:
        """Forget everything (the engine restarted)."""
        self._nodes.clear()
        self._leaves.clear()
