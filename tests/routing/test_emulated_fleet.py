"""One URL with four data-parallel ranks keeps as much as four separate engines; the index is never exact and wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from faults.harbour import Harbour, backend, document, engine_settings, proxy_for, until
from homeport_engines.emulator import Emulator
from homeport_engines.emulator.settings import CacheGroup

WORDS = [f"vessel{number} " for number in range(12_000)]
SESSIONS, TURNS = 8, 5
BLOCK_TOKENS = 16


@asynccontextmanager
async def fleet(engines: int, ranks: int, **settings: Any) -> AsyncIterator[Harbour]:
    """``engines`` backends of ``ranks`` data-parallel ranks each; their KV events are followed."""
    async with AsyncExitStack() as stack:
        running = {
            f"m{number}": await stack.enter_async_context(
                Emulator(engine_settings(data_parallel=ranks, block_tokens=BLOCK_TOKENS, **settings))
            )
            for number in range(engines)
        }
        backends = [backend(name, engine, data_parallel=ranks) for name, engine in running.items()]
        url, control, proxy = await stack.enter_async_context(proxy_for(document(backends)))
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)))
        harbour = Harbour(url, control, proxy, running, http)
        await until(lambda: len(control.places()) == engines * ranks)
        yield harbour


async def played(harbour: Harbour, model: str) -> tuple[float, set[str], list[tuple[str, int, int]]]:
    """Sessions take turns: the share of prompt tokens found cached, the places that answered, and (index state,
    expected, found) of every request."""
    prompt = cached = 0
    places: set[str] = set()
    seen: list[tuple[str, int, int]] = []
    messages: list[list[dict[str, str]]] = [[] for _ in range(SESSIONS)]
    for number in range(SESSIONS * TURNS):
        session = number % SESSIONS
        said = "".join(WORDS[number * 250 : number * 250 + 250])
        messages[session].append({"role": "user", "content": said})
        body = {"model": model, "max_tokens": 8, "messages": messages[session]}
        reply = await harbour.ask(body, x_session_id=f"s{session}")
        assert reply.status == 200, reply.raw
        messages[session].append({"role": "assistant", "content": reply.text})
        await harbour.at_rest()
        path = f"{harbour.url}/homeport/v1/requests/{reply.headers['x-homeport-request-id']}"
        async with harbour.http.get(path) as answer:
            summary = await answer.json()
        tokens, place = summary["tokens"], summary["backend"]
        status = next(one for one in harbour.control.places() if one.name == place)
        places.add(place)
        seen.append((status.index, tokens["expected_cached"] or 0, tokens["cached"]))
        prompt += tokens["prompt"]
        cached += tokens["cached"]
    return cached / prompt, places, seen


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("m", {}),
        ("m", {"groups": (CacheGroup(), CacheGroup("sliding_window", 64))}),
        ("pilot", {"adapters": ("pilot",)}),
        ("m", {"kv_blocks": 900, "host_blocks": 4096}),
    ],
    ids=["plain", "hybrid", "adapter", "host tier"],
)
async def test_ranks_behind_one_url_keep_what_separate_engines_keep(model: str, settings: dict[str, Any]) -> None:
    async with fleet(1, 4, **settings) as together:
        shared, ranks, seen = await played(together, model)
    async with fleet(4, 1, **settings) as apart:
        own, engines, _ = await played(apart, model)
    assert len(ranks) == len(engines) == 4
    assert own > 0.5
    assert shared >= 0.95 * own
    if model == "m":
        assert "exact" in {state for state, _, _ in seen}
    for state, expected, found in seen:
        if state == "exact":
            assert expected <= found + BLOCK_TOKENS, seen
