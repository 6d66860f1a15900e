"""With an engine's KV events followed, prompts reach the router under the engine's own block names."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from homeport_engines.vllm.kv import block_hashes
from homeport_proxy.routing.views import RequestView
from proxy.scripted_engines import ScriptedEngine, Seen, backends, chat, proxy_for

TOKENS = list(range(64))
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}


ASKED = {
    "/v1/chat/completions": "/tokenize",
    "/v1/messages": "/v1/messages/render",
    "/v1/responses": "/v1/responses/render",
}


@pytest.mark.parametrize("path", list(ASKED))
@pytest.mark.parametrize("how", ["answers", "slow", "refuses", "does not offer it", "not followed"])
async def test_block_names(how: str, path: str) -> None:
    async def engine_of(request: web.Request, seen: Seen) -> web.StreamResponse:
        if seen.path != ASKED[path]:
            return await chat(request, seen)
        if how == "slow":
            await asyncio.Event().wait()
        if how == "refuses":
            return web.json_response({}, status=400)
        if how == "does not offer it":
            return web.json_response({}, status=403)
        if path == "/v1/chat/completions":
            return web.json_response({"tokens": TOKENS, "count": len(TOKENS)})
        return web.json_response({"request_id": "r", "token_ids": TOKENS, "sampling_params": {}})

    engine = await ScriptedEngine(engine_of).start()
    async with proxy_for(backends(engine)) as (url, proxy):
        router = proxy.control.routers["local"]
        arrived: list[RequestView] = []
        arrive = router.arrive
        router.arrive = lambda view, now_s: (arrived.append(view), arrive(view, now_s))[1]  # type: ignore[method-assign,func-returns-value]
        if how != "not followed":
            router.block_tokens = lambda place: 16  # type: ignore[method-assign]
        for _ in range(2):
            async with aiohttp.request("POST", url + path, json=BODY | {"cache_salt": "s"}) as answer:
                assert answer.status == 200
        asked = [seen for seen in engine.seen if seen.path == ASKED[path]]
        names = {16: block_hashes(TOKENS, 16, cache_salt="s")}
        assert [dict(view.prefix.token_blocks) for view in arrived] == [names if how == "answers" else {}] * 2
        if how == "answers":
            assert [(view.prompt_tokens, view.prompt_estimated) for view in arrived] == [(len(TOKENS), False)] * 2
        assert len(asked) == {"answers": 2, "slow": 1, "refuses": 2, "does not offer it": 1, "not followed": 0}[how]
        whole = BODY.keys() | {"cache_salt"}
        members = {"model", "messages"} if path == "/v1/chat/completions" else whole
        assert all(seen.body.keys() == members for seen in asked)
        assert all(pool.busy_count == 0 for pool in proxy.pipeline.engines.pools())
    await engine.stop()
