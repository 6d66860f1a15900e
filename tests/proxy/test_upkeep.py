"""What keeps a request cheap stays so: no circles of objects, one timer for all deadlines, books kept in batches."""

from __future__ import annotations

import asyncio
import gc
from typing import cast

import aiohttp
import pytest

from homeport_proxy import config as cfg
from homeport_proxy.account import BOOK_AT, Account
from homeport_proxy.exchange import Exchange
from homeport_proxy.handoff import Attempt
from homeport_proxy.job import Job
from homeport_proxy.observe.metrics import Metrics
from homeport_proxy.patience import Patience, Watch
from homeport_proxy.relay import Relay
from homeport_proxy.upstream import Connection
from proxy.scripted_engines import ScriptedEngine, backends, chat, proxy_for
from proxy.test_admin import exchange

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello " * 300}]}


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_request_leaves_no_circle_of_objects(streamed: bool) -> None:
    """Such a circle would keep the body until Python looks for circles, hundreds of requests later."""
    engine = await ScriptedEngine(chat).start()
    async with proxy_for(backends(engine)) as (url, _), aiohttp.ClientSession() as client:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                async with client.post(f"{url}/v1/chat/completions", json=BODY | {"stream": streamed}) as answer:
                    await answer.read()
            await asyncio.sleep(0)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = [type(one).__name__ for one in gc.garbage if isinstance(one, Exchange | Job | Relay | Attempt)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert left == []
    await engine.stop()


class _Leg:
    """Stands for a connection; ``failed`` once it is given up."""

    def __init__(self) -> None:
        self.failed = asyncio.Event()

    def fail(self, why: str, *, timed_out: bool) -> None:
        self.failed.set()


async def test_one_timer_serves_every_deadline_and_forgets_what_ended() -> None:
    watch = Watch()
    late, ended, early = _Leg(), _Leg(), _Leg()
    patiences = [
        Patience(watch, cast("Connection", leg), after_s, lambda: True)
        for leg, after_s in ((late, 0.2), (ended, 0.02), (early, 0.01))
    ]
    patiences[1].stop()
    async with asyncio.timeout(30):
        await early.failed.wait()
        assert not late.failed.is_set()
        await late.failed.wait()
    assert not ended.failed.is_set()
    patiences[0].stop()


async def test_requests_are_booked_without_anybody_reading() -> None:
    booked = asyncio.Event()
    config = cfg.parse("regions: {r: {backends: [{name: d0, url: 'http://127.0.0.1:1'}]}}")
    metrics = Metrics()
    account = Account(config, metrics, lambda _: True, booked=booked.set)
    account.done(exchange("r0"))
    assert not metrics.requests.values
    async with asyncio.timeout(30):
        await booked.wait()
    assert sum(metrics.requests.values.values()) == 1
    for number in range(BOOK_AT):
        account.done(exchange(f"r{number + 1}"))
    assert sum(metrics.requests.values.values()) == 1 + BOOK_AT, "many are not kept waiting"
    account.close()


async def test_a_fault_in_one_requests_books_leaves_the_others_alone() -> None:
    config = cfg.parse("regions: {r: {backends: [{name: d0, url: 'http://127.0.0.1:1'}]}}")
    heard: list[str] = []

    def listener(one: Exchange, _: object) -> None:
        if one.request_id == "bad":
            raise RuntimeError("a fault of ours")
        heard.append(one.request_id)

    account = Account(config, Metrics(), lambda _: True, [listener])
    for request_id in ("a", "bad", "b"):
        account.done(exchange(request_id))
    account.book()
    assert heard == ["a", "b"]
    account.close()
