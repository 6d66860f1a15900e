"""KV events: encodings, hashes, streams with faults. An index that says exact is right."""

import hashlib
import tracemalloc
from dataclasses import dataclass, field
from random import Random

import cbor2
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeport_engines.vllm.kv import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventFormatError,
    KvBatch,
    block_hashes,
    decode_batch,
)
from homeport_proxy.routing.index.book import BYTES_PER_BLOCK, BlockBook
from homeport_proxy.routing.index.exact import ExactIndex
from homeport_proxy.routing.views import PrefixKeys, RoutingSettings
from routing.routing_kit import Fleet, chain, request, spec

STORED_MAP = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": [5] * 32,
    "block_size": 16,
    "lora_id": None,
    "medium": "GPU",
    "extra_keys": None,
    "group_idx": 0,
}


@pytest.mark.parametrize(
    ("wire", "event"),
    [
        (STORED_MAP, BlockStored((1, 2), None, 16)),
        ({**STORED_MAP, "parent_block_hash": b"\xff" * 32}, BlockStored((1, 2), 2**64 - 1, 16)),
        ({**STORED_MAP, "group_idx": 2, "medium": "CPU"}, BlockStored((1, 2), None, 16, "CPU", 2)),
        (["BlockStored", [1, 2], 7, [5] * 32, 16, None, "GPU"], BlockStored((1, 2), 7, 16)),
        (["BlockStored", [1, 2], None, [5] * 32, 16, 3], BlockStored((1, 2), None, 16, adapter="3")),
        ({"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU"}, BlockRemoved((9,))),
        (["BlockRemoved", [9], "CPU"], BlockRemoved((9,), "CPU")),
        (["AllBlocksCleared"], AllBlocksCleared()),
        ({"type": "AllBlocksCleared"}, AllBlocksCleared()),
    ],
)
def test_both_encodings(wire: object, event: object) -> None:
    batch = decode_batch(4, msgspec.msgpack.encode([1.5, [wire], 3]))
    assert batch == KvBatch(4, 1.5, (event,), 3)  # type: ignore[arg-type]


def test_unknown_events_are_left_out_and_broken_ones_named() -> None:
    assert decode_batch(0, msgspec.msgpack.encode([1.0, [{"type": "BlockPinned"}]])).events == ()
    for wire in (b"\xc1", msgspec.msgpack.encode({"a": 1}), msgspec.msgpack.encode([1.0, [7]])):
        with pytest.raises(EventFormatError):
            decode_batch(0, wire)
    with pytest.raises(EventFormatError, match="block_hashes"):
        decode_batch(0, msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}]]))


def test_block_hashes_are_sha256_of_canonical_cbor() -> None:
    tokens = list(range(50))
    none = hashlib.sha256(cbor2.dumps("vllm-none-hash", canonical=True)).digest()
    first = hashlib.sha256(cbor2.dumps([none, tokens[:16], None], canonical=True)).digest()
    second = hashlib.sha256(cbor2.dumps([first, tokens[16:32], None], canonical=True)).digest()
    assert block_hashes(tokens, 16, low_64=False)[:2] == [int.from_bytes(first, "big"), int.from_bytes(second, "big")]
    assert [name & (2**64 - 1) for name in block_hashes(tokens, 16, low_64=False)] == block_hashes(tokens, 16)
    assert len(block_hashes(tokens, 16)) == 3


def test_salts_and_adapters_part_the_hashes() -> None:
    tokens = list(range(64))
    plain = block_hashes(tokens, 16)
    salted = block_hashes(tokens, 16, cache_salt="a")
    assert not set(plain) & set(salted)
    assert not set(salted) & set(block_hashes(tokens, 16, cache_salt="b"))
    assert not set(plain) & set(block_hashes(tokens, 16, adapter="sql"))
    with pytest.raises(ValueError, match="block_tokens"):
        block_hashes(tokens, 0)


def test_removals_are_counted_per_copy() -> None:
    book = BlockBook()
    book.stored([1, 2, 3], None, "GPU", 0, 16)
    book.stored([1, 2, 3], None, "CPU", 0, 16)
    book.removed([2], "GPU", 0)
    found = book.resident([1, 2, 3])
    assert (found.device_blocks, found.any_blocks) == (1, 3)
    book.removed([2], "CPU", 0)
    assert book.resident([1, 2, 3]).any_blocks == 1
    book.stored([7], None, "GPU", 0, 16)
    book.stored([7], None, "GPU", 0, 16)
    book.removed([7], "GPU", None)
    assert book.resident([7]).device_blocks == 1
    book.removed([7], "GPU", None)
    assert book.resident([7]).device_blocks == 0


