"""KV hand-off between emulated engines: leases on the prefill side, pulls on the decode side.

NIXL's ways: the prefill engine holds the blocks of a finished prefill until the decode engine notifies it or the
lease ends; heartbeats extend the lease while the request waits; a read after that is not refused and brings wrong
data. Mooncake's ways: both legs carry one transfer id and may start in any order. The side channel is HTTP with JSON
here, one port per data-parallel rank; only emulated engines speak it.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import aiohttp
from aiohttp import web

from homeport.fingerprint import JsonValue
from homeport_engines.emulator.books import Books
from homeport_engines.emulator.cache import Block
from homeport_engines.emulator.clock import Clock
from homeport_engines.emulator.scheduler import Pull, Rank
from homeport_engines.emulator.settings import EmulatorSettings

LeaseState = Literal["held", "expired", "done", "unknown"]
MOONCAKE_TIMEOUT_S = 480.0
PEER_ANSWER_S = 5.0
"""A peer that answers no sooner counts as gone; generous, because a busy machine is no lost engine."""
_REMEMBERED = 10_000


class EngineDeathError(Exception):
    """A request that a real engine does not survive."""


@dataclass(slots=True)
class _Lease:
    tables: list[list[Block]]
    timer: asyncio.TimerHandle


class Leases:
    """Blocks that one rank keeps for other engines, by request id (NIXL) or transfer id (Mooncake)."""

    def __init__(self, rank: Rank, books: Books) -> None:
        self.rank = rank
        self.engine_id = str(uuid.uuid4())
        self._books = books
        self._held: dict[str, _Lease] = {}
        self._ended: OrderedDict[str, LeaseState] = OrderedDict()
        self._arrivals: dict[str, asyncio.Future[None]] = {}

    @property
    def held(self) -> int:
        """Leases that have not ended."""
        return len(self._held)

    @property
    def pinned_blocks(self) -> int:
        """Blocks kept by leases."""
        return sum(len(blocks) for lease in self._held.values() for blocks in lease.tables)

    def grant(self, key: str, tables: list[list[Block]], lease_s: float) -> None:
        """Keep blocks under ``key`` for ``lease_s`` real seconds."""
        timer = asyncio.get_running_loop().call_later(lease_s, self._expire, key)
        self._held[key] = _Lease(tables, timer)
        arrival = self._arrivals.pop(key, None)
        if arrival is not None and not arrival.done():
            arrival.set_result(None)

    def state(self, key: str) -> LeaseState:
        """What a read under ``key`` finds now."""
        return "held" if key in self._held else self._ended.get(key, "unknown")

    def extend(self, key: str, lease_s: float) -> bool:
        """A heartbeat came; False when there is nothing left to extend."""
        lease = self._held.get(key)
        if lease is None:
            return False
        lease.timer.cancel()
        lease.timer = asyncio.get_running_loop().call_later(lease_s, self._expire, key)
        return True

    def finish(self, key: str) -> None:
        """The other engine has what it wanted, or wants it no more."""
        if key not in self._held:
            self.rank.counters.late_notifications += self._ended.get(key) == "expired"
            return
        self._end(key, "done")

    async def arrival(self, key: str, timeout_s: float) -> bool:
        """Wait until blocks are kept under ``key`` (Mooncake's decode leg may come first)."""
        if self.state(key) != "unknown":
            return True
        future = self._arrivals.setdefault(key, asyncio.get_running_loop().create_future())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(future), timeout_s)
        return self.state(key) != "unknown"

    def drop_all(self) -> None:
        """Forget every lease and take a new identity, as a restarted process does."""
        for lease in self._held.values():
            lease.timer.cancel()
        self._held.clear()
        self._ended.clear()
        self.engine_id = str(uuid.uuid4())

    def _expire(self, key: str) -> None:
        self._books.orphans += 1
        self.rank.counters.expired_leases += 1
        self._end(key, "expired")

    def _end(self, key: str, state: LeaseState) -> None:
        lease = self._held.pop(key)
        lease.timer.cancel()
        self.rank.release(lease.tables)
        self._ended[key] = state
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)


