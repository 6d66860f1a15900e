"""A prefix cache's content as a leaf-first LRU over chained block keys: what an engine's block pool keeps."""

from __future__ import annotations

from collections.abc import Sequence

from homeport_proxy.routing.index.tree import Hold, PrefixTree


class PrefixLru:
    """Blocks of chained keys, evicted by last use, of equals the deepest; ``capacity_blocks`` bounds it.

    A key covers all keys before it, so a chain is held up to some depth and not beyond. Uses are noted by runs of
    blocks (see ``tree``): a prompt's runs are linked newest last, each run's parent just newer than itself, so that
    the oldest link is always a leaf. Several places may share one ``tree``, each under its ``name``.
    """

    __slots__ = ("_blocks", "_ends", "_tree", "capacity_blocks", "gone", "name")

    def __init__(self, capacity_blocks: int, tree: PrefixTree | None = None, name: str = "") -> None:
        self.capacity_blocks = capacity_blocks
        self.name = name
        self._tree = tree if tree is not None else PrefixTree()
        self._ends = Hold(None)
        """Both ends of the order of use: its ``newer`` is the oldest hold, its ``older`` the newest."""
        self._blocks = 0
        self.gone: list[int] | None = None
        """Where to note evicted keys, for whoever tells others of them."""

    def __len__(self) -> int:
        return self._blocks

    def match(self, keys: Sequence[int]) -> int:
        """How many leading ``keys`` are held."""
        depth = 0
        for run, common in self._tree.path(keys):
            hold = run.holds.get(self.name)
            if hold is None:
                break
            depth += min(hold.length, common)
        return depth

    def use(self, keys: Sequence[int]) -> int:
        """Note one use of the chain ``keys`` and keep all of it; returns how many blocks were evicted."""
        self.add(keys)
        return self.shrink(self.capacity_blocks)

    def add(self, keys: Sequence[int]) -> int:
        """The same without eviction, which a later ``shrink`` makes up for; returns how many blocks are new."""
        name, ends, fresh = self.name, self._ends, 0
        for run, length in reversed(self._tree.cover(keys, name)):
            hold = run.holds.get(name)
            if hold is None:
                hold = run.holds[name] = Hold(run)
                self._tree.holds += 1
            else:
                hold.unlink()
            hold.link_after(ends.older)
            if hold.length < length:
                fresh += length - hold.length
                hold.length = length
                run.changed()
        self._blocks += fresh
        return fresh

    def shrink(self, blocks: int) -> int:
        """Evict until at most ``blocks`` are held; returns how many went."""
        before = self._blocks
        while self._blocks > blocks:
            hold = self._ends.newer
            run, held = hold.run, hold.length
            if run is None:
                raise RuntimeError("blocks are held that no run has")
            spared = min(held, self._blocks - blocks)
            if self.gone is not None:
                self.gone.extend(reversed(run.keys[held - spared : held]))
            self._blocks -= spared
            hold.length -= spared
            run.changed()
            if not hold.length:
                hold.unlink()
                del run.holds[self.name]
                self._tree.holds -= 1
            if held == len(run.keys):
                self._tree.trim(run)
        return before - self._blocks

    def clear(self) -> None:
        """Forget everything (the engine restarted)."""
        gone, self.gone = self.gone, None
        self.shrink(0)
        self.gone = gone
