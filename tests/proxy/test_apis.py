"""The client APIs: real clients unchanged, errors in each one's shape, usage that is true, paths let through."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web

from homeport_proxy.api import of_path
from proxy.scripted_engines import (
    NIXL,
    ScriptedEngine,
    Seen,
    backends,
    chat,
    eventually,
    pair,
    proxy_for,
    stream,
)

LONG = "hello " * 400
MESSAGE_USAGE = {"input_tokens": 100, "output_tokens": 2, "cache_read_input_tokens": 90}
RESPONSE_USAGE = {
    "input_tokens": 100,
    "output_tokens": 2,
    "total_tokens": 102,
    "input_tokens_details": {"cached_tokens": 99},
    "output_tokens_details": {"reasoning_tokens": 0},
}


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def response(status: str, **more: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": "Hi", "annotations": []}
    item = {"id": "i", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "status": status,
        "output": [item] if status == "completed" else [],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "usage": RESPONSE_USAGE if status == "completed" else None,
        **more,
    }


async def every_api(request: web.Request, seen: Seen) -> web.StreamResponse:
    """An engine with all four text APIs, embeddings and tokenize; a prefill leg gets parameters on each."""
    path = seen.path.partition("?")[0]
    if path in ("/v1/chat/completions", "/v1/completions"):
        return await chat(request, seen)
    body = seen.body if seen.raw.startswith(b"{") else {}
    if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
        usage = MESSAGE_USAGE | {"input_tokens": 60, "cache_read_input_tokens": 40}
        if path == "/v1/responses":
            usage = RESPONSE_USAGE | {"input_tokens_details": {"cached_tokens": 40}}
        return web.json_response({"id": "p", "usage": usage, "kv_transfer_params": NIXL})
    if path == "/v1/responses" and body.get("stream"):
        return await stream(
            request,
            [
                event("response.created", sequence_number=0, response=response("in_progress")),
                event(
                    "response.output_text.delta",
                    sequence_number=1,
                    delta="Hi",
                    item_id="i",
                    output_index=0,
                    content_index=0,
                    logprobs=[],
                ),
                event("response.completed", sequence_number=2, response=response("completed", kv_transfer_params=NIXL)),
            ],
        )
    if path.startswith("/v1/responses"):
        return web.json_response(response("completed"))
    if path == "/v1/messages/count_tokens":
        return web.json_response({"input_tokens": 5})
    if path == "/v1/messages":
        message = {"id": "msg", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None}
        if not body.get("stream"):
            content = [{"type": "text", "text": "Hi"}]
            return web.json_response(message | {"content": content, "stop_reason": "end_turn", "usage": MESSAGE_USAGE})
        start = message | {"content": [], "stop_reason": None, "usage": MESSAGE_USAGE | {"output_tokens": 0}}
        return await stream(
            request,
            [
                event("message_start", message=start),
                event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
                event("content_block_delta", index=0, delta={"type": "text_delta", "text": "Hi"}),
                event("content_block_stop", index=0),
                event("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage=MESSAGE_USAGE),
                event("message_stop"),
            ],
        )
    if path == "/v1/embeddings":
        data = [{"object": "embedding", "index": 0, "embedding": [0.5]}]
        return web.json_response({"object": "list", "model": "m", "data": data, "usage": {"prompt_tokens": 3}})
    return web.json_response({"path": seen.path, "method": request.method})


async def test_openai_python_unchanged() -> None:
    engine = await ScriptedEngine(every_api).start()
    async with proxy_for(backends(engine)) as (url, _), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        whole = await client.chat.completions.create(model="m", messages=messages)
        assert whole.choices[0].message.content == "Hello you"
        parts = [
            chunk.choices[0].delta.content
            async for chunk in await client.chat.completions.create(model="m", messages=messages, stream=True)
        ]
        assert "".join(part or "" for part in parts) == "Hello you"
        answer = await client.responses.create(model="m", input="hi")
        assert answer.output_text == "Hi"
        kinds = [item.type async for item in await client.responses.create(model="m", input="hi", stream=True)]
        assert kinds == ["response.created", "response.output_text.delta", "response.completed"]
        assert [model.id async for model in client.models.list()] == ["m"]
        assert (await client.models.retrieve("m")).id == "m"
        assert (await client.embeddings.create(model="m", input="x", encoding_format="float")).data[0].embedding == [
            0.5
        ]
        stored = await client.responses.retrieve("resp_1")
        assert stored.id == "resp_1"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="absent", messages=messages)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_unknown")
    await engine.stop()


async def test_anthropic_python_unchanged() -> None:
    engine = await ScriptedEngine(every_api).start()
    async with (
        proxy_for(backends(engine)) as (url, _),
        anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0) as client,
    ):
        messages: Any = [{"role": "user", "content": "hi"}]
        whole = await client.messages.create(model="m", max_tokens=5, messages=messages)
        assert whole.usage.cache_read_input_tokens == 90
        async with client.messages.stream(model="m", max_tokens=5, messages=messages) as text:
            assert await text.get_final_text() == "Hi"
        assert (await client.messages.count_tokens(model="m", messages=messages)).input_tokens == 5
        assert [model.id async for model in await client.models.list()] == ["m"]
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(model="absent", max_tokens=5, messages=messages)
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        assert missing.value.request_id
    await engine.stop()


async def usage_of(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Every usage object of an answer, streamed or not."""
    async with aiohttp.request("POST", url + path, json=body) as answer:
        text = await answer.text()
        assert answer.status == 200, text
        assert "kv_transfer_params" not in text
        assert answer.headers["x-homeport-prefill-backend"] == "p0"
    documents = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")] or [json.loads(text)]
    found = [d.get("usage") or (d.get("response") or d.get("message") or {}).get("usage") for d in documents]
    return [usage for usage in found if usage]


