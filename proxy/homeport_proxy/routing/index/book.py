"""One engine rank's resident blocks as its events tell them: copies per medium, groups of hybrid models, holes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BYTES_PER_BLOCK = 420
"""Memory of one block's node in CPython: dictionary slot, key, node, its copies."""

DEVICE_MEDIUMS = frozenset({"GPU", "gpu", "", "device"})
"""Mediums that the engine computes from directly (vLLM says GPU on a CPU too); all others must be loaded first."""


class _Node:
    __slots__ = ("children", "copies", "parent")

    def __init__(self, parent: int | None) -> None:
        self.parent = parent
        self.children = 0
        self.copies: dict[str, int] = {}


class _Group:
    """Blocks of one KV cache group. ``windowed``: it drops blocks whose successors stay (sliding window, mamba)."""

    __slots__ = ("holes", "nodes", "windowed")

    def __init__(self) -> None:
        self.nodes: dict[int, _Node] = {}
        self.holes = 0
        self.windowed = False

    def stored(self, hashes: Sequence[int], parent: int | None, medium: str) -> None:
        nodes = self.nodes
        for key in hashes:
            node = nodes.get(key)
            if node is None:
                node = nodes[key] = _Node(parent)
                node.children = 0
                above = nodes.get(parent) if parent is not None else None
                if above is not None:
                    above.children += 1
                elif parent is not None:
                    self.holes += 1
            # one copy per medium: an engine that stores the same hash twice in a medium holds two blocks
            node.copies[medium] = node.copies.get(medium, 0) + 1
            parent = key

    def removed(self, hashes: Iterable[int], medium: str) -> None:
        nodes = self.nodes
        for key in hashes:
            node = nodes.get(key)
            if node is None:
                continue
            left = node.copies.get(medium, 0) - 1
            if left > 0:
                node.copies[medium] = left
                continue
            node.copies.pop(medium, None)
            if node.copies:
                continue
            del nodes[key]
            above = nodes.get(node.parent) if node.parent is not None else None
            if above is not None:
                above.children -= 1
            elif node.parent is not None:
                self.holes -= 1
            if node.children:
                self.windowed = True
                self.holes += node.children

    def contiguous(self, keys: Sequence[int], device_only: bool) -> int:
        """Leading keys held; with ``device_only`` those the engine can use without loading."""
        nodes = self.nodes
        depth = 0
        for key in keys:
            node = nodes.get(key)
            if node is None or (device_only and not DEVICE_MEDIUMS.intersection(node.copies)):
                break
            depth += 1
        return depth


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
        return sum(len(group.nodes) for group in self._groups.values())


def _backed_up(keys: Sequence[int], depth: int, windowed: Sequence[_Group]) -> int:
    while depth and not all(keys[depth - 1] in group.nodes for group in windowed):
        depth -= 1
    return depth
