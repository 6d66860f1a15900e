"""KV events: a subscriber that only listens knows exactly what lies in the cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from emulator.emulating import Subscriber, client, fast, replay, until
from homeport_engines.emulator import CacheGroup, Emulator
from homeport_engines.emulator.hashing import ROOT, block_hash, event_hash, extra_keys

TEXT = "The harbour master wrote it down. " * 20
HYBRID = (CacheGroup(), CacheGroup("sliding_window", 100), CacheGroup("mamba", 1))


@asynccontextmanager
async def listening(endpoint: str, topic: bytes = b"") -> AsyncIterator[Subscriber]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SUBSCRIBE, topic)
    socket.connect(endpoint)
    subscriber = Subscriber()

    async def read() -> None:
        while True:
            _, number, payload = await socket.recv_multipart()
            subscriber.take(int.from_bytes(number, "big"), payload)

    task = asyncio.ensure_future(read())
    try:
        yield subscriber
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        socket.close(0)
        context.term()


def truth(engine: Emulator, rank: int = 0) -> dict[tuple[int, int, str], int]:
    """What really lies in a rank's cache and host tier."""
    where = engine.core.ranks[rank]
    found = {(event_hash(key[0]), key[1], "GPU"): count for key, count in where.cache.resident().items()}
    return found | {(event_hash(key[0]), key[1], "CPU"): 1 for key in where.host.resident()}


async def read_all(engine: Emulator, rank: int = 0) -> Subscriber:
    subscriber = Subscriber()
    for number, payload in await replay(engine.core.publishers[rank].replay_endpoint):
        subscriber.take(number, payload)
    return subscriber


@pytest.mark.parametrize("encoding", ["map", "array"])
@pytest.mark.parametrize(
    "changes",
    [
        {"kv_blocks": 4096},
        {"kv_blocks": 64},
        {"kv_blocks": 300, "groups": HYBRID},
        {"kv_blocks": 64, "host_blocks": 40},
        {"kv_blocks": 300, "groups": HYBRID, "host_blocks": 100},
    ],
    ids=["roomy", "evicting", "hybrid", "host tier", "hybrid with host tier"],
)
async def test_the_index_from_events_is_the_cache(encoding: str, changes: dict[str, Any]) -> None:
    async with Emulator(fast(event_encoding=encoding, **changes)) as engine, client(engine.url) as c:
        for turn in range(8):
            await asyncio.gather(*(c.chat(f"{(turn + n) % 5}{TEXT}", max_tokens=30) for n in range(3)))
        await until(lambda: engine.used_blocks == 0)
        assert (await read_all(engine)).copies == truth(engine)
        assert truth(engine)


