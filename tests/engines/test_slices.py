"""A long prompt in parts on a real engine: they land in its prefix cache, the words stay the same, the books true."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from engines.engine_kit import BLOCK_TOKENS, Pair, fresh_text
from homeport_proxy import tokens
from homeport_proxy.routing.views import Ticket
from proxy.scripted_engines import eventually, proxy_for

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

STEP_TOKENS = 256
"""Of the router's idea of an engine's step: the engine's context is too short for parts of the usual length."""


async def post(url: str, body: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return {name.lower(): value for name, value in answer.headers.items()}, await answer.json()


@pytest.mark.parametrize("known", [False, True], ids=["new prompt", "a turn of it known"])
async def test_a_prompt_in_parts(pair: Pair, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "ANSWER_S", 60.0)
    monkeypatch.setenv("D0_KEY", pair.key("d0"))
    config = {
        "listen": "127.0.0.1:0",
        "regions": {"local": {"backends": [{"name": "d0", "url": pair.url("d0"), "key_env": "D0_KEY"}]}},
        "routing": {"slice_s": 0.001},
    }
    body: dict[str, Any] = {"model": pair.model, "max_tokens": 16, "temperature": 0}
    async with proxy_for(config) as (url, proxy):
        router = proxy.control.routers["local"]
        router.reconfigure(replace(router.settings, step_tokens=STEP_TOKENS))
        said = [{"role": "user", "content": fresh_text(160)}]
        _, first = await post(url, body | {"messages": said})
        await eventually(lambda: router.block_tokens("d0") == BLOCK_TOKENS, 60)
        if known:
            said.append(first["choices"][0]["message"])
        else:
            said.clear()
        said.append({"role": "user", "content": f"{fresh_text(1500)}\nWhat is this note about?"})

        parts: list[int] = []
        sliced = proxy.control.placer.sliced

        async def noted(ticket: Ticket, cached_tokens: int | None, *, ok: bool) -> None:
            assert ok
            assert ticket.part_tokens is not None
            parts.append(ticket.part_tokens)
            await sliced(ticket, cached_tokens, ok=ok)

        monkeypatch.setattr(proxy.control.placer, "sliced", noted)
        hits_before = pair.by_source("d0")["local_cache_hit"]
        headers, answer = await post(url, body | {"messages": said})
        hits = pair.by_source("d0")["local_cache_hit"] - hits_before

        assert len(parts) >= 2
        assert parts == sorted(set(parts))
        assert headers["x-homeport-reason"].endswith(f"; prefilled in {len(parts) + 1} parts")
        found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found == int(headers["x-homeport-expected-cached-tokens"])
        assert (found >= BLOCK_TOKENS) is known, "what was there before the first part"
        # each part finds the one before it, and the request itself finds the last
        assert hits == found + sum(part // BLOCK_TOKENS * BLOCK_TOKENS for part in parts)

        alone = pair.ask_engine("p0", "/v1/chat/completions", body | {"messages": said})
        assert answer["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]
        assert answer["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
        assert answer["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