@pytest.mark.parametrize("streamed", [False, True])
async def test_usage_is_the_prefill_engines_on_every_api(streamed: bool) -> None:
    prefill, decode = await ScriptedEngine(every_api).start(), await ScriptedEngine(every_api).start()
    async with proxy_for(pair(prefill, decode)) as (url, proxy):
        ask: dict[str, Any] = {"model": "m", "stream": streamed}
        listed = [{"role": "user", "content": LONG}]
        options = {"stream_options": {"include_usage": True}} if streamed else {}
        for usage in await usage_of(url, "/v1/chat/completions", ask | {"messages": listed} | options):
            assert usage["prompt_tokens_details"]["cached_tokens"] == 40
        for usage in await usage_of(url, "/v1/completions", ask | {"prompt": LONG} | options):
            assert usage["prompt_tokens_details"]["cached_tokens"] == 40
        for usage in await usage_of(url, "/v1/responses", ask | {"input": LONG}):
            assert usage["input_tokens_details"]["cached_tokens"] == 40
        found = await usage_of(url, "/v1/messages", ask | {"messages": listed, "max_tokens": 5})
        assert len(found) == (2 if streamed else 1)
        for usage in found:
            assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (150, 40)
        for summary in proxy.control.account.requests.latest(4):
            assert summary["tokens"]["cached"] == 40  # type: ignore[index,call-overload]
    assert len(prefill.seen) == len(decode.seen) == 4
    await prefill.stop()
    await decode.stop()


@pytest.mark.parametrize(
    ("fleet", "path", "streamed"),
    [
        ("one", "/v1/chat/completions", False),
        ("one", "/v1/responses", False),
        ("one", "/v1/messages", True),
        ("split", "/v1/chat/completions", True),
    ],
)
async def test_no_more_is_expected_cached_than_the_prompt_turns_out_to_hold(
    fleet: str, path: str, streamed: bool
) -> None:
    """Prompts are estimated by their bytes, here far too long; what is known before the head goes out, counts."""
    engines = [await ScriptedEngine(every_api).start() for _ in range(2)]
    config = pair(*engines) if fleet == "split" else backends(engines[0])
    prompt = {"input": LONG} if path == "/v1/responses" else {"messages": [{"role": "user", "content": LONG}]}
    async with proxy_for(config) as (url, proxy), aiohttp.ClientSession() as client:
        for session in ("one", "another"):
            proxy.control.account.bytes_per_token.take({"m": 1.0})
            body = {"model": "m", "stream": streamed, "max_tokens": 5, **prompt}
            async with client.post(url + path, json=body, headers={"x-session-id": session}) as answer:
                await answer.read()
        expected = int(answer.headers["x-homeport-expected-cached-tokens"])
        assert proxy.control.account.requests.latest(1)[0]["tokens"]["expected_cached"] == expected  # type: ignore[index,call-overload]
    assert 0 < expected <= 200
    for engine in engines:
        await engine.stop()


