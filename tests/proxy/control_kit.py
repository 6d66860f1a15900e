"""Helpers for tests of the control plane: an engine stub whose health can be turned, servers, waiting for a fact."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
"""


@dataclass
class StubEngine:
    """Answers the questions the proxy asks engines; ``health`` is the status given, None hangs."""

    models: list[str] = field(default_factory=lambda: ["m"])
    health: int | None = 200
    metrics: str | None = METRICS
    version: str = "0.32.0"
    asked: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""

    def app(self) -> web.Application:
        """The application to serve."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/version", self._version)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        self._note(request)
        if self.health is None:
            await asyncio.sleep(3600)
        return web.Response(status=self.health or 200)

    async def _models(self, request: web.Request) -> web.Response:
        self._note(request)
        return web.json_response({"data": [{"id": name, "max_model_len": 8192} for name in self.models]})

    async def _version(self, request: web.Request) -> web.Response:
        self._note(request)
        return web.json_response({"version": self.version})

    async def _metrics(self, request: web.Request) -> web.Response:
        self._note(request)
        return web.Response(status=404) if self.metrics is None else web.Response(text=self.metrics)

    def _note(self, request: web.Request) -> None:
        self.asked.append(request.path)
        self.keys.append(request.headers.get("authorization"))


@asynccontextmanager
async def serving(app: web.Application, port: int = 0) -> AsyncIterator[str]:
    """Serve an application on this machine; gives its base address."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def engine(**settings: object) -> AsyncIterator[StubEngine]:
    """A running engine stub."""
    stub = StubEngine(**settings)  # type: ignore[arg-type]
    async with serving(stub.app()) as url:
        stub.url = url
        yield stub


async def until(fact: Callable[[], object], within_s: float = 20.0) -> None:
    """Wait for a fact to become true."""
    async with asyncio.timeout(within_s):
        while not fact():  # noqa: ASYNC110 - a fact of the outside world has no event
            await asyncio.sleep(0.005)


class Clock:
    """A clock that goes on when told, and keeps what was to be woken."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._alarms: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now_s

    def wake_in(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Stands for ``loop.call_later``."""
        self._alarms.append((self.now_s + delay_s, callback))

    def advance(self, seconds: float) -> None:
        """Let time pass, ringing what is due in order."""
        end_s = self.now_s + seconds
        while due := [alarm for alarm in self._alarms if alarm[0] <= end_s]:
            alarm = min(due, key=lambda a: a[0])
            self._alarms.remove(alarm)
            self.now_s = max(self.now_s, alarm[0])
            alarm[1]()
        self.now_s = end_s
