"""One worker process: the data plane, with everything that must be known once asked of the parent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import aiohttp
from aiohttp import web

from homeport_proxy.account import BytesPerToken
from homeport_proxy.admit import Admission
from homeport_proxy.app import Proxy
from homeport_proxy.breaker import Result
from homeport_proxy.control import Control
from homeport_proxy.errors import ProxyError
from homeport_proxy.exchange import Exchange, Identity
from homeport_proxy.fleet import Fleet, Member
from homeport_proxy.health import Part
from homeport_proxy.identity import Look
from homeport_proxy.limits import Refusal, TenantLimit
from homeport_proxy.loop import listener_tls, loop_factory, settle_memory
from homeport_proxy.observe import admin, logs
from homeport_proxy.observe.metrics import Metrics
from homeport_proxy.peers import Located, Peer
from homeport_proxy.placer import Placed
from homeport_proxy.routing.views import Decision, Outcome, RequestView, State, Ticket
from homeport_proxy.workers.link import Link
from homeport_proxy.workers.wire import EndedTicket, Facts, TravellingError, to_travel

log = logging.getLogger(__name__)

FLUSH_S = 1.0


class RemotePlacer:
    """Placement by the parent's routers; tickets here stand for those there."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._numbers: dict[Ticket, int] = {}
        self._ended: dict[Ticket, EndedTicket] = {}

    async def place(self, region: str, request: RequestView) -> Placed:
        answer = await self._link.ask("place", region, request)
        if isinstance(answer, TravellingError):
            raise ProxyError(answer.status, answer.code, answer.message, retry_after_s=answer.retry_after_s)
        number, placed = answer
        self._numbers[placed.ticket] = number
        return cast("Placed", placed)

    async def again(self, ticket: Ticket, exclude: frozenset[str]) -> Decision | None:
        number = self._numbers.get(ticket)
        decision: Decision | None = None if number is None else await self._link.ask("again", number, exclude)
        if decision is not None:
            ticket.decision = decision
        return decision

    async def without_prefill(self, ticket: Ticket, why: str) -> Decision:
        decision: Decision = await self._link.ask("without_prefill", self._numbers[ticket], why)
        ticket.decision = decision
        return decision

    def prefill_done(self, ticket: Ticket, cached_tokens: int | None) -> None:
        if (number := self._numbers.get(ticket)) is not None:
            self._link.tell("prefill_done", number, cached_tokens)

    async def sliced(self, ticket: Ticket, cached_tokens: int | None, *, ok: bool) -> None:
        if (number := self._numbers.get(ticket)) is not None:
            answer = await self._link.ask("sliced", number, cached_tokens, ok)
            ticket.decision, ticket.part_tokens = answer

    def first_token(self, ticket: Ticket) -> None:
        if (number := self._numbers.get(ticket)) is not None:
            self._link.tell("first_token", number)

    def finished(
        self,
        ticket: Ticket,
        *,
        prompt_tokens: int | None,
        cached_tokens: int | None,
        output_tokens: int | None,
        ok: bool,
    ) -> Outcome:
        """The parent hears of it together with the finished exchange, and books the outcome there."""
        number = self._numbers.pop(ticket, None)
        if number is not None:
            self._ended[ticket] = EndedTicket(number, prompt_tokens, cached_tokens, output_tokens, ok)
        return Outcome(prompt_tokens, cached_tokens)

    def ended(self, ticket: Ticket | None) -> EndedTicket | None:
        """What :meth:`finished` was told of a ticket, once."""
        return None if ticket is None else self._ended.pop(ticket, None)

    def cancel(self, ticket: Ticket) -> None:
        if (number := self._numbers.pop(ticket, None)) is not None:
            self._link.tell("cancel", number)


class RemoteLimits:
    """Limits counted by the parent."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def take(self, tenant: str, tokens: int, limit: TenantLimit) -> Refusal | None:
        return cast("Refusal | None", await self._link.ask("take", tenant, tokens, limit))

    def give(self, tenant: str, tokens: int, limit: TenantLimit) -> None:
        self._link.tell("give", tenant, tokens, limit)


class RemoteHealth:
    """Outcomes told to the parent; states as it last told them."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.states: dict[str, State] = {}

    def sent(self, place: str, part: Part) -> None:
        self._link.tell("sent", place, part)

    def ended(self, place: str, part: Part, result: Result, *, retry_after_s: float | None = None) -> None:
        self._link.tell("ended", place, part, result, retry_after_s)

    def state(self, member: Member) -> State:
        return self.states.get(member.name, "unknown")


class RemoteBooks:
    """Identity, regions and stored responses, asked of the parent."""

    def __init__(self, link: Link, control: RemoteControl) -> None:
        self._link = link
        self._control = control

    async def identify(self, seen: Look) -> Identity:
        return cast("Identity", await self._link.ask("identify", seen))

    async def locate(self, exchange: Exchange) -> Located | None:
        config = self._control.config
        if len(config.regions) == 1:
            return Located(config.region)  # nothing to choose: regions a tenant or model may name are this one
        answer = await self._link.ask("locate", to_travel(exchange, keep_document=False))
        if answer is None:
            return None
        region, by_peer, reason, home_down = answer
        return Located(region, self._control.regions.peers.get(region) if by_peer else None, reason, home_down)

    async def holder(self, tenant: str, response_id: str) -> str | None:
        return cast("str | None", await self._link.ask("holder", tenant, response_id))

    def stored(self, tenant: str, response_id: str, place: str) -> None:
        self._link.tell("stored", tenant, response_id, place)


