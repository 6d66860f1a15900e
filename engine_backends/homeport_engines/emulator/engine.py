"""The engine behind the HTTP surface: ranks, leases, event streams, and how a request becomes sequences."""

from __future__ import annotations

import asyncio
import traceback
import uuid
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import islice

from homeport.fingerprint import JsonValue
from homeport_engines.emulator.answers import Answer, Delta, Rule, Wanted, answer, seed_of
from homeport_engines.emulator.books import Books, Record
from homeport_engines.emulator.clock import Clock
from homeport_engines.emulator.events import EventPublisher
from homeport_engines.emulator.handoff import Leases, Legs, Puller, SideChannel, nixl_params
from homeport_engines.emulator.prompt import Conversation
from homeport_engines.emulator.scheduler import Rank, Sequence
from homeport_engines.emulator.settings import EmulatorSettings


@dataclass(frozen=True, slots=True)
class Job:
    """One generation request, whichever API it came by."""

    request_id: str
    api: str
    prompt: array[int]
    wanted: Wanted
    talk: Conversation | None = None
    choices: int = 1
    seed: str = ""
    adapter: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    session: str | None = None
    rank: int | None = None
    legs: Legs = field(default_factory=Legs)


@dataclass(frozen=True, slots=True)
class Step:
    """What became visible of one choice: new pieces, their number of tokens, and the end when it has ended."""

    choice: int
    deltas: tuple[Delta, ...]
    tokens: tuple[int, ...]
    finish: str | None


class EngineFailedError(Exception):
    """The engine could not finish the request (HTTP 500)."""


