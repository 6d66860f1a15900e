"""The event subscriber against real ZMQ sockets that publish, lose and replay as vLLM's do."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
import zmq.asyncio

from homeport_engines.vllm.events import KvEventSubscriber
from homeport_engines.vllm.kv import KvBatch
from homeport_proxy.routing.index.exact import ExactIndex


class Publisher:
    """A PUB socket and a replay ROUTER on free ports of the loopback."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.router = self.context.socket(zmq.ROUTER)
        self.pub_url = f"tcp://127.0.0.1:{self.pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay_url = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        self.log: list[bytes] = []
        self.replays: list[int] = []

    async def publish(self, hashes: list[int], *, lose: bool = False) -> None:
        event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "block_size": 16}
        self.log.append(msgspec.msgpack.encode([float(len(self.log) + 1), [event], 0]))
        if not lose:
            await self.pub.send_multipart([b"kv", (len(self.log) - 1).to_bytes(8, "big"), self.log[-1]])

    async def serve(self) -> None:
        while True:
            client, _, start = await self.router.recv_multipart()
            self.replays.append(int.from_bytes(start, "big"))
            for seq in range(self.replays[-1], len(self.log)):
                await self.router.send_multipart([client, b"", b"kv", seq.to_bytes(8, "big"), self.log[seq]])
            await self.router.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self) -> None:
        self.pub.close(0)
        self.router.close(0)
        self.context.destroy(0)


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    made = Publisher()
    serving = asyncio.create_task(made.serve())
    yield made
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    made.close()


async def test_history_is_fetched_live_batches_follow_and_gaps_are_replayed(publisher: Publisher) -> None:
    await publisher.publish([1])
    await publisher.publish([2])
    index = ExactIndex()
    changed = asyncio.Event()

    def on_batch(batch: KvBatch) -> int | None:
        missing = index.take("d0", batch)
        changed.set()
        return missing

    def on_replay(batches: object) -> None:
        index.replayed("d0", batches)  # type: ignore[arg-type]
        changed.set()

    def on_connect() -> None:
        index.forget("d0")

    subscriber = KvEventSubscriber(publisher.pub_url, publisher.replay_url, on_batch, on_replay, on_connect)
    running = asyncio.create_task(subscriber.run())
    try:
        async with asyncio.timeout(20):
            await changed.wait()
            assert index.resident("d0", [1]).device_blocks == 1
            assert index.resident("d0", [2]).device_blocks == 1
            await publisher.publish([3], lose=True)
            # the subscription may still be joining: publish until something arrives
            while len(publisher.replays) < 2:
                changed.clear()
                await publisher.publish([100 + len(publisher.log)])
                try:
                    async with asyncio.timeout(0.2):
                        await changed.wait()
                except TimeoutError:
                    continue
            while index.state("d0") != "whole":
                changed.clear()
                await changed.wait()
        assert index.resident("d0", [3]).device_blocks == 1
        assert publisher.replays[0] == 0
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_without_a_replay_endpoint_the_index_says_so(publisher: Publisher) -> None:
    index = ExactIndex()
    answered = asyncio.Event()

    def on_replay(batches: object) -> None:
        index.replayed("d0", batches)  # type: ignore[arg-type]
        answered.set()

    subscriber = KvEventSubscriber(publisher.pub_url, None, lambda batch: None, on_replay, lambda: None)
    running = asyncio.create_task(subscriber.run())
    async with asyncio.timeout(10):
        await answered.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert index.state("d0") == "waiting"
