"""The paged prefix cache of one rank: a pool of blocks, found by hash, evicted least recently used.

Books as in vLLM: every attention group has its own blocks out of one pool; a block that no request holds stays
findable until its room is needed; two requests that computed the same block hold two copies, and each copy is
announced when stored and when evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from homeport_engines.emulator.settings import CacheGroup

Key = tuple[bytes, int]
"""A block's hash and its attention group."""


class Block:
    """Room for ``block_tokens`` tokens of one group's KV."""

    __slots__ = ("key", "number", "refs")

    def __init__(self, number: int) -> None:
        self.number = number
        self.refs = 0
        self.key: Key | None = None


class PagedCache:
    """Blocks of one rank. ``on_evict`` is told each key whose copy leaves."""

    def __init__(
        self, blocks: int, block_tokens: int, groups: Sequence[CacheGroup], on_evict: Callable[[Key], None]
    ) -> None:
        self.capacity = blocks
        self.block_tokens = block_tokens
        self.groups = tuple(groups)
        self._on_evict = on_evict
        self._made = 0
        self._blank: list[Block] = []
        self._idle: OrderedDict[int, Block] = OrderedDict()
        self._found: dict[Key, dict[int, Block]] = {}

    @property
    def free(self) -> int:
        """Blocks that no request holds."""
        return self.capacity - self._made + len(self._blank) + len(self._idle)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, as ``vllm:kv_cache_usage_perc`` means it."""
        return 1.0 - self.free / self.capacity

    def holds(self, key: Key) -> bool:
        """Whether a copy of this block is resident."""
        return key in self._found

    def resident(self) -> dict[Key, int]:
        """Every findable block with its number of copies."""
        return {key: len(copies) for key, copies in self._found.items()}

    def lookup(self, hashes: Sequence[bytes], has: Callable[[Key], bool] | None = None) -> int:
        """The longest prefix, in blocks, that every group can continue from."""
        has = has or self.holds
        length = len(hashes)
        while True:
            start = length
            for group, spec in enumerate(self.groups):
                length = self._reach(hashes[:length], group, spec, has)
            if length == start:
                return length

    def _reach(self, hashes: Sequence[bytes], group: int, spec: CacheGroup, has: Callable[[Key], bool]) -> int:
        if spec.window_tokens is None:
            for index, digest in enumerate(hashes):
                if not has((digest, group)):
                    return index
            return len(hashes)
        needed = self.window_blocks(spec)
        run = 0
        for index in range(len(hashes) - 1, -1, -1):
            run = run + 1 if has((hashes[index], group)) else 0
            if run == needed:
                return index + needed
        return run  # a run that reaches the first block is a whole prefix

    def window_blocks(self, spec: CacheGroup) -> int:
        """Blocks before a position that a windowed group needs to continue there."""
        window = spec.window_tokens or 1
        return max(1, -(-(window - 1) // self.block_tokens))

    def take(self, key: Key) -> Block | None:
        """Hold the resident block of this key; None when it is not resident."""
        copies = self._found.get(key)
        if not copies:
            return None
        block = next(iter(copies.values()))
        if block.refs == 0:
            del self._idle[block.number]
        block.refs += 1
        return block

    def fresh(self) -> Block:
        """Hold an empty block, evicting the least recently used one when no blank is left.

        Raises IndexError when every block is held (check ``free`` first).
        """
        if self._blank:
            block = self._blank.pop()
        elif self._made < self.capacity:
            self._made += 1  # numbers begin at 1: block 0 is vLLM's null block
            block = Block(self._made)
        elif self._idle:
            _, block = self._idle.popitem(last=False)
            self._forget(block)
        else:
            raise IndexError("every KV block is held")
        block.refs = 1
        return block

    def commit(self, block: Block, key: Key) -> None:
        """A full block becomes findable by its hash."""
        block.key = key
        self._found.setdefault(key, {})[block.number] = block

    def release(self, blocks: Sequence[Block]) -> None:
        """Let blocks go, the last one first, so that tails are evicted before heads."""
        for block in reversed(blocks):
            block.refs -= 1
            if block.refs:
                continue
            if block.key is None:
                self._blank.append(block)
            else:
                self._idle[block.number] = block

    def clear(self) -> bool:
        """Forget every idle block; False, and nothing done, while requests hold blocks (as in vLLM)."""
        if self.free < self.capacity:
            return False
        while self._idle:
            _, block = self._idle.popitem()
            block.key = None
            self._blank.append(block)
        self._found.clear()
        return True

    def _forget(self, block: Block) -> None:
        key = block.key
        if key is None:
            return
        copies = self._found[key]
        del copies[block.number]
        if not copies:
            del self._found[key]
        block.key = None
        self._on_evict(key)


class HostTier:
    """A larger, slower tier behind the cache: blocks are written through to it and loaded back at a price."""

    def __init__(self, blocks: int, on_evict: Callable[[Key], None]) -> None:
        self.capacity = blocks
        self._on_evict = on_evict
        self._kept: OrderedDict[Key, None] = OrderedDict()

    def holds(self, key: Key) -> bool:
        """Whether the block is here."""
        return key in self._kept

    def store(self, key: Key) -> bool:
        """Keep a block; True when it was not here before."""
        new = key not in self._kept
        self._kept[key] = None
        self._kept.move_to_end(key)
        while len(self._kept) > self.capacity:
            gone, _ = self._kept.popitem(last=False)
            self._on_evict(gone)
        return new and self.capacity > 0

    def resident(self) -> list[Key]:
        """Everything that is here, the least recently used first."""
        return list(self._kept)

    def touch(self, key: Key) -> None:
        """Mark a block as used."""
        if key in self._kept:
            self._kept.move_to_end(key)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)
