"""What reaches the client: bytes as they come, usage as it was asked for, ends that are ends."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from proxy.scripted_engines import (
    SSE_HEAD,
    USAGE,
    RawEngine,
    ScriptedEngine,
    Seen,
    backends,
    chat,
    chunk,
    eventually,
    in_chunk,
    proxy_for,
    reset,
    stream,
)

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
STREAM = BODY | {"stream": True}
PATH = "/v1/chat/completions"


def idle(proxy: Any) -> bool:
    """Nothing is left of any request: no connection busy, no ticket, no orphan."""
    pipeline = proxy.pipeline
    busy = sum(pool.busy_count for pool in pipeline.engines.pools())
    return busy == 0 and proxy.control.placer.open_tickets == 0 and pipeline.desk.orphans.count == 0


async def read_raw(url: str, request: bytes) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    try:
        return await reader.read()
    finally:
        writer.close()


def raw_post(body: bytes, version: str = "1.1", path: str = PATH, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: x", "Connection: close", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def test_usage_that_was_not_asked_for_is_asked_for_and_hidden() -> None:
    engine = await ScriptedEngine(chat).start()
    async with proxy_for(backends(engine)) as (url, proxy), aiohttp.ClientSession() as client:
        async with client.post(url + PATH, json=STREAM) as answer:
            text = await answer.text()
        assert "usage" not in text
        assert engine.seen[0].body["stream_options"] == {"include_usage": True}
        summary = proxy.control.account.requests.get(answer.headers["x-homeport-request-id"])
        assert summary is not None
        assert summary["tokens"]["prompt"] == 100  # type: ignore[index,call-overload]
        options = {"include_usage": False, "continuous_usage_stats": False}
        async with client.post(url + PATH, json=STREAM | {"stream_options": options}) as answer:
            assert "usage" not in await answer.text()
        assert engine.seen[1].body["stream_options"] == {"include_usage": True, "continuous_usage_stats": False}
        async with client.post(url + PATH, json=STREAM | {"stream_options": {"include_usage": True}}) as answer:
            assert '"prompt_tokens": 100' in await answer.text()
    await engine.stop()


async def test_the_body_travels_byte_for_byte() -> None:
    engine = await ScriptedEngine(chat).start()
    body = b'{ "messages":[{"role":"user","content":"h\\u00e9\\/ x"}],"temperature":1.0000,\n"odd":{"b":1},"model":"m"}'
    async with proxy_for(backends(engine)) as (url, _), aiohttp.ClientSession() as client:
        headers = {"content-type": "application/json", "User-Agent": "me/1", "X-Odd": "ä"}
        async with client.post(url + PATH, data=body, headers=headers) as answer:
            await answer.read()
    assert engine.seen[0].raw == body
    assert engine.seen[0].headers["user-agent"] == "me/1"
    await engine.stop()


async def test_engine_members_never_come_from_or_reach_a_client() -> None:
    async def leaky(request: web.Request, seen: Seen) -> web.StreamResponse:
        if seen.body.get("stream"):
            return await stream(request, [chunk("a", kv_transfer_params={"x": 1}), chunk("b"), b"data: [DONE]\n\n"])
        return web.json_response({"id": "1", "choices": [], "usage": USAGE, "kv_transfer_params": {"x": 1}})

    engine = await ScriptedEngine(leaky).start()
    bad = {"kv_transfer_params": {"do_remote_prefill": True}, "bootstrap_room": 1, "disaggregated_params": {}}
    headers = {"x-data-parallel-rank": "7", "x-homeport-evil": "1", "x-request-id": "___prefill_addr_x"}
    async with proxy_for(backends(engine)) as (url, _), aiohttp.ClientSession() as client:
        for streamed in (False, True):
            async with client.post(url + PATH, json=BODY | bad | {"stream": streamed}, headers=headers) as answer:
                text = await answer.text()
                assert "kv_transfer" not in text
                assert "___" not in answer.headers["x-homeport-request-id"]
    for seen in engine.seen:
        assert not bad.keys() & seen.body.keys()
        assert not {"x-data-parallel-rank", "x-homeport-evil"} & seen.headers.keys()
        assert "___" not in seen.headers["x-request-id"]
    assert len({seen.headers["x-request-id"] for seen in engine.seen}) == 2
    await engine.stop()


@pytest.mark.parametrize("how", ["close", "reset", "half frame", "clean end without an end"])
async def test_an_engine_that_dies_in_mid_stream_is_told_of(how: str) -> None:
    async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        head = SSE_HEAD
        if how == "clean end without an end":
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
            writer.write(head + chunk() + chunk("a"))
        else:
            writer.write(head + in_chunk(chunk()) + in_chunk(chunk("a")))
        if how == "half frame":
            writer.write(in_chunk(chunk("b")[:20]))
        await writer.drain()
        await asyncio.sleep(0.05)
        if how == "reset":
            reset(writer)

    engine = await RawEngine(dying).start()
    async with proxy_for(backends(engine)) as (url, proxy):
        raw = await read_raw(url, raw_post(json.dumps(STREAM).encode(), "1.0"))
        _, _, body = raw.partition(b"\r\n\r\n")
        frames = [frame for frame in body.split(b"\n\n") if frame]
        documents = [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
        assert documents[1]["choices"][0]["delta"]["content"] == "a"
        assert documents[-1]["error"]["code"] == "upstream_error"
        assert b"[DONE]" not in body
        chunked = await read_raw(url, raw_post(json.dumps(STREAM).encode()))
        assert chunked.endswith(b"0\r\n\r\n"), "the body ends cleanly"
        assert idle(proxy)
    await engine.stop()


@pytest.mark.parametrize(
    ("path", "frames", "last"),
    [
        (
            "/v1/responses",
            [b'event: response.created\ndata: {"type":"response.created","sequence_number":0}\n\n'],
            {"type": "error", "code": "upstream_error", "param": None, "sequence_number": 1},
        ),
        ("/v1/messages", [b'event: message_start\ndata: {"type":"message_start"}\n\n'], {"type": "error"}),
    ],
)
async def test_a_broken_stream_ends_in_its_apis_words(path: str, frames: list[bytes], last: dict[str, Any]) -> None:
    async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(SSE_HEAD + b"".join(map(in_chunk, frames)))
        await writer.drain()

    engine = await RawEngine(dying).start()
    async with proxy_for(backends(engine)) as (url, _):
        raw = await read_raw(url, raw_post(json.dumps(STREAM | {"max_tokens": 5}).encode(), "1.0", path))
        end = raw.split(b"\n\n")[-2]
        assert end.startswith(b"event: error\ndata: ")
        document = json.loads(end.partition(b"data: ")[2])
        assert last.items() <= document.items()
        assert document.get("message") or document["error"]["type"] == "api_error"
    await engine.stop()


async def test_a_client_that_leaves_aborts_the_engine_streamed_and_silent() -> None:
    async def silent(request: web.Request, seen: Seen) -> web.StreamResponse:
        if seen.body.get("stream"):
            return await stream(request, [chunk(), chunk("x")], pause=asyncio.Event())
        await asyncio.Event().wait()
        raise AssertionError

    engine = await ScriptedEngine(silent).start()
    async with proxy_for(backends(engine)) as (url, proxy):
        host, port = url.removeprefix("http://").split(":")
        for streamed in (True, False):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(raw_post(json.dumps(BODY | {"stream": streamed}).encode()))
            count = len(engine.seen)
            await eventually(lambda count=count: len(engine.seen) > count)  # type: ignore[misc]
            writer.close()
            await eventually(lambda: engine.open == 0, 1.0)
            await eventually(lambda: idle(proxy), 1.0)
    assert all(seen.aborted for seen in engine.seen)
    await engine.stop()


async def test_back_pressure_reaches_the_engine() -> None:
    written = 0
    filler = in_chunk(b": " + b"x" * 65_000 + b"\n\n")

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        nonlocal written
        writer.write(SSE_HEAD + in_chunk(chunk("a")))
        for _ in range(400):
            writer.write(filler)
            await writer.drain()
            written += 1
        writer.write(in_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()

    engine = await RawEngine(flood).start()
    async with proxy_for(backends(engine)) as (url, proxy):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 16)
        writer.write(raw_post(json.dumps(STREAM).encode()))
        await eventually(lambda: written > 3)
        before = -1
        while before != written:
            before = written
            await asyncio.sleep(0.1)
        assert written < 300, "a client that does not read holds the engine"
        body = await reader.read(-1)
        assert body.endswith(b"0\r\n\r\n")
        assert written == 400
        writer.close()
        assert idle(proxy)
    await engine.stop()


async def test_a_stale_connection_never_shows() -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        data = json.dumps({"id": "1", "choices": [], "usage": USAGE}).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data) + data
        )
        await writer.drain()
        if number % 2:
            await engine.read_request(reader)
            reset(writer)  # the second request on this connection meets a closing server

    engine = await RawEngine(once).start()
    async with proxy_for(backends(engine)) as (url, proxy), aiohttp.ClientSession() as client:
        for _ in range(4):
            async with client.post(url + PATH, json=BODY) as answer:
                assert answer.status == 200
        assert engine.connections > 1
        assert idle(proxy)
    await engine.stop()


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_every_framing_of_an_answer(framing: str, version: str) -> None:
    data = json.dumps({"id": "1", "choices": [], "usage": USAGE}).encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-engine: 1\r\n"
        if framing == "length":
            writer.write(head + b"content-length: %d\r\n\r\n" % len(data) + data)
        elif framing == "chunked":
            writer.write(head + b"transfer-encoding: chunked\r\n\r\n" + in_chunk(data[:5]) + in_chunk(data[5:]))
            writer.write(b"0\r\n\r\n")
        else:
            writer.write(head + b"\r\n" + data)
        await writer.drain()

    engine = await RawEngine(answer).start()
    async with proxy_for(backends(engine)) as (url, _):
        raw = await read_raw(url, raw_post(json.dumps(BODY).encode(), version))
        head, _, body = raw.partition(b"\r\n\r\n")
        assert body == data
        assert b"x-engine: 1" in head
        assert f"HTTP/{version} 200".encode() in head
    await engine.stop()


async def test_trailers_of_an_engine_go_no_further() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + in_chunk(b"{}") + b"0\r\nx-late: 1\r\ncontent-type: text/html\r\n\r\n")
        await writer.drain()

    engine = await RawEngine(answer).start()
    async with proxy_for(backends(engine)) as (url, _):
        raw = await read_raw(url, raw_post(json.dumps(BODY).encode()))
    assert b"\r\n\r\n{}" in raw
    assert b"x-late" not in raw
    assert raw.count(b"content-type") == 1
    await engine.stop()


@pytest.mark.parametrize("what", [b"x-a: b\r\n", b"y" * 1000, b"HTTP/1.1 102 Processing\r\n\r\n"])
async def test_a_head_that_never_ends_is_given_up(what: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(b"" if what.startswith(b"HTTP") else b"HTTP/1.1 200 OK\r\nx-first: " + what)
        while not writer.is_closing():
            writer.write(what * 1000)
            await writer.drain()

    engine = await RawEngine(answer).start()
    async with proxy_for(backends(engine)) as (url, proxy):
        raw = await read_raw(url, raw_post(json.dumps(BODY).encode()))
        assert raw.startswith(b"HTTP/1.1 502")
        assert idle(proxy)
    await engine.stop()


async def test_a_compressed_answer_is_read_and_passed_plain() -> None:
    packed = gzip.compress(json.dumps({"id": "1", "choices": [], "usage": USAGE, "kv_transfer_params": None}).encode())

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        assert seen.headers["accept-encoding"] == "identity"
        return web.Response(body=packed, headers={"content-encoding": "gzip", "content-type": "application/json"})

    engine = await ScriptedEngine(answer).start()
    async with proxy_for(backends(engine)) as (url, _), aiohttp.request("POST", url + PATH, json=BODY) as reply:
        assert "content-encoding" not in reply.headers
        assert (await reply.json())["usage"] == USAGE
    await engine.stop()


async def test_a_ten_megabyte_event_passes() -> None:
    big = chunk("y" * 10_000_000)

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        return await stream(request, [chunk(), big, b"data: [DONE]\n\n"])

    engine = await ScriptedEngine(answer).start()
    async with proxy_for(backends(engine)) as (url, _), aiohttp.request("POST", url + PATH, json=STREAM) as reply:
        assert await reply.read() == chunk() + big + b"data: [DONE]\n\n"
    await engine.stop()


@pytest.mark.parametrize(
    "kind", ["chunked upload", "expect", "expect unmet", "too large", "too large chunked", "stalled", "gzip chunked"]
)
async def test_uploads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homeport_proxy.intake.IDLE_S", 0.1)
    engine = await ScriptedEngine(chat).start()
    body = json.dumps(BODY | {"pad": "z" * 3000}).encode()
    limit = 2000 if kind.startswith("too large") else 100_000
    async with proxy_for(backends(engine, limits={"body_bytes": limit})) as (url, _):
        if "chunked" in kind:
            head = (
                f"POST {PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
            )
            head = head.replace(b"chunked\r\n", b"gzip, chunked\r\n") if kind == "gzip chunked" else head
            request = head + b"".join(in_chunk(body[i : i + 700]) for i in range(0, len(body), 700)) + b"0\r\n\r\n"
        elif kind == "stalled":
            request = raw_post(body)[:-10]
        elif kind == "expect":
            request = raw_post(body, "1.1", PATH, "Expect: 100-continue")
        elif kind == "expect unmet":
            request = raw_post(body, "1.1", PATH, "Expect: the-moon")
        else:
            request = raw_post(body)
        raw = await read_raw(url, request)
    if kind.startswith("too large"):
        assert raw.startswith(b"HTTP/1.1 413")
        assert b'"code":"request_too_large"' in raw
        assert not engine.seen
    elif kind in ("stalled", "gzip chunked"):
        assert raw.startswith(b"HTTP/1.1 408" if kind == "stalled" else b"HTTP/1.1 501")
        assert b'"code":"invalid_request"' in raw
        assert not engine.seen
    elif kind == "expect unmet":
        assert raw.startswith(b"HTTP/1.1 417")
    else:
        assert raw.startswith(b"HTTP/1.1 100" if kind == "expect" else b"HTTP/1.1 200")
        assert b"Hello you" in raw
        assert engine.seen[0].raw == body
        assert engine.seen[0].headers["content-length"] == str(len(body))
        assert "transfer-encoding" not in engine.seen[0].headers
    await engine.stop()


async def test_usage_null_in_every_chunk_is_hidden_too() -> None:
    async def openai_like(request: web.Request, seen: Seen) -> web.StreamResponse:
        frames = [chunk("a", usage=None), chunk("b", usage=None), chunk(choices=[], usage=USAGE), b"data: [DONE]\n\n"]
        return await stream(request, frames)

    engine = await ScriptedEngine(openai_like).start()
    async with proxy_for(backends(engine)) as (url, _), aiohttp.request("POST", url + PATH, json=STREAM) as reply:
        text = await reply.text()
        assert "usage" not in text
        assert text.count("data: ") == 3
    await engine.stop()


async def test_stopping_lets_streams_finish() -> None:
    go = asyncio.Event()

    async def paused(request: web.Request, seen: Seen) -> web.StreamResponse:
        return await stream(request, [chunk("a"), chunk("b"), b"data: [DONE]\n\n"], pause=go)

    engine = await ScriptedEngine(paused).start()
    async with proxy_for(backends(engine)) as (url, proxy), aiohttp.ClientSession() as client:
        async with client.post(url + PATH, json=STREAM) as reply:
            stopping = asyncio.create_task(proxy.stop())
            await eventually(lambda: proxy.control.stopping)
            with pytest.raises(aiohttp.ClientError):
                await client.post(url + PATH, json=STREAM)
            go.set()
            assert b"[DONE]" in await reply.read()
        await stopping
    await engine.stop()


async def test_a_stream_of_an_unknown_kind_lasts_while_bytes_come() -> None:
    async def dribble(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/octet-stream"})
        await response.prepare(request)
        for _ in range(12):
            await response.write(b"x")
            await asyncio.sleep(0.05)
        return response

    engine = await ScriptedEngine(dribble).start()
    timeouts = {"first_token_s": 0.2, "idle_s": 0.2}
    async with proxy_for(backends(engine, timeouts=timeouts)) as (url, proxy), aiohttp.ClientSession() as client:
        async with client.get(f"{url}/v1/some/feed") as reply:
            assert await reply.read() == b"x" * 12
        async with client.options(url + PATH) as reply:
            assert reply.status == 200
        await eventually(lambda: idle(proxy))
    await engine.stop()


async def test_many_open_streams_leave_nothing_behind() -> None:
    go = asyncio.Event()

    async def paused(request: web.Request, seen: Seen) -> web.StreamResponse:
        return await stream(request, [chunk("a"), b"data: [DONE]\n\n"], pause=go)

    engine = await ScriptedEngine(paused).start()
    async with proxy_for(backends(engine)) as (url, proxy):
        tasks = len(asyncio.all_tasks())
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as client:

            async def one(number: int) -> bytes:
                async with client.post(url + PATH, json=STREAM | {"user": str(number)}) as reply:
                    return await reply.read()

            asked = [asyncio.create_task(one(number)) for number in range(80)]
            await eventually(lambda: engine.open == 80, 30)
            for task in asked[:40]:
                task.cancel()
            await eventually(lambda: engine.open == 40, 10)
            go.set()
            done = await asyncio.gather(*asked, return_exceptions=True)
            assert sum(isinstance(answer, bytes) and b"[DONE]" in answer for answer in done) == 40
        await eventually(lambda: idle(proxy))
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks + 3)
    await engine.stop()


ENDS = {
    "/v1/chat/completions": b"data: [DONE]\n\n",
    "/v1/messages": b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    "/v1/responses": b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r"}}\n\n',
}
COUNTED = {
    "/v1/chat/completions": chunk(choices=[], usage=USAGE),
    "/v1/messages": b'event: message_delta\ndata: {"usage":{"input_tokens":100,"output_tokens":3}}\n\n',
    "/v1/responses": b'event: x.delta\ndata: {"response":{"usage":{"input_tokens":100,"output_tokens":3}}}\n\n',
}


@pytest.mark.parametrize("path", list(ENDS))
@pytest.mark.parametrize("whole", [True, False])
async def test_a_client_that_hangs_up_on_the_last_frame_has_been_served(path: str, whole: bool) -> None:
    """Codex closes its connection on ``response.completed``, before the engine has closed the stream."""
    last = ENDS[path] if whole else b": nothing\n\n"

    async def stays_open(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(COUNTED[path])
        await response.write(last)
        await asyncio.Event().wait()
        raise AssertionError

    engine = await ScriptedEngine(stays_open).start()
    body = STREAM | {"max_tokens": 5, "input": "hello", "stream_options": {"include_usage": True}}
    async with proxy_for(backends(engine)) as (url, proxy), aiohttp.ClientSession() as client:
        async with client.post(url + path, json=body) as answer:
            await answer.content.readuntil(last.strip())
            answer.close()
        await eventually(lambda: idle(proxy) and engine.open == 0)
        request_id = answer.headers["x-homeport-request-id"]
        await eventually(lambda: proxy.control.account.requests.get(request_id) is not None)
        summary = proxy.control.account.requests.get(request_id)
        assert summary is not None
        assert summary["error"] == (None if whole else "client_closed")
        assert summary["tokens"]["prompt"] == 100  # type: ignore[index,call-overload]
        assert summary["tokens"]["output"] == 3  # type: ignore[index,call-overload]
    await engine.stop()


FAILURES = {
    "/v1/chat/completions": b'data: {"error": {"message": "no KV", "code": 500}}\n\ndata: [DONE]\n\n',
    "/v1/messages": b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"no KV"}}\n\n',
    "/v1/responses": b'event: response.failed\ndata: {"type":"response.failed","response":{"error":{"code":"x"}}}\n\n',
}


@pytest.mark.parametrize("path", list(FAILURES))
@pytest.mark.parametrize("begun", [True, False])
async def test_an_engines_own_error_frame_is_a_failure(path: str, begun: bool) -> None:
    """It passes as it stands, is no first token, and the request is booked as failed."""
    token = {
        "/v1/chat/completions": chunk("a"),
        "/v1/messages": b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n',
        "/v1/responses": b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta"}\n\n',
    }
    frames = [token[path], FAILURES[path]] if begun else [FAILURES[path]]

    async def failing(request: web.Request, seen: Seen) -> web.StreamResponse:
        return await stream(request, frames)

    engine = await ScriptedEngine(failing).start()
    body = STREAM | {"max_tokens": 5, "input": "hello"}
    async with proxy_for(backends(engine)) as (url, proxy), aiohttp.ClientSession() as client:
        async with client.post(url + path, json=body) as answer:
            assert await answer.read() == b"".join(frames)
        summary = proxy.control.account.requests.get(answer.headers["x-homeport-request-id"])
        assert summary is not None
        assert summary["error"] == "upstream_error"
        assert (summary["ms"]["first_token"] is not None) is begun  # type: ignore[index,call-overload]
        assert idle(proxy)
    await engine.stop()


@pytest.mark.parametrize("streamed", [True, False])
async def test_every_answer_has_a_time_to_its_first_token(streamed: bool) -> None:
    """Unstreamed, that is its end: its first byte is its last."""
    engine = await ScriptedEngine(chat).start()
    async with proxy_for(backends(engine)) as (url, proxy), aiohttp.ClientSession() as client:
        async with client.post(url + PATH, json=BODY | {"stream": streamed}) as answer:
            await answer.read()
        proxy.control.account.book()
        assert sum(proxy.control.metrics.ttft.counts) == 1
        assert "first-token" in answer.headers["server-timing"] or streamed
    await engine.stop()
