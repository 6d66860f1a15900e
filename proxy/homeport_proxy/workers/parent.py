"""The parent of the workers: it owns homes, limits, drains, health and books, and keeps the workers running."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from homeport_proxy.breaker import Result
from homeport_proxy.control import Control
from homeport_proxy.errors import ProxyError
from homeport_proxy.exchange import Exchange
from homeport_proxy.health import Part
from homeport_proxy.limits import TenantLimit
from homeport_proxy.observe import admin
from homeport_proxy.placer import Placed
from homeport_proxy.routing.views import Decision, RequestView, Ticket
from homeport_proxy.workers.link import Link
from homeport_proxy.workers.wire import EndedTicket, Facts, MemberFacts, TravellingError, arrived

log = logging.getLogger(__name__)

TELL_FACTS_S = 0.25
RESTART_AFTER_S = 0.5


class Desk:
    """The parent's side of one worker: what it holds is given back when the worker dies."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._tickets: dict[int, Ticket] = {}
        self._next_ticket = 0
        self._taken: Counter[tuple[str, TenantLimit]] = Counter()
        self._legs: Counter[tuple[str, Part]] = Counter()
        self._under_way: set[tuple[str, str]] = set()

    def handle(self, method: str, arguments: tuple[Any, ...]) -> Awaitable[Any] | None:
        """One question or message."""
        handler: Callable[..., Awaitable[Any] | None] = getattr(self, f"on_{method}")
        return handler(*arguments)

    def close(self) -> None:
        """The worker is gone: cancel its requests, give back what it took."""
        for ticket in self._tickets.values():
            self._control.placer.cancel(ticket)
        for (tenant, limit), count in self._taken.items():
            for _ in range(count):
                self._control.state.limits.give(tenant, 0, limit)
        for (place, part), count in self._legs.items():
            for _ in range(count):
                self._control.health.ended(place, part, Result.NEUTRAL)
        for session, request_id in self._under_way:
            self._control.regions.ended(session, request_id)

    # placement

    async def on_place(self, region: str, request: RequestView) -> tuple[int, Placed] | TravellingError:
        try:
            placed = await self._control.placer.place(region, request)
        except ProxyError as error:
            return TravellingError(error.status, error.code, error.message, error.retry_after_s)
        self._next_ticket += 1
        self._tickets[self._next_ticket] = placed.ticket
        return self._next_ticket, placed

    async def on_again(self, number: int, exclude: frozenset[str]) -> Decision | None:
        ticket = self._tickets.get(number)
        return None if ticket is None else await self._control.placer.again(ticket, exclude)

    async def on_without_prefill(self, number: int, why: str) -> Decision:
        return await self._control.placer.without_prefill(self._tickets[number], why)

    def on_prefill_done(self, number: int, cached_tokens: int | None) -> None:
        if (ticket := self._tickets.get(number)) is not None:
            self._control.placer.prefill_done(ticket, cached_tokens)

    async def on_sliced(self, number: int, cached_tokens: int | None, ok: bool) -> tuple[Decision | None, int | None]:
        ticket = self._tickets[number]
        await self._control.placer.sliced(ticket, cached_tokens, ok=ok)
        return ticket.decision, ticket.part_tokens

    def on_first_token(self, number: int) -> None:
        if (ticket := self._tickets.get(number)) is not None:
            self._control.placer.first_token(ticket)

    def on_cancel(self, number: int) -> None:
        if (ticket := self._tickets.pop(number, None)) is not None:
            self._control.placer.cancel(ticket)

    # books

    def on_identify(self, seen: Any) -> Awaitable[Any]:
        return self._control.books.identify(seen)

    async def on_locate(self, exchange: Exchange) -> tuple[str, bool, str, bool] | None:
        located = await self._control.books.locate(arrived(exchange))
        if located is None:
            return None
        self._under_way.add((exchange.session, exchange.request_id))
        return located.region, located.peer is not None, located.reason, located.home_down

    def on_holder(self, tenant: str, response_id: str) -> Awaitable[Any]:
        return self._control.books.holder(tenant, response_id)

    def on_stored(self, tenant: str, response_id: str, place: str) -> None:
        self._control.books.stored(tenant, response_id, place)

    # limits, health, account

    async def on_take(self, tenant: str, tokens: int, limit: TenantLimit) -> Any:
        refusal = await self._control.state.limits.take(tenant, tokens, limit)
        if refusal is None:
            self._taken[tenant, limit] += 1
        return refusal

    def on_give(self, tenant: str, tokens: int, limit: TenantLimit) -> None:
        self._taken[tenant, limit] -= 1
        self._control.state.limits.give(tenant, tokens, limit)

    def on_sent(self, place: str, part: Part) -> None:
        self._legs[place, part] += 1
        self._control.health.sent(place, part)

    def on_ended(self, place: str, part: Part, result: Result, retry_after_s: float | None) -> None:
        self._legs[place, part] -= 1
        self._control.health.ended(place, part, result, retry_after_s=retry_after_s)

    def on_peer_failed(self, name: str, refused: bool) -> None:
        if (peer := self._control.regions.peers.get(name)) is not None:
            self._control.regions.failed(peer, refused=refused)

    def on_done(self, exchange: Exchange, body_bytes: int, ended: EndedTicket | None) -> None:
        self._under_way.discard((exchange.session, exchange.request_id))
        ticket = self._tickets.pop(ended.number, None) if ended is not None else None
        if ended is not None and ticket is not None:
            exchange.outcome = self._control.placer.finished(
                ticket,
                prompt_tokens=ended.prompt_tokens,
                cached_tokens=ended.cached_tokens,
                output_tokens=ended.output_tokens,
                ok=ended.ok,
            )
        self._control.account.done(arrived(exchange), body_bytes=body_bytes)

    def on_gaps(self, counts: list[int], total_s: float) -> None:
        self._control.metrics.itl.merge(counts, total_s)


