"""Regions at work: what is known of each, local or reached through its own proxy, and where a session is served.

A peer's proxy is asked at the health interval for its load (``GET /homeport/v1/region``); the quickest recent answer is
the round trip. A session displaced from its home (down, draining, over its share) stays where it went until it has been
idle, then its hash calls it back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import msgspec

from homeport_proxy.attention import within
from homeport_proxy.config import Config, ConfigError, Region
from homeport_proxy.exchange import Exchange
from homeport_proxy.probe import client_tls, reason_of, request_headers
from homeport_proxy.region import RegionView, choose

log = logging.getLogger(__name__)

IDLE_RETURN_S = 5.0
"""A displaced session goes home once nothing of it has been under way for this long."""


class RegionReport(msgspec.Struct, omit_defaults=True):
    """What a proxy tells its peers of its own region. Tokens are those in flight; waits in seconds."""

    region: str
    usable: bool = True
    draining: bool = False
    inflight_tokens: int = 0
    wait_s: float | None = None
    backends: list[dict[str, object]] = []


class Located(msgspec.Struct, frozen=True):
    """Where a request is served. ``peer`` is set when that is another proxy; ``reason`` is empty at home.
    ``home_down``: the region that is the session's home cannot be used."""

    region: str
    peer: Peer | None = None
    reason: str = ""
    home_down: bool = False


@dataclass(slots=True, eq=False)
class Peer:
    """Another region's proxy. ``up`` None: not asked yet, which counts as usable."""

    name: str
    region: Region
    up: bool | None = None
    failed: int = 0
    error: str | None = None
    report: RegionReport | None = None
    recent_rtt_s: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    @property
    def url(self) -> str:
        """The address of its proxy."""
        return self.region.proxy or ""

    @property
    def rtt_s(self) -> float:
        """The round trip: the quickest of the last answers, the configured guess before the first."""
        return min(self.recent_rtt_s) if self.recent_rtt_s else (self.region.rtt_ms or 0.0) / 1000

    def headers(self) -> dict[str, str]:
        """Headers for requests to it: the configured ones and its key."""
        return request_headers(self.region, self.region.headers)


