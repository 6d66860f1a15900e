"""An engine that answers the proxy's own questions with nonsense is told of, and nothing of the proxy fails by it."""

from __future__ import annotations

import logging

import aiohttp
import pytest
from aiohttp import web

from proxy.control_kit import serving, until
from proxy.scripted_engines import proxy_for

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
GARBAGE: dict[str, bytes] = {
    "empty": b"",
    "deep": b"[" * 100_000,
    "no text": b"\xff\xfe\x00",
    "null": b"null",
    "number": b"7",
    "huge number": b'{"data": [{"id": "m", "max_model_len": 1e400}]}',
    "other shape": b'{"data": {"id": 3}, "tokens": "x", "0": [], "version": {}}',
    "list of lists": b'{"data": [[], null, 3], "tokens": [1.5, null], "0": {"endpoint": 3}}',
    "metrics that are none": b'vllm:num_requests_running NaN\nvllm:kv_cache_usage_perc +Inf\nvllm:x{a="\n',
    "endless counters": b'vllm:prompt_tokens_total 1e999\nvllm:num_requests_waiting{engine="-1"} -Inf\n',
    "hostile events": b'{"0": {"endpoint": "ipc:///etc/passwd", "replay_endpoint": "tcp://*:x"}, "x": {}}',
    "far rank": b'{"99999999999": {"endpoint": "tcp://*:1"}, "-1": {"endpoint": "tcp://*:1"}}',
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_nonsense_is_told_of(garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[str] = []

    async def nonsense(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        if request.path.endswith("completions"):
            return web.json_response({"id": "c", "choices": [], "usage": {"prompt_tokens": 5}})
        return web.Response(body=garbage)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", nonsense)
    async with serving(app) as engine, aiohttp.ClientSession() as client:
        regions = {"r": {"backends": [{"name": "d0", "url": engine}]}}
        config = {"regions": regions, "models": [{"name": "m"}], "health": {"interval_s": 0.02}}
        async with proxy_for(config) as (url, proxy):
            proxy.control.routers["r"].block_tokens = lambda place: 16  # type: ignore[method-assign]
            rounds = len(asked)
            await until(lambda: len(asked) > rounds + 10)
            for path in ("/v1/chat/completions", "/v1/completions"):
                async with client.post(url + path, json=BODY | {"prompt": "hi"}) as answer:
                    assert answer.status in (200, 404), await answer.text()
            async with client.get(url + "/homeport/v1/status") as answer:
                assert answer.status == 200
    assert "/tokenize" in asked
    assert "/kv_event_sources" in asked
    faults = [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    assert not faults, [(record.getMessage(), record.exc_info) for record in faults]
