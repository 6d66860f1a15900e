"""One simulated run: a workload through a cluster under one policy, in virtual time, by the production router."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from homeport_engines.vllm.kv import KvBatch
from homeport_proxy.routing.index import Index
from homeport_proxy.routing.index.lru import PrefixLru
from homeport_proxy.routing.policies import POLICIES, Policy
from homeport_proxy.routing.router import Router
from homeport_proxy.routing.views import PlaceSpec, PrefixKeys, RequestView, RoutingSettings, Ticket, Word
from homeport_proxy.simulate.cluster import Cluster
from homeport_proxy.simulate.engine import Job, SimEngine
from homeport_proxy.simulate.oracle import OracleIndex
from homeport_proxy.simulate.peers import ONE_CACHE, PEERS
from homeport_proxy.simulate.result import Sample, Samples
from homeport_proxy.simulate.steps import SteppedEngine
from homeport_proxy.simulate.workload import Call, Lane, Workload

MODEL = "m"


@dataclass(frozen=True, slots=True)
class Failure:
    """An engine that dies at ``down_s`` and comes back with an empty cache at ``up_s`` (None: never)."""

    engine: str
    down_s: float
    up_s: float | None = None


@dataclass(slots=True, eq=False)
class LaneRun:
    """A lane being played: its next call, its session digest, who follows it."""

    lane: Lane
    parent: str | None
    next_call: int = 0
    followers: dict[int, list[int]] = field(default_factory=dict)
    region: str = ""


Event = tuple[float, int, Callable[[], None]]


class Simulation:
    """Plays a workload; ``run`` returns the samples of the measured window."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        policy: str,
        *,
        seed: int = 0,
        settings: RoutingSettings | None = None,
        rule: Policy | None = None,
        queue_for_peers: bool = False,
        failures: Sequence[Failure] = (),
        whole: bool = False,
    ) -> None:
        self.workload = workload
        self.cluster = cluster
        self.rng = Random(seed)
        self.now_s = 0.0
        self._events: list[Event] = []
        self._serial = 0
        self._wake_s = float("inf")
        self.samples = Samples()
        self.engines = _engines(cluster, policy, seed)
        self._region_of = _region_of(cluster)
        self.router = self._router(policy, seed, settings or RoutingSettings(), rule, queue_for_peers)
        self._lanes: list[LaneRun] = []
        self._jobs: dict[Ticket, Job] = {}
        self._requests = 0
        self._measuring = 0
        self._whole = whole
        for failure in failures:
            self._plan(failure)

    def _router(
        self, policy: str, seed: int, settings: RoutingSettings, rule: Policy | None, queue_for_peers: bool
    ) -> Router:
        cluster = self.cluster
        index: Index | None = None
        if policy == ONE_CACHE:
            index = OracleIndex(self.engines, cluster.block_tokens)
        if policy in PEERS:
            rule = rule or PEERS[policy]()
            settings = replace(settings, late_binding=queue_for_peers)
        elif policy in POLICIES:
            settings = replace(settings, policy=policy)  # type: ignore[arg-type]
        router = Router(settings, seed=seed, policy=rule, index=index)
        router.set_places(_specs(cluster, self.engines))
        for name, engine in self.engines.items():
            router.set_state(name, "up", 0.0)
            if cluster.index == "exact" and policy != ONE_CACHE:
                router.kv_follow(name)
                engine.tell = self._telling(router, name)
        return router

    def _telling(self, router: Router, place: str) -> Callable[[KvBatch], None]:
        """An engine's events reach the router ``telemetry_lag_s`` late, and in order."""

        def tell(batch: KvBatch) -> None:
            self.at(self.now_s + self.cluster.telemetry_lag_s, lambda: _heard(router, place, batch))

        return tell

    # -- the clock ---------------------------------------------------------------------------------------------------

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do ``action`` at ``time_s``."""
        self._serial += 1
        heapq.heappush(self._events, (time_s, self._serial, action))

    def run(self) -> Samples:
        """Play everything. What happens at one moment is all known before anything is sent."""
        span_s = self._start()
        start, end = self.cluster.window
        self.samples.window_s = (0.0, math.inf) if self._whole else (start * span_s, end * span_s)
        events = self._events
        while events:
            self.now_s = events[0][0]
            if self.now_s > self.samples.window_s[1] and not self._measuring:
                break  # what comes after the window changes nothing in it
            while events and events[0][0] <= self.now_s:
                heapq.heappop(events)[2]()
            self._pump()
        return self.samples

    def _start(self) -> float:
        workload, cluster = self.workload, self.cluster
        regions = self._regions()
        conversations = list(workload.conversations)
        # a seed is an order: open-loop traces with a coarse clock do not tell who came first within a tick
        self.rng.shuffle(conversations)
        if workload.closed:
            gap_s = cluster.sessions.spread_s_per_session
            for number, conversation in enumerate(conversations):
                first = len(self._lanes)
                region = regions(number)
                for lane in conversation.lanes:
                    parent = None if lane is conversation.lanes[0] else conversation.name
                    self._lanes.append(LaneRun(lane, parent, region=region))
                for offset, lane in enumerate(conversation.lanes):
                    if lane.after is not None:
                        self._lanes[first].followers.setdefault(lane.after, []).append(first + offset)
                    else:
                        # the first call's own delay is the client's before the session began
                        delay_s = lane.calls[0].wait_s if offset else 0.0
                        self._arrive_at(number * gap_s + delay_s, first + offset)
            return gap_s * len(conversations)
        last_s = 0.0
        for number, conversation in enumerate(conversations):
            region = regions(number)
            for lane in conversation.lanes:
                self._lanes.append(LaneRun(lane, None, region=region))
                for position, call in enumerate(lane.calls):
                    time_s = call.wait_s / cluster.rate_scale
                    last_s = max(last_s, time_s)
                    self._open_arrival(time_s, len(self._lanes) - 1, position)
        return last_s

    def _regions(self) -> Callable[[int], str]:
        names = list(self.cluster.regions)
        weights = [self.cluster.regions[name].share for name in names]
        if not names:
            return lambda _: ""
        return lambda _: self.rng.choices(names, weights)[0]

    def _arrive_at(self, time_s: float, lane: int) -> None:
        self.at(time_s, lambda: self._arrive(lane, self._lanes[lane].next_call))

    def _open_arrival(self, time_s: float, lane: int, position: int) -> None:
        self.at(time_s, lambda: self._arrive(lane, position))

    # -- a request ---------------------------------------------------------------------------------------------------

    def _arrive(self, lane: int, position: int) -> None:
        run = self._lanes[lane]
        call = run.lane.calls[position]
        run.next_call = position + 1
        self._requests += 1
        last = position + 1 == len(run.lane.calls)
        request = RequestView(
            request_id=f"r{self._requests}",
            api="chat",
            model=MODEL,
            session=run.lane.name if self.cluster.session_ids else f"r{self._requests}",
            prompt_tokens=call.prompt_tokens,
            prefix=self._prefix(call),
            sliceable=self.cluster.slices,
            rtt_s=self._distances(run.region),
            parent=run.parent,
            kind="subagent" if run.parent else "main",
            final=last and self.cluster.end_hints,
        )
        ticket = self.router.arrive(request, self.now_s)
        self._measuring += self.now_s <= self.samples.window_s[1]
        self._jobs[ticket] = Job(ticket, call, lane, self.now_s)

    def _prefix(self, call: Call) -> PrefixKeys:
        tokens = {self.cluster.block_tokens: call.keys} if self.cluster.index == "exact" else {}
        return PrefixKeys(text_blocks=call.keys, token_blocks=tokens)

    def _distances(self, origin: str) -> dict[str, float]:
        """Round trips from a region to the engines of the others (s)."""
        if not origin:
            return {}
        regions = self.cluster.regions
        return {
            name: max(regions[origin].rtt_ms, regions[place].rtt_ms) / 1000
            for name, place in self._region_of.items()
            if place != origin
        }

    def _pump(self) -> None:
        for ticket in self.router.due(self.now_s):
            self._dispatch(self._jobs[ticket])
        next_s = self.router.next_due_s(self.now_s)
        if next_s is not None and (next_s < self._wake_s or self._wake_s <= self.now_s):
            self._wake_s = max(next_s, self.now_s + 1e-6)
            self.at(self._wake_s, lambda: None)

    def _dispatch(self, job: Job) -> None:
        decision = job.ticket.decision
        if decision is None:
            raise RuntimeError(f"the cluster cannot serve a request: {job.ticket.refused}")
        job.host = self.engines[decision.place]
        job.rtt_s = job.ticket.request.rtt_s.get(decision.place, 0.0)
        engine = self.engines[decision.prefill_place or decision.place]
        engine.waiting.append(job if job.ticket.part_tokens is None else self._part(job, job.ticket.part_tokens))
        self._keep_busy(engine)

    def _part(self, job: Job, tokens: int) -> Job:
        """The first ``tokens`` of a request's prompt as a request of their own."""
        call = job.call
        part = Call(tokens, 1, call.keys[: tokens // self.cluster.block_tokens], call.wait_s)
        return Job(job.ticket, part, job.lane, job.arrived_s, host=job.host, attempt=job.attempt, part_of=job)

    def _keep_busy(self, engine: SimEngine) -> None:
        end_s = engine.begin(self.now_s)
        if end_s is not None:
            serial = engine.serial
            self.at(end_s, lambda: self._ended(engine, serial))

    def _ended(self, engine: SimEngine, serial: int) -> None:
        if engine.serial != serial:
            return  # the engine died meanwhile, or goes on otherwise than planned
        prefilled, finished = engine.end(self.now_s)
        self._keep_busy(engine)
        for job in prefilled:
            self._prefilled(engine, job)
        for job in finished:
            self._finished(job, engine, job.attempt)

    def _prefilled(self, engine: SimEngine, job: Job) -> None:
        host, attempt = job.host, job.attempt
        if host is None:
            raise RuntimeError("a prefill without a host")
        if job.part_of is not None:
            self._sliced(job, job.part_of)
            return
        if host is engine:
            self._first_token(job, host)
            return
        self.router.prefill_done(job.ticket, self.now_s, job.cached_tokens)
        held = min(host.cache.match(job.call.keys) * host.block_tokens, job.call.prompt_tokens)
        transfer_s = (job.call.prompt_tokens - held) / host.rates.transfer_tokens_per_s
        self.at(self.now_s + transfer_s, lambda: self._first_token(job, host) if job.attempt == attempt else None)

    def _sliced(self, part: Job, job: Job) -> None:
        if part.attempt != job.attempt:
            return  # the engine died meanwhile
        job.host = None
        if job.found_tokens is None:
            job.found_tokens = part.cached_tokens
        self.router.sliced(job.ticket, self.now_s, cached_tokens=part.cached_tokens, ok=True)

    def _first_token(self, job: Job, host: SimEngine) -> None:
        attempt = job.attempt
        job.first_token_s = self.now_s
        if job.ticket.decision is not None and job.ticket.decision.prefill_place is not None:
            host.receive(job)
        self.router.first_token(job.ticket, self.now_s)
        end_s = host.start_decode(job, self.now_s)
        if end_s is not None:
            self.at(end_s, lambda: self._finished(job, host, attempt))
        else:
            self._keep_busy(host)

    def _finished(self, job: Job, host: SimEngine, attempt: int) -> None:
        if job.attempt != attempt:
            return  # the engine died meanwhile
        host.end_decode(job)
        call = job.call
        if job.found_tokens is not None:
            job.cached_tokens = job.found_tokens
        self.router.finished(
            job.ticket,
            self.now_s,
            prompt_tokens=call.prompt_tokens,
            cached_tokens=job.cached_tokens,
            output_tokens=call.output_tokens,
            ok=True,
        )
        del self._jobs[job.ticket]
        self._measuring -= job.arrived_s <= self.samples.window_s[1]
        self._record(job, host)
        run = self._lanes[job.lane]
        if not self.workload.closed:
            return
        done = run.next_call - 1
        for follower in run.followers.pop(done, []):
            self._arrive_at(self.now_s + self._lanes[follower].lane.calls[0].wait_s, follower)
        if run.next_call < len(run.lane.calls):
            self._arrive_at(self.now_s + run.lane.calls[run.next_call].wait_s, job.lane)

    # -- failures ----------------------------------------------------------------------------------------------------

    def _plan(self, failure: Failure) -> None:
        self.at(failure.down_s, lambda: self._fail(failure.engine))
        if failure.up_s is not None:
            self.at(failure.up_s, lambda: self._revive(failure.engine))

    def _fail(self, name: str) -> None:
        """The engine dies: what waits there is tried elsewhere, what was being answered is asked again."""
        engine = self.engines[name]
        self.router.set_state(name, "down", self.now_s)
        lost = [job for job in self._jobs.values() if job.host is engine]
        engine.crash()
        for job in lost:
            job.attempt += 1
            if job.first_token_s:
                self.router.cancel(job.ticket, self.now_s)
                del self._jobs[job.ticket]
                self._measuring -= job.arrived_s <= self.samples.window_s[1]
                self._ask_again(job)
            elif self.router.again(job.ticket, frozenset({name}), self.now_s) is not None:
                self._dispatch(job)

    def _ask_again(self, job: Job) -> None:
        run = self._lanes[job.lane]
        position = run.lane.calls.index(job.call)
        self.at(self.now_s, lambda: self._arrive(job.lane, position))

    def _revive(self, name: str) -> None:
        self.router.set_state(name, "up", self.now_s)

    def _record(self, job: Job, host: SimEngine) -> None:
        decision = job.ticket.decision
        if decision is None:
            return
        output = job.call.output_tokens
        decode_s = self.now_s - job.first_token_s
        stretched = host.stretched(job.first_token_s, self.now_s)
        self.samples.add(
            Sample(
                arrived_s=job.arrived_s,
                ttft_s=job.first_token_s - job.arrived_s + job.rtt_s,
                prompt_tokens=job.call.prompt_tokens,
                cached_tokens=job.cached_tokens,
                moved=decision.word not in (Word.HOME, Word.PLACED),
                crossed=job.rtt_s > 0,
            )
        )
        self.samples.gaps(job.arrived_s, decode_s / max(output, 1), output, stretched)
        if self._requests % 64 == 0:
            oldest = min((other.first_token_s or other.arrived_s for other in self._jobs.values()), default=self.now_s)
            for engine in self.engines.values():
                engine.forget_before(oldest)


def _engines(cluster: Cluster, policy: str, seed: int) -> dict[str, SimEngine]:
    rng = Random(seed + 7919)
    blocks = cluster.cache_tokens // cluster.block_tokens
    names = _names(cluster)
    shared = PrefixLru(blocks * len(names)) if policy == ONE_CACHE else None
    engines = {}
    for name, _ in names:
        rates = cluster.rates
        if cluster.uneven:
            rates = replace(rates, tokens_per_s=rates.tokens_per_s * (1 + cluster.uneven * rng.uniform(-1, 1)))
        engines[name] = (SteppedEngine if cluster.steps else SimEngine)(
            name,
            rates,
            PrefixLru(blocks) if shared is None else shared,
            cluster.block_tokens,
            cluster.chunk_tokens,
            cluster.noise,
            shared is not None,
            Random(rng.random()),
        )
    return engines


def _heard(router: Router, place: str, batch: KvBatch) -> None:
    router.kv_events(place, batch)


def _region_of(cluster: Cluster) -> dict[str, str]:
    """Each engine's region, in the order of the file; empty without regions."""
    places = [region for region, members in cluster.regions.items() for _ in range(members.replicas)]
    return {f"e{number}": region for number, region in enumerate(places)}


def _names(cluster: Cluster) -> list[tuple[str, str]]:
    if cluster.prefill_replicas:
        return [(f"p{n}", "prefill") for n in range(cluster.prefill_replicas)] + [
            (f"d{n}", "decode") for n in range(cluster.decode_replicas)
        ]
    return [(f"e{n}", "mixed") for n in range(_replicas(cluster))]


def _replicas(cluster: Cluster) -> int:
    return sum(region.replicas for region in cluster.regions.values()) or cluster.replicas


def _specs(cluster: Cluster, engines: dict[str, SimEngine]) -> list[PlaceSpec]:
    split = bool(cluster.prefill_replicas)
    return [
        PlaceSpec(
            name=name,
            backend=name,
            role=role,  # type: ignore[arg-type]
            models=frozenset({MODEL}),
            kv_transfer="nixl" if split else "none",
            rates=cluster.rates,
            kv_capacity_tokens=cluster.cache_tokens,
        )
        for name, role in _names(cluster)
    ]
