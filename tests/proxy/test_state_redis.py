"""Several proxies through a real Redis: one home per session, one limit per tenant, one drain; and life without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from homeport_proxy import config as cfg
from homeport_proxy.control import Control
from homeport_proxy.errors import ProxyError
from homeport_proxy.routing.router import Router
from homeport_proxy.routing.views import PlaceSpec, PrefixKeys, RequestView, RoutingSettings
from proxy.control_kit import StubEngine, serving, until
from proxy.redis_kit import RedisServer, redis_server
from proxy.test_tenants import exchange


def text(engines: list[str], redis: RedisServer, extra: str = "") -> str:
    backends = ", ".join(f"{{name: b{i}, url: '{url}'}}" for i, url in enumerate(engines))
    return f"""
regions: {{r: {{backends: [{backends}]}}}}
state: {{redis: "{redis.url}"}}
ledger: {{path: null}}
log: {{level: error}}
{extra}
"""


@asynccontextmanager
async def engines(count: int) -> AsyncIterator[list[str]]:
    async with serving(StubEngine().app()) as url:
        yield [url] * count  # one stands for all: health is all that engines are asked here


@asynccontextmanager
async def proxies(count: int, redis: RedisServer, backends: int = 3, extra: str = "") -> AsyncIterator[list[Control]]:
    async with engines(backends) as urls:
        made = [Control(cfg.parse(text(urls, redis, extra))) for _ in range(count)]
        for control in made:
            await control.start()
        try:
            yield made
        finally:
            for control in made:
                await control.stop()


def request(session: str, tokens: int = 1000) -> RequestView:
    return RequestView(f"r-{session}", "chat", "m", session, tokens)


async def placed(control: Control, session: str) -> str:
    """Where a whole request of the session goes."""
    ticket, _ = await control.placer.place("r", request(session))
    assert ticket.decision is not None
    control.placer.first_token(ticket)
    control.placer.finished(ticket, prompt_tokens=1000, cached_tokens=0, output_tokens=1, ok=True)
    return ticket.decision.place


async def test_two_proxies_send_a_session_to_one_backend(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as redis, proxies(2, redis) as (one, two):
        for i in range(20):
            first = await placed(one, f"s{i}")
            await asyncio.sleep(0)
            assert await placed(two, f"s{i}") == first
            assert await placed(one, f"s{i}") == first


async def test_a_proxy_that_starts_later_knows_the_homes(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as redis, proxies(1, redis) as (one,):
        homes = {f"s{i}": await placed(one, f"s{i}") for i in range(10)}
        async with proxies(1, redis) as (late,):
            assert {session: await placed(late, session) for session in homes} == homes


async def test_a_finished_session_is_forgotten_by_all(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as redis, proxies(2, redis) as (one, two):
        await placed(one, "s")
        assert await two.state.home_of("s") is not None
        assert await one.placer.finish_session("s")
        for _ in range(100):
            if await two.state.home_of("s") is None:
                return
        raise AssertionError("the pin outlived its session")


async def test_drains_and_their_end_reach_every_proxy(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as redis, proxies(2, redis) as (one, two):
        assert one.drain("b1", 60)
        await until(lambda: two.health.state(two.fleet.members["b1"]) == "draining")
        async with proxies(1, redis) as (late,):
            assert late.health.state(late.fleet.members["b1"]) == "draining"
        assert one.drain("b1", 60, carry=True)
        await until(lambda: two.fleet.members["b1"].carry)
        assert one.drain("b1", 60)
        await until(lambda: not two.fleet.members["b1"].carry)
        assert two.undrain("b1")
        await until(lambda: one.health.state(one.fleet.members["b1"]) == "up")


async def test_load_of_the_others_counts(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as redis, proxies(2, redis, backends=2) as (one, two):
        ticket, _ = await one.placer.place("r", request("big", 8_000))
        assert ticket.decision is not None
        busy = ticket.decision.place
        heard = []
        hear = two.foreign_load
        two.foreign_load = lambda load: (heard.append(load.get(busy)), hear(load))[1]  # type: ignore[method-assign]
        await until(lambda: any(heard))
        assert {await placed(two, f"new{i}") for i in range(6)} == {"b0", "b1"} - {busy}
        one.placer.cancel(ticket)


async def test_a_tenants_limit_holds_over_all_proxies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K", "k")
    extra = "tenants: [{name: t, key_env: K, max_concurrent: 2, tokens_per_minute: 1000}]"
    async with redis_server(tmp_path) as redis, proxies(2, redis, extra=extra) as (one, two):
        async with one.admission.enter(exchange("t", 10)), two.admission.enter(exchange("t", 10)):
            for control in (one, two):
                with pytest.raises(ProxyError) as caught:
                    async with control.admission.enter(exchange("t", 10)):
                        pass
                assert (caught.value.status, caught.value.code) == (429, "rate_limited")
        async with one.admission.enter(made := exchange("t", 900)):
            made.status = 200
        with pytest.raises(ProxyError, match="tokens per minute") as caught:
            async with two.admission.enter(exchange("t", 900)):
                pass
        assert caught.value.retry_after_s
        assert caught.value.retry_after_s <= 60


@pytest.mark.parametrize("how", ["kill", "hang"])
async def test_without_redis_they_go_on_alone_agree_by_hash_and_say_so(tmp_path: Path, how: str) -> None:
    async with redis_server(tmp_path) as redis, proxies(2, redis) as (one, two):
        known = {f"old{i}": await placed(one, f"old{i}") for i in range(6)}
        await getattr(redis, how)()
        assert {session: await placed(one, session) for session in known} == known, "sessions stay at home"
        fresh = [f"new{i}" for i in range(12)]
        at_one = [await placed(one, session) for session in fresh]
        at_two = [await placed(two, session) for session in fresh]
        assert at_one == at_two
        assert len(set(at_one)) > 1
        for control in (one, two):
            said = [line for line in control.degraded() if line.startswith("state: ")]
            assert said
            assert "does not answer" in said[0]
        if how == "hang":
            redis.go_on()
        else:
            await redis.start()
        await until(lambda: not one.state.alone and not two.state.alone)
        assert await placed(one, "back") == await placed(two, "back")


async def test_a_redis_that_never_was_delays_nothing(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    async with proxies(1, redis) as (one,):
        assert one.ready()
        assert await placed(one, "s") == await placed(one, "s")
        assert any(line.startswith("state: ") for line in one.degraded())


async def test_passwords_are_never_shown(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    config = cfg.parse(
        f"regions: {{r: {{backends: [{{name: a, url: 'http://127.0.0.1:1'}}]}}}}\n"
        f"state: {{redis: 'redis://user:hunter2@127.0.0.1:{redis.port}/0'}}"
    )
    control = Control(config)
    await control.start()
    try:
        said = " ".join(control.degraded())
        assert "state: redis://user:***@" in said
        assert "hunter2" not in said
    finally:
        await control.stop()


def test_a_home_settled_elsewhere_is_kept_though_nothing_is_known_to_lie_there() -> None:
    """What other proxies sent to it is in no index here: that is no sign that nothing would be lost by moving."""
    router = Router(RoutingSettings())
    router.set_places([PlaceSpec(name, name, "mixed", frozenset({"m"})) for name in ("m0", "m1")])
    keys = PrefixKeys([1000 + number for number in range(8)])

    def ask(session: str) -> str:
        ticket = router.arrive(RequestView(session, "chat", "m", session, 1000, keys), 0.0)
        router.due(0.0)
        assert ticket.decision is not None
        router.finished(ticket, 0.0, prompt_tokens=1000, cached_tokens=0, output_tokens=1, ok=True)
        return ticket.decision.place

    warm = ask("other")
    cold = "m1" if warm == "m0" else "m0"
    assert router.adopt("s", cold, 0.0)
    assert ask("s") == cold
