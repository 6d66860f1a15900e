"""KV events reach the router, from what the engine tells or the file says; an engine without any is left alone."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec
import pytest
import zmq
from aiohttp import web

from emulator.emulating import fast
from homeport_engines.emulator import Emulator, Fault
from homeport_engines.vllm.kv import BlockStored, KvBatch
from homeport_proxy import config as cfg
from homeport_proxy import kv_feed
from homeport_proxy.fleet import Fleet, Member
from homeport_proxy.kv_feed import KvFeed, Source, _reachable, sources_of
from homeport_proxy.local.checks import free_port
from proxy.control_kit import engine, serving, until


@dataclass
class Router:
    """Hears what a router would."""

    batches: list[tuple[str, KvBatch]] = field(default_factory=list)
    replays: list[str] = field(default_factory=list)
    followed: dict[str, bool] = field(default_factory=dict)
    connected: int = 0

    def kv_events(self, place: str, batch: KvBatch) -> int | None:
        self.batches.append((place, batch))
        return None

    def kv_replayed(self, place: str, batches: Sequence[KvBatch]) -> int | None:
        self.replays.append(place)
        self.batches += [(place, batch) for batch in batches]
        return None

    def kv_connected(self, place: str) -> None:
        self.connected += 1

    def kv_follow(self, place: str, on: bool = True) -> None:
        self.followed[place] = on


def member(url: str, more: str = "") -> Member:
    text = f"regions: {{r: {{backends: [{{name: d0, url: '{url}'{more}}}]}}}}"
    return Fleet(cfg.parse(text)).members["d0"]


async def chat(url: str) -> None:
    body = {"model": "emulated", "max_tokens": 2, "messages": [{"role": "user", "content": "word " * 600}]}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200


async def test_an_engine_is_followed_by_what_it_tells() -> None:
    router, feed = Router(), KvFeed(5.0)
    async with Emulator(fast()) as emulated:
        try:
            feed.backend_is_up(member(emulated.url), router, again=True)
            await until(lambda: router.replays)
            await chat(emulated.url)
            await until(lambda: router.batches)
            place, batch = router.batches[0]
            assert (place, router.connected) == ("d0", 1)
            assert any(isinstance(event, BlockStored) for event in batch.events)
            feed.keep_only({})
            assert router.followed == {"d0": False}
        finally:
            await feed.stop()


async def test_an_engine_that_did_not_say_where_it_publishes_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "ASK_AGAIN_S", 0.01)
    router, feed = Router(), KvFeed(0.2)
    async with Emulator(fast()) as emulated:
        silent = emulated.faults.add(Fault("hang", path="/kv_event_sources"))
        broken = emulated.faults.add(Fault("status", path="/kv_event_sources", status=503))
        try:
            feed.backend_is_up(member(emulated.url), router, again=True)
            await until(lambda: router.connected)
            assert (silent.done, broken.done, router.followed) == (1, 1, {"d0": True})
        finally:
            emulated.faults.clear()
            await feed.stop()


async def test_an_engine_that_left_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "ASK_AGAIN_S", 0.01)
    router, feed = Router(), KvFeed(5.0)
    async with Emulator(fast()) as emulated:
        broken = emulated.faults.add(Fault("status", path="/kv_event_sources", status=503, times=None))
        feed.backend_is_up(member(emulated.url), router, again=True)
        await until(lambda: broken.done > 1)
        feed.forget("d0")
        await until(lambda: not feed.asking)
        await feed.stop()
    assert router == Router()


async def test_an_engine_without_events_is_left_alone() -> None:
    router, feed = Router(), KvFeed(5.0)
    async with engine() as stub:
        for more in ("", ", kv_events: none", ", engine: openai"):
            feed.backend_is_up(member(stub.url, more), router, again=True)
        assert await sources_of(member(stub.url).backend, 5.0) == []
        await feed.stop()
    assert router == Router()


async def test_an_address_where_nobody_publishes_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM connects to an endpoint without a wildcard instead of binding it, and still names it as its own."""
    monkeypatch.setattr("homeport_proxy.kv_feed.SILENT_S", 0.05)
    router, feed = Router(), KvFeed(5.0)
    followed = member("http://127.0.0.1:1", f", kv_events: {{pub: 'tcp://127.0.0.1:{free_port()}'}}")
    feed.backend_is_up(followed, router, again=True)
    await until(lambda: followed.notes)
    assert "nobody publishes there" in "".join(followed.notes.values())
    feed.keep_only({})
    assert (followed.notes, router.followed) == ({}, {"d0": False})
    await feed.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="sockets without a file are Linux's")
async def test_a_local_socket_is_heard() -> None:
    name = f"ipc://@homeport-test-{uuid.uuid4().hex}"
    router, feed = Router(), KvFeed(5.0)
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    try:
        publisher.bind(name)
        feed.backend_is_up(member("http://127.0.0.1:1", f", kv_events: {{pub: '{name}'}}"), router, again=True)
        await until(lambda: router.connected)
        payload = msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared"}], 0])

        def heard() -> bool:  # a subscription needs a moment to arrive: what was published before is lost
            publisher.send_multipart([b"kv", (0).to_bytes(8, "big"), payload])
            return bool(router.batches)

        await until(heard)
    finally:
        await feed.stop()
        context.destroy(linger=0)


async def test_vllm_names_its_publishers_by_rank() -> None:
    """The shape that vLLM 0.32 answers with."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5558", "hwm": 100_000}
    config |= {"replay_endpoint": None, "buffer_steps": 10_000, "max_queue_size": 100_000, "topic": "kv@m"}

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"1": config})

    app = web.Application()
    app.router.add_get("/kv_event_sources", answer)
    async with serving(app) as url:
        found = await sources_of(member(url).backend, 5.0)
    assert found == [Source(1, "tcp://127.0.0.1:5558", None, "kv@m")]


async def test_given_endpoints_count_up_with_the_rank() -> None:
    more = ", data_parallel: 2, kv_events: {pub: 'tcp://h:5557', replay: 'tcp://h:5558'}"
    assert await sources_of(member("http://h:1", more).backend, 1.0) == [
        Source(0, "tcp://h:5557", "tcp://h:5558"),
        Source(1, "tcp://h:5558", "tcp://h:5559"),
    ]


@pytest.mark.parametrize(
    ("endpoint", "host", "seen"),
    [
        ("tcp://*:5557", "engine", "tcp://engine:5557"),
        ("tcp://0.0.0.0:5557", "10.0.0.1", "tcp://10.0.0.1:5557"),
        ("tcp://[::]:5557", "fd00::1", "tcp://[fd00::1]:5557"),
        ("tcp://pod-3:5557", "engine", "tcp://pod-3:5557"),
        ("ipc://@kv", "127.0.0.1", "ipc://@kv"),
    ],
)
def test_a_bind_address_is_seen_from_outside(endpoint: str, host: str, seen: str) -> None:
    assert _reachable(endpoint, host) == seen


@pytest.mark.parametrize("endpoint", ["ipc:///etc/passwd", "inproc://x", "http://x"])
def test_another_machines_sockets_are_not_ours(endpoint: str) -> None:
    with pytest.raises(ValueError, match="cannot be reached"):
        _reachable(endpoint, "h")
