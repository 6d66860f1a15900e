"""The table's rows about other proxies: a region reached through its own proxy, and proxies that share Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from faults.harbour import PATIENCE, Harbour, Strait, backend, black_hole, document, engine_settings, proxy_for, until
from faults.table import Row, cases
from homeport_engines.emulator import Emulator
from proxy.redis_kit import redis_server

PROMPT = "Which harbour is this ship's home?"


@dataclass(slots=True)
class Regions:
    """``here`` with its own engine; ``far`` behind its own proxy and a strait."""

    here: Harbour
    far: Harbour
    strait: Strait
    session: str = ""

    async def settle(self) -> None:
        """Find a session whose home is the other region."""
        for number in range(50):
            reply = await self.here.chat("Ahoy.", session=f"s{number}")
            assert reply.status == 200, reply.raw
            if reply.headers["x-homeport-region"] == "far":
                self.session = f"s{number}"
                return
        raise AssertionError("no session's home is the other region")


@asynccontextmanager
async def two_regions(**sections: Any) -> AsyncIterator[Regions]:
    async with AsyncExitStack() as stack:
        near, away = [await stack.enter_async_context(Emulator(engine_settings())) for _ in range(2)]
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)))
        far_url, far_control, far_proxy = await stack.enter_async_context(
            proxy_for(
                {
                    **document([]),
                    "region": "far",
                    "regions": {"far": {"backends": [backend("f0", away)]}},
                    "timeouts": {**PATIENCE, "first_token_s": 30, "idle_s": 30},
                }
            )
        )
        strait = await stack.enter_async_context(Strait(int(far_url.rsplit(":", 1)[1])))
        regions = {"near": {"backends": [backend("n0", near)]}, "far": {"proxy": strait.url, "rtt_ms": 1}}
        url, control, proxy = await stack.enter_async_context(
            proxy_for({**document([]), "region": "near", "regions": regions, **sections})
        )
        here = Harbour(url, control, proxy, {"n0": near}, http)
        yield Regions(here, Harbour(far_url, far_control, far_proxy, {"f0": away}, http), strait)


@pytest.mark.parametrize(("row", "stream"), cases("two regions"))
async def test_peer_row(row: Row, stream: bool) -> None:
    async with two_regions() as regions:
        await regions.settle()
        strait = regions.strait
        async with AsyncExitStack() as stack:
            if row.when == "before the request":
                await strait.close()
                if row.what == "swallows connections":
                    await stack.enter_async_context(black_hole(strait.port))
            else:
                strait.trouble = row.what.split()[0].rstrip("s")
                strait.after_bytes = 2500 if row.when == "mid-answer" else 0
            reply = await regions.here.chat(PROMPT, session=regions.session, stream=stream, max_tokens=400)
        outcome = row.streamed if stream else row.whole
        if outcome == "other":
            assert (reply.status, reply.error, reply.broken) == (200, None, False), reply.raw
            assert reply.headers["x-homeport-region"] == "near"
        elif outcome == "error frame":
            assert reply.status == 200
            assert reply.error is not None
            assert "[DONE]" not in reply.frames
            assert not reply.broken
        else:
            assert reply.status == int(outcome), reply.raw
            assert reply.headers["x-should-retry"] == "false"
            assert regions.here.engines["n0"].books.running == 0
        await regions.here.at_rest()
        await regions.far.at_rest()
        assert await regions.here.total("homeport_requests_total") == regions.here.sent


async def test_a_tenants_regions_are_a_hard_limit_also_when_the_peer_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAR_ONLY_KEY", "k")
    tenants = [{"name": "far-only", "key_env": "FAR_ONLY_KEY", "regions": ["far"]}]
    async with two_regions(tenants=tenants) as regions:
        await regions.strait.close()
        body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}]}
        reply = await regions.here.ask(body, authorization="Bearer k", x_session_id="s")
        assert reply.status == 503
        assert regions.here.engines["n0"].books.seen["/v1/chat/completions"] == 0


@pytest.mark.parametrize(("row", "stream"), cases("two proxies"))
async def test_redis_row(row: Row, stream: bool, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(redis_server(tmp_path))
        engines = {f"m{n}": await stack.enter_async_context(Emulator(engine_settings())) for n in range(2)}
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)))
        written = document([backend(name, engine) for name, engine in engines.items()], state={"redis": redis.url})
        proxies = [
            Harbour(*await stack.enter_async_context(proxy_for(written)), engines, http)  # type: ignore[call-arg]
            for _ in range(2)
        ]
        first = await proxies[0].chat("Ahoy.")
        await (redis.kill() if row.what == "killed" else redis.hang())
        for proxy in proxies:
            reply = await proxy.chat(PROMPT, stream=stream)
            assert (reply.status, reply.error) == (200, None), reply.raw
            if proxy is proxies[0]:
                assert reply.headers["x-homeport-backend"] == first.headers["x-homeport-backend"]
        fresh = {(await proxy.chat(PROMPT, session="new")).headers["x-homeport-backend"] for proxy in proxies}
        assert len(fresh) == 1, "without Redis proxies agree by hash"
        await until(lambda: all(any("state" in line for line in p.control.degraded()) for p in proxies))
        for proxy in proxies:
            await proxy.at_rest()
