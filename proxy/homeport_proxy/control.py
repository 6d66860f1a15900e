"""The control plane as one object: configuration in force, fleet and health, tenants, regions, routers, books, drains.

The data plane asks it who may come in, where a request goes and what became of it; people ask it through the admin API.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from aiohttp import web

from homeport_engines.base import EngineStats
from homeport_engines.sglang import telemetry as sglang_telemetry
from homeport_engines.vllm import telemetry as vllm_telemetry
from homeport_proxy import carrying
from homeport_proxy import config as configuration
from homeport_proxy.account import Account, Listener
from homeport_proxy.admit import Admission
from homeport_proxy.books import LocalBooks
from homeport_proxy.config import Config, ConfigError
from homeport_proxy.discovery import Discoverer
from homeport_proxy.exchange import Exchange
from homeport_proxy.fleet import Fleet, Member
from homeport_proxy.health import Health
from homeport_proxy.identity import Identities
from homeport_proxy.kv_feed import KvFeed
from homeport_proxy.limits import LocalLimits
from homeport_proxy.observe import admin
from homeport_proxy.observe.logs import AccessLog
from homeport_proxy.observe.metrics import Metrics
from homeport_proxy.observe.prometheus import Sample
from homeport_proxy.observe.recording import Recorder
from homeport_proxy.observe.tracing import Tracing
from homeport_proxy.observe.writer import BackgroundWriter
from homeport_proxy.peers import RegionReport, Regions
from homeport_proxy.placer import LocalPlacer
from homeport_proxy.region import RegionView
from homeport_proxy.routing.decisions import dump as dump_decision
from homeport_proxy.routing.router import Router
from homeport_proxy.routing.views import (
    USABLE,
    DecisionRecord,
    PlaceStatus,
    RouterStatus,
    RoutingSettings,
    State,
)
from homeport_proxy.state import Alone, Drain, Load, RedisState
from homeport_proxy.state import State as StateStore

log = logging.getLogger(__name__)

WATCH_FILES_S = 1.0
STATUS_KEPT_S = 0.05


class Control:
    """Built from a configuration, then ``start``ed. Raises ConfigError for one that must not be served.

    ``config_path``: watched for changes; None: never reloaded. ``insecure``: an open proxy may listen anywhere.
    """

    def __init__(self, config: Config, *, config_path: Path | None = None, insecure: bool = False) -> None:
        self._insecure = insecure
        check(config, insecure=insecure)
        self.config = config
        self.config_path = config_path
        self.started_unix_s = time.time()
        self.stopping = False
        self.reload_fault: str | None = None
        self._clock = time.monotonic
        self._changed_ns = _changed_ns(config_path)
        self._status: dict[str, tuple[float, RouterStatus]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.metrics = Metrics()
        self.state = self._shared_state(config)
        self.routers: dict[str, Router] = {}
        self.placer = LocalPlacer(self.routers, lambda: self.config.limits.queue, self.state, self._clock)
        self.fleet = Fleet(config)
        self.health = Health(
            self.fleet,
            config.health,
            telemetry=read_telemetry,
            on_state=self._state_changed,
            on_stats=self._stats_came,
            on_cool=self._cooled,
            clock=self._clock,
        )
        self.kv_feed = KvFeed(config.health.timeout_s)
        self.discoverer = Discoverer(self.fleet)
        self.admission = Admission(config.tenants, self.state.limits)
        self.regions = Regions(config, self._local_view, self._allowed_regions, self._clock)
        identities = Identities(config.affinity.max_sessions)
        self.books = LocalBooks(identities, self.regions)
        self.recorder = Recorder(config.record)
        self.access_log = AccessLog(config.log)
        self._decisions = decision_log(config)
        listeners: list[Listener] = [self.access_log]
        if config.tracing.enabled:
            listeners.append(Tracing())
        self.account = Account(
            config,
            self.metrics,
            self.fleet.has_model,
            listeners,
            at_once=[lambda e: self.regions.ended(e.session, e.request_id), self.recorder],
            booked=self.access_log.flush,
        )
        self.metrics.watch(self)
        self.fleet.on_change = self._places_changed
        self._places_changed()

    # life

    async def start(self) -> None:
        """Find and probe every backend and peer once, then watch them, discovery and the files until ``stop``."""
        await self.discoverer.start()
        await asyncio.gather(self.health.start(), self.regions.start(), self.state.start(self))
        self._tasks.append(asyncio.create_task(self._watch_files(), name="watch files"))

    async def stop(self) -> None:
        """Stop watching and close the books."""
        self.stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(self.discoverer.stop(), self.health.stop(), self.regions.stop(), self.kv_feed.stop())
        await self.state.stop()
        self.placer.close()
        await asyncio.to_thread(self._close_books)

    def _close_books(self) -> None:
        self.account.close()
        self.recorder.close()
        if self._decisions is not None:
            self._decisions.close()

    def ready(self) -> bool:
        """Whether clients should be sent here: something usable is known and the proxy is not stopping."""
        if self.stopping:
            return False
        peers = any(peer.up for peer in self.regions.peers.values())
        return self.health.ready() or (self.health.started and peers)

    def reload(self) -> bool:
        """Read the file again; a bad one changes nothing and is told in the log and the status. True: taken."""
        if self.config_path is None:
            return False
        self._changed_ns = _changed_ns(self.config_path)
        try:
            # the listener stays as it is: what the command line gave it is not in the file
            config = configuration.load(self.config_path).model_copy(update={"listen": self.config.listen})
            check(config, insecure=self._insecure)
        except ConfigError as error:
            self.reload_fault = (
                f"{self.config_path.name} was not taken, the one before stays: {'; '.join(error.errors)}"
            )
            log.error("%s", self.reload_fault)
            return False
        self.reload_fault = None
        for name in ("state", "record", "ledger", "log", "tracing", "decisions"):
            if getattr(config, name) != getattr(self.config, name):
                log.warning("`%s` changed: that takes a restart", name)
        self.config = config
        self.health.settings = config.health
        self.regions.reconfigure(config)
        self.admission.reconfigure(config.tenants)
        self.account.reconfigure(config)
        for router in self.routers.values():
            router.reconfigure(routing_settings(config))
        self.books.identities.reconfigure(config.affinity.max_sessions)
        self.fleet.reconfigure(config)
        self.discoverer.reconfigure()
        log.info("configuration reloaded")
        return True

    def routes(self) -> list[web.RouteDef]:
        """What people and programs ask the proxy about itself: health, metrics, admin API, dashboard."""
        return admin.routes(self)

    # drains

    def drain(self, name: str, deadline_s: float | None = None, *, carry: bool = False) -> bool:
        """Take a backend or region out: no new sessions; False when there is none of that name. ``carry``: its
        sessions' KV is fetched from it as they move (see :meth:`why_not_carried`)."""
        return self._drain(name, self.config.timeouts.drain_s if deadline_s is None else deadline_s, carry)

    def why_not_carried(self, name: str) -> str | None:
        """Why no session's KV could be fetched from a backend that drains; None when it could."""
        member = self.fleet.members.get(name)
        if member is None:
            return "only a backend of this proxy can hand KV over"
        others = [m for m in self.fleet.members.values() if m is not member and m.region == member.region]
        whys = [carrying.why_not(member.backend, other.backend) for other in others]
        return None if None in whys else next(iter(whys), "there is no other backend in its region")

    def undrain(self, name: str) -> bool:
        """Take it back; False when there is none of that name."""
        return self._drain(name, None)

    def _drain(self, name: str, deadline_s: float | None, carry: bool = False) -> bool:
        if not self._set_drain(name, deadline_s, carry):
            return False
        self.state.drains_changed()
        return True

    def _set_drain(self, name: str, deadline_s: float | None, carry: bool = False) -> bool:
        member = self.fleet.members.get(name)
        if member is not None:
            if deadline_s is None:
                self.health.undrain(member)
            else:
                self.health.drain(member, deadline_s, carry=carry)
            return True
        if name not in self.config.regions:
            return False
        if deadline_s is None:
            self.regions.draining.discard(name)
        else:
            self.regions.draining.add(name)
        return True

    # what is shared with other proxies

    def own_load(self) -> dict[str, Load]:
        return {p.name: Load(p.requests, p.prefill_tokens, p.decode_tokens) for p in self.places() if p.requests}

    def foreign_load(self, load: Mapping[str, Load]) -> None:
        for router in self.routers.values():
            for place in router.status(self._clock()).places:
                one = load.get(place, Load())
                router.foreign_load(
                    place,
                    requests=one.requests,
                    prefill_tokens=one.prefill_tokens,
                    decode_tokens=one.decode_tokens,
                )

    def own_drains(self) -> dict[str, Drain]:
        now_s, now_unix_s = self._clock(), time.time()
        drained = {
            member.name: Drain(now_unix_s + member.draining_until_s - now_s, member.carry)
            for member in self.fleet.members.values()
            if member.draining_until_s is not None
        }
        return drained | dict.fromkeys(self.regions.draining, Drain(now_unix_s))

    def follow_drains(self, drains: Mapping[str, Drain]) -> None:
        now_unix_s = time.time()
        own = self.own_drains()
        for name in own.keys() - drains.keys():
            self._set_drain(name, None)
        for name, drain in drains.items():
            if name not in own or own[name].carry != drain.carry:
                self._set_drain(name, max(0.0, drain.until_unix_s - now_unix_s), drain.carry)

    # what is known

    def router_status(self, region: str) -> RouterStatus | None:
        """A local region's router at a glance, at most :data:`STATUS_KEPT_S` old."""
        router = self.routers.get(region)
        if router is None:
            return None
        now_s = self._clock()
        at_s, status = self._status.get(region, (-1.0, None))
        if status is None or now_s - at_s > STATUS_KEPT_S:
            status = router.status(now_s)
            self._status[region] = (now_s, status)
        return status

    def places(self) -> list[PlaceStatus]:
        """Every place of every local region."""
        found = [self.router_status(region) for region in self.routers]
        return [place for status in found if status is not None for place in status.places.values()]

    def degraded(self) -> list[str]:
        """Everything that does not work as configured, one sentence each."""
        said = [self.reload_fault] if self.reload_fault else []
        said += [f"keys: {fault}" for fault in self.admission.faults]
        said += self.state.degraded()
        said += self.discoverer.degraded() + self.health.degraded() + self.regions.degraded() + self._without_prefill()
        for region in self.routers:
            status = self.router_status(region)
            said += status.degraded if status else ()
        said += self.recorder.degraded()
        said += self._decisions.degraded("decision log") if self._decisions else []
        if self.account.ledger.error:
            said.append(f"ledger: {self.account.ledger.error}")
        return said

    def report(self) -> RegionReport:
        """What peers are told of the region this proxy stands in."""
        view = self._local_view(self.config.region)
        return RegionReport(view.name, view.usable, view.draining, view.inflight_tokens, view.wait_s)

    # gauges

    def inflight_tokens(self) -> Iterable[Sample]:
        for place in self.places():
            yield (place.name, "prefill"), place.prefill_tokens
            yield (place.name, "decode"), place.decode_tokens

    def backend_up(self) -> Iterable[Sample]:
        for member in self.fleet.members.values():
            yield (member.name,), float(self.health.state(member) in ("up", "draining"))

    def sessions(self) -> Iterable[Sample]:
        yield (), self.session_count()

    def session_count(self) -> int:
        """Sessions remembered in all local regions."""
        return sum(status.sessions for region in self.routers if (status := self.router_status(region)) is not None)

    def spec_acceptance(self) -> Iterable[Sample]:
        for place in self.places():
            if place.spec_acceptance is not None:
                yield (place.name,), place.spec_acceptance

    def index_confidence(self) -> Iterable[Sample]:
        for place in self.places():
            if place.index != "none":
                yield (place.name,), place.confidence

    def wanted_backends(self) -> Iterable[Sample]:
        have: dict[tuple[str, str], int] = {}
        for member in self.fleet.members.values():
            key = (member.backend.pool, member.backend.role)
            have[key] = have.get(key, 0) + 1
        for region in self.routers:
            status = self.router_status(region)
            for pool, role in (status.wanted if status else {}).items():
                have[pool, role] = have.get((pool, role), 0) + 1
        yield from ((key, float(count)) for key, count in have.items())

    # inside

    def _shared_state(self, config: Config) -> StateStore:
        local = LocalLimits(self._clock)
        return (
            Alone(local) if config.state.redis is None else RedisState(config.state.redis, config.state.prefix, local)
        )

    def _places_changed(self) -> None:
        self.kv_feed.keep_only(self.fleet.members)
        for name, region in self.config.regions.items():
            if region.kind == "local":
                router = self.routers.get(name)
                if router is None:
                    router = self.routers[name] = Router(
                        routing_settings(self.config), log=self._decisions.put if self._decisions else None
                    )
                router.set_places(self.fleet.places(name))
        for gone in [name for name in self.routers if name not in self.config.regions]:
            self.routers.pop(gone).set_places([])
        for member in self.fleet.members.values():
            if (router := self.routers.get(member.region)) is not None:
                router.set_share(member.name, self.health.share(member))
            self._tell(member, self.health.routing_state(member), again=False)
        self.placer.wake()

    def _state_changed(self, member: Member, state: State) -> None:
        self._tell(member, state, again=True)
        self.placer.wake()

    def _tell(self, member: Member, state: State, *, again: bool) -> None:
        router = self.routers.get(member.region)
        if router is not None:
            router.set_state(member.name, state, self._clock())
            if state == "up":
                self.kv_feed.backend_is_up(member, router, again=again)
            self._status.pop(member.region, None)

    def _stats_came(self, place: str, stats: EngineStats) -> None:
        member = self.fleet.member(place)
        if member is not None and (router := self.routers.get(member.region)) is not None:
            router.observe_stats(place, stats, self._clock())

    def _cooled(self, member: Member, until_s: float) -> None:
        if (router := self.routers.get(member.region)) is not None:
            router.cool(member.name, until_s)

    def _local_view(self, name: str) -> RegionView:
        region = self.config.regions[name]
        members = [m for m in self.fleet.members.values() if m.region == name and m.backend.role != "prefill"]
        status = self.router_status(name)
        places = list(status.places.values()) if status else []
        waits = [
            place.prefill_tokens / place.rates.tokens_per_s
            for place in places
            if place.state in USABLE and place.role != "decode"
        ]
        return RegionView(
            name=name,
            weight=region.weight,
            usable=any(self.health.state(member) != "down" for member in members),
            draining=name in self.regions.draining,
            local=name == self.config.region,
            rtt_s=0.0 if name == self.config.region else (region.rtt_ms or 0.0) / 1000,
            inflight_tokens=sum(place.prefill_tokens + place.decode_tokens for place in places),
            wait_s=min(waits, default=None),
        )

    def _allowed_regions(self, exchange: Exchange) -> set[str] | None:
        if self.admission.open and not self.config.models:
            return None
        tenant = self.admission.tenant(exchange.tenant)
        model = self.config.model(exchange.model) if exchange.model and self.config.models else None
        limits = [
            set(holder.regions) for holder in (tenant, model) if holder is not None and holder.regions is not None
        ]
        return set.intersection(*limits) if limits else None

    def _without_prefill(self) -> list[str]:
        pools: dict[tuple[str, str], list[State]] = {}
        for member in self.fleet.members.values():
            if member.backend.role == "prefill":
                pools.setdefault((member.region, member.backend.pool), []).append(self.health.state(member))
        return [
            f"no-prefill: no prefill backend of pool {pool} in {region} is usable; decode backends prefill themselves"
            for (region, pool), states in pools.items()
            if not any(state in USABLE for state in states)
        ]

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(WATCH_FILES_S)
            try:
                if self.config_path is not None and _changed_ns(self.config_path) != self._changed_ns:
                    self.reload()
                if self.admission.reload_keys():
                    log.info("keys reloaded")
            except Exception:  # a fault of ours here must not end the watch: later changes would go unseen
                log.exception("reloading failed inside the proxy; the configuration before stays")


