"""Hours of traffic in minutes: whatever went wrong, memory, descriptors and tasks return to where they began."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import resource
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import yaml

from faults.harbour import Harbour, document, harbour, until
from faults.test_processes import Program
from homeport_engines.emulator import Fault
from homeport_proxy.account import RequestLog

pytestmark = pytest.mark.long
FLEET = {"p0": "prefill", "d0": "decode", "d1": "decode"}
FAULTS = ("reset", "half_frame", "garbage", "close", "status", "slow", "content_length")
PHASES = ("before_headers", "after_headers", "mid_stream")
ROUND = 150
WARM_UP = 5
"""Rounds until everything that is kept is full."""
ROUNDS = 4
SOAK_S = float(os.environ.get("HOMEPORT_SOAK_S", "0"))
"""Rounds go on for at least this long: 3600 is the hour."""


def body_of(dice: random.Random) -> tuple[str, dict[str, Any]]:
    """A request of any API; sessions and prompts repeat, so what may be remembered is bounded."""
    text = f"Log of the day {dice.randrange(40)}. " * dice.choice((1, 10, 60))
    stream, tokens = dice.random() < 0.6, dice.choice((1, 8, 40))
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}
    path, body = dice.choice(
        [
            ("/v1/chat/completions", chat),
            ("/v1/completions", {"prompt": text, "max_tokens": tokens}),
            ("/v1/responses", {"input": text, "max_output_tokens": tokens}),
            ("/v1/messages", chat),
        ]
    )
    return path, {"model": "m", "stream": stream, **body}


async def traffic(fleet: Harbour, dice: random.Random) -> None:
    """One round: requests side by side, some of them hurt, some of them left by their client."""

    async def one() -> None:
        path, body = body_of(dice)
        try:
            async with asyncio.timeout(dice.choice((0.02, 0.1, 20, 20, 20, 20))):
                await fleet.ask(body, path, x_session_id=f"s{dice.randrange(30)}")
        except (TimeoutError, aiohttp.ClientError):
            pass  # the client left, or its connection was cut

    for _ in range(ROUND // 10):
        engine = fleet.engines[dice.choice(list(fleet.engines))]
        kind: Any = dice.choice(FAULTS)
        engine.faults.add(Fault(kind, dice.choice(PHASES), status=dice.choice((400, 429, 500, 503)), delay_s=0.02))
        await asyncio.gather(*(one() for _ in range(10)))
    for engine in fleet.engines.values():
        engine.faults.clear()
    fleet.replies.clear()
    # a fault may have opened a breaker: let it close again before the next round
    with contextlib.suppress(TimeoutError):
        await until(lambda: all(place.state == "up" for place in fleet.control.places()), 60)
    assert {place.name: place.state for place in fleet.control.places()} == dict.fromkeys(FLEET, "up")
    await fleet.at_rest()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def tasks() -> int:
    return len(asyncio.all_tasks())


def kept() -> tuple[int, dict[str, int]]:
    """Memory that code of the proxy allocated and still holds, in all and by line."""
    gc.collect()
    snapshot = tracemalloc.take_snapshot()
    mine = snapshot.filter_traces([tracemalloc.Filter(True, "*/homeport_proxy/*"), tracemalloc.Filter(True, "*/sdk/*")])
    lines = {str(trace.traceback): trace.size for trace in mine.statistics("lineno")}
    return sum(lines.values()), lines


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
@pytest.mark.timeout(SOAK_S + 1800)
async def test_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    # the last requests are kept to be asked about: a shorter memory is full sooner
    monkeypatch.setattr(RequestLog.__init__, "__defaults__", (ROUND,))
    dice = random.Random(7)
    # proxy, engines and clients share one traced thread, where a hand-off takes up to half a second
    async with harbour(FLEET, lease_s=8.0, time_scale=500.0, kv_blocks=640) as fleet:
        for _ in range(WARM_UP):
            await traffic(fleet, dice)
        await fleet.http.get(fleet.url + "/metrics")
        await asyncio.sleep(5)  # idle connections go after 4 s
        tasks_before, files_before, (bytes_before, before) = tasks(), descriptors(), kept()
        until_s, rounds = time.monotonic() + SOAK_S, 0
        while rounds < ROUNDS or time.monotonic() < until_s:
            await traffic(fleet, dice)
            rounds += 1
        print(f"{rounds} rounds of {ROUND} requests")
        with contextlib.suppress(TimeoutError):
            await until(lambda: tasks() <= tasks_before and descriptors() <= files_before, 30)
        assert tasks() <= tasks_before
        assert descriptors() <= files_before
        bytes_after, after = kept()
        growth = sorted(((size - before.get(line, 0), line) for line, size in after.items()), reverse=True)[:8]
        assert bytes_after - bytes_before < 500_000, f"{bytes_before} to {bytes_after}: {growth}"
        assert fleet.control.ready()
        for engine in fleet.engines.values():
            assert engine.books.read_after_lease == engine.books.deaths == 0


STREAMS = 1_000


async def test_a_thousand_open_streams(tmp_path: Path) -> None:
    """All are open at once, all end whole; the proxy's process is then as large and as open as it was before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384), hard))
    options = "--port 0 --model m --max-sequences 4000 --step-s 0.005 --t0-s 0 --no-kv-events --kv-blocks 200000"
    engine = Program(["engine", "emulate", *options.split()], "ready at")
    file = tmp_path / "homeport.yaml"
    proxy = Program(["serve", "-c", str(file)], "listening on", "stderr")
    try:
        await engine.start()
        patience = {"connect_s": 60, "first_token_s": 300, "idle_s": 300}
        written = document([{"name": "m0", "url": engine.url}], timeouts=patience, health={"interval_s": 5})
        file.write_text(yaml.safe_dump({"listen": "127.0.0.1:0", **written}))
        await proxy.start()
        await thousand(proxy, engine.url)
    finally:
        await proxy.end()
        await engine.end()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def thousand(proxy: Program, engine_url: str) -> None:
    """Open all streams twice: what is made once is made in the first round."""
    assert proxy.run is not None
    process = psutil.Process(proxy.run.pid)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        await together(http, proxy.url, engine_url, process)
        before = process.memory_info().rss
        at_once = await together(http, proxy.url, engine_url, process)
        after = process.memory_info().rss
        print(f"RSS MB: {before >> 20} before, {at_once >> 20} with {STREAMS} streams, {after >> 20} after")
        assert at_once - before < 64 << 20, "a stream costs at most 64 kB"
        assert after - before < 16 << 20


