"""A simulated engine: a block cache, a FIFO prefill, a decode batch. Virtual time; knows nothing of the router."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from homeport_engines.vllm.kv import BlockRemoved, BlockStored, KvBatch, KvEvent
from homeport_proxy.routing.cost import decode_step_s, prefill_s
from homeport_proxy.routing.index.lru import PrefixLru
from homeport_proxy.routing.views import Rates, Ticket
from homeport_proxy.simulate.workload import Call


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through the cluster; times are virtual seconds."""

    ticket: Ticket
    call: Call
    lane: int
    arrived_s: float
    rtt_s: float = 0.0
    cached_tokens: int = 0
    first_token_s: float = 0.0
    host: SimEngine | None = None
    attempt: int = 0
    computed_tokens: int = 0
    """Of the prompt, cached ones included (engines that compute in steps)."""
    decoding: bool = False
    part_of: Job | None = None
    """The request whose prompt begins with this one."""
    found_tokens: int | None = None
    """Cached tokens that its first part found."""


@dataclass(slots=True, eq=False)
class SimEngine:
    """One replica.

    ``shared``: ``cache`` belongs to all replicas, and a prompt's blocks count as held from the start of its prefill:
    nothing is ever computed twice at the same time, so that no placement can find more cached (the bound).
    """

    name: str
    rates: Rates
    cache: PrefixLru
    block_tokens: int
    chunk_tokens: int
    noise: float = 0.0
    shared: bool = False
    rng: Random = field(default_factory=Random)
    waiting: deque[Job] = field(default_factory=deque)
    running: Job | None = None
    sequences: int = 0
    context_tokens: int = 0
    tell: Callable[[KvBatch], None] | None = None
    """Where KV events go, when the engine publishes them."""
    told: int = 0
    busy_s: float = 0.0
    """Time spent in prefill since the start."""
    serial: int = 0
    """Of what was begun last; an ``end`` that was planned under another one is off."""
    _prefills: deque[tuple[float, float, float]] = field(default_factory=deque)

    def begin(self, now_s: float) -> float | None:
        """Take up the next work; returns when ``end`` is due, None when there is nothing new to do."""
        if self.running is not None or not self.waiting:
            return None
        job = self.running = self.waiting.popleft()
        cached = self._find_cached(job)
        if self.shared:
            self.cache.use(job.call.keys)
        uncached = job.call.prompt_tokens - cached
        work_s = self._noisy(prefill_s(self.rates, uncached, cached))
        self._worked(now_s, work_s, -(-uncached // self.chunk_tokens))
        self.serial += 1
        return now_s + work_s

    def end(self, now_s: float) -> tuple[list[Job], list[Job]]:
        """What was begun is done: jobs whose prefill ended (their blocks are cached), jobs whose answer ended."""
        job = self.running
        if job is None:
            raise RuntimeError("no prefill is running")
        self.running = None
        self._use(job.call.keys)
        return [job], []

    def _find_cached(self, job: Job) -> int:
        job.cached_tokens = min(self.cache.match(job.call.keys) * self.block_tokens, job.call.prompt_tokens - 1)
        return job.cached_tokens

    def _noisy(self, work_s: float) -> float:
        return work_s * (1 + self.noise * self.rng.uniform(-1, 1)) if self.noise else work_s

    def _worked(self, now_s: float, work_s: float, chunks: int) -> None:
        self.busy_s += work_s
        self._prefills.append((now_s, now_s + work_s, work_s / chunks))

    def start_decode(self, job: Job, now_s: float) -> float | None:
        """The sequence joins the batch; returns when its last token comes, None when ``end`` will tell."""
        self.sequences += 1
        self.context_tokens += job.call.prompt_tokens
        return now_s + job.call.output_tokens * decode_step_s(self.rates, self.sequences, self.context_tokens)

    def end_decode(self, job: Job) -> None:
        """The sequence leaves; its blocks were in use until now."""
        self.sequences -= 1
        self.context_tokens -= job.call.prompt_tokens
        self._use(job.call.keys)

    def receive(self, job: Job) -> None:
        """The prompt's KV came from the prefill engine."""
        self._use(job.call.keys)

    def _use(self, keys: Sequence[int]) -> None:
        if self.tell is None:
            self.cache.use(keys)
            return
        held = self.cache.match(keys)
        gone = self.cache.gone = []
        self.cache.use(keys)
        events: list[KvEvent] = []
        if held < len(keys):
            parent = keys[held - 1] if held else None
            events.append(BlockStored(tuple(keys[held:]), parent, self.block_tokens))
        if gone:
            events.append(BlockRemoved(tuple(gone)))
        if events:
            self.tell(KvBatch(self.told, float(self.told + 1), tuple(events)))
            self.told += 1

    def crash(self) -> None:
        """Everything in memory is gone."""
        self.serial += 1
        self.waiting.clear()
        self.running = None
        self.sequences = self.context_tokens = 0
        self.cache.clear()

    def stretched(self, since_s: float, until_s: float) -> list[tuple[float, float]]:
        """(chunk seconds, chunks) of prefill that ran here between two times: each stretched one decode step."""
        return [
            (chunk_s, (min(end_s, until_s) - max(start_s, since_s)) / chunk_s)
            for start_s, end_s, chunk_s in self._prefills
            if end_s > since_s and start_s < until_s and chunk_s > 0
        ]

    def forget_before(self, time_s: float) -> None:
        """Prefills that ended before ``time_s`` are no longer asked for."""
        while self._prefills and self._prefills[0][1] < time_s:
            self._prefills.popleft()