@pytest.mark.parametrize(
    ("path", "tokens"),
    [
        (
            "/v1/chat/completions",
            [b'{"choices":[{"delta":{"content":"a"}}]}', b'{"choices":[{"delta":{"tool_calls":[{}]}}]}'],
        ),
        ("/v1/completions", [b'{"choices":[{"text":"a"}]}']),
        ("/v1/responses", [b'{"type":"response.output_text.delta"}', b'{"type":"response.completed"}']),
        ("/v1/messages", [b'{"type":"content_block_delta"}', b'{"type":"message_delta"}']),
    ],
)
def test_what_is_a_token(path: str, tokens: list[bytes]) -> None:
    api = of_path(path)
    silent = [
        b'{"choices":[{"delta":{"role":"assistant","content":""}}]}',
        b'{"choices":[{"text":""}]}',
        b'{"choices":[]}',
        b'{"type":"response.created"}',
        b'{"type":"message_start"}',
        b'{"type":"ping"}',
        b"[]",
        b"",
    ]
    assert all(api.has_token(b"", data) for data in tokens)
    assert not any(api.has_token(b"", data) for data in silent)


SHAPES = [
    ("/v1/chat/completions", b"{", 400, "invalid_request"),
    ("/v1/chat/completions", b"[1]", 400, "invalid_request"),
    ("/v1/completions", b'{"model":"absent"}', 404, "model_not_found"),
    ("/v1/responses", b'{"model":"absent"}', 404, "model_not_found"),
    ("/v1/messages", b'{"model":"absent"}', 404, "not_found_error"),
    ("/v1/messages", b"nonsense", 400, "invalid_request_error"),
    ("/v1/load_lora_adapter", b"{}", 404, "invalid_request"),
    ("/v1/x/../load_lora_adapter", b"{}", 404, "invalid_request"),
    ("/v1/%6coad_lora_adapter", b"{}", 404, "invalid_request"),
    ("/v1//unload_lora_adapter", b"{}", 404, "invalid_request"),
    ("/v1/chat/completions/render", b"{}", 404, "invalid_request"),
    ("/nothing", b"{}", 404, "invalid_request"),
    ("/health/../nothing", b"{}", 404, "invalid_request"),
    ("/v1/../metrics", b"", 404, "invalid_request"),
    ("/v1/%2e%2e/homeport/v1/status", b"", 404, "invalid_request"),
]


@pytest.mark.parametrize(("path", "body", "status", "word"), SHAPES)
async def test_our_errors_have_the_apis_shape(path: str, body: bytes, status: int, word: str) -> None:
    engine = await ScriptedEngine(every_api).start()
    async with proxy_for(backends(engine)) as (url, proxy):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: mine.1\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        raw = await reader.read()
        writer.close()
        head, _, text = raw.decode().partition("\r\n\r\n")
        document = json.loads(text)
        assert f" {status} " in head.splitlines()[0]
        assert "x-homeport-request-id: mine.1" in head
        if path == "/v1/messages":
            assert document["type"] == "error"
            assert document["error"]["type"] == word
        else:
            assert document["error"]["code"] == word
            assert document["error"]["type"] == "invalid_request_error"
        assert not engine.seen
        assert proxy.control.placer.open_tickets == 0
    await engine.stop()