def check(config: Config, *, insecure: bool = False) -> None:
    """Raises ConfigError for a configuration that must not be served: open to others, or keys that cannot be read."""
    refusal = config.refuses_to_listen(insecure)
    faults = ([refusal] if refusal else []) + configuration.missing_secrets(config)
    if faults:
        raise ConfigError(faults)


def routing_settings(config: Config) -> RoutingSettings:
    """The router's settings out of the file's sections."""
    return RoutingSettings(
        policy=config.routing.policy,
        shadow=tuple(config.routing.shadow),
        load_bound=config.routing.load_bound,
        late_binding=config.routing.late_binding,
        overload_context=config.routing.hold_new_sessions_above,
        slice_s=config.routing.slice_s,
        drain_idle_s=config.routing.drain_idle_s,
        index_bytes=config.routing.index_mb * 1024 * 1024,
        min_uncached_tokens=config.disaggregation.min_uncached_tokens,
        idle_ttl_s=config.affinity.idle_ttl_s,
        max_sessions=config.affinity.max_sessions,
    )


def read_telemetry(engine: str, text: str) -> dict[int, EngineStats]:
    """An engine family's metrics by data-parallel rank. Raises ValueError when they are not its metrics."""
    return {"vllm": vllm_telemetry.read, "sglang": sglang_telemetry.read}[engine](text)


def decision_log(config: Config) -> BackgroundWriter[DecisionRecord] | None:
    """The writer of the decision log, None without one. Raises ConfigError when its file cannot be written."""
    if config.decisions.file is None:
        return None
    try:
        config.decisions.file.parent.mkdir(parents=True, exist_ok=True)
        file = config.decisions.file.open("ab", buffering=0)
    except OSError as error:
        raise ConfigError([f"decisions.file: cannot write {config.decisions.file}: {error.strerror}"]) from None

    def write(record: DecisionRecord) -> None:
        file.write(dump_decision(record))

    return BackgroundWriter("decisions", write, file.close)


def _changed_ns(path: Path | None) -> int | None:
    try:
        return None if path is None else path.stat().st_mtime_ns
    except OSError:
        return -1