class Regions:
    """All regions as seen from here. ``local_view`` describes a region whose backends this proxy reaches itself."""

    def __init__(
        self,
        config: Config,
        local_view: Callable[[str], RegionView],
        allowed: Callable[[Exchange], set[str] | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._local_view = local_view
        self._allowed = allowed
        self._clock = clock
        self._away: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._under_way: dict[str, set[str]] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None
        self.draining: set[str] = set()
        """Regions taken out by hand."""
        self.peers: dict[str, Peer] = {}
        self.reconfigure(config)

    def reconfigure(self, config: Config) -> None:
        """Take a reloaded file; peers whose address stays keep what is known of them."""
        self._config = config
        peers = {name: region for name, region in config.regions.items() if region.kind == "peer"}
        kept: dict[str, Peer] = {}
        for name, region in peers.items():
            old = self.peers.get(name)
            if old is not None and old.url == region.proxy:
                old.region = region
                kept[name] = old
            else:
                kept[name] = Peer(name, region)
        self.peers = kept

    def views(self) -> list[RegionView]:
        """Every region as the choice sees it."""
        return [self._view(name, region) for name, region in self._config.regions.items()]

    def locate(self, exchange: Exchange) -> Located | None:
        """Where this request is served; None when no region it may use is usable.

        A request that has hopped is served here, and so is one without a session.
        """
        here = self._config.region
        allowed = self._allowed(exchange)
        if exchange.hops > 0 and exchange.session:
            self._remember(exchange.session)
        if exchange.hops > 0 or not exchange.session:
            return Located(here) if allowed is None or here in allowed else self._elsewhere(exchange, allowed)
        if len(self._config.regions) == 1 and (allowed is None or here in allowed):
            return Located(here)
        located = self._choose(exchange.session, allowed)
        if located is not None:
            self._under_way.setdefault(exchange.session, set()).add(exchange.request_id)
        return located

    def ended(self, session: str, request_id: str) -> None:
        """A request of the session is over, however often it was located: its idle time may begin."""
        under_way = self._under_way.get(session)
        if under_way is None:
            return
        under_way.discard(request_id)
        if under_way:
            return
        del self._under_way[session]
        if session in self._away:
            self._away[session] = (self._away[session][0], self._clock())

    def failed(self, peer: Peer, *, refused: bool) -> None:
        """A request to a peer failed before it answered."""
        peer.failed += 1
        if refused or peer.failed >= self._config.health.fail_after:
            peer.up = False

    async def start(self) -> None:
        """Ask every peer once, then go on at the health interval."""
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(keepalive_timeout=4.0))
        await self.ask_all()
        self._task = asyncio.create_task(self._run(), name="peers")

    async def stop(self) -> None:
        """Stop asking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def ask_all(self) -> None:
        """Ask every peer for its report now."""
        await asyncio.gather(*(self._ask(peer) for peer in self.peers.values()))

    def degraded(self) -> list[str]:
        """Peers that do not answer, one sentence each."""
        return [f"region {p.name}: {p.error or 'does not answer'}" for p in self.peers.values() if p.up is False]

    def _choose(self, session: str, allowed: set[str] | None) -> Located | None:
        now_s = self._clock()
        stay_at, idle_since_s = self._away.get(session, (None, 0.0))
        if stay_at is not None and session not in self._under_way and now_s - idle_since_s >= IDLE_RETURN_S:
            del self._away[session]
            stay_at = None
        views = self.views()
        choice = choose(
            session,
            views,
            allowed=allowed,
            staying_at=stay_at,
            new=session not in self._seen,
            load_bound=self._config.routing.load_bound,
        )
        if choice is None:
            return None
        self._remember(session)
        if choice.region == choice.home:
            self._away.pop(session, None)
        elif not choice.once:
            self._away[session] = (choice.region, now_s)
        home_down = any(view.name == choice.home and not view.usable for view in views)
        return Located(choice.region, self.peers.get(choice.region), choice.reason, home_down)

    def _elsewhere(self, exchange: Exchange, allowed: set[str]) -> Located | None:
        """Not allowed here: another region, unless the request came from one (it must not travel on)."""
        if exchange.hops > 0:
            return None
        usable = [v for v in self.views() if v.name in allowed and v.usable]
        nearest = min(usable, key=lambda v: v.rtt_s, default=None)
        return None if nearest is None else Located(nearest.name, self.peers.get(nearest.name), "not allowed here")

    def _remember(self, session: str) -> None:
        self._seen[session] = None
        self._seen.move_to_end(session)
        for book in (self._seen, self._away):
            while len(book) > self._config.affinity.max_sessions:
                book.popitem(last=False)

    def _view(self, name: str, region: Region) -> RegionView:
        if region.kind == "local":
            return self._local_view(name)
        peer = self.peers[name]
        report = peer.report
        return RegionView(
            name=name,
            weight=region.weight,
            usable=peer.up is not False and (report is None or report.usable),
            draining=name in self.draining or bool(report and report.draining),
            rtt_s=peer.rtt_s,
            inflight_tokens=report.inflight_tokens if report else 0,
            wait_s=report.wait_s if report else None,
        )

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._config.health.interval_s)
            try:
                await self.ask_all()
            except Exception:  # the watch must go on: a fault here would freeze what is known of every peer
                log.exception("asking peers failed inside the proxy")

    def _why(self, peer: Peer, error: Exception) -> str:
        if isinstance(error, aiohttp.ClientConnectorError):
            return f"{peer.url} cannot be reached: {reason_of(error.os_error)}"
        if isinstance(error, TimeoutError):
            return f"{peer.url} does not answer within {self._config.health.timeout_s:g} s"
        return str(error) or type(error).__name__

    async def _ask(self, peer: Peer) -> None:
        assert self._session is not None, "started"
        began_s = self._clock()
        try:
            async with (
                within(self._config.health.timeout_s),
                self._session.get(
                    f"{peer.url}/homeport/v1/region",
                    headers=peer.headers(),
                    ssl=client_tls(peer.region.tls),
                    allow_redirects=False,
                ) as answer,
            ):
                body = await answer.content.read(1 << 20)
                if answer.status != 200:
                    raise ValueError(f"{peer.url} answers {answer.status} to its peers; check its key")
                report = msgspec.json.decode(body, type=RegionReport)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RecursionError, ConfigError) as error:
            refused = isinstance(error, aiohttp.ClientConnectorError)
            peer.error = self._why(peer, error)
            self.failed(peer, refused=refused)
            return
        peer.recent_rtt_s.append(self._clock() - began_s)
        peer.report, peer.up, peer.failed, peer.error = report, True, 0, None
