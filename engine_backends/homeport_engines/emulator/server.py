"""The emulated engine as an HTTP server: vLLM's routes, and the switches that only an emulator has."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import json
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from aiohttp import web

from homeport.fingerprint import JsonValue
from homeport_engines.emulator import prompt
from homeport_engines.emulator.answers import Rule, load_rules, parse_rules
from homeport_engines.emulator.api import chat, completions, messages, responses, tokens
from homeport_engines.emulator.api.jobs import Api, Body, Desk
from homeport_engines.emulator.books import Books
from homeport_engines.emulator.engine import Engine, EngineFailedError
from homeport_engines.emulator.faults import Fault, Faults, reset
from homeport_engines.emulator.handoff import EngineDeathError
from homeport_engines.emulator.http import FAULT, STREAM, ApiError, Stream, Wire
from homeport_engines.emulator.metrics import exposition
from homeport_engines.emulator.settings import EmulatorSettings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_BODY_BYTES = 1 << 30
VERSION = "0.32.0"


class Emulator:
    """One emulated engine, served.

    ``async with Emulator(EmulatorSettings(...)) as engine`` gives ``engine.url``, ``engine.books`` and
    ``engine.faults``. ``script`` adds answer rules to those of the settings' script file.
    """

    def __init__(self, settings: EmulatorSettings, script: tuple[Rule, ...] = ()) -> None:
        rules = script + (load_rules(settings.script) if settings.script else ())
        self.settings = settings
        self.core = Engine(settings, rules)
        self.faults = Faults()
        self._wire = Wire(self.faults, self.core.books)
        self._desk = Desk(self.core, self._wire, int(time.time()))
        self._store = responses.Store()
        self._runner: web.AppRunner | None = None
        self._socket: socket.socket | None = None
        self._busy = 0
        self.port = settings.port

    @property
    def books(self) -> Books:
        """What this engine did."""
        return self.core.books

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.settings.host}:{self.port}"

    @property
    def held_leases(self) -> int:
        """Prefills kept for a decode engine."""
        return sum(leases.held for leases in self.core.leases)

    @property
    def pinned_blocks(self) -> int:
        """KV blocks kept for a decode engine."""
        return sum(leases.pinned_blocks for leases in self.core.leases)

    @property
    def used_blocks(self) -> int:
        """KV blocks that running requests and leases hold."""
        return sum(rank.cache.capacity - rank.cache.free for rank in self.core.ranks)

    @property
    def connections(self) -> int:
        """HTTP connections open now."""
        server = self._runner.server if self._runner is not None else None
        return len(server.connections) if server is not None else 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # --- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind every port and begin to serve. Raises OSError when a port is taken."""
        await self.core.start()
        app = web.Application(client_max_size=_BODY_BYTES, middlewares=[self._around])
        app.add_routes(self._routes())
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=self.settings.keep_alive_s,
            shutdown_timeout=0.1,
        )
        await self._runner.setup()
        await self.listen()

    async def stop(self) -> None:
        """Cut every connection and close every port."""
        self.faults.clear()
        self.cut_connections()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        await self.core.stop()

    async def listen(self) -> None:
        """Take connections (again)."""
        if self._runner is None:
            raise RuntimeError("not started")
        site = web.TCPSite(self._runner, self.settings.host, self.port, reuse_address=True, backlog=1024)
        await site.start()
        self.port = self._runner.addresses[-1][1]

    async def refuse(self) -> None:
        """Refuse new connections; open ones stay."""
        for site in list(self._runner.sites) if self._runner is not None else []:
            await site.stop()

    def cut_connections(self) -> None:
        """Reset every open connection, as a killed process does."""
        server = self._runner.server if self._runner is not None else None
        for connection in list(server.connections) if server is not None else []:
            if connection.transport is not None:
                connection.transport.abort()

    async def kill(self) -> None:
        """Behave as a process that was killed: no listener, no connection, no KV, no side channel."""
        await self.refuse()
        self.cut_connections()
        self.core.restart()
        for channel in self.core.side_channels:
            await channel.stop()

    async def revive(self) -> None:
        """Come back after :meth:`kill`, empty, on the same ports."""
        for channel in self.core.side_channels:
            await channel.start(channel.port)
        await self.listen()

    def hang(self) -> None:
        """Stop computing; connections are still taken."""
        for rank in self.core.ranks:
            rank.pause()

    def resume(self) -> None:
        """Compute again."""
        for rank in self.core.ranks:
            rank.resume()

    def restart(self) -> None:
        """Lose cache, leases, counters and event numbers in place; running requests fail."""
        self.core.restart()

    # --- HTTP ----------------------------------------------------------------------------------------------------

    def _routes(self) -> list[web.RouteDef]:
        post: dict[str, Api] = {
            "/v1/chat/completions": chat.create,
            "/v1/completions": completions.create,
            "/v1/messages": messages.create,
            "/v1/messages/count_tokens": messages.count_tokens,
            "/v1/embeddings": tokens.embed,
            "/v1/chat/completions/render": tokens.rendering(prompt.chat, "chatcmpl"),
            "/v1/messages/render": tokens.rendering(prompt.messages, "msg"),
            "/v1/responses/render": tokens.rendering(prompt.responses, "resp"),
            "/tokenize": tokens.tokenize_prompt,
            "/detokenize": tokens.detokenize_tokens,
        }
        routes = [web.post(path, self._json(api)) for path, api in post.items()]
        routes += [web.post("/v1/responses", self._json(self._respond)), web.get("/v1/responses/{id}", self._stored)]
        get: dict[str, Handler] = {
            "/health": self._health,
            "/ping": self._health,
            "/version": self._version,
            "/v1/models": self._models,
            "/metrics": self._metrics,
            "/load": self._load,
            "/kv_event_sources": self._sources,
            "/emulator/books": self._show_books,
            "/emulator/faults": self._show_faults,
        }
        routes += [web.get(path, handler) for path, handler in get.items()]
        return [
            *routes,
            web.post("/v1/load_lora_adapter", self._json(self._load_adapter)),
            web.post("/v1/unload_lora_adapter", self._json(self._unload_adapter)),
            web.post("/reset_prefix_cache", self._reset_cache),
            web.post("/emulator/faults", self._add_fault),
            web.delete("/emulator/faults", self._clear_faults),
            web.post("/emulator/script", self._set_script),
            web.post("/emulator/{verb:hang|resume|restart|refuse|kill}", self._switch),
        ]

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path
        if path.startswith("/emulator/"):
            return await handler(request)
        self.books.seen[path] += 1
        fault = self.faults.pick(path)
        if fault is not None:
            request[FAULT] = fault
            answer = await self._wire.strike_first(request, fault)
            if answer is not None:
                return answer
        try:
            self._authorize(request)
            return await handler(request)
        except ApiError as error:
            return await self._wire.error(request, error)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return await self._wire.error(request, ApiError(error.status, error.reason))

    def _authorize(self, request: web.Request) -> None:
        key = self.settings.api_key
        if key is None or not request.path.startswith("/v1"):
            return
        given = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise ApiError(401, "Unauthorized")

    def _json(self, api: Api) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await _read_json(request)
            self._busy += 1
            try:
                return await api(self._desk, request, body)
            except EngineFailedError as error:
                return await self._failed(request, str(error))
            except EngineDeathError as error:
                return await self._die(request, str(error))
            except ConnectionError:
                raise asyncio.CancelledError from None  # the client left while its answer was being written
            finally:
                self._busy -= 1

        return handle

    async def _failed(self, request: web.Request, message: str) -> web.StreamResponse:
        """An engine error: 500, or an error frame when the stream has begun."""
        error = ApiError(500, message)
        stream: Stream | None = request.get(STREAM)
        if stream is None or not stream.response.prepared:
            raise error
        await stream.frame(error.body(request.path), "error" if request.path.startswith("/v1/messages") else None)
        if not request.path.startswith("/v1/messages"):
            await stream.frame("[DONE]")
        return await stream.close()

    async def _die(self, request: web.Request, message: str) -> web.StreamResponse:
        """What kills the engine process: really, or in the books and for this connection only."""
        self.books.deaths += 1
        print(f"EngineCore died: {message}", file=sys.stderr, flush=True)
        if self.settings.dies:
            os._exit(1)
        reset(request)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def _respond(self, desk: Desk, request: web.Request, body: Body) -> web.StreamResponse:
        return await responses.create(desk, self._store, request, body)

    async def _stored(self, request: web.Request) -> web.StreamResponse:
        return await self._wire.reply(request, self._store.get(request.match_info["id"])[1])

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def _version(self, request: web.Request) -> web.StreamResponse:
        return await self._wire.reply(request, {"version": VERSION})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        settings = self.settings
        cards: list[JsonValue] = [
            {
                "id": name,
                "object": "model",
                "created": self._desk.started_s,
                "owned_by": "vllm",
                "root": name,
                "parent": settings.model if name != settings.model else None,
                "max_model_len": settings.longest_tokens if name == settings.model else None,
                "permission": [],
            }
            for name in (settings.model, *self.core.adapters)
        ]
        return await self._wire.reply(request, {"object": "list", "data": cards})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        fault = request.get(FAULT)
        missing = fault.names if fault is not None and fault.kind == "metrics_missing" else ()
        if fault is not None and fault.kind == "metrics_missing" and not missing:
            raise web.HTTPNotFound
        text = exposition(self.settings, self.core.ranks, self.core.leases, missing)
        return web.Response(text=text, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _load(self, request: web.Request) -> web.StreamResponse:
        return await self._wire.reply(request, {"server_load": self._busy})

    async def _sources(self, request: web.Request) -> web.StreamResponse:
        sources: JsonValue = {
            str(index): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": publisher.endpoint,
                "replay_endpoint": publisher.replay_endpoint,
                "buffer_steps": 10_000,
                "hwm": 100_000,
                "max_queue_size": 100_000,
                "topic": self.settings.event_topic,
            }
            for index, publisher in enumerate(self.core.publishers)
        }
        return await self._wire.reply(request, sources)

    async def _load_adapter(self, desk: Desk, request: web.Request, body: Body) -> web.StreamResponse:
        name = body.get("lora_name")
        if not isinstance(name, str) or not name:
            raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", "lora_name")
        if name not in self.core.adapters:
            self.core.adapters.append(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, desk: Desk, request: web.Request, body: Body) -> web.StreamResponse:
        name = body.get("lora_name")
        if name not in self.core.adapters:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.", "lora_name")
        self.core.adapters.remove(str(name))
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _reset_cache(self, request: web.Request) -> web.StreamResponse:
        done = [rank.clear_cache() for rank in self.core.ranks]
        return web.Response(status=200 if all(done) else 503)

    # --- the emulator's own switches -----------------------------------------------------------------------------

    async def _show_books(self, request: web.Request) -> web.StreamResponse:
        books = self.books
        totals = {
            item.name: getattr(books, item.name)
            for item in dataclasses.fields(books)
            if isinstance(getattr(books, item.name), int)
        }
        shown: JsonValue = {
            **totals,
            "running": books.running,
            "held_leases": self.held_leases,
            "pinned_blocks": self.pinned_blocks,
            "used_blocks": self.used_blocks,
            "seen": dict(books.seen),
            "faults_done": dict(books.faults_done),
            "requests": [dataclasses.asdict(record) for record in list(books.requests)[-1000:]],
        }
        return web.json_response(shown)

    async def _show_faults(self, request: web.Request) -> web.StreamResponse:
        return web.json_response([dataclasses.asdict(fault) for fault in self.faults.armed()])

    async def _add_fault(self, request: web.Request) -> web.StreamResponse:
        try:
            fault = self.faults.add(Fault.parse(await _read_json(request)))
        except (ValueError, TypeError) as error:
            return web.json_response({"error": str(error)}, status=400)
        except ApiError as error:
            return web.json_response({"error": str(error)}, status=error.status)
        return web.json_response(dataclasses.asdict(fault))

    async def _clear_faults(self, request: web.Request) -> web.StreamResponse:
        self.faults.clear()
        return web.json_response({})

    async def _set_script(self, request: web.Request) -> web.StreamResponse:
        try:
            self.core.rules = parse_rules(await request.json())
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response({"rules": len(self.core.rules)})

    async def _switch(self, request: web.Request) -> web.StreamResponse:
        """Hang, resume, restart, refuse or kill; the last two come back after ``?for_s=`` seconds."""
        verb = request.match_info["verb"]
        if verb in ("hang", "resume", "restart"):
            {"hang": self.hang, "resume": self.resume, "restart": self.restart}[verb]()
        else:
            away_s = float(request.query.get("for_s", "5"))
            asyncio.get_running_loop().call_soon(self._go_away, verb, away_s)
        return web.json_response({})

    def _go_away(self, verb: str, away_s: float) -> None:
        async def away() -> None:
            await (self.refuse() if verb == "refuse" else self.kill())
            await asyncio.sleep(away_s)
            await (self.listen() if verb == "refuse" else self.revive())

        self._away = asyncio.ensure_future(away())


async def _read_json(request: web.Request) -> dict[str, JsonValue]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError):
        raise ApiError(400, "[{'type': 'json_invalid', 'loc': ('body', 0), 'msg': 'JSON decode error'}]") from None
    if not isinstance(body, dict):
        raise ApiError(400, "[{'type': 'model_attributes_type', 'loc': ('body',), 'msg': 'Input should be a valid '}]")
    return body
