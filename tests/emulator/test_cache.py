"""The paged cache keeps true books under any order of taking, filling and releasing."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from homeport_engines.emulator import CacheGroup
from homeport_engines.emulator.cache import Block, HostTier, Key, PagedCache

FULL, WINDOW = CacheGroup(), CacheGroup("sliding_window", 5)


def digest(number: int) -> bytes:
    return bytes([number])


class Machine(RuleBasedStateMachine):
    """Requests take, fill and release blocks at random; copies are counted from the outside by events alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: Counter[Key] = Counter()
        self.stored: Counter[Key] = Counter()
        self.cache = PagedCache(6, 4, [FULL], self._evicted)
        self.held: list[list[Block]] = []

    def _evicted(self, key: Key) -> None:
        self.gone[key] += 1

    @precondition(lambda self: self.cache.free > 0)
    @rule(number=st.integers(0, 5), full=st.booleans())
    def compute(self, number: int, full: bool) -> None:
        block = self.cache.fresh()
        if full:
            self.cache.commit(block, (digest(number), 0))
            self.stored[digest(number), 0] += 1
        self.held.append([block])

    @rule(number=st.integers(0, 5))
    def reuse(self, number: int) -> None:
        key = (digest(number), 0)
        block = self.cache.take(key)
        assert (block is not None) == (self.stored[key] > self.gone[key])
        if block is not None:
            self.held.append([block])

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 100))
    def release(self, pick: int) -> None:
        self.cache.release(self.held.pop(pick % len(self.held)))

    @precondition(lambda self: self.cache.free == 0)
    @rule()
    def full_is_refused(self) -> None:
        with pytest.raises(IndexError):
            self.cache.fresh()

    @invariant()
    def books_are_true(self) -> None:
        held = {block.number for blocks in self.held for block in blocks}
        assert self.cache.free == 6 - len(held)
        assert self.cache.resident() == {k: n - self.gone[k] for k, n in self.stored.items() if n > self.gone[k]}

    @rule()
    def clear(self) -> None:
        if self.cache.clear():
            assert not self.held
            self.stored.clear()
            self.gone.clear()
        else:
            assert self.held


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBooks = Machine.TestCase


def test_the_least_recently_used_block_leaves_first_and_tails_before_heads() -> None:
    evicted: list[Key] = []
    cache = PagedCache(4, 4, [FULL], evicted.append)
    head, tail = cache.fresh(), cache.fresh()
    cache.commit(head, (digest(1), 0))
    cache.commit(tail, (digest(2), 0))
    other = cache.fresh()
    cache.commit(other, (digest(3), 0))
    cache.release([other])
    cache.release([head, tail])
    for _ in range(4):
        cache.fresh()
    assert [key[0] for key in evicted] == [digest(3), digest(2), digest(1)]


@given(st.sets(st.integers(0, 9)), st.integers(0, 10))
def test_full_attention_needs_every_block(resident: set[int], length: int) -> None:
    cache = PagedCache(1, 4, [FULL], lambda _: None)
    hashes = [digest(number) for number in range(length)]
    found = cache.lookup(hashes, lambda key: key[0][0] in resident)
    assert found == next((n for n in range(length) if n not in resident), length)


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.integers(0, 10), st.integers(1, 14))
def test_a_hybrid_prefix_is_the_longest_one_all_groups_can_continue(
    full: set[int], windowed: set[int], length: int, window: int
) -> None:
    group = CacheGroup("sliding_window", window)
    cache = PagedCache(1, 4, [FULL, group], lambda _: None)
    hashes = [digest(number) for number in range(length)]
    found = cache.lookup(hashes, lambda key: key[0][0] in (full if key[1] == 0 else windowed))

    def possible(blocks: int) -> bool:
        near = range(max(0, blocks - cache.window_blocks(group)), blocks)
        return set(range(blocks)) <= full and set(near) <= windowed

    assert found == max(n for n in range(length + 1) if possible(n))


def test_a_host_tier_is_bounded_and_says_what_leaves() -> None:
    gone: list[Key] = []
    tier = HostTier(2, gone.append)
    assert tier.store((digest(1), 0))
    assert tier.store((digest(2), 0))
    assert not tier.store((digest(1), 0))
    tier.store((digest(3), 0))
    assert gone == [(digest(2), 0)]
    assert len(tier) == 2
