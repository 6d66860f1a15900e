"""One engine rank's resident blocks as its events tell them: copies per medium, groups of hybrid models, holes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BYTES_PER_BLOCK = 100
"""Memory of one block in CPython, rounded up: a dictionary slot and the key, which its successor's entry shares."""

DEVICE_MEDIUMS = frozenset({"GPU", "gpu", "", "device"})
"""Mediums that the engine computes from directly (vLLM says GPU on a CPU too); all others must be loaded first."""

_ONE = {"": 1}


class _Group:
    """Blocks of one KV cache group. ``windowed``: it drops blocks whose successors stay (sliding window, mamba).

    Most blocks have one copy, on the device, and one successor: only the others are noted apart.
    """

    __slots__ = ("_copies", "_last", "_successors", "_tiered", "parents", "windowed")

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}
        """Each block's predecessor (None: it stands at the root)."""
        self._copies: dict[int, dict[str, int]] = {}
        self._successors: dict[int, int] = {}
        self._last: int | None = None
        self._tiered = False
        self.windowed = False

    def stored(self, hashes: Sequence[int], parent: int | None, medium: str) -> None:
        medium = "" if medium in DEVICE_MEDIUMS else medium
        parents = self.parents
        self._tiered |= bool(medium)
        if parent == self._last:
            parent = self._last  # the same number is kept once
        for key in hashes:
            if key not in parents:
                parents[key] = parent
                self._successors[key] = 0
                if parent is not None:
                    self._succeeded(parent, 1)
                if medium:
                    self._copies[key] = {medium: 1}
            else:
                # one copy per medium: an engine that stores the same hash twice in a medium holds two blocks
                copies = self._copies.setdefault(key, dict(_ONE))
                copies[medium] = copies.get(medium, 0) + 1
            parent = self._last = key

    def removed(self, hashes: Iterable[int], medium: str) -> None:
        medium = "" if medium in DEVICE_MEDIUMS else medium
        for key in hashes:
            if key not in self.parents:
                continue
            copies = self._copies.get(key, _ONE)
            left = {kind: count - (kind == medium) for kind, count in copies.items() if count > (kind == medium)}
            if left and left != _ONE:
                self._copies[key] = left
                continue
            self._copies.pop(key, None)
            if left:
                continue
            parent = self.parents.pop(key)
            if parent is not None:
                self._succeeded(parent, -1)
            if self._successors.pop(key, 1):
                self.windowed = True

    def _succeeded(self, key: int, by: int) -> None:
        if key not in self.parents:
            return
        count = self._successors.pop(key, 1) + by
        if count != 1:
            self._successors[key] = count

    def contiguous(self, keys: Sequence[int], device_only: bool) -> int:
        """Leading keys held; with ``device_only`` those the engine can use without loading."""
        parents, copies = self.parents, self._copies
        if not self.windowed and not self._tiered:
            return self._closed(keys)
        depth = 0
        for key in keys:
            if key not in parents or (device_only and "" not in copies.get(key, _ONE)):
                break
            depth += 1
        return depth

    def _closed(self, keys: Sequence[int]) -> int:
        """The same where a block is held only with all before it."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in self.parents:
                low = middle + 1
            else:
                high = middle
        return low


@dataclass(frozen=True, slots=True)
class Resident:
    """Leading blocks of a prompt held on the device, and held at all (device or a tier to load from)."""

    device_blocks: int
    any_blocks: int


class BlockBook:
    """Everything one rank holds. Purely what was told: no eviction of its own, no clock."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self.block_tokens: int | None = None

    def stored(self, hashes: Sequence[int], parent: int | None, medium: str, group: int, block_tokens: int) -> None:
        """Blocks were stored, chained below ``parent`` (None: at the root)."""
        self.block_tokens = block_tokens
        self._groups.setdefault(group, _Group()).stored(hashes, parent, medium)

    def removed(self, hashes: Sequence[int], medium: str, group: int | None) -> None:
        """One copy of each block left ``medium``; without a group it is looked for in all."""
        groups = [self._groups[group]] if group in self._groups else list(self._groups.values())
        if group is not None and group not in self._groups:
            groups = []
        for held in groups:
            held.removed(hashes, medium)

    def cleared(self) -> None:
        """Everything is gone."""
        self._groups.clear()

    def resident(self, keys: Sequence[int]) -> Resident:
        """How far a prompt's block hashes are held.

        Groups that keep whole prefixes must hold every block; a windowed group only the last one used.
        """
        groups = self._groups.values()
        whole = [group for group in groups if not group.windowed] or list(groups)
        if not whole:
            return Resident(0, 0)
        device = min(group.contiguous(keys, True) for group in whole)
        anywhere = min(group.contiguous(keys, False) for group in whole)
        windowed = [group for group in groups if group.windowed and group not in whole]
        return Resident(_backed_up(keys, device, windowed), _backed_up(keys, anywhere, windowed))

    def __len__(self) -> int:
        return sum(len(group.parents) for group in self._groups.values())


def _backed_up(keys: Sequence[int], depth: int, windowed: Sequence[_Group]) -> int:
    while depth and not all(keys[depth - 1] in group.parents for group in windowed):
        depth -= 1
    return depth