class SideChannel:
    """A port for other engines: one rank's under NIXL, every rank's under Mooncake (its bootstrap server)."""

    def __init__(self, settings: EmulatorSettings, leases: Sequence[Leases], books: Books) -> None:
        self._settings = settings
        self._leases = list(leases)
        self._books = books
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, port: int) -> None:
        """Listen; port 0 takes a free one."""
        app = web.Application()
        app.add_routes(
            [
                web.post("/read", self._read),
                web.post("/done", self._done),
                web.post("/heartbeat", self._heartbeat),
                web.get("/query", self._query),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._settings.host, port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening and cut what is connected."""
        if self._runner is not None:
            server = self._runner.server
            for connection in list(server.connections) if server is not None else []:
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
            self._runner = None

    def _find(self, asked: Mapping[str, JsonValue]) -> Leases:
        for leases in self._leases:
            if leases.engine_id == asked.get("engine_id"):
                return leases
        raise web.HTTPConflict(text="another engine lives here now")

    async def _read(self, request: web.Request) -> web.Response:
        """What the decode engine finds: under Mooncake it waits for a prefill that has not ended yet."""
        asked = await request.json()
        leases, key = self._find(asked), str(asked.get("key"))
        if asked.get("wait_s"):
            await leases.arrival(key, float(asked["wait_s"]))
        state = leases.state(key)
        if state == "done":
            self._books.reused_params += 1
        elif state == "expired":
            self._books.read_after_lease += 1
        return web.json_response({"state": state})

    async def _done(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self._find(asked).finish(str(asked.get("key")))
        return web.json_response({})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        asked = await request.json()
        return web.json_response({"held": self._find(asked).extend(str(asked.get("key")), self._settings.lease_s)})

    async def _query(self, _: web.Request) -> web.Response:
        """Mooncake's bootstrap: who serves each data-parallel rank."""
        address = f"{self._settings.host}:{self.port}"
        return web.json_response(
            {
                str(leases.rank.index): {"engine_id": leases.engine_id, "worker_addr": {"0": {"0": address}}}
                for leases in self._leases
            }
        )


@dataclass(slots=True)
class Remote:
    """Where another engine keeps blocks for us."""

    url: str
    engine_id: str
    key: str
    wait_s: float = 0.0


class Puller:
    """The decode side: reads other engines' blocks for one emulator."""

    def __init__(self, settings: EmulatorSettings, clock: Clock, books: Books) -> None:
        self._settings = settings
        self._clock = clock
        self._books = books
        self._session: aiohttp.ClientSession | None = None
        self._beats: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Open the client."""
        # a stalled peer must not hold a transfer for ever; Mooncake's long wait is bounded by its own timeout
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=MOONCAKE_TIMEOUT_S + 10))

    async def stop(self) -> None:
        """Close the client and end every heartbeat."""
        for beat in list(self._beats):
            beat.cancel()
        await asyncio.gather(*self._beats, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def pull(self, remote: Remote, tokens: int, *, cached_tokens: int | None, whole: bool) -> Pull:
        """A transfer of ``tokens`` tokens from ``remote``; heartbeats go out until it has ended."""
        beat = asyncio.ensure_future(self._heartbeat(remote))
        self._beats.add(beat)
        beat.add_done_callback(self._beats.discard)

        async def fetch(wanted: int) -> bool:
            try:
                return await self._fetch(remote, wanted)
            finally:
                beat.cancel()

        async def drop() -> None:
            beat.cancel()
            with contextlib.suppress(ConnectionError):
                await self._ask(remote, "done")

        return Pull(tokens, fetch, drop, cached_tokens, whole)

    async def _fetch(self, remote: Remote, tokens: int) -> bool:
        try:
            answer = await self._ask(remote, "read", wait_s=remote.wait_s)
        except ConnectionError:
            await asyncio.sleep(self._settings.load_failure_s)
            raise
        state = answer.get("state")
        if state == "unknown" and remote.wait_s:
            raise ConnectionError("the prefill never came")
        self._books.read_after_lease += state in ("expired", "unknown")
        self._books.reused_params += state == "done"
        rates = self._settings.rates
        await self._clock.sleep_until(self._clock.now() + rates.transfer_t0_s + tokens / rates.transfer_tokens_per_s)
        with contextlib.suppress(ConnectionError):  # the blocks are here; the lease there will end by itself
            await self._ask(remote, "done")
        return state == "held"

    async def _heartbeat(self, remote: Remote) -> None:
        if remote.wait_s:
            return
        while True:
            await asyncio.sleep(self._settings.lease_s / 3)
            with contextlib.suppress(ConnectionError):
                await self._ask(remote, "heartbeat")

    async def _ask(self, remote: Remote, verb: str, *, wait_s: float = 0.0) -> Mapping[str, JsonValue]:
        if self._session is None:
            raise ConnectionError("stopped")
        asked = {"engine_id": remote.engine_id, "key": remote.key, "wait_s": wait_s}
        # without a wait a peer answers at once; one that hangs counts as gone
        limit = aiohttp.ClientTimeout(total=wait_s + max(self._settings.load_failure_s, PEER_ANSWER_S))
        try:
            async with self._session.post(f"{remote.url}/{verb}", json=asked, timeout=limit) as answer:
                if answer.status != 200:
                    raise ConnectionError(f"{remote.url} answered {answer.status}")
                body = await answer.json()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConnectionError(str(error)) from error
        return body if isinstance(body, dict) else {}


@dataclass(frozen=True, slots=True)
class Legs:
    """What a request's transfer parameters ask of this engine."""

    keep_as: str | None = None
    """Keep the blocks after the prefill: under this Mooncake transfer id, or "" for NIXL (under the request's id)."""
    remote: Remote | None = None
    remote_tokens: int | None = None
    cached_tokens: int | None = None
    whole: bool = True

    @property
    def kind(self) -> Literal["whole", "prefill", "decode"]:
        """Which leg of a split request this is."""
        return "prefill" if self.keep_as is not None else "decode" if self.remote is not None else "whole"


def read_legs(kv: str, params: Mapping[str, JsonValue]) -> Legs:
    """Read ``kv_transfer_params``. Raises EngineDeathError where the real connector's assertion kills the engine."""
    if kv == "none" or not params:
        return Legs()
    keep = str(params.get("transfer_id", "")) if params.get("do_remote_decode") else None
    pulls = bool(params.get("do_remote_prefill"))
    if kv == "mooncake":
        return Legs(keep, _mooncake_remote(params) if pulls else None)
    has_blocks = params.get("remote_block_ids") is not None
    if pulls and not has_blocks:
        raise EngineDeathError("AssertionError: do_remote_prefill without remote_block_ids")
    # a prefill leg that names blocks of a decode engine reads the last turn back (bidirectional transfer)
    remote = _nixl_remote(params) if pulls or (keep is not None and has_blocks) else None
    tokens, cached = params.get("remote_num_tokens"), params.get("remote_prefill_cached_tokens")
    return Legs(
        "" if keep is not None else None,
        remote,
        int(tokens) if isinstance(tokens, int) else None,
        cached if isinstance(cached, int) and keep is None else None,
        whole=keep is None,
    )


def _nixl_remote(params: Mapping[str, JsonValue]) -> Remote | None:
    names = ("remote_host", "remote_port", "remote_engine_id", "remote_request_id")
    if any(params.get(name) is None for name in names):
        return None  # vLLM warns and computes by itself
    url = f"http://{params['remote_host']}:{params['remote_port']}"
    return Remote(url, str(params["remote_engine_id"]), str(params["remote_request_id"]))


def _mooncake_remote(params: Mapping[str, JsonValue]) -> Remote:
    names = ("remote_bootstrap_addr", "remote_engine_id", "transfer_id")
    if any(not isinstance(params.get(name), str) for name in names):
        raise EngineDeathError(f"KeyError: a Mooncake decode leg needs {', '.join(names)}")
    url = str(params["remote_bootstrap_addr"]).rstrip("/")
    return Remote(url, str(params["remote_engine_id"]), str(params["transfer_id"]), MOONCAKE_TIMEOUT_S)


def nixl_params(
    leases: Leases, host: str, port: int, key: str, tables: list[list[Block]], tokens: int, cached_tokens: int
) -> dict[str, JsonValue]:
    """The parameters a prefill answer carries, member by member as vLLM 0.32's NixlConnector gives them."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[block.number for block in blocks] for blocks in tables],
        "remote_engine_id": leases.engine_id,
        "remote_request_id": key,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": cached_tokens,
    }