class RemoteRegions:
    """Peers as connections need them."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.peers: dict[str, Peer] = {}

    def failed(self, peer: Peer, *, refused: bool) -> None:
        self._link.tell("peer_failed", peer.name, refused)


class BlockSizes:
    """The engines' block sizes in tokens, as their KV events told the parent."""

    def __init__(self) -> None:
        self.sizes: Mapping[str, int] = {}

    def block_tokens(self, place: str) -> int | None:
        return self.sizes.get(place)


class RemoteAccount:
    """Finished requests sent to the parent's books; gaps counted here and sent on once a second."""

    def __init__(self, link: Link, placer: RemotePlacer, keep_document: bool) -> None:
        self._link = link
        self._placer = placer
        self._keep_document = keep_document
        self._itl = Metrics().itl
        self.bytes_per_token = BytesPerToken()
        self.gap = self._itl.observe

    def done(self, exchange: Exchange) -> None:
        ended = self._placer.ended(exchange.ticket)
        self._link.tell("done", to_travel(exchange, keep_document=self._keep_document), len(exchange.body), ended)

    def flush(self) -> None:
        """Send the gaps counted since the last time."""
        counts = self._itl.counts
        if any(counts):
            self._link.tell("gaps", counts, self._itl.sum)
            self._itl.counts[:] = [0] * len(counts)
            self._itl.sum = 0.0


class RemoteControl:
    """The control plane as a worker has it: the shape the data plane asks, answered by the parent."""

    def __init__(self, link: Link, facts: Facts, folder: Path) -> None:
        self.config = facts.config
        self.started_unix_s = time.time()
        self.stopping = False
        self.placer = RemotePlacer(link)
        self.health = RemoteHealth(link)
        self.regions = RemoteRegions(link)
        self.books = RemoteBooks(link, self)
        self.account = RemoteAccount(link, self.placer, keep_document=facts.config.record.file is not None)
        self.fleet = Fleet(facts.config)
        self._block_sizes = BlockSizes()
        self.routers: dict[str, BlockSizes] = {}
        self.admission = Admission(facts.config.tenants, RemoteLimits(link))
        self._folder = folder
        self.take(facts)

    def take(self, facts: Facts) -> None:
        """The parent's facts changed."""
        if facts.config != self.config:
            self.admission.reconfigure(facts.config.tenants)
        self.config = facts.config
        self.stopping = self.stopping or facts.stopping
        members: dict[str, Member] = {}
        for name, fact in facts.members.items():
            member = self.fleet.members.get(name) or Member(fact.region, fact.backend)
            member.region, member.backend, member.ranks = fact.region, fact.backend, fact.ranks
            member.models, member.max_model_len, member.carry = fact.models, fact.max_model_len, fact.carry
            members[name] = member
            self.health.states[name] = fact.state
        self.fleet.take(facts.config, members)
        self.account.bytes_per_token.take(facts.bytes_per_token)
        self._block_sizes.sizes = facts.block_tokens
        self.routers = {n: self._block_sizes for n, region in facts.config.regions.items() if region.kind == "local"}
        peers = {name: region for name, region in facts.config.regions.items() if region.kind == "peer"}
        for name in self.regions.peers.keys() - peers.keys():
            del self.regions.peers[name]
        for name, region in peers.items():
            peer = self.regions.peers.setdefault(name, Peer(name, region))
            peer.region, peer.up = region, False if name in facts.peers_down else None

    def routes(self) -> list[web.RouteDef]:
        """Whatever is asked of the proxy itself is the parent's to answer."""
        return [web.route("*", "/{tail:.*}", self._forward)]

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        headers = request.headers.copy()
        headers.popall(admin.PEER_HEADER, None)
        headers[admin.PEER_HEADER] = request.remote or ""
        connector = aiohttp.UnixConnector(str(self._folder / "admin"))
        async with (
            aiohttp.ClientSession(connector=connector, auto_decompress=False) as session,
            session.request(
                request.method,
                f"http://parent{request.rel_url}",
                headers=headers,
                data=await request.read(),
                allow_redirects=False,
            ) as answer,
        ):
            kept = {n: v for n, v in answer.headers.items() if n.lower() not in ("transfer-encoding", "connection")}
            return web.Response(status=answer.status, headers=kept, body=await answer.read())


async def work(folder: Path, host: str, port: int) -> int:
    """Serve until told to stop, or until the parent is gone."""
    facts: asyncio.Future[Facts] = asyncio.get_running_loop().create_future()
    control: RemoteControl | None = None

    def handle(method: str, arguments: tuple[Any, ...]) -> None:
        if method == "facts" and control is not None:
            control.take(arguments[0])
        elif method == "facts" and not facts.done():
            facts.set_result(arguments[0])

    link = Link(*await asyncio.open_unix_connection(folder / "workers"), handle)
    line = asyncio.create_task(link.run())
    first = await facts
    logs.configure(first.config.log)
    control = RemoteControl(link, first, folder)
    # the data plane asks a control plane for nothing but what RemoteControl answers
    proxy = Proxy(cast("Control", control))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    line.add_done_callback(lambda _: stop.set())
    await proxy.start()
    await proxy.listen(host, port, tls=listener_tls(first.config.listen), reuse_port=True)
    settle_memory()
    link.tell("listening")
    flushing = asyncio.create_task(_keep_flushing(control))
    try:
        await stop.wait()
    finally:
        await proxy.stop()
        flushing.cancel()
        control.account.flush()
        link.close()
        with contextlib.suppress(asyncio.CancelledError):
            await line
    return 0


async def _keep_flushing(control: RemoteControl) -> None:
    while True:
        await asyncio.sleep(FLUSH_S)
        control.account.flush()
        control.admission.reload_keys()


def main() -> int:
    """Entry point of the worker process: FOLDER HOST PORT."""
    folder, host, port = sys.argv[1:]
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work(Path(folder), host, int(port)))


if __name__ == "__main__":
    sys.exit(main())
