"""The leaf-first LRU against a plain model of an engine's cache, and its bounds."""

import tracemalloc
from array import array
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeport_proxy.routing.index.approximate import ApproximateIndex
from homeport_proxy.routing.index.lru import PrefixLru
from homeport_proxy.routing.index.tree import PrefixTree
from homeport_proxy.routing.views import PrefixKeys, RequestView
from routing.routing_kit import chain, request


class Naive:
    """Every block with its own last use; the oldest goes, and of equals the deepest."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[int, tuple[int, int]] = {}
        self.clock = 0

    def use(self, keys: list[int]) -> None:
        self.clock += 1
        for depth, key in enumerate(keys):
            self.used[key] = (self.clock, -depth)
        while len(self.used) > self.capacity:
            del self.used[min(self.used, key=lambda key: self.used[key])]

    def match(self, keys: list[int]) -> int:
        return next((depth for depth, key in enumerate(keys) if key not in self.used), len(keys))


# prompts of a small tree: a head shared by all, then one of a few branches, cut anywhere
_PROMPTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=60)


def keys_of(branch: int, length: int) -> list[int]:
    return (chain("head", 3) + chain(f"branch{branch}", 9))[:length]


@given(_PROMPTS, st.integers(1, 30))
@settings(max_examples=80, deadline=None)
def test_the_lru_holds_what_a_full_lru_holds(prompts: list[tuple[int, int]], capacity: int) -> None:
    lru, naive = PrefixLru(capacity), Naive(capacity)
    for branch, length in prompts:
        keys = keys_of(branch, length)
        lru.use(keys)
        naive.use(keys)
        assert len(lru) == len(naive.used) <= capacity
        for other in range(4):
            whole = keys_of(other, 12)
            assert lru.match(whole) == naive.match(whole)


# which place, which branch, cut where, and which of two tails of its own behind the cut, how long
_SHARED = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(0, 3), st.integers(0, 12), st.integers(0, 1), st.sampled_from([0, 0, 1, 4])
    ),
    max_size=60,
)


@given(_SHARED, st.lists(st.integers(1, 30), min_size=4, max_size=4), st.integers(0, 40))
@settings(max_examples=120, deadline=None)
def test_places_that_share_a_tree_each_hold_what_they_would_alone(
    prompts: list[tuple[int, int, int, int, int]], capacities: list[int], restart: int
) -> None:
    tree = PrefixTree()
    places = [PrefixLru(capacity, tree, f"d{number}") for number, capacity in enumerate(capacities)]
    alone = [Naive(capacity) for capacity in capacities]
    for number, (place, branch, length, tail, tail_length) in enumerate(prompts):
        keys = keys_of(branch, length) + chain(f"tail{branch}-{length}-{tail}", tail_length)
        places[place].use(keys)
        alone[place].use(keys)
        if number == restart:
            places[place].clear()
            alone[place].used.clear()
        for held, naive in zip(places, alone, strict=True):
            assert len(held) == len(naive.used)
            assert held.match(keys) == naive.match(keys)
            assert all(held.match(keys_of(other, 12)) == naive.match(keys_of(other, 12)) for other in range(4))
        assert tree.keys == len(set().union(*(naive.used for naive in alone))), "nothing is kept that no place holds"
    for held in places:
        held.clear()
    assert tree.bytes == 0


def test_a_conversation_is_one_run_again_once_its_dead_ends_were_evicted() -> None:
    """Each turn ends in text that the next one does not repeat: without this a walk would lengthen turn by turn."""
    tree = PrefixTree()
    lru = PrefixLru(60, tree)
    body = chain("body", 50)
    for turn in range(1, 40):
        lru.use(body[:turn] + chain(f"volatile{turn}", 1))
    for number in range(3):
        lru.use(body + chain(f"last{number}", 1))
    assert lru.match(body) == 50
    assert len(tree.path(body)) > 5
    lru.use(chain("other", 8))
    lru.use(body)
    assert len(tree.path(body)) == 1
    assert lru.match(body) == 50


def test_evicted_keys_are_told_deepest_first() -> None:
    lru = PrefixLru(6)
    lru.gone = []
    old, new = chain("old", 4), chain("new", 4)
    lru.use(old)
    lru.use(new)
    assert lru.gone == [old[3], old[2]]
    lru.use(old[:1] + chain("fork", 3))
    assert lru.gone == [old[3], old[2], old[1], *reversed(new[2:])]


def test_a_single_prompt_larger_than_the_cache_keeps_its_head() -> None:
    lru = PrefixLru(10)
    keys = chain("long", 50)
    lru.use(keys)
    assert len(lru) == 10
    assert lru.match(keys) == 10


def test_the_approximate_index_is_bounded_in_bytes_over_all_places() -> None:
    budget = 500_000
    index = ApproximateIndex(budget, default_kv_tokens=10_000_000)
    for place in range(8):
        index.set_place(f"d{place}", None)
    for number in range(4_000):
        one = request(f"s{number}", 4)
        index.sent(f"d{number % 8}", one)
        index.settled(f"d{number % 8}")
        assert index.bytes <= budget
    assert index.cached_tokens("d7", request("s3999", 4)) > 0
    assert index.cached_tokens("d0", request("s0", 4)) == 0


@pytest.mark.parametrize(
    ("sessions", "blocks", "turns", "places"), [(200, 100, 1, 1), (2_000, 10, 1, 8), (40, 400, 20, 64)]
)
def test_the_index_takes_no_more_memory_than_it_says(sessions: int, blocks: int, turns: int, places: int) -> None:
    rng = Random(1)
    head = [rng.getrandbits(64) for _ in range(4)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = ApproximateIndex(10**9, default_kv_tokens=10**9)
        for place in range(places):
            index.set_place(f"d{place}", None)
        empty = tracemalloc.get_traced_memory()[0] - before
        for number in range(sessions):
            keys = array("Q", head)
            for _ in range(turns):
                keys.extend(rng.getrandbits(64) for _ in range(blocks // turns))
                index.sent(f"d{number % places}", request("s", prefix=PrefixKeys(keys[:])))
            index.settled(f"d{number % places}")
        used = tracemalloc.get_traced_memory()[0] - before - empty
    finally:
        tracemalloc.stop()
    assert 0.5 * index.bytes < used <= index.bytes


def test_a_place_holds_what_its_engine_can() -> None:
    index = ApproximateIndex(10**9, default_kv_tokens=1)
    index.set_place("d0", 128 * 100)
    for number in range(50):
        index.sent("d0", request(f"s{number}", 10))
        index.settled("d0")
    assert 80 <= index.blocks <= 110
    index.set_place("d0", 128 * 400)
    for number in range(50):
        index.sent("d0", request(f"t{number}", 10))
        index.settled("d0")
    assert 350 <= index.blocks <= 440
    index.forget("d0")
    assert index.blocks == 0
    index.drop_place("d0")
    assert index.bytes == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 12)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_one_look_for_all_places_says_what_each_place_says(sent: list[tuple[int, int, int]]) -> None:
    index = ApproximateIndex(40 * 320, default_kv_tokens=128 * 15)
    for place in range(6):
        index.set_place(f"d{place}", None)
    for number, (place, branch, length) in enumerate(sent):
        index.sent(f"d{place}", prompt_of(branch, length))
        if number % 3:
            index.settled(f"d{place}")
        if number % 20 == 19:
            index.forget(f"d{place}")
            index.drop_place(f"d{(place + 1) % 6}")
            index.set_place(f"d{(place + 1) % 6}", None)
        for other in range(4):
            one = prompt_of(other, 12)
            found = index.cached_by_place(one)
            for n in range(6):
                assert found.at(f"d{n}") == index.cached_tokens(f"d{n}", one)


def prompt_of(branch: int, length: int) -> RequestView:
    return request("s", length, prefix=PrefixKeys(keys_of(branch, length)))


def test_a_prompt_without_blocks_is_nothing_known() -> None:
    index = ApproximateIndex(10**6, 1000)
    index.set_place("d0", None)
    empty = request("s", 1, prefix=PrefixKeys())
    index.sent("d0", empty)
    assert index.cached_tokens("d0", empty) == 0