async def test_hashes_are_those_of_the_tokens_that_tokenize_gives() -> None:
    async with Emulator(fast(block_tokens=8)) as engine, client(engine.url) as c:
        for salt in (None, "tenant"):
            more = {"cache_salt": salt} if salt else {}
            await c.chat(TEXT, max_tokens=1, **more)
            body = {"messages": [{"role": "user", "content": TEXT}]}
            tokens = (await c.post("/tokenize", body)).json["tokens"]
            parent, wanted = ROOT, []
            for index in range(len(tokens) // 8):
                parent = block_hash(parent, tokens[index * 8 : index * 8 + 8], extra_keys(None, salt, index))
                wanted.append(event_hash(parent))
            copies = (await read_all(engine)).copies
            assert {(digest, 0, "GPU") for digest in wanted} <= set(copies)


async def test_what_a_stored_event_says() -> None:
    async with Emulator(fast(block_tokens=8, adapters=("lora",))) as engine, client(engine.url) as c:
        body = {"model": "lora", "messages": [{"role": "user", "content": TEXT}], "cache_salt": "s", "max_tokens": 1}
        await c.post("/v1/chat/completions", body, X_Session_ID="task-1")
        event = (await read_all(engine)).batches[0][1][0]
        assert event["type"] == "BlockStored"
        assert event["parent_block_hash"] is None
        assert len(event["token_ids"]) == 8 * len(event["block_hashes"])
        assert event["extra_keys"][:2] == [["lora", "s"], ["lora"]]
        assert (event["block_size"], event["medium"], event["lora_name"]) == (8, "GPU", "lora")
        assert (event["group_idx"], event["session_id"]) == (0, "task-1")


async def test_live_events_have_a_topic_and_gapless_numbers_and_restart_at_zero() -> None:
    async with Emulator(fast(event_topic="kv@pod1@m")) as engine, client(engine.url) as c:
        sources = (await c.get("/kv_event_sources")).json
        assert sources["0"]["topic"] == "kv@pod1@m"
        async with listening(sources["0"]["endpoint"], b"kv@pod1") as subscriber:
            for turn in range(100):  # a PUB socket drops what comes before the subscription has arrived
                await c.chat(f"{turn}{TEXT}", max_tokens=1)
                if subscriber.batches:
                    break
            await c.chat(f"last{TEXT}", max_tokens=1)
            newest = engine.core.publishers[0]
            await until(lambda: subscriber.batches[-1][0] == newest._next - 1)
            numbers = [number for number, _ in subscriber.batches]
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
            engine.restart()
            await c.chat(f"new{TEXT}", max_tokens=1)
            await until(lambda: subscriber.batches[-1][0] == 0)


async def test_a_lost_batch_is_in_the_replay() -> None:
    async with Emulator(fast()) as engine, client(engine.url) as c:
        engine.core.publishers[0].drop_next = 1
        await c.chat(TEXT, max_tokens=1)
        assert [number for number, _ in await replay(engine.core.publishers[0].replay_endpoint)] == [0]


async def test_the_replay_buffer_is_bounded() -> None:
    async with Emulator(fast(event_buffer=3)) as engine, client(engine.url) as c:
        for turn in range(6):
            await c.chat(f"{turn}{TEXT}", max_tokens=1)
        numbers = [number for number, _ in await replay(engine.core.publishers[0].replay_endpoint)]
        assert numbers == [3, 4, 5]
        assert [n for n, _ in await replay(engine.core.publishers[0].replay_endpoint, 5)] == [5]


async def test_every_rank_has_a_stream_of_its_own() -> None:
    async with Emulator(fast(data_parallel=4)) as engine, client(engine.url) as c:
        sources = (await c.get("/kv_event_sources")).json
        assert list(sources) == ["0", "1", "2", "3"]
        body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}
        await c.post("/v1/chat/completions", body, X_data_parallel_rank="2")
        assert [bool((await read_all(engine, rank)).copies) for rank in range(4)] == [False, False, True, False]
        assert (await read_all(engine, 2)).copies == truth(engine, 2)


async def test_clearing_the_cache_is_announced() -> None:
    async with Emulator(fast(host_blocks=100)) as engine, client(engine.url) as c:
        await c.chat(TEXT, max_tokens=1)
        assert (await c.post("/reset_prefix_cache", {})).status == 200
        subscriber = await read_all(engine)
        assert subscriber.batches[-1][1] == [{"type": "AllBlocksCleared"}]
        assert subscriber.copies == truth(engine) == {}


async def test_two_copies_are_two_stored_and_one_removal_is_one_copy() -> None:
    """Two requests that compute the same prefix side by side each keep a copy."""
    async with Emulator(fast(time_scale=1.0, kv_blocks=512)) as engine, client(engine.url) as c:
        engine.hang()
        asked = [asyncio.ensure_future(c.chat(TEXT, max_tokens=1)) for _ in range(2)]
        await until(lambda: engine.books.started == 2)
        engine.resume()
        await asyncio.gather(*asked)
        copies = (await read_all(engine)).copies
        assert copies == truth(engine)
        assert set(copies.values()) == {2}


async def test_a_host_tier_gives_back_what_the_cache_lost() -> None:
    async with Emulator(fast(kv_blocks=48, host_blocks=1000)) as engine, client(engine.url) as c:
        first = await c.chat(TEXT, max_tokens=1)
        for turn in range(4):
            await c.chat(f"{turn}{TEXT}", max_tokens=1)
        again = await c.chat(TEXT, max_tokens=1)
        prompt = first["usage"]["prompt_tokens"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (prompt - 1) // 16 * 16
        counters = engine.core.ranks[0].counters
        assert counters.external_hits == counters.by_source["external_kv_transfer"] > 0
        assert sum(counters.by_source.values()) == counters.prompt_tokens