def test_a_windowed_group_needs_only_its_last_block() -> None:
    book = BlockBook()
    for group in (0, 1):
        book.stored([1, 2, 3, 4], None, "GPU", group, 16)
    book.removed([1, 2], "GPU", 1)
    assert book.resident([1, 2, 3, 4]).device_blocks == 4
    book.removed([4], "GPU", 1)
    assert book.resident([1, 2, 3, 4]).device_blocks == 3
    book.removed([3], "GPU", 1)
    assert book.resident([1, 2, 3, 4]).device_blocks == 0
    book.removed([2], "GPU", 0)
    assert book.resident([1, 2, 3, 4]).device_blocks == 0


def test_a_book_takes_no_more_memory_than_it_says() -> None:
    rng = Random(1)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        book = BlockBook()
        for _ in range(440):  # just above a size at which the dictionary has grown
            book.stored([rng.getrandbits(64) for _ in range(100)], None, "GPU", 0, 16)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used <= len(book) * BYTES_PER_BLOCK


@dataclass
class Engine:
    """A publisher: true content, every batch it ever sent since its start."""

    blocks: set[int] = field(default_factory=set)
    log: list[KvBatch] = field(default_factory=list)
    clock: float = 0.0

    def publish(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> KvBatch:
        self.clock += 1
        batch = KvBatch(len(self.log), self.clock, (event,))
        self.log.append(batch)
        return batch

    def change(self, kind: str, conversation: int, length: int) -> KvBatch:
        keys = chain(f"c{conversation}", 8)
        if kind == "store":
            fresh = [key for key in keys[:length] if key not in self.blocks]
            held = [key for key in keys[:length] if key in self.blocks]
            self.blocks.update(fresh)
            parent = held[-1] if held else None
            return self.publish(BlockStored(tuple(fresh), parent, 16))
        if kind == "remove":
            gone = [key for key in keys[length - 1 :] if key in self.blocks]
            self.blocks.difference_update(gone)
            return self.publish(BlockRemoved(tuple(reversed(gone))))
        if kind == "clear":
            self.blocks.clear()
            return self.publish(AllBlocksCleared())
        self.blocks.clear()
        self.log = []  # restarted: the sequence begins anew
        self.clock += 1
        return self.publish(BlockStored((), None, 16))

    def truth(self, keys: list[int]) -> int:
        return next((depth for depth, key in enumerate(keys) if key not in self.blocks), len(keys))


_CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["store"] * 6 + ["remove"] * 3 + ["clear", "restart"]),
        st.integers(0, 4),
        st.integers(1, 8),
        st.sampled_from(["deliver"] * 6 + ["drop", "double", "delay", "old"]),
    ),
    max_size=80,
)