async def together(http: aiohttp.ClientSession, url: str, engine_url: str, process: psutil.Process) -> int:
    """Every stream stands after its first tokens until all are open, then all go on; the proxy's size meanwhile."""
    stop = {"kind": "hang", "phase": "mid_stream", "path": "/v1/chat/*", "times": None}
    async with http.post(engine_url + "/emulator/faults", json=stop) as answer:
        assert answer.status == 200
    opened = 0

    async def one(number: int) -> str:
        nonlocal opened
        text = f"Watch {number}."
        body = {"model": "m", "stream": True, "max_tokens": 20, "messages": [{"role": "user", "content": text}]}
        headers = {"x-session-id": f"s{number}"}
        async with http.post(url + "/v1/chat/completions", json={**body, "ignore_eos": True}, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
            first = await reply.content.readany()
            opened += 1
            return (first + await reply.content.read()).decode()

    asked = [asyncio.ensure_future(one(number)) for number in range(STREAMS)]
    await until(lambda: opened == STREAMS or any(task.done() for task in asked), 300)
    size = process.memory_info().rss
    async with http.delete(engine_url + "/emulator/faults"):
        answers = await asyncio.gather(*asked)
    assert all(answer.rstrip().endswith("[DONE]") for answer in answers)
    await until(lambda: process.num_fds() < 100, 30)
    return size
