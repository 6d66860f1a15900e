"""Prompts as a radix tree over chained block keys, shared by all places: which leading blocks of each run lie where."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence

BYTES_PER_KEY = 9
BYTES_PER_RUN = 420
BYTES_PER_HOLD = 130
"""Memory in CPython, rounded up (bench/decide.py measures it): a key in its run's array, a run with its dictionary of
holds, its first key and its slot in the tree, one place's hold of a run with its slot in the run."""


class Run:
    """Consecutive blocks that were always sent together: the keys of a stretch of one or many prompts."""

    __slots__ = ("_short", "children", "holds", "keys", "parent")

    def __init__(self, keys: array[int], parent: Run | None) -> None:
        self.keys = keys
        self.parent = parent
        self.children = 0
        self.holds: dict[str, Hold] = {}
        self._short: Mapping[str, int] | None = None

    def short(self, places: Collection[str]) -> Mapping[str, int]:
        """How much each of ``places`` holds that does not hold all of it; looked up once, until ``changed``."""
        if self._short is None:
            size, holds = len(self.keys), self.holds
            held = {place: holds[place].length if place in holds else 0 for place in places}
            self._short = {place: length for place, length in held.items() if length < size}
        return self._short

    def changed(self) -> None:
        """Its keys are others now, or who holds how much of it, or which places there are."""
        self._short = None

    def common(self, keys: Sequence[int], depth: int) -> int:
        """How many of this run's keys are ``keys[depth:]``'s first ones; the first one is known to be."""
        own = self.keys
        high = min(len(own), len(keys) - depth)
        if own[high - 1] == keys[depth + high - 1]:
            return high  # a key covers all before it
        low = 1
        while low < high:
            middle = (low + high) // 2
            if own[middle] == keys[depth + middle]:
                low = middle + 1
            else:
                high = middle
        return low


class Hold:
    """What one place holds of a run: its first ``length`` keys. A link in the place's order of use."""

    __slots__ = ("length", "newer", "older", "run")

    def __init__(self, run: Run | None) -> None:
        self.run = run
        self.length = 0
        self.newer = self.older = self

    def unlink(self) -> None:
        """Out of the order of use."""
        self.older.newer, self.newer.older = self.newer, self.older

    def link_after(self, older: Hold) -> None:
        """Into the order of use, just newer than ``older``."""
        self.older, self.newer = older, older.newer
        older.newer.older = self
        older.newer = self


class PrefixTree:
    """Runs by their first key: keys are chained, so that a key stands in one place of the tree only.

    Places (``lru.PrefixLru``) keep their holds in it; a key that no place holds is dropped.
    """

    def __init__(self) -> None:
        self._root = Run(array("Q"), None)
        self._starts: dict[int, Run] = {}
        self._path: list[tuple[Run, int]] = []
        self._path_of: tuple[int, int] | None = None
        self.keys = 0
        self.holds = 0

    @property
    def bytes(self) -> int:
        """Estimated memory, bytes."""
        return self.keys * BYTES_PER_KEY + len(self._starts) * BYTES_PER_RUN + self.holds * BYTES_PER_HOLD

    def joined_or_left(self) -> None:
        """The places that there are have changed."""
        for run in self._starts.values():
            run.changed()

    def path(self, keys: Sequence[int]) -> list[tuple[Run, int]]:
        """The runs that ``keys`` go through, each with how many of its keys are theirs; not to be changed.

        The last one is remembered: one request is looked up several times in a row.
        """
        if not keys:
            return []
        name = (len(keys), keys[-1])  # the last key covers all before it
        if name == self._path_of:
            return self._path
        path: list[tuple[Run, int]] = []
        starts, run, depth, length = self._starts, self._root, 0, len(keys)
        while depth < length:
            below = starts.get(keys[depth])
            if below is None or below.parent is not run:
                break
            run = below
            common = run.common(keys, depth)
            path.append((run, common))
            depth += common
            if common < len(run.keys):
                break
        self._path, self._path_of = path, name
        return path

    def cover(self, keys: Sequence[int], place: str) -> list[tuple[Run, int]]:
        """The whole of ``keys`` as runs, each with how much of it is theirs; cut and grown so that a use by ``place``
        covers all that it holds of each."""
        path = self._merged(self.path(keys), place)
        depth = sum([common for _, common in path])
        if path:
            last, common = path[-1]
            if common < len(last.keys):
                held = last.holds.get(place)
                if depth < len(keys) or (held is not None and held.length > common):
                    path[-1] = (self._cut(last, common), common)
        if depth < len(keys):
            self._grow(path, keys, depth)
        return path

    def trim(self, run: Run) -> None:
        """Keys of ``run`` that nobody holds any longer are gone."""
        self._path_of = None
        longest = max([hold.length for hold in run.holds.values()], default=0)
        self.keys -= len(run.keys) - longest
        if longest:
            del run.keys[longest:]
            return
        if self._starts.get(run.keys[0]) is run:
            del self._starts[run.keys[0]]
        if run.parent is not None:
            run.parent.children -= 1

    def _merged(self, path: Sequence[tuple[Run, int]], place: str) -> list[tuple[Run, int]]:
        """The path with those runs made one that nothing parts any longer: a branch between them was evicted."""
        merged: list[tuple[Run, int]] = []
        for run, common in path:
            if merged and merged[-1][0].children == 1 and _used_together(merged[-1][0], run, place):
                common += merged[-1][1]
                self._fuse(merged.pop()[0], run)
            merged.append((run, common))
        return merged

    def _fuse(self, upper: Run, run: Run) -> None:
        self._path_of = None
        for place, hold in upper.holds.items():
            below = run.holds.get(place)
            if below is None:
                run.holds[place], hold.run = hold, run
            else:
                below.length += hold.length
                hold.unlink()
                self.holds -= 1
        del self._starts[run.keys[0]]
        self._starts[upper.keys[0]] = run
        run.keys = upper.keys + run.keys
        run.changed()
        run.parent = upper.parent

    def _grow(self, path: list[tuple[Run, int]], keys: Sequence[int], depth: int) -> None:
        self._path_of = None
        tail = array("Q", keys[depth:])
        self.keys += len(tail)
        parent = path[-1][0] if path else self._root
        if path and not parent.children:
            parent.keys.extend(tail)
            parent.changed()
            path[-1] = (parent, len(parent.keys))
            return
        parent.children += 1
        run = self._starts[keys[depth]] = Run(tail, parent)
        path.append((run, len(tail)))

    def _cut(self, run: Run, at: int) -> Run:
        """Part a run in two; returns the upper part. ``run`` stays the lower one."""
        self._path_of = None
        upper = Run(run.keys[:at], run.parent)
        upper.children = 1
        self._starts[upper.keys[0]] = upper
        self._starts[run.keys[at]] = run
        run.keys = run.keys[at:]
        run.parent = upper
        run.changed()
        for place, hold in list(run.holds.items()):
            if hold.length <= at:
                del run.holds[place]
                upper.holds[place] = hold
                hold.run = upper
                continue
            above = upper.holds[place] = Hold(upper)
            above.length = at
            above.link_after(hold)  # used when the lower part was, and to go after it
            hold.length -= at
            self.holds += 1
        return upper


def _used_together(upper: Run, run: Run, place: str) -> bool:
    """Whether every place used both runs last by the same prompt (``place`` is about to)."""
    for name, hold in upper.holds.items():
        below = run.holds.get(name)
        if below is not None and below.newer is not hold and name != place:
            return False
    return True
