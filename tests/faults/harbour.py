"""A whole fleet in one process: the proxy in front of emulated engines, and what must hold when a request is over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import yaml
from multidict import CIMultiDict
from prometheus_client.parser import text_string_to_metric_families

from homeport_engines.emulator import Emulator, EmulatorSettings
from homeport_proxy import config as configuration
from homeport_proxy.app import Proxy
from homeport_proxy.control import Control

GUARD_S = 30.0
"""A client that waits longer than this hangs."""
TEXT = "Every ship has a home port, and every home port has a harbour master. " * 12
OUTPUT_TOKENS = 24
PATIENCE = {"connect_s": 0.3, "first_token_s": 0.4, "idle_s": 0.4, "drain_s": 0.5}


def engine_settings(**changes: Any) -> EmulatorSettings:
    """A fast engine that fails loudly and quickly."""
    return EmulatorSettings(**{"time_scale": 200.0, "load_failure_s": 0.05, "model": "m", **changes})


@dataclass(slots=True)
class Reply:
    """What the client got. ``broken``: the connection ended before the answer did."""

    status: int
    headers: CIMultiDict[str]
    raw: bytes
    broken: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def frames(self) -> list[Any]:
        data = [line[6:] for line in self.raw.decode().splitlines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in data]

    @property
    def error(self) -> Any:
        """The error in the answer or at the end of its stream; None when it is whole."""
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            return next((f["error"] for f in self.frames if isinstance(f, dict) and f.get("error")), None)
        return self.json.get("error") if self.raw else {"message": "empty"}

    @property
    def text(self) -> str:
        """The assistant's text of a chat answer."""
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            choices = [f["choices"][0] for f in self.frames if isinstance(f, dict) and f.get("choices")]
            return "".join(choice["delta"].get("content") or "" for choice in choices)
        return str(self.json["choices"][0]["message"]["content"])


@dataclass(slots=True)
class Harbour:
    """The running fleet: ``engines`` by backend name, the proxy's own parts, and a client."""

    url: str
    control: Control
    proxy: Proxy
    engines: dict[str, Emulator]
    http: aiohttp.ClientSession
    sent: int = 0
    arrived_bytes: int = 0
    """What clients have got of this request and those before."""
    replies: list[Reply] = field(default_factory=list)

    async def ask(self, body: Mapping[str, Any], path: str = "/v1/chat/completions", **headers: str) -> Reply:
        """One request; fails when it hangs."""
        self.sent += 1
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with asyncio.timeout(GUARD_S):
            async with self.http.post(self.url + path, json=body, headers=names) as answer:
                raw, broken = b"", False
                try:
                    async for piece in answer.content.iter_any():
                        raw += piece
                        self.arrived_bytes += len(piece)
                except aiohttp.ClientPayloadError:
                    broken = True
                reply = Reply(answer.status, CIMultiDict(answer.headers), raw, broken)
        self.replies.append(reply)
        return reply

    async def chat(self, text: str = TEXT, *, session: str = "s", **more: Any) -> Reply:
        """One chat turn of a session."""
        body = {"model": "m", "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, **more}
        return await self.ask({**body, "messages": [{"role": "user", "content": text}]}, x_session_id=session)

    async def at_rest(self) -> None:
        """Wait until nothing is under way any more anywhere; fails when something leaks."""
        try:
            await until(lambda: not self.leaks())
        except TimeoutError:
            raise AssertionError(f"left behind: {self.leaks()}") from None

    def leaks(self) -> dict[str, Any]:
        """What is still held, by whom."""
        found: dict[str, Any] = {}
        for name, engine in self.engines.items():
            held = {"running": engine.books.running, "leases": engine.held_leases, "blocks": engine.used_blocks}
            if any(held.values()):
                found[name] = held
        for place in self.control.places():
            if place.requests or place.prefill_tokens or place.decode_tokens:
                found[f"router/{place.name}"] = (place.requests, place.prefill_tokens, place.decode_tokens)
        if busy := [pool.origin.port for pool in self.proxy.pipeline.engines.pools() if pool.busy_count]:
            found["connections"] = busy
        if self.proxy.pipeline.desk.orphans.count:
            found["orphans"] = self.proxy.pipeline.desk.orphans.count
        return found

    async def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """The proxy's metrics by name and labels."""
        async with self.http.get(self.url + "/metrics") as answer:
            text = await answer.text()
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def total(self, name: str) -> float:
        """A metric summed over its labels."""
        return sum(value for (sample, _), value in (await self.metrics()).items() if sample == name)


async def until(condition: Any, timeout_s: float = 20.0) -> None:
    """Wait for something that no event announces."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - there is no event for what is awaited
            await asyncio.sleep(0.005)


@asynccontextmanager
async def proxy_for(document: Mapping[str, Any]) -> AsyncIterator[tuple[str, Control, Proxy]]:
    """The proxy for a configuration, on a free port."""
    control = Control(configuration.parse(yaml.safe_dump({"listen": "127.0.0.1:0", **document})))
    proxy = Proxy(control)
    await control.start()
    try:
        await proxy.start()
        yield f"http://127.0.0.1:{await proxy.listen('127.0.0.1', 0)}", control, proxy
    finally:
        await proxy.stop()
        await control.stop()


def backend(name: str, engine: Emulator, **more: Any) -> dict[str, Any]:
    """A backend's part of the configuration."""
    kv = engine.settings.kv
    return {"name": name, "url": engine.url, "role": engine.settings.role, "kv_transfer": kv, **more}


def document(backends: list[dict[str, Any]], **sections: Any) -> dict[str, Any]:
    """A configuration with short patience."""
    return {
        "regions": {"local": {"backends": backends}},
        "disaggregation": {"min_uncached_tokens": 1},
        "health": {"interval_s": 0.1, "timeout_s": 0.3},
        "timeouts": PATIENCE,
        **sections,
    }


@asynccontextmanager
async def harbour(roles: Mapping[str, str], kv: str = "nixl", **options: Any) -> AsyncIterator[Harbour]:
    """A fleet: ``roles`` by backend name; ``sections`` of the configuration; the rest are engine settings."""
    sections = options.pop("sections", {})
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(
                Emulator(engine_settings(role=role, kv=kv if role != "mixed" else "none", **options))
            )
            for name, role in roles.items()
        }
        written = document([backend(name, engine) for name, engine in engines.items()], **sections)
        url, control, proxy = await stack.enter_async_context(proxy_for(written))
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)))
        yield Harbour(url, control, proxy, engines, http)