class Parent:
    """Starts ``count`` workers that listen on one port, serves them, starts again what dies, stops them in the end."""

    def __init__(self, control: Control, count: int) -> None:
        self._control = control
        self._count = count
        self._folder = Path(tempfile.mkdtemp(prefix="homeport-"))
        self._links: set[Link] = set()
        self._ready = asyncio.Event()
        self._serving = 0
        self._told: Facts | None = None
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None
        self._held: socket.socket | None = None

    @property
    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [process.pid for process in self._processes.values()]

    async def start(self, host: str, port: int) -> int:
        """Start everything; returns the port once every worker listens on it. Raises OSError when it is taken."""
        self._held = _hold(host, port)
        port = int(self._held.getsockname()[1])
        self._server = await asyncio.start_unix_server(self._meet, self._folder / "workers")
        app = web.Application()
        app[admin.TRUSTS_PEER_HEADER] = True
        app.add_routes(self._control.routes())
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self._folder / "admin")).start()
        for number in range(self._count):
            self._tasks.append(asyncio.create_task(self._keep(number, host, port), name=f"worker {number}"))
        self._tasks.append(asyncio.create_task(self._tell_facts(), name="facts"))
        await self._ready.wait()
        return port

    async def stop(self) -> None:
        """Let the workers finish their streams for ``timeouts.drain_s``, then end them."""
        self._control.stopping = True
        self._tell()
        for process in self._processes.values():
            process.terminate()
        waiting = [process.wait() for process in self._processes.values()]
        try:
            async with asyncio.timeout(self._control.config.timeouts.drain_s + 10):
                await asyncio.gather(*waiting)
        except TimeoutError:
            for process in self._processes.values():
                process.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._held is not None:
            self._held.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        desk = Desk(self._control)

        def handle(method: str, arguments: tuple[Any, ...]) -> Awaitable[Any] | None:
            if method == "listening":
                self._serving += 1
                if self._serving >= self._count:
                    self._ready.set()
                return None
            return desk.handle(method, arguments)

        link = Link(reader, writer, handle)
        self._links.add(link)
        link.tell("facts", self._facts())
        try:
            await link.run()
        finally:
            self._links.discard(link)
            desk.close()

    async def _keep(self, number: int, host: str, port: int) -> None:
        while not self._control.stopping:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "homeport_proxy.workers.worker",
                str(self._folder),
                host,
                str(port),
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
            self._processes[number] = process
            code = await process.wait()
            if not self._control.stopping:
                log.error("worker %d ended with status %s; another one takes its place", process.pid, code)
                await asyncio.sleep(RESTART_AFTER_S)

    async def _tell_facts(self) -> None:
        while True:
            await asyncio.sleep(TELL_FACTS_S)
            self._tell()

    def _tell(self) -> None:
        facts = self._facts()
        if facts != self._told:
            self._told = facts
            for link in self._links:
                link.tell("facts", facts)

    def _facts(self) -> Facts:
        control = self._control
        members = {
            member.name: MemberFacts(
                member.region,
                member.backend,
                member.models,
                member.max_model_len,
                member.ranks,
                control.health.state(member),
                member.carry,
            )
            for member in control.fleet.members.values()
        }
        sizes = {
            place: size
            for member in control.fleet.members.values()
            if (router := control.routers.get(member.region)) is not None
            for place in member.place_names()
            if (size := router.block_tokens(place)) is not None
        }
        down = frozenset(peer.name for peer in control.regions.peers.values() if peer.up is False)
        return Facts(control.config, members, control.account.bytes_per_token.ratios(), down, sizes, control.stopping)


def _hold(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen: it keeps the port for the workers, and finds a free one for 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port))  # without SO_REUSEPORT first: a port that somebody else shares is taken
        taken = int(held.getsockname()[1])
        held.close()
        held = socket.socket(family, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, taken))
    except OSError:
        held.close()
        raise
    return held
