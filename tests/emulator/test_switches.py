"""Faults on command, each seen from a raw connection; and the emulator as a process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from emulator.emulating import client, fast, until
from homeport_engines.emulator import Emulator, Fault, command
from homeport_engines.emulator.settings import EmulatorSettings

BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "ignore_eos": True}


async def ask(url: str, body: Any, timeout_s: float = 10.0) -> tuple[bytes, str]:
    """Everything a raw connection brings, and how it ended: ``end``, ``reset`` or ``silence``."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    got, how = b"", "end"
    try:
        async with asyncio.timeout(timeout_s):
            while piece := await reader.read(65536):
                got += piece
    except ConnectionResetError:
        how = "reset"
    except TimeoutError:
        how = "silence"
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return got, how


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["before_headers", "after_headers", "mid_stream"])
@pytest.mark.parametrize("kind", ["reset", "hang", "half_frame", "close", "garbage"])
async def test_each_fault_in_each_phase(kind: Any, phase: Any, stream: bool) -> None:
    async with Emulator(fast()) as engine:
        whole, _ = await ask(engine.url, {**BODY, "stream": stream})
        engine.faults.add(Fault(kind, phase))
        got, how = await ask(engine.url, {**BODY, "stream": stream}, 0.3 if kind == "hang" else 10)
        assert engine.books.faults_done[kind] == 1
        assert how == {"reset": "reset", "hang": "silence"}.get(kind, "end")
        if phase == "before_headers":
            assert not got or (kind == "garbage" and not got.startswith(b"HTTP/"))
        else:
            assert got.startswith(b"HTTP/1.1 200")
            assert len(got) < len(whole) or kind == "garbage"
        assert (b"data: " in got) == (
            stream and (phase == "mid_stream" or (kind, phase) == ("garbage", "after_headers"))
        )
        again, _ = await ask(engine.url, {**BODY, "stream": stream})
        assert len(again) == len(whole)  # one time only
        await until(lambda: not engine.books.running)


async def test_a_hang_ends_when_it_is_lifted() -> None:
    async with Emulator(fast()) as engine, client(engine.url) as c:
        engine.faults.add(Fault("hang", "mid_stream", times=None))
        asked = asyncio.ensure_future(c.post("/v1/chat/completions", {**BODY, "stream": True}))
        await until(lambda: engine.books.faults_done["hang"] == 1)
        engine.faults.clear()
        assert (await asked).frames[-1] == "[DONE]"


async def test_statuses_with_retry_after_at_the_nth_request() -> None:
    async with Emulator(fast()) as engine, client(engine.url) as c:
        engine.faults.add(Fault("status", status=429, retry_after_s=7, nth=2, times=1))
        answers = [await c.post("/v1/chat/completions", BODY) for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 429, 200]
        assert answers[1].headers["retry-after"] == "7"
        assert answers[1].json["error"]["code"] == 429


async def test_a_wrong_content_length() -> None:
    async with Emulator(fast()) as engine, client(engine.url) as c:
        engine.faults.add(Fault("content_length"))
        with pytest.raises(aiohttp.ClientPayloadError):
            await c.post("/v1/chat/completions", BODY)


async def test_a_silent_engine_computes_and_never_answers() -> None:
    async with Emulator(fast()) as engine:
        engine.faults.add(Fault("silent"))
        got, how = await ask(engine.url, BODY, 0.3)
        assert (got, how) == (b"", "silence")
        assert engine.books.finished == 1


async def test_metrics_can_be_missing() -> None:
    async with Emulator(fast()) as engine, client(engine.url) as c:
        engine.faults.add(Fault("metrics_missing", names=("vllm:kv_cache_usage_perc",), times=None))
        text = (await c.get("/metrics")).raw
        assert b"vllm:kv_cache_usage_perc" not in text
        assert b"vllm:num_requests_running" in text
        engine.faults.clear()
        engine.faults.add(Fault("metrics_missing"))
        assert (await c.get("/metrics")).status == 404


async def test_refusing_killing_and_coming_back() -> None:
    async with Emulator(fast(kv="nixl")) as engine, client(engine.url) as c:
        await engine.refuse()
        with pytest.raises(aiohttp.ClientConnectorError):
            async with aiohttp.ClientSession() as fresh:
                await fresh.get(engine.url + "/health")
        await engine.listen()
        engine.hang()
        asked = asyncio.ensure_future(c.chat("hello"))
        await until(lambda: engine.books.running)
        await engine.kill()
        with pytest.raises(aiohttp.ClientError):
            await asked
        engine.resume()
        await engine.revive()
        await c.chat("hello")
        assert engine.used_blocks == 0


async def test_faults_over_http() -> None:
    async with Emulator(fast()) as engine, client(engine.url) as c:
        assert (await c.post("/emulator/faults", {"kind": "status", "status": 503})).status == 200
        assert (await c.post("/v1/chat/completions", BODY)).status == 503
        for wrong in (
            {"kind": "flood"},
            {"status": 500},
            {"kind": "reset", "colour": 1},
            {"kind": "hang", "phase": "?"},
        ):
            refused = await c.post("/emulator/faults", wrong)
            assert refused.status == 400
            assert refused.json["error"]
        async with c.http.delete(engine.url + "/emulator/faults"):
            assert (await c.get("/emulator/faults")).json == []
        assert (await c.post("/emulator/script", [{"answer": "scripted"}])).json == {"rules": 1}
        assert (await c.chat("x"))["choices"][0]["message"]["content"] == "scripted"
        books = (await c.get("/emulator/books")).json
        assert books["finished"] == 1
        assert books["requests"][0]["outcome"] == "stop"
        await c.post("/emulator/restart", {})
        assert engine.books.restarts == 1


@asynccontextmanager
async def process(*options: str, **environment: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """An emulator as a process, and its URL."""
    code = (
        "import argparse, sys\n"
        "from homeport_engines.emulator import command\n"
        "parser = argparse.ArgumentParser()\n"
        "command.configure(parser)\n"
        "sys.exit(command.run(parser.parse_args()))\n"
    )
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, "--port", "0", "--time-scale", "1000", *options,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, **environment},
    )  # fmt: skip
    assert run.stdout is not None
    try:
        line = await asyncio.wait_for(run.stdout.readline(), 30)
        yield run, line.decode().split()[-1]
    finally:
        if run.returncode is None:
            run.kill()
        await run.communicate()


async def test_the_process_stops_on_sigterm() -> None:
    async with process("--model", "m", "--api-key-env", "KEY", KEY="k") as (run, url), client(url) as c:
        assert (await c.get("/v1/models")).status == 401
        run.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(run.wait(), 10) == 0


async def test_the_process_dies_as_a_real_engine_does() -> None:
    async with process("--kv", "nixl", "--no-kv-events") as (run, url), client(url) as c:
        with pytest.raises(aiohttp.ClientError):
            await c.chat("hello", kv_transfer_params={"do_remote_prefill": True})
        assert await asyncio.wait_for(run.wait(), 10) == 1


def test_every_option_says_what_it_does_and_what_stands_without_it() -> None:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    for action in parser._actions[1:]:
        assert "(default: " in (action.help or ""), action.option_strings
    settings = command.settings_from(parser.parse_args([]))
    assert settings == EmulatorSettings(port=8000, dies=True)
