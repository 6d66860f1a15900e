"""Small scripted engines on real sockets, and a proxy in front of them, for the tests of the data plane."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from homeport_proxy import config as configuration
from homeport_proxy.app import Proxy
from homeport_proxy.control import Control

Handler = Callable[[web.Request, "Seen"], Awaitable[web.StreamResponse]]
_STARTED: list[ScriptedEngine | RawEngine] = []


@dataclass
class Seen:
    """One request as an engine saw it."""

    path: str
    headers: dict[str, str]
    raw: bytes
    aborted: bool = False

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)


@dataclass
class ScriptedEngine:
    """An engine whose every answer is a function; keeps what it saw. ``url`` is set while it runs."""

    handler: Handler
    model: str = "m"
    seen: list[Seen] = field(default_factory=list)
    open: int = 0
    url: str = ""
    port: int = 0
    _runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> ScriptedEngine:
        app = web.Application(client_max_size=128 * 1024 * 1024)
        app.router.add_get("/health", _ok)
        app.router.add_get("/metrics", _ok)
        app.router.add_get("/kv_event_sources", _absent)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{tail:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        _STARTED.append(self)
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "max_model_len": 100_000}]})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.raw_path, {k.lower(): v for k, v in request.headers.items()}, await request.read())
        self.seen.append(seen)
        self.open += 1
        try:
            return await self.handler(request, seen)
        except (asyncio.CancelledError, ConnectionError):
            seen.aborted = True
            raise
        finally:
            self.open -= 1


async def _ok(_: web.Request) -> web.Response:
    return web.Response()


async def _absent(_: web.Request) -> web.Response:
    return web.Response(status=404)


def chunk(content: str | None = None, **more: Any) -> bytes:
    """One chat stream frame."""
    delta = {"role": "assistant", "content": ""} if content is None else {"content": content}
    document = {"id": "c1", "object": "chat.completion.chunk", "model": "m", "choices": [{"index": 0, "delta": delta}]}
    return b"data: " + json.dumps(document | more).encode() + b"\n\n"


USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 3,
    "total_tokens": 103,
    "prompt_tokens_details": {"cached_tokens": 7},
}
NIXL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e1",
    "remote_request_id": "r1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}


async def stream(
    request: web.Request, frames: list[bytes], *, pause: asyncio.Event | None = None
) -> web.StreamResponse:
    """Answer with these frames; ``pause``: wait for it after the first."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for index, frame in enumerate(frames):
        await response.write(frame)
        if index == 0 and pause is not None:
            await pause.wait()
    await response.write_eof()
    return response


async def chat(request: web.Request, seen: Seen) -> web.StreamResponse:
    """A chat engine: streams three tokens or answers whole; a prefill leg gets NIXL parameters."""
    body = seen.body
    params = body.get("kv_transfer_params")
    if params and params.get("do_remote_decode"):
        usage = USAGE | {"prompt_tokens_details": {"cached_tokens": 40}}
        return web.json_response(
            {"id": "p1", "choices": [{"message": {"content": "x"}}], "usage": usage, "kv_transfer_params": NIXL}
        )
    if not body.get("stream"):
        message = {"role": "assistant", "content": "Hello you"}
        return web.json_response(
            {
                "id": "c1",
                "object": "chat.completion",
                "model": "m",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": USAGE,
                "kv_transfer_params": None,
            }
        )
    frames = [chunk(), chunk("Hel"), chunk("lo"), chunk(" you")]
    if (body.get("stream_options") or {}).get("include_usage"):
        frames.append(chunk(choices=[], usage=USAGE))
    return await stream(request, [*frames, b"data: [DONE]\n\n"])


@contextlib.asynccontextmanager
async def proxy_for(text: str | dict[str, Any]) -> AsyncIterator[tuple[str, Proxy]]:
    """A running proxy for a configuration (YAML text or plain values): its base URL and itself. Stops the engines that
    were started before it, too, so that a failing test leaves nothing behind."""
    config = configuration.parse(text if isinstance(text, str) else json.dumps(text))
    control = Control(config)
    proxy = Proxy(control)
    await control.start()
    try:
        await proxy.start()
        port = await proxy.listen("127.0.0.1", 0)
        yield f"http://127.0.0.1:{port}", proxy
    finally:
        await proxy.stop()
        await control.stop()
        while _STARTED:
            await _STARTED.pop().stop()


def backends(*engines: ScriptedEngine, **settings: Any) -> dict[str, Any]:
    """A configuration with mixed backends b0, b1..."""
    listed = [{"name": f"b{i}", "url": engine.url} for i, engine in enumerate(engines)]
    return {"listen": "127.0.0.1:0", "regions": {"local": {"backends": listed}}, **settings}


def pair(prefill: ScriptedEngine, decode: ScriptedEngine, **settings: Any) -> dict[str, Any]:
    """A configuration with one prefill and one decode backend that hand over by NIXL."""
    listed = [
        {"name": "p0", "url": prefill.url, "role": "prefill", "kv_transfer": "nixl"},
        {"name": "d0", "url": decode.url, "role": "decode", "kv_transfer": "nixl"},
    ]
    return {
        "listen": "127.0.0.1:0",
        "regions": {"local": {"backends": listed}},
        "disaggregation": {"min_uncached_tokens": 1},
        **settings,
    }


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]


@dataclass
class RawEngine:
    """An engine at the level of bytes: ``script(reader, writer, connection number)`` serves each connection.

    Health and model probes are answered by themselves; the script gets only connections that carry other requests,
    with the request's head already read into ``heads``.
    """

    script: Script
    heads: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    url: str = ""
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> RawEngine:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        _STARTED.append(self)
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await self.read_request(reader, keep=False)
            if head.startswith((b"GET /health", b"GET /metrics", b"GET /v1/models ", b"GET /kv_event_sources")):
                data = b'{"data":[{"id":"m"}]}'
                writer.write(
                    b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)
                )
                return
            self.connections += 1
            self.open += 1
            try:
                self.heads.append(head)
                await self.script(reader, writer, self.connections)
            finally:
                self.open -= 1
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def read_request(self, reader: asyncio.StreamReader, *, keep: bool = True) -> bytes:
        """Read one whole request; returns its head."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        body = await reader.readexactly(length)
        if b"GET " not in head[:4]:
            self.bodies.append(body)
        if keep:
            self.heads.append(head)
        return head


def reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with RST instead of FIN."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def json_answer(data: bytes, *more: bytes) -> bytes:
    """A whole JSON answer as bytes; ``more``: further header lines."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + b"".join(more)
    return head + b"content-length: %d\r\n\r\n%s" % (len(data), data)


SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def in_chunk(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


async def eventually(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    """Wait until a condition holds that no event announces."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
