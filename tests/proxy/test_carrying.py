"""`drain --carry`: a session's KV goes with it, over emulated engines that keep true books."""

from __future__ import annotations

import itertools
import json
from typing import Any

import aiohttp
import pytest

from emulator.emulating import fast
from homeport_engines.emulator import Emulator
from homeport_proxy import config as configuration
from homeport_proxy.carrying import why_not
from proxy.scripted_engines import eventually, proxy_for

PATH = "/v1/chat/completions"


def config(*urls: str, **settings: Any) -> dict[str, Any]:
    listed = [{"name": f"m{i}", "url": url, "role": "mixed", "kv_transfer": "nixl"} for i, url in enumerate(urls)]
    routing = {"drain_idle_s": 0.001, "slice_s": 0.001}  # a session moves with its next request
    return {"listen": "127.0.0.1:0", "regions": {"local": {"backends": listed}}, "routing": routing, **settings}


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize(("streamed", "sentences"), [(True, 200), (False, 200), (True, 3000)])
async def test_a_session_takes_its_kv_along(carry: bool, streamed: bool, sentences: int) -> None:
    """Also where the prompt is so long that it would be prefilled in parts at its new home."""
    settings = fast(kv="nixl", model="m")
    async with Emulator(settings) as one, Emulator(settings) as two:
        engines = {"m0": one, "m1": two}
        async with proxy_for(config(one.url, two.url)) as (url, proxy), aiohttp.ClientSession() as client:
            messages = [{"role": "user", "content": "The harbour has many berths. " * sentences}]

            async def turn() -> tuple[Any, Any]:
                body = {"model": "m", "messages": messages, "stream": streamed, "max_tokens": 8}
                headers = {"x-session-id": "s"}
                async with client.post(url + PATH, json=body, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
                await eventually(lambda: proxy.control.placer.open_tickets == 0)
                messages.extend([{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and then?"}])
                summary: Any = proxy.control.account.requests.get(answer.headers["x-homeport-request-id"])
                return answer.headers, summary["tokens"]

            first, _ = await turn()
            home = first["x-homeport-backend"]
            other = "m1" if home == "m0" else "m0"
            drained = f"{url}/homeport/v1/backends/{home}/drain"
            async with client.post(drained, json={"carry": carry}) as answer:
                said = await answer.json()
            assert said["note"] == ("each session takes its KV along when it moves" if carry else None)
            moved, tokens = await turn()
            assert (moved["x-homeport-backend"], moved["x-homeport-decision"]) == (other, "moved")
            assert moved.get("x-homeport-prefill-backend") == (home if carry else None)
            assert (tokens["cached"] > 1000) is carry
            if carry:
                assert engines[other].books.requests[-1].transferred_tokens > 1000
            after, tokens = await turn()
            assert after["x-homeport-backend"] == other
            assert "x-homeport-prefill-backend" not in after
            assert tokens["cached"] > 1000
            await eventually(lambda: one.held_leases == two.held_leases == 0)


SETTINGS = ({"role": "mixed"}, {"role": "decode"}, {"role": "decode", "kv_readback": True}, {"role": "prefill"})


def test_who_can_hand_over() -> None:
    listed = [
        {"name": f"b{i}", "url": f"http://127.0.0.1:{i + 1}", "kv_transfer": "nixl", **settings}
        for i, settings in enumerate([*SETTINGS, {"role": "mixed", "kv_transfer": "none"}])
    ]
    loaded = configuration.parse(json.dumps({"regions": {"r": {"backends": listed}}}))
    backends = [backend for _, backend in loaded.backends]
    can = {(a.name, b.name) for a, b in itertools.permutations(backends, 2) if why_not(a, b) is None}
    assert can == {("b0", "b1")}
    assert "gives none" in str(why_not(backends[1], backends[0]))
    assert "no session lives there" in str(why_not(backends[3], backends[0]))
    assert "has no kv_transfer" in str(why_not(backends[4], backends[0]))