async def test_the_proxys_own_paths() -> None:
    engine = await ScriptedEngine(every_api).start()
    async with proxy_for(backends(engine)) as (url, _), aiohttp.ClientSession() as client:
        browser = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
        async with client.get(url, headers=browser) as answer:
            assert answer.status == 200
            assert (answer.url.path, answer.content_type) == ("/homeport", "text/html")
        for method, path in (
            ("GET", "/"),
            ("GET", "/homeport/nothing"),
            ("GET", "/homeport/v1/x"),
            ("PUT", "/homeport/v1/x"),
        ):
            async with client.request(method, url + path) as answer:
                assert answer.status == 404
                assert (await answer.json())["error"]["type"] == "invalid_request_error"
    await engine.stop()


async def test_a_model_that_nobody_serves_is_named_in_the_books() -> None:
    engine = await ScriptedEngine(every_api).start()
    async with proxy_for(backends(engine, models=[{"name": "m"}])) as (url, proxy), aiohttp.ClientSession() as client:
        async with client.post(f"{url}/v1/chat/completions", json={"model": "a\nb" + "c" * 500}) as answer:
            assert answer.status == 404
        (summary,) = proxy.control.account.requests.latest(1)
        assert summary["model"] == "a?b" + "c" * 125
        labels = {values[1] for values in proxy.control.metrics.requests.values}
        assert labels == {"other"}
    await engine.stop()


async def test_other_paths_pass_unchanged() -> None:
    engine = await ScriptedEngine(every_api).start()
    async with proxy_for(backends(engine)) as (url, proxy), aiohttp.ClientSession() as client:
        async with client.get(f"{url}/v1/some/thing?a=%20b&c") as answer:
            assert await answer.json() == {"path": "/v1/some/thing?a=%20b&c", "method": "GET"}
            assert answer.headers["x-homeport-backend"] == "b0"
        form = aiohttp.FormData({"file": b"\x00\xff"}, default_to_multipart=True)
        async with client.post(f"{url}/v1/audio/transcriptions", data=form) as answer:
            assert answer.status == 200
        assert b"\x00\xff" in engine.seen[1].raw
        async with client.post(f"{url}/tokenize", json={"model": "m", "prompt": "x"}) as answer:
            assert answer.status == 200
        async with client.head(f"{url}/v1/some/thing") as answer:
            assert answer.status == 200
        async with client.delete(f"{url}/v1/files/f1") as answer:
            assert (await answer.json())["method"] == "DELETE"
        await eventually(lambda: proxy.control.placer.open_tickets == 0)
    await engine.stop()


async def test_aliases_reach_the_engine_by_its_own_name() -> None:
    engine = await ScriptedEngine(every_api).start()
    models = [{"name": "m", "aliases": ["gpt-4o-mini", "claude-*"]}]
    async with proxy_for(backends(engine, models=models)) as (url, _), aiohttp.ClientSession() as client:
        for asked in ("m", "gpt-4o-mini", "claude-opus-9"):
            body = {"model": asked, "messages": [], "max_tokens": 5}
            async with client.post(f"{url}/v1/messages", json=body) as answer:
                assert (await answer.json())["model"] == "m"
        async with client.get(f"{url}/v1/models", headers={"anthropic-version": "2023-06-01"}) as answer:
            assert [model["id"] for model in (await answer.json())["data"]] == ["m", "gpt-4o-mini"]
        async with client.delete(f"{url}/v1/models/m") as answer:
            assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
    assert [seen.body["model"] for seen in engine.seen] == ["m", "m", "m"]
    await engine.stop()


async def test_keys_scopes_and_priorities_with_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_A", "secret-a")
    monkeypatch.setenv("ENGINE_KEY", "engine-secret")
    engine = await ScriptedEngine(every_api).start()
    config = backends(engine, tenants=[{"name": "a", "key_env": "KEY_A"}])
    config["regions"]["local"]["backends"][0]["key_env"] = "ENGINE_KEY"
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "cache_salt": "mine", "priority": 5}
    async with proxy_for(config) as (url, _), aiohttp.ClientSession() as client:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            async with client.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
                assert answer.status == 401
                assert (await answer.json())["error"]["code"] == "invalid_api_key"
            async with client.get(f"{url}/v1/models", headers=headers) as answer:
                assert answer.status == 401
        for name, value in (("authorization", "Bearer secret-a"), ("x-api-key", "secret-a")):
            async with client.post(f"{url}/v1/chat/completions", json=body, headers={name: value}) as answer:
                assert answer.status == 200
    for seen in engine.seen:
        assert seen.headers["authorization"] == "Bearer engine-secret"
        assert "x-api-key" not in seen.headers
        assert "priority" not in seen.body
        assert seen.body["cache_salt"] not in ("mine", "")
    await engine.stop()


