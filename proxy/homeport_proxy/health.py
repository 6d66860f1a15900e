"""Which backends can be used: probes at an interval, what requests meet, breakers per leg, slow start, drains.

A refused connection marks a backend down at once. A probe that fails says less than a request that succeeded: while
answers keep coming, failed probes are overruled. Back-pressure (429, 503) and 4xx never count against a backend. When
open breakers would leave (almost) nobody, they are ignored: a whole fleet in trouble must not lock everybody out.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from homeport_engines.base import EngineStats
from homeport_engines.registry import kind
from homeport_proxy.breaker import Breaker, Result
from homeport_proxy.config import Health as HealthSettings
from homeport_proxy.fleet import Fleet, Member
from homeport_proxy.probe import Alive, ProbeError, Prober
from homeport_proxy.routing.views import USABLE, State

Part = Literal["prefill", "serve"]
Telemetry = Callable[[str, str], Mapping[int, EngineStats]]
"""Reads an engine family's metrics text: (engine, text) -> stats by data-parallel rank. Raises ValueError."""

ASK_MODELS_EVERY_S = 30.0
log = logging.getLogger(__name__)


class Health:
    """Watches a fleet. ``on_state`` hears every change of a backend's state, ``on_stats`` every scrape by place."""

    def __init__(
        self,
        fleet: Fleet,
        settings: HealthSettings,
        *,
        telemetry: Telemetry | None = None,
        on_state: Callable[[Member, State], None] = lambda *_: None,
        on_stats: Callable[[str, EngineStats], None] = lambda *_: None,
        on_cool: Callable[[Member, float], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
        wake_in: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        self.fleet = fleet
        self.settings = settings
        self._telemetry = telemetry
        self._on_state = on_state
        self._on_stats = on_stats
        self._on_cool = on_cool
        self._clock = clock
        self._wake_in = wake_in
        self._told: dict[str, State] = {}
        self._asked_models_s: dict[str, float] = {}
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._ramping: set[str] = set()
        self._loop_task: asyncio.Task[None] | None = None
        self._prober: Prober | None = None

    # what is known

    def state(self, member: Member) -> State:
        """The backend's state now, for people: ``draining`` until it is undrained, ``down`` beats everything."""
        now_s = self._clock()
        if self._unreachable(member, now_s) or (self._broken(member, now_s) and member not in self.panicking()):
            return "down"
        if member.draining_until_s is not None:
            return "draining"
        if self._broken(member, now_s) or not (member.probed or member.last_success_s is not None):
            return "unknown"
        return "up"

    def routing_state(self, member: Member) -> State:
        """The state the router is told: a drain past its deadline keeps nobody any longer."""
        state = self.state(member)
        if state == "draining" and self._clock() >= (member.draining_until_s or 0.0):
            return "drained"
        return state

    def ready(self) -> bool:
        """Every backend was probed once and one that can answer clients is usable."""
        serving = [m for m in self.fleet.members.values() if m.backend.role != "prefill"]
        return self.started and any(self.state(m) in USABLE for m in serving)

    @property
    def started(self) -> bool:
        """Every backend was probed once."""
        return self._loop_task is not None

    def share(self, member: Member) -> float:
        """The share of its capacity a backend gets: it grows from a tenth after a recovery (slow start)."""
        if member.recovered_s is None:
            return 1.0
        return min(1.0, max(0.1, (self._clock() - member.recovered_s) / self.settings.slow_start_s))

    def panicking(self) -> set[Member]:
        """Members whose open breaker is ignored, because heeding all would leave too few of their kind."""
        now_s = self._clock()
        found: set[Member] = set()
        for group in self._groups():
            reachable = [m for m in group if not self._unreachable(m, now_s)]
            broken = [m for m in reachable if self._broken(m, now_s)]
            if broken and len(reachable) - len(broken) < self.settings.panic_threshold * len(group):
                found.update(broken)
        return found

    def degraded(self) -> list[str]:
        """What does not work as configured, one sentence each."""
        said = [
            f"{m.name}: down, {m.fault or 'its requests fail'}"
            for m in self.fleet.members.values()
            if self.state(m) == "down"
        ]
        said += [f"{m.name}: {note}" for m in self.fleet.members.values() for note in m.notes.values()]
        if panicking := sorted(m.name for m in self.panicking()):
            said.append(f"{', '.join(panicking)}: used in spite of failing, nobody else is left")
        return said

    # what requests meet

    def sent(self, place: str, part: Part) -> None:
        """A leg was sent to a place. Every call is followed by one of ``ended``."""
        member = self.fleet.member(place)
        if member is not None and (leg := self._leg(member, part)).open_until_s is not None:  # closed: nothing to note
            leg.sent(self._clock())
            self.refresh([member])

    def ended(self, place: str, part: Part, result: Result, *, retry_after_s: float | None = None) -> None:
        """A leg ended or proved itself (headers or a first token are enough for a success).

        ``retry_after_s``: what the engine asked for; it keeps new sessions away for that long.
        """
        member = self.fleet.member(place)
        if member is None:
            return
        now_s = self._clock()
        leg = self._leg(member, part)
        # nearly always: no state can change by it
        if result is Result.SUCCESS and leg.open_until_s is None and self._well(member):
            leg.ended(result, now_s)
            member.last_success_s = now_s
            return
        leg.ended(result, now_s)
        if result is Result.SUCCESS:
            self._recover(member, now_s)
            member.last_success_s = now_s
        elif result is Result.REFUSED:
            member.refused = True
            member.fault = "refuses connections"
        if retry_after_s is not None and retry_after_s > 0:
            member.cool_until_s = now_s + min(retry_after_s, self.settings.max_cool_s)
            self._on_cool(member, member.cool_until_s)
        if leg.open_until_s is not None and leg.open_until_s > now_s:
            self._later(leg.open_until_s - now_s)
        self.refresh([member])

    # drains

    def drain(self, member: Member, deadline_s: float, *, carry: bool = False) -> None:
        """Take no new sessions; bound ones go on until idle, at most ``deadline_s`` from now. ``carry``: their KV is
        fetched from it when they move."""
        member.draining_until_s = self._clock() + deadline_s
        member.carry = carry
        self._later(deadline_s)
        self.refresh([member])

    def undrain(self, member: Member) -> None:
        """Back into service."""
        member.draining_until_s = None
        member.carry = False
        self.refresh([member])

    # probing

    async def start(self) -> None:
        """Probe every backend once, then go on at the interval until ``stop``."""
        self._prober = await Prober(self.settings.timeout_s).__aenter__()
        await self.probe_all()
        self._loop_task = asyncio.create_task(self._run(), name="health")

    async def stop(self) -> None:
        """Stop probing and close what is open."""
        tasks = [*self._probing.values(), *([self._loop_task] if self._loop_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._prober is not None:
            await self._prober.__aexit__(None, None, None)

    async def probe_all(self) -> None:
        """Probe every backend now; returns when all answered or timed out."""
        await asyncio.gather(*(self._probe(member) for member in list(self.fleet.members.values())))

    def refresh(self, members: Iterable[Member] | None = None) -> None:
        """Tell of every state that changed, by an event or by time alone."""
        panic_or_all = self.fleet.members.values() if members is None or self._any_broken() else members
        for member in list(panic_or_all):
            state = self.routing_state(member)
            if self._told.get(member.name) != state:
                self._told[member.name] = state
                self._on_state(member, state)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.settings.interval_s)
            try:
                self._round()
            except Exception:  # the watch must go on whatever one round meets
                log.exception("a round of probes failed inside the proxy")

    def _round(self) -> None:
        for name, member in self.fleet.members.items():
            if name not in self._probing:
                task = asyncio.create_task(self._probe(member), name=f"probe {name}")
                self._probing[name] = task
                task.add_done_callback(functools.partial(self._probed, name))
        for gone in self._told.keys() - self.fleet.members.keys():
            del self._told[gone]
        ramping = {m.name for m in self.fleet.members.values() if self.share(m) < 1.0}
        if ramping or self._ramping:
            self.fleet.touch()  # once more after the last: it has its full share then
        self._ramping = ramping
        self.refresh()

    def _probed(self, name: str, task: asyncio.Task[None]) -> None:
        self._probing.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("probe of %s failed inside the proxy", name, exc_info=error)

    async def _probe(self, member: Member) -> None:
        assert self._prober is not None, "started"
        alive, fault = await self._prober.alive(member.backend)
        now_s = self._clock()
        member.fault = fault
        if alive is Alive.YES:
            recovered = self._recover(member, now_s)
            await self._ask(member, again=recovered)
        else:
            member.refused = member.refused or alive is Alive.REFUSED
            member.failed_probes += 1
        member.probed = True
        self.refresh([member])

    async def _ask(self, member: Member, again: bool) -> None:
        assert self._prober is not None, "started"
        asked_s = self._asked_models_s.get(member.name)
        due = asked_s is None or self._clock() - asked_s >= ASK_MODELS_EVERY_S
        if again or due or member.models is None:
            try:
                served = await self._prober.served(member.backend)
            except ProbeError as error:
                strange = f", which is not like {member.backend.engine}" if error.no_such_page else ""
                member.notes["models"] = f"{error}{strange}; its models are not known"
            else:
                member.notes.pop("models", None)
                self._asked_models_s[member.name] = self._clock()
                listed = member.backend.models
                self.fleet.learned(
                    member, models=served.models if listed is None else frozenset(listed), max_len=served.max_model_len
                )
        await self._scrape(member)

    async def _scrape(self, member: Member) -> None:
        assert self._prober is not None, "started"
        path = kind(member.backend.engine).metrics_path
        if path is None or self._telemetry is None:
            return
        try:
            stats = self._telemetry(member.backend.engine, await self._prober.get(member.backend, path))
        except (ProbeError, ValueError) as error:
            member.notes["telemetry"] = f"{error}; load is known from this proxy's own requests only"
            return
        member.notes.pop("telemetry", None)
        self.fleet.measured(member, stats)
        for rank, place in enumerate(member.place_names()):
            if (found := stats.get((member.ranks or (0,))[rank])) is not None:
                self._on_stats(place, found)

    # helpers

    def _well(self, member: Member) -> bool:
        return not member.refused and not member.failed_probes and self._told.get(member.name) == "up"

    def _recover(self, member: Member, now_s: float) -> bool:
        was_down = self._unreachable(member, now_s)
        member.refused = False
        member.failed_probes = 0
        if was_down and member.probed:
            member.recovered_s = now_s
            self.fleet.touch()
        return was_down

    def _unreachable(self, member: Member, now_s: float) -> bool:
        if member.refused:
            return True
        if member.failed_probes < self.settings.fail_after:
            return False
        believed_s = self.settings.timeout_s + self.settings.fail_after * self.settings.interval_s
        return member.last_success_s is None or now_s - member.last_success_s >= believed_s

    def _broken(self, member: Member, now_s: float) -> bool:
        return not self._leg(member, "prefill" if member.backend.role == "prefill" else "serve").allows(now_s)

    def _any_broken(self) -> bool:
        return any(m.prefill_leg.open_until_s or m.serve_leg.open_until_s for m in self.fleet.members.values())

    def _groups(self) -> list[list[Member]]:
        groups: dict[tuple[str, str, bool], list[Member]] = {}
        for member in self.fleet.members.values():
            key = (member.region, member.backend.pool, member.backend.role == "prefill")
            groups.setdefault(key, []).append(member)
        return list(groups.values())

    @staticmethod
    def _leg(member: Member, part: Part) -> Breaker:
        return member.prefill_leg if part == "prefill" else member.serve_leg

    def _later(self, delay_s: float) -> None:
        wake_in = self._wake_in or asyncio.get_running_loop().call_later
        wake_in(delay_s + 0.001, self.refresh)