class Generation:
    """One job being computed: iterate :meth:`steps`, then read the figures. :meth:`close` aborts what still runs."""

    def __init__(
        self, job: Job, rank: Rank, sequences: list[Sequence], params: Callable[[Sequence], JsonValue]
    ) -> None:
        self.job = job
        self._rank = rank
        self.sequences = sequences
        self._params = params
        self.transfer_params: JsonValue = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.job.prompt)

    @property
    def cached_tokens(self) -> int:
        """What the engine reports as cached (known from the first step on)."""
        return self.sequences[0].cached_tokens or 0

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far, over all choices."""
        return sum(sequence.emitted for sequence in self.sequences)

    def answer(self, choice: int) -> Answer:
        """The answer of one choice (it changes when a transfer brings wrong data)."""
        return self.sequences[choice].answer

    async def steps(self) -> AsyncIterator[Step]:
        """Yield what becomes visible. Raises EngineFailedError when the engine fails the request."""
        shown = [0] * len(self.sequences)
        open_ones = set(range(len(self.sequences)))
        turn = asyncio.Event()
        for sequence in self.sequences:
            sequence.progress = turn
        while open_ones:
            turn.clear()
            for choice in sorted(open_ones):
                sequence = self.sequences[choice]
                finish = sequence.finish
                if finish in ("error", "abort"):
                    raise EngineFailedError(
                        "EngineCore encountered an issue. See stack trace (above) for the root cause."
                    )
                if sequence.emitted == shown[choice]:
                    continue
                first, shown[choice] = shown[choice], sequence.emitted
                if finish is not None:
                    open_ones.discard(choice)
                    self._settle(sequence)
                group = islice(sequence.answer.deltas, sequence.emitted - first)
                tokens = tuple(sequence.answer.tokens[first : sequence.emitted])
                yield Step(choice, _joined([d for deltas in group for d in deltas]), tokens, finish)
            if open_ones:
                await turn.wait()

    def _settle(self, sequence: Sequence) -> None:
        if sequence.keep:
            self.transfer_params = self._params(sequence)

    def close(self) -> None:
        """Abort what still runs; blocks kept for another engine stay kept."""
        for sequence in self.sequences:
            self._rank.abort(sequence)
            if sequence.kept is not None:
                self._settle(sequence)


def _joined(deltas: list[Delta]) -> tuple[Delta, ...]:
    """Neighbours of one kind become one."""
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if last is not None and (last.kind, last.index) == (delta.kind, delta.index) and delta.kind != "tool_name":
            joined[-1] = Delta(delta.kind, last.text + delta.text, delta.index)
        else:
            joined.append(delta)
    return tuple(joined)


class Engine:
    """Everything of an emulated engine but its HTTP surface."""

    def __init__(self, settings: EmulatorSettings, rules: tuple[Rule, ...]) -> None:
        self.settings = settings
        self.rules = rules
        self.books = Books()
        self.clock = Clock(settings.time_scale)
        self.adapters = list(settings.adapters)
        self.publishers = [
            EventPublisher(index, settings.event_topic, settings.event_encoding, settings.event_buffer)
            for index in range(settings.data_parallel if settings.kv_events else 0)
        ]
        self.ranks = [self._rank(index) for index in range(settings.data_parallel)]
        self.leases = [Leases(rank, self.books) for rank in self.ranks]
        self.puller = Puller(settings, self.clock, self.books)
        shared = [self.leases] if settings.kv == "mooncake" else [[leases] for leases in self.leases]
        self.side_channels = [SideChannel(settings, group, self.books) for group in shared if settings.kv != "none"]
        self._loops: list[asyncio.Task[None]] = []

    def _rank(self, index: int) -> Rank:
        publish = self.publishers[index].publish if self.publishers else _nothing
        return Rank(self.settings, index, self.clock, self.books, publish)

    async def start(self) -> None:
        """Bind side channels and event sockets, begin to compute."""
        settings = self.settings
        await self.puller.start()
        base = settings.side_channel_port if settings.kv == "nixl" else settings.bootstrap_port
        for index, channel in enumerate(self.side_channels):
            await channel.start(base + index if base else 0)
        for index, publisher in enumerate(self.publishers):
            ports = (settings.event_port, settings.replay_port)
            await publisher.start(settings.host, *(port + index if port else 0 for port in ports))
        self._loops = [asyncio.ensure_future(_compute(rank)) for rank in self.ranks]

    async def stop(self) -> None:
        """Stop computing and close every socket."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        for rank in self.ranks:
            rank.abort_all()
        for leases in self.leases:
            leases.drop_all()
        await self.puller.stop()
        for channel in self.side_channels:
            await channel.stop()
        for publisher in self.publishers:
            await publisher.stop()

    def restart(self) -> None:
        """Lose all KV, leases, counters and event numbers, as a new process would; the ports stay."""
        self.books.restarts += 1
        for rank, leases in zip(self.ranks, self.leases, strict=True):
            rank.reset()
            leases.drop_all()
        for publisher in self.publishers:
            publisher.restart()

    def submit(self, job: Job) -> Generation:
        """Start computing a job."""
        index = job.rank if job.rank is not None else self._least_loaded()
        rank = self.ranks[index]
        sequences = [self._sequence(job, index, choice) for choice in range(job.choices)]
        for sequence in sequences:
            rank.submit(sequence)
        return Generation(job, rank, sequences, lambda sequence: self._hand_out(job, index, sequence))

    def _least_loaded(self) -> int:
        return min(range(len(self.ranks)), key=lambda index: self.ranks[index].load())

    def _sequence(self, job: Job, index: int, choice: int) -> Sequence:
        # vLLM makes ids unique inside the engine the same way, whatever a client sent
        unique = f"{job.request_id}-{choice}-{uuid.uuid4().hex[:8]}"
        record = Record(unique, job.api, index, job.legs.kind, len(job.prompt), adapter=job.adapter)
        record.session = job.session
        legs = job.legs
        pull = None
        if legs.remote is not None and choice == 0:
            tokens = min(len(job.prompt), legs.remote_tokens or len(job.prompt))
            pull = self.puller.pull(legs.remote, tokens, cached_tokens=legs.cached_tokens, whole=legs.whole)
        return Sequence(
            record,
            job.prompt,
            self._answer(job, choice),
            adapter=job.adapter,
            cache_salt=job.cache_salt,
            priority=job.priority,
            session=job.session,
            pull=pull,
            spoiled=lambda: self._answer(job, choice, "data read after the lease"),
            keep=legs.keep_as is not None or (legs.remote is not None and self.settings.readback_ttl_s is not None),
        )

    def _answer(self, job: Job, choice: int, *more: str) -> Answer:
        about = (job.adapter or "", job.seed, str(choice) if choice else "", *more)
        wanted, talk = job.wanted, job.talk
        if more:  # wrong KV makes wrong text, whatever a script says
            wanted, talk = Wanted(wanted.limit, wanted.least, wanted.ignore_end), None
        return answer(seed_of(job.prompt, *about), wanted, talk, self.rules, self.settings.output_tokens)

    def _hand_out(self, job: Job, index: int, sequence: Sequence) -> JsonValue:
        """Turn kept blocks into a lease and its parameters; None when the connector gives none."""
        tables, sequence.kept = sequence.kept, None
        rank, leases, settings = self.ranks[index], self.leases[index], self.settings
        if tables is None:
            return None
        if job.legs.kind == "prefill" and sequence.finish != "length":
            rank.release(tables)  # ended by a stop token: both connectors send nothing then
            return None
        if settings.kv == "mooncake":
            leases.grant(job.legs.keep_as or "", tables, settings.lease_s)
            return None
        lease_s = settings.lease_s if job.legs.kind == "prefill" else settings.readback_ttl_s or settings.lease_s
        leases.grant(sequence.record.request_id, tables, lease_s)
        return nixl_params(
            leases,
            settings.host,
            self.side_channels[index].port,
            sequence.record.request_id,
            tables,
            len(sequence.prompt) if job.legs.kind == "prefill" else len(sequence.tokens) - 1,
            sequence.cached_tokens or 0,
        )


async def _compute(rank: Rank) -> None:
    """Run a rank; a defect in it must fail its requests, not leave them waiting."""
    try:
        await rank.run()
    except Exception:
        traceback.print_exc()
        rank.abort_all()
        raise


def _nothing(_: object) -> None:
    """Events go nowhere when they are switched off."""
