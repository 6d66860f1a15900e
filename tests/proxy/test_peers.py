"""Regions reached through their own proxies: one home per session, one hop, and the way home after trouble."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from homeport_proxy import config as cfg
from homeport_proxy import peers
from homeport_proxy.app import Proxy
from homeport_proxy.control import Control
from proxy.control_kit import until
from proxy.scripted_engines import ScriptedEngine, chat


class RegionProxy:
    """One region: an engine and a proxy that knows the others."""

    def __init__(self, name: str, port: int, engine: ScriptedEngine) -> None:
        self.name = name
        self.port = port
        self.engine = engine
        self.url = f"http://127.0.0.1:{port}"
        self.control: Control | None = None
        self._proxy: Proxy | None = None
        self._text = ""

    async def start(self, text: str | None = None) -> None:
        """Start, or start again."""
        self._text = text or self._text
        self.control = Control(cfg.parse(self._text))
        await self.control.start()
        self._proxy = Proxy(self.control)
        await self._proxy.start()
        await self._proxy.listen("127.0.0.1", self.port)

    async def stop(self) -> None:
        """Stop; harmless when stopped already."""
        if self._proxy is not None and self.control is not None:
            await self._proxy.stop()
            await self.control.stop()
        self._proxy = None

    async def chat(self, session: str, **headers: str) -> dict[str, str]:
        """One request of a session; the answer's headers."""
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                f"{self.url}/v1/chat/completions", json=body, headers={"x-session-id": session, **headers}
            ) as answer,
        ):
            await answer.read()
            return {"status": str(answer.status), **answer.headers}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@asynccontextmanager
async def regions(extra: str = "") -> AsyncIterator[dict[str, RegionProxy]]:
    """Two regions, a and b, each with one engine."""
    async with AsyncExitStack() as stack:
        made: dict[str, RegionProxy] = {}
        for name in ("a", "b"):
            engine = await ScriptedEngine(chat).start()
            stack.push_async_callback(engine.stop)
            made[name] = RegionProxy(name, free_port(), engine)
            stack.push_async_callback(made[name].stop)
        for name, proxy in made.items():
            other = made["b" if name == "a" else "a"]
            await proxy.start(f"""
listen: 127.0.0.1:{proxy.port}
region: {name}
regions:
  {name}: {{backends: [{{name: "engine-{name}", url: "{proxy.engine.url}"}}]}}
  {other.name}: {{proxy: "{other.url}", rtt_ms: 5}}
health: {{interval_s: 0.05, timeout_s: 2}}
timeouts: {{drain_s: 0.1}}
log: {{level: error}}
{extra}
""")
        for proxy in made.values():
            await until(lambda proxy=proxy: all(p.up for p in proxy.control.regions.peers.values()))
        yield made


def home_of(answer: dict[str, str]) -> str:
    return answer["x-homeport-backend"].removeprefix("engine-")


async def session_at(made: dict[str, RegionProxy], home: str) -> str:
    """A session whose home is a region, as seen from the other one."""
    other = made["a" if home == "b" else "b"]
    for i in range(64):
        if home_of(await other.chat(f"{home}-{i}")) == home:
            return f"{home}-{i}"
    raise AssertionError("no session hashes there")


async def test_every_regions_proxy_sends_a_session_to_one_home() -> None:
    async with regions() as made:
        homes = {}
        for i in range(12):
            answers = [await made[name].chat(f"s{i}") for name in ("a", "b")]
            assert {answer["status"] for answer in answers} == {"200"}
            (homes[f"s{i}"],) = {home_of(answer) for answer in answers}
            for name, answer in zip(("a", "b"), answers, strict=True):
                assert (answer["x-homeport-decision"] == "peer") is (homes[f"s{i}"] != name)
        assert set(homes.values()) == {"a", "b"}


async def test_a_request_that_has_hopped_is_served_where_it_is() -> None:
    async with regions() as made:
        session = await session_at(made, "b")
        answer = await made["a"].chat(session, **{"x-homeport-hops": "1"})
        assert home_of(answer) == "a"


async def test_a_lost_region_moves_only_its_sessions_and_they_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "IDLE_RETURN_S", 3600.0)
    async with regions() as made:
        at_a, at_b = await session_at(made, "a"), await session_at(made, "b")
        await made["b"].stop()
        for word in ("failover", "home", "home"):
            answer = await made["a"].chat(at_b)
            assert (answer["status"], home_of(answer), answer["x-homeport-decision"]) == ("200", "a", word)
        assert home_of(await made["a"].chat(at_a)) == "a"
        control = made["a"].control
        assert control is not None
        await until(lambda: any(line.startswith("region b: ") for line in control.degraded()))
        await made["b"].start()
        await until(lambda: control.regions.peers["b"].up)
        assert home_of(await made["a"].chat(at_b)) == "a", "a running session stays"
        monkeypatch.setattr(peers, "IDLE_RETURN_S", 0.0)
        async with asyncio.timeout(20):
            while home_of(await made["a"].chat(at_b)) != "b":
                pass  # the books of the request before may not be closed yet


async def test_a_drained_region_is_left_by_all() -> None:
    async with regions() as made:
        at_b = await session_at(made, "b")
        control_a, control_b = made["a"].control, made["b"].control
        assert control_a is not None
        assert control_b is not None
        assert control_b.drain("b")
        await until(lambda: any(v.name == "b" and v.draining for v in control_a.regions.views()))
        assert home_of(await made["a"].chat(at_b)) == "a"
        assert home_of(await made["b"].chat(at_b)) == "a", "its own proxy sends it away as well"


async def test_a_models_regions_are_a_hard_limit() -> None:
    async with regions("models: [{name: m, regions: [b]}]") as made:
        for i in range(6):
            assert home_of(await made["a"].chat(f"s{i}")) == "b"
        await made["b"].stop()
        control = made["a"].control
        assert control is not None
        await until(lambda: control.regions.peers["b"].up is False)
        answer = await made["a"].chat("s0")
        assert answer["status"] == "503"
        assert "retry-after" in {name.lower() for name in answer}


async def test_the_round_trip_is_measured() -> None:
    async with regions() as made:
        control = made["a"].control
        assert control is not None
        peer = control.regions.peers["b"]
        await until(lambda: len(peer.recent_rtt_s) > 2)
        assert 0 < peer.rtt_s < 5


async def test_two_regions_of_one_proxy_share_sessions_and_drain_apart() -> None:
    async with AsyncExitStack() as stack:
        engines = [await ScriptedEngine(chat).start() for _ in range(2)]
        for engine in engines:
            stack.push_async_callback(engine.stop)
        proxy = RegionProxy("a", free_port(), engines[0])
        stack.push_async_callback(proxy.stop)
        await proxy.start(f"""
listen: 127.0.0.1:{proxy.port}
region: a
regions:
  a: {{backends: [{{name: engine-a, url: "{engines[0].url}"}}]}}
  b: {{backends: [{{name: engine-b, url: "{engines[1].url}"}}], rtt_ms: 1}}
timeouts: {{drain_s: 0.1}}
log: {{level: error}}
""")
        homes = {f"s{i}": home_of(await proxy.chat(f"s{i}")) for i in range(12)}
        assert set(homes.values()) == {"a", "b"}
        for session, home in homes.items():
            answer = await proxy.chat(session)
            assert (home_of(answer), answer["x-homeport-region"]) == (home, home)
        control = proxy.control
        assert control is not None
        assert control.drain("b")
        assert {home_of(await proxy.chat(session)) for session in homes} == {"a"}
