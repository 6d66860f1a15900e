"""The aiohttp server: which requests go down the pipeline, which are answered here, and how it starts and stops."""

from __future__ import annotations

import asyncio
import logging
import ssl

import msgspec
from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError

from homeport_proxy import models, paths
from homeport_proxy.api import BY_PATH
from homeport_proxy.control import Control
from homeport_proxy.downstream import Downstream, written
from homeport_proxy.errors import ProxyError, method_not_allowed
from homeport_proxy.headers import lines_of
from homeport_proxy.pipeline import Pipeline, answer_error, arrive

MAX_HEADER_BYTES = 64 * 1024


class _OurFaults(logging.Filter):
    """What is no HTTP is the client's doing: it was answered with 400, and the log needs no traceback of it."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


_log = logging.getLogger(__name__)
_log.addFilter(_OurFaults())


class Proxy:
    """One process's server around a control plane. ``start`` it, ``listen``, then ``stop`` it."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.pipeline = Pipeline(control)
        self._runner: web.AppRunner | None = None
        self._sites: list[web.BaseSite] = []

    async def start(self) -> None:
        """Make the server. The control plane must have been started."""
        app = web.Application()
        app.add_routes(self.control.routes())
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_log,
            handler_cancellation=True,
            shutdown_timeout=self.control.config.timeouts.drain_s,
            keepalive_timeout=75.0,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )
        await runner.setup()
        server = runner.server
        assert server is not None, "set up"
        self._operations = server.request_handler
        server.request_handler = self._dispatch
        self._with_operations = server.request_factory
        server.request_factory = self._request
        self._runner = runner

    async def listen(self, host: str, port: int, *, tls: ssl.SSLContext | None = None, reuse_port: bool = False) -> int:
        """Accept connections; returns the port (a free one when 0 was asked for). Raises OSError when it is taken."""
        assert self._runner is not None, "started"
        site = web.TCPSite(self._runner, host, port, ssl_context=tls, backlog=1024, reuse_port=reuse_port or None)
        await site.start()
        self._sites.append(site)
        return int(self._runner.addresses[-1][1])

    async def stop(self) -> None:
        """Stop accepting, let requests finish for ``timeouts.drain_s``, then close everything."""
        self.control.stopping = True
        if self._runner is not None:
            await self._runner.cleanup()
        await self.pipeline.close()

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        if message.path in BY_PATH:  # these have no use for what an application adds
            return web.BaseRequest(message, payload, protocol, writer, task, task.get_loop())
        return self._with_operations(message, payload, protocol, writer, task)

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        if "websocket" in request.headers.get("upgrade", "").lower():
            return self._answer(request, _no_websocket())
        if request.raw_path in BY_PATH:
            return await self.pipeline.handle(request)
        path, _ = paths.split_target(request.raw_path)
        if path == "/v1/models" or path.startswith("/v1/models/"):
            return self._models(request)
        if path.startswith("/v1/") or path in BY_PATH:
            return await self.pipeline.handle(request)
        # these are found by the target as it stands: a spelling that only leads there is no page of ours
        if path.startswith(("/homeport", "/health/", "/metrics")) and request.raw_path.startswith(path):
            return await self._operations(request)
        if request.raw_path == "/" and "text/html" in request.headers.get("accept", ""):
            return web.Response(status=302, headers={"location": "/homeport"})
        return self._answer(request, _unknown_path())

    def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        exchange = arrive(request)
        exchange.api = "models"
        down = Downstream(request)
        anthropic = "anthropic-version" in request.headers
        try:
            self.control.admission.caller(request.headers)
            if request.method not in ("GET", "HEAD"):
                raise method_not_allowed(request.method, ("GET", "HEAD"))
            document = models.answer(self.control, exchange.path, anthropic=anthropic)
        except ProxyError as error:
            if anthropic:
                exchange.api = "messages"
            answer_error(exchange, down, error)
            return written(down)
        names = dict.fromkeys(("x-homeport-request-id", "x-request-id"), exchange.request_id)
        lines = lines_of({"content-type": "application/json", **names})
        down.whole(200, lines, msgspec.json.encode(document))
        return written(down)

    def _answer(self, request: web.BaseRequest, error: ProxyError) -> web.StreamResponse:
        down = Downstream(request)
        if error.status == 426:
            down.keep_alive = False
        answer_error(arrive(request), down, error)
        return written(down)


def _no_websocket() -> ProxyError:
    message = "WebSocket is not offered here; use HTTP with `stream: true` (server-sent events)."
    return ProxyError(426, "invalid_request", message)


def _unknown_path() -> ProxyError:
    message = "Nothing is served at this path; the APIs are below /v1/, the proxy's own pages below /homeport."
    return ProxyError(404, "invalid_request", message)