async def test_without_tenants_the_clients_key_passes_unless_the_backend_has_its_own() -> None:
    engine = await ScriptedEngine(every_api).start()
    async with proxy_for(backends(engine)) as (url, _):
        headers = {"authorization": "Bearer client"}
        body = {"model": "m", "messages": [], "cache_salt": "mine", "priority": 5}
        async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
    assert engine.seen[0].headers["authorization"] == "Bearer client"
    assert engine.seen[0].body["cache_salt"] == "mine"
    await engine.stop()


async def test_stored_responses_go_to_their_holder() -> None:
    count = 0

    async def numbered(request: web.Request, seen: Seen) -> web.StreamResponse:
        nonlocal count
        count += 1
        return web.json_response(response("completed", id=f"resp_{count}"))

    engines = [await ScriptedEngine(numbered).start() for _ in range(3)]
    async with proxy_for(backends(*engines)) as (url, proxy), aiohttp.ClientSession() as client:
        holders: dict[str, str] = {}
        for number in range(6):
            body = {"model": "m", "input": f"{number} " * 100}
            async with client.post(f"{url}/v1/responses", json=body) as answer:
                holders[(await answer.json())["id"]] = answer.headers["x-homeport-backend"]
        for response_id, holder in list(holders.items()):
            async with client.get(f"{url}/v1/responses/{response_id}") as answer:
                assert answer.headers["x-homeport-backend"] == holder
            body = {"model": "m", "input": "go on", "previous_response_id": response_id}
            async with client.post(f"{url}/v1/responses", json=body) as answer:
                assert answer.headers["x-homeport-backend"] == holder
        async with client.post(f"{url}/v1/responses", json=body | {"previous_response_id": "resp_x"}) as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["param"] == "previous_response_id"
        assert len(set(holders.values())) > 1
        await eventually(lambda: proxy.control.placer.open_tickets == 0)
    for engine in engines:
        await engine.stop()


async def test_a_websocket_is_refused_at_once() -> None:
    engine = await ScriptedEngine(every_api).start()
    async with proxy_for(backends(engine)) as (url, _), aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await client.ws_connect(f"{url}/v1/responses")
        assert refused.value.status == 426
    assert not engine.seen
    await engine.stop()


@pytest.mark.parametrize("streamed", [False, True])
async def test_another_region_serves_through_its_own_proxy(streamed: bool) -> None:
    engine = await ScriptedEngine(chat).start()
    async with proxy_for({"region": "ams", "regions": {"ams": {"backends": [{"name": "x0", "url": engine.url}]}}}) as (
        far,
        _,
    ):
        here = await ScriptedEngine(chat).start()
        config = {
            "region": "fra",
            "regions": {
                "fra": {"weight": 0.000001, "backends": [{"name": "y0", "url": here.url}]},
                "ams": {"proxy": far, "rtt_ms": 1},
            },
        }
        async with proxy_for(config) as (url, proxy):
            body = {"model": "m", "messages": [{"role": "user", "content": LONG}], "stream": streamed}
            async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=body) as answer:
                text = await answer.text()
                assert answer.status == 200, text
                assert answer.headers["x-homeport-decision"] == "peer"
                assert answer.headers["x-homeport-region"] == "ams"
                assert answer.headers["x-homeport-backend"] == "x0"
                assert ("[DONE]" in text) is streamed
            assert not here.seen
            assert "x-homeport-hops" not in engine.seen[0].headers
            await eventually(lambda: all(pool.busy_count == 0 for pool in proxy.pipeline.engines.pools()))
            hop = {"x-homeport-hops": "1"}
            async with aiohttp.request("POST", f"{url}/v1/chat/completions", json=body, headers=hop) as answer:
                assert answer.headers["x-homeport-backend"] == "y0"
            await proxy.control.regions.ask_all()