@given(_CHANGES, st.integers(0, 30), st.booleans())
@settings(max_examples=80, deadline=None)
def test_never_exact_and_wrong(changes: list[tuple[str, int, int, str]], kept: int, answers: bool) -> None:
    """Dropped, doubled, delayed and repeated batches, restarts, a replay buffer that is too short or silent."""
    index, engine = ExactIndex(), Engine()
    index.follow("d0")
    delayed: list[KvBatch] = []
    delivered = -1

    def hand_over(batch: KvBatch) -> None:
        nonlocal delivered
        missing = index.take("d0", batch)
        delivered = len(engine.log) - 1 if batch is engine.log[-1] else delivered
        while missing is not None:
            buffer = engine.log[-kept:] if kept else []
            answer = [item for item in buffer if item.seq >= missing] if answers else []
            missing = index.replayed("d0", answer)
            delivered = len(engine.log) - 1 if answer and answer[-1] is engine.log[-1] else delivered

    for kind, conversation, length, fate in changes:
        batch = engine.change(kind, conversation, length)
        if kind == "restart":
            # its connection broke: the subscriber starts over, as it does on every new connection
            delayed.clear()
            index.forget("d0")
            index.replayed("d0", engine.log[-kept:] if answers and kept else [])
            delivered = 0 if answers and kept else -1
        if fate == "delay":
            delayed.append(batch)
            continue
        if fate == "drop":
            continue
        hand_over(batch)
        if fate == "double":
            hand_over(batch)
        if fate == "old" and len(engine.log) > 1:
            hand_over(engine.log[len(engine.log) // 2])
        while delayed and fate == "deliver":
            hand_over(delayed.pop(0))
        if index.state("d0") == "whole" and delivered == len(engine.log) - 1:
            for name in range(5):
                keys = chain(f"c{name}", 8)
                assert index.resident("d0", keys).device_blocks == engine.truth(keys)


def test_a_gap_is_seen_at_once_and_healed_by_the_replay() -> None:
    index, engine = ExactIndex(), Engine()
    first = engine.change("store", 0, 3)
    lost = engine.change("store", 1, 3)
    last = engine.change("store", 2, 3)
    assert index.take("d0", first) is None
    assert index.state("d0") == "whole"
    assert index.take("d0", last) == 1
    assert index.state("d0") == "gap"
    assert index.replayed("d0", [lost, last]) is None
    assert index.state("d0") == "whole"
    assert index.resident("d0", chain("c1", 8)).device_blocks == 3


def test_what_is_lost_for_good_is_never_exact_again_until_a_restart() -> None:
    index, engine = ExactIndex(), Engine()
    batches = [engine.change("store", n % 5, 3) for n in range(6)]
    assert index.take("d0", batches[4]) == 0
    index.replayed("d0", [])
    assert index.state("d0") == "partial"
    index.take("d0", batches[5])
    assert index.state("d0") == "partial"
    fresh = engine.change("restart", 0, 1)
    index.take("d0", fresh)
    assert index.state("d0") == "whole"


def test_the_router_uses_events_when_prompts_come_in_tokens() -> None:
    fleet = Fleet(spec("d0"), spec("d1"), settings=RoutingSettings())
    router = fleet.router
    router.kv_follow("d0")
    keys = chain("s", 20)
    prompt = PrefixKeys(keys, token_blocks={16: keys})
    assert router.kv_events("d0", KvBatch(0, 1.0, (BlockStored(tuple(keys[:15]), None, 16),))) is None
    ticket = fleet.ask(request("s", prompt_tokens=330, prefix=prompt))
    assert ticket.decision is not None
    assert (ticket.decision.place, ticket.decision.expected_cached_tokens) == ("d0", 240)
    assert router.status(0.0).places["d0"].index == "exact"
    assert router.status(0.0).places["d1"].index == "approximate"
    assert router.kv_events("d0", KvBatch(5, 2.0, ())) == 1
    assert router.status(0.0).places["d0"].index == "degraded"
    assert router.kv_replayed("d0", []) is None
    assert router.status(0.0).places["d0"].index == "degraded"
    router.set_state("d0", "down", fleet.now_s)
    router.set_state("d0", "up", fleet.now_s)
    assert router.status(0.0).places["d0"].index == "approximate"


def test_a_session_is_cold_once_its_engine_dropped_half_of_its_prompt() -> None:
    fleet = Fleet(spec("d0"))
    router, keys = fleet.router, chain("s", 20)
    router.kv_follow("d0")
    prompt = PrefixKeys(keys, token_blocks={16: keys})
    router.kv_events("d0", KvBatch(0, 1.0, (BlockStored(tuple(keys), None, 16),)))
    fleet.ask(request("s", prompt_tokens=330, prefix=prompt))

    def warm(number: int, *dropped: int) -> bool:
        router.kv_events("d0", KvBatch(number, 2.0, (BlockRemoved(dropped),)))
        seen = router.session("s", fleet.now_s)
        assert seen is not None
        assert (seen.keep_s is not None) is seen.warm
        return seen.warm

    assert warm(1, *keys[10:])
    assert not warm(2, *keys[9:10])
    router.kv_follow("d0", on=False)
    assert warm(3), "without events nobody knows"


def test_a_prompt_on_its_way_counts_as_held() -> None:
    fleet = Fleet(spec("d0"), settings=RoutingSettings(late_binding=False))
    fleet.router.kv_follow("d0")
    keys = chain("s", 20)
    prompt = PrefixKeys(keys, token_blocks={16: keys})
    fleet.router.kv_events("d0", KvBatch(0, 1.0, (BlockStored((1,), None, 16),)))
    first = fleet.start(request("s", prompt_tokens=330, prefix=prompt))
    second = fleet.start(request("t", prompt_tokens=330, prefix=prompt))
    assert second.decision is not None
    assert second.decision.expected_cached_tokens == 320
    fleet.router.cancel(first, fleet.now_s)
    fleet.router.cancel(second, fleet.now_s)
    third = fleet.start(request("u", prompt_tokens=330, prefix=prompt))
    assert third.decision is not None
    assert third.decision.expected_cached_tokens == 0


def test_a_host_tier_is_loaded_when_that_is_cheaper() -> None:
    fleet = Fleet(spec("d0"), spec("d1"), settings=RoutingSettings(late_binding=False))
    keys = chain("s", 500)
    for place in ("d0", "d1"):
        fleet.router.kv_follow(place)
        fleet.router.kv_events(place, KvBatch(0, 1.0, (BlockStored((1,), None, 16),)))
    fleet.router.kv_events("d1", KvBatch(1, 2.0, (BlockStored(tuple(keys), None, 16, "CPU"),)))
    ticket = fleet.start(request("s", prompt_tokens=8001, prefix=PrefixKeys(keys, token_blocks={16: keys})))
    assert ticket.decision is not None
    assert ticket.decision.place == "d1"
    assert ticket.decision.expected_cached_tokens == 0