@asynccontextmanager
async def black_hole(port: int) -> AsyncIterator[None]:
    """A port that takes no connection and refuses none: its backlog is full, so SYNs are dropped."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(0)
    fillers = []
    try:
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(("127.0.0.1", port))
            fillers.append(filler)
        await asyncio.sleep(0)
        yield
    finally:
        for filler in fillers:
            filler.close()
        listener.close()


class Strait:
    """A stretch of network in front of a port: it forwards bytes, and can be made to fail.

    ``trouble`` None forwards. ``reset`` and ``hang`` strike at a connection that carries a POST, once ``after_bytes``
    bytes of the answer passed; a hang then holds every connection. ``struck`` counts.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.trouble: str | None = None
        self.after_bytes = 0
        self.struck = 0
        self.port = 0
        self._frozen = asyncio.Event()

    async def __aenter__(self) -> Strait:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def url(self) -> str:
        """Where it is entered."""
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        """Take connections."""
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Refuse connections and cut those that are open."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        back, forth = await asyncio.open_connection("127.0.0.1", self._target)
        carries = asyncio.Event()
        ways = [
            asyncio.ensure_future(self._there(reader, forth, carries)),
            asyncio.ensure_future(self._back(back, writer, carries)),
        ]
        try:
            with contextlib.suppress(asyncio.CancelledError):  # cut by close(); nobody waits for this task
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for end in (writer, forth):
                end.transport.abort()

    async def _there(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, carries: asyncio.Event) -> None:
        while data := await reader.read(65536):
            await self._if_frozen()
            if b"POST " in data:
                carries.set()
                if self.trouble is not None and self.after_bytes == 0:
                    writer.write(data)
                    await self._strike()
                    return
            writer.write(data)

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, carries: asyncio.Event) -> None:
        passed = 0
        while data := await reader.read(256):
            await self._if_frozen()
            if self.trouble is not None and carries.is_set() and passed + len(data) > self.after_bytes:
                await self._strike()
                return
            passed += len(data)
            writer.write(data)

    async def _strike(self) -> None:
        self.struck += 1
        if self.trouble == "hang":
            self._frozen.set()
            await self._if_frozen()

    async def _if_frozen(self) -> None:
        if self._frozen.is_set():
            await asyncio.Event().wait()
