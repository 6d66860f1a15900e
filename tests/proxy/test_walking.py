"""The way of a request end to end, on real sockets: streamed and not, on one engine and over two."""

from __future__ import annotations

import aiohttp
import pytest

from proxy.scripted_engines import NIXL, ScriptedEngine, backends, chat, pair, proxy_for

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello " * 400}]}


@pytest.mark.parametrize("streamed", [False, True])
async def test_one_engine_answers(streamed: bool) -> None:
    engine = await ScriptedEngine(chat).start()
    async with proxy_for(backends(engine)) as (url, _), aiohttp.ClientSession() as client:
        async with client.post(f"{url}/v1/chat/completions", json=BODY | {"stream": streamed}) as answer:
            text = await answer.text()
        assert answer.status == 200, text
        assert answer.headers["x-homeport-backend"] == "b0"
        assert answer.headers["x-homeport-decision"] == "placed"
        assert "kv_transfer_params" not in text
        assert ("[DONE]" in text) is streamed
        assert '"usage"' not in text if streamed else '"usage"' in text
    await engine.stop()


@pytest.mark.parametrize("streamed", [False, True])
async def test_prefill_is_handed_to_decode(streamed: bool) -> None:
    prefill, decode = await ScriptedEngine(chat).start(), await ScriptedEngine(chat).start()
    async with proxy_for(pair(prefill, decode)) as (url, _), aiohttp.ClientSession() as client:
        body = BODY | {"stream": streamed, "max_tokens": 50}
        if streamed:
            body["stream_options"] = {"include_usage": True}
        async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
            text = await answer.text()
        assert answer.status == 200, text
        assert answer.headers["x-homeport-prefill-backend"] == "p0"
        assert answer.headers["x-homeport-backend"] == "d0"
        assert '"cached_tokens":40' in text.replace(" ", "")
    [first] = prefill.seen
    assert first.body["max_tokens"] == 1
    assert first.body["stream"] is False
    [second] = decode.seen
    assert second.body["kv_transfer_params"] == NIXL
    assert second.body["max_tokens"] == 50
    await prefill.stop()
    await decode.stop()
