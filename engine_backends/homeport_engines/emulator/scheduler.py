"""One rank of an emulated engine: a FIFO prefill queue and a decode batch that share a paged cache, in emulated time.

A step computes one decode step of every running sequence together with prefill work up to ``chunk_tokens``, oldest
first, as an engine with chunked prefill does; its length comes from the rates. Decided like vLLM: prefix hits stop one
token before the prompt's end, blocks are announced when full, the youngest sequence is preempted when blocks run out,
and a sequence whose KV comes from elsewhere holds its blocks while it waits for them.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from array import array
from collections import deque
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from homeport.fingerprint import JsonValue
from homeport_engines.emulator.answers import Answer
from homeport_engines.emulator.books import Books, Counters, Outcome, Record
from homeport_engines.emulator.cache import Block, HostTier, Key, PagedCache
from homeport_engines.emulator.clock import Clock
from homeport_engines.emulator.hashing import ROOT, block_hash, event_hash, extra_keys
from homeport_engines.emulator.settings import EmulatorSettings

Event = dict[str, JsonValue]
_LAG_S = 1.0  # real seconds the emulation may be late before it gives up catching up


@dataclass(slots=True)
class Pull:
    """KV to be fetched from another engine before a sequence is computed: ``tokens`` of its prompt at most.

    ``fetch`` transfers and returns False when the data read is not what it should be; it raises ConnectionError when
    nothing came. ``cached_tokens`` is what the prefill engine says it found cached. ``whole``: the transfer covers the
    prompt, so the first token costs a decode step only.
    """

    tokens: int
    fetch: Callable[[int], Awaitable[bool]]
    drop: Callable[[], Awaitable[None]]
    cached_tokens: int | None = None
    whole: bool = True


class Sequence:
    """One sequence of tokens being computed; its reader waits on ``progress`` and reads ``emitted``."""

    def __init__(
        self,
        record: Record,
        prompt: array[int],
        answer: Answer,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        session: str | None = None,
        pull: Pull | None = None,
        spoiled: Callable[[], Answer] | None = None,
        keep: bool = False,
    ) -> None:
        self.record = record
        self.prompt = prompt
        self.answer = answer
        self.adapter = adapter
        self.cache_salt = cache_salt
        self.priority = priority
        self.session = session
        self.pull = pull
        self.spoiled = spoiled
        self.keep = keep
        self.kept: list[list[Block]] | None = None
        self.tokens = array("I", prompt)
        self.hashes: list[bytes] = []
        self.tables: list[list[Block | None]] = []
        self.computed = 0
        self.target = len(prompt)
        self.charged_t0 = False
        self.cached_tokens: int | None = None
        self.emitted = 0
        self.finish: str | None = None
        self.progress = asyncio.Event()
        self.arrived = 0.0
        self.last_emit = 0.0
        self.transfer: asyncio.Task[None] | None = None
        self.light_start = False
        self.counted = False

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens are still to be computed."""
        return self.computed < self.target

    def extend_hashes(self, block_tokens: int, upto: int) -> None:
        """Hash every full block of the first ``upto`` tokens."""
        for index in range(len(self.hashes), upto // block_tokens):
            parent = self.hashes[-1] if self.hashes else ROOT
            piece = self.tokens[index * block_tokens : (index + 1) * block_tokens]
            self.hashes.append(block_hash(parent, piece, extra_keys(self.adapter, self.cache_salt, index)))


class Rank:
    """One data-parallel rank. ``publish`` takes the KV events of a step."""

    def __init__(
        self, settings: EmulatorSettings, index: int, clock: Clock, books: Books, publish: Callable[[list[Event]], None]
    ) -> None:
        self.settings = settings
        self.index = index
        self.clock = clock
        self.books = books
        self.counters = Counters()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.loading: list[Sequence] = []
        self._publish = publish
        self._events: list[Event] = []
        self.cache = PagedCache(settings.kv_blocks, settings.block_tokens, settings.groups, self._evicted)
        self.host = HostTier(settings.host_blocks, self._host_evicted)
        self._wake = asyncio.Event()
        self._go = asyncio.Event()
        self._go.set()
        self._now = clock.now()
        self._random = random.Random(settings.seed * 1000 + index)
        self._tasks: set[asyncio.Future[None]] = set()

    # --- requests ------------------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.arrived = self.clock.now()
        sequence.record.arrived_s = sequence.arrived
        self.books.started += 1
        self.books.requests.append(sequence.record)
        if self.settings.priority_scheduling:
            place = next((i for i, other in enumerate(self.waiting) if other.priority > sequence.priority), None)
            self.waiting.insert(len(self.waiting) if place is None else place, sequence)
        else:
            self.waiting.append(sequence)
        self._wake.set()

    def abort(self, sequence: Sequence, outcome: Outcome = "abort") -> None:
        """End a sequence whose reader left or that failed; does nothing when it has ended."""
        if sequence.finish is not None:
            return
        for place in (self.waiting, self.running, self.loading):
            if sequence in place:
                place.remove(sequence)
        if sequence.transfer is not None:
            sequence.transfer.cancel()
        self._end(sequence, outcome)

    def abort_all(self, outcome: Outcome = "error") -> None:
        """End every sequence."""
        for sequence in [*self.waiting, *self.running, *self.loading]:
            self.abort(sequence, outcome)

    def load(self) -> int:
        """What vLLM's balancer between ranks compares: four per waiting and one per running request."""
        return 4 * len(self.waiting) + len(self.running) + len(self.loading)

    def pause(self) -> None:
        """Stop computing, as an engine whose GPU hangs."""
        self._go.clear()

    def resume(self) -> None:
        """Compute again."""
        self._go.set()

    def reset(self) -> None:
        """Forget all KV and every counter, as a new process would; every sequence ends."""
        self.abort_all()
        self.counters = Counters()
        self.cache = PagedCache(
            self.settings.kv_blocks, self.settings.block_tokens, self.settings.groups, self._evicted
        )
        self.host.clear()
        self._events.clear()

    def clear_cache(self) -> bool:
        """Forget the prefix cache and say so to subscribers; False while requests hold blocks."""
        if not self.cache.clear():
            return False
        self.host.clear()
        self._events.append({"type": "AllBlocksCleared"})
        self._flush()
        return True

    def release(self, tables: Seq[Seq[Block]]) -> None:
        """Let go of blocks that were kept for another engine."""
        for blocks in tables:
            self.cache.release(blocks)
        self._wake.set()

    # --- the loop ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Compute until cancelled."""
        while True:
            await self._go.wait()
            self._admit()
            batch = [sequence for sequence in self.running if not self._heavy(sequence)]
            chunks = self._chunks(alone=not batch)
            if not chunks and not batch:
                self._flush()
                self._wake.clear()
                if not self._can_admit():
                    await self._wake.wait()
                    self._now = self.clock.now()
                continue
            self._now = max(self._now, self.clock.now() - _LAG_S * self.clock.scale)
            self._now += self._step_s(chunks, batch)
            await self.clock.sleep_until(self._now)
            await self._go.wait()
            for sequence, tokens in chunks:
                if sequence.finish is None and sequence in self.running:
                    self._prefilled(sequence, tokens)
            for sequence in batch:
                if sequence.finish is None and sequence in self.running:
                    self._decoded(sequence)
            self._flush()

    def _heavy(self, sequence: Sequence) -> bool:
        return sequence.prefilling and not sequence.light_start

    def _chunks(self, *, alone: bool) -> list[tuple[Sequence, int]]:
        """Prefill work of the next step, first come first served, ``chunk_tokens`` in all.

        Without a decode batch one prefill at a time: nothing is gained by letting the first wait for the second.
        """
        found: list[tuple[Sequence, int]] = []
        room = self.settings.chunk_tokens
        for sequence in self.running:
            if room <= 0 or (alone and found):
                break
            if self._heavy(sequence):
                found.append((sequence, min(sequence.target - sequence.computed, room)))
                room -= found[-1][1]
        return found

    def _step_s(self, chunks: Seq[tuple[Sequence, int]], batch: Seq[Sequence]) -> float:
        rates = self.settings.rates
        length = rates.decode_s(len(batch), sum(sequence.computed for sequence in batch))
        for sequence, tokens in chunks:
            if not sequence.charged_t0:
                sequence.charged_t0 = True
                length += rates.t0_s
            length += rates.prefill_s(sequence.computed, tokens)
        return length

    # --- admission -----------------------------------------------------------------------------------------------

    def _can_admit(self) -> bool:
        return bool(self.waiting) and self._fits(self.waiting[0])

    def _fits(self, sequence: Sequence) -> bool:
        if len(self.running) + len(self.loading) >= self.settings.max_sequences:
            return False
        needed = -(-(len(sequence.tokens) + 1) // self.settings.block_tokens) * len(self.settings.groups)
        return needed <= self.cache.free

    def _admit(self) -> None:
        while self._can_admit():
            self._start(self.waiting.popleft())

    def _start(self, sequence: Sequence) -> None:
        size = self.settings.block_tokens
        sequence.target = len(sequence.tokens)
        usable = (len(sequence.tokens) - 1) // size
        sequence.extend_hashes(size, len(sequence.tokens))
        hashes = sequence.hashes[:usable]
        here = self.cache.lookup(hashes)
        there = self.cache.lookup(hashes, self._anywhere) if self.host.capacity else here
        self._hold(sequence, here)
        sequence.computed = here * size
        if sequence.cached_tokens is None:
            self._count_start(sequence, here * size)
        self._set_source(sequence, here * size, max(there, here) * size)

    def _anywhere(self, key: Key) -> bool:
        return self.cache.holds(key) or self.host.holds(key)

    def _hold(self, sequence: Sequence, found: int) -> None:
        """Take the blocks of the found prefix, then fresh ones for the rest of what is known."""
        total = -(-(len(sequence.tokens) + 1) // self.settings.block_tokens)
        sequence.tables = []
        for group, spec in enumerate(self.settings.groups):
            # before the window's reach a windowed group needs nothing: vLLM puts its null block there
            needed_from = 0 if spec.window_tokens is None else max(0, found - self.cache.window_blocks(spec))
            table: list[Block | None] = [
                self.cache.take((sequence.hashes[index], group)) if index >= needed_from else None
                for index in range(found)
            ]
            sequence.tables.append(table)
        for table in sequence.tables:
            table.extend(self.cache.fresh() for _ in range(total - found))

    def _count_start(self, sequence: Sequence, found_tokens: int) -> None:
        counters = self.counters
        counters.queue_s.observe(max(0.0, self.clock.now() - sequence.arrived))
        counters.prefix_queries += len(sequence.prompt)
        counters.prefix_hits += found_tokens
        counters.prompt_tokens += len(sequence.prompt)
        sequence.cached_tokens = found_tokens
        sequence.record.cached_tokens = found_tokens

    def _set_source(self, sequence: Sequence, here: int, there: int) -> None:
        """Where the rest of the prompt comes from: another engine, the host tier, or computing it."""
        pull = sequence.pull
        outside = there - here if pull is None else min(pull.tokens, sequence.target) - here
        if outside > 0:
            self.counters.external_queries += sequence.target - here
            self.counters.external_hits += outside  # counted before the outcome is known, as vLLM does
            work = self._from_host(sequence, here, there) if pull is None else self._fetch(sequence, pull, outside)
            self._load(sequence, work)
            return
        if pull is not None:
            self._drop_pull(sequence)
        self._count_source(sequence, 0)
        self.running.append(sequence)

    def _count_source(self, sequence: Sequence, outside: int) -> None:
        """Book the prompt by where it came from, once per request."""
        if sequence.counted:
            return
        sequence.counted = True
        here = sequence.computed
        by_source = self.counters.by_source
        by_source["local_cache_hit"] += here
        by_source["external_kv_transfer"] += outside
        by_source["local_compute"] += sequence.target - here - outside

    def _load(self, sequence: Sequence, work: Awaitable[None]) -> None:
        self.loading.append(sequence)
        sequence.transfer = asyncio.ensure_future(work)

    def _drop_pull(self, sequence: Sequence) -> None:
        """Everything is here already: tell the other engine that it may free its copy."""
        pull, sequence.pull = sequence.pull, None
        if pull is not None:
            sequence.record.cached_tokens = sequence.cached_tokens or 0
            self._background(pull.drop())

    async def _fetch(self, sequence: Sequence, pull: Pull, tokens: int) -> None:
        started = self.clock.now()
        try:
            good = await pull.fetch(tokens)
        except ConnectionError:
            self.counters.failed_transfers += 1
            self._fetch_failed(sequence)
            return
        self.counters.transfers += 1
        self.counters.transferred_tokens += tokens
        self.counters.transfer_s.observe(self.clock.now() - started)
        self._count_source(sequence, tokens)
        sequence.record.transferred_tokens = tokens
        sequence.pull = None
        if not good:
            sequence.record.stale = True
            sequence.answer = sequence.spoiled() if sequence.spoiled else sequence.answer
        passed = pull.cached_tokens
        sequence.cached_tokens = passed if passed is not None else (sequence.cached_tokens or 0) + tokens
        sequence.light_start = pull.whole
        # the last token of a prompt is always computed here: its logits are needed
        self._loaded(sequence, min(sequence.computed + tokens, sequence.target - 1))

    def _fetch_failed(self, sequence: Sequence) -> None:
        sequence.pull = None
        sequence.transfer = None
        if self.settings.load_failure == "fail":
            self.abort(sequence, "error")
            return
        self._count_source(sequence, 0)
        self._loaded(sequence, sequence.computed)

    async def _from_host(self, sequence: Sequence, here: int, there: int) -> None:
        rates = self.settings.rates
        await self.clock.sleep_until(self.clock.now() + (there - here) / rates.host_tokens_per_s)
        for index in range(here // self.settings.block_tokens, there // self.settings.block_tokens):
            for group in range(len(self.settings.groups)):
                self.host.touch((sequence.hashes[index], group))
        self._count_source(sequence, there - here)
        sequence.cached_tokens = (sequence.cached_tokens or 0) + there - here
        sequence.record.cached_tokens = sequence.cached_tokens
        self._loaded(sequence, there)

    def _loaded(self, sequence: Sequence, computed: int) -> None:
        sequence.transfer = None
        if sequence not in self.loading:
            return
        self.loading.remove(sequence)
        self._advance(sequence, computed)
        self.running.append(sequence)
        self._wake.set()

    # --- progress ------------------------------------------------------------------------------------------------

    def _prefilled(self, sequence: Sequence, chunk: int) -> None:
        sequence.record.computed_tokens += chunk
        self._advance(sequence, sequence.computed + chunk)
        if not sequence.prefilling:
            self._emit(sequence, 1)

    def _decoded(self, sequence: Sequence) -> None:
        if sequence.prefilling:  # only the last token after a transfer
            sequence.record.computed_tokens += sequence.target - sequence.computed
            self._advance(sequence, sequence.target)
            sequence.light_start = False
            self._emit(sequence, 1)
            return
        accepted = self._speculate(sequence)
        if self._room(sequence, len(sequence.tokens) + 1 + accepted):
            self._advance(sequence, len(sequence.tokens))
            self._emit(sequence, 1 + accepted)

    def _speculate(self, sequence: Sequence) -> int:
        speculation = self.settings.speculation
        if speculation is None:
            return 0
        accepted = 0
        while accepted < speculation.draft_tokens and self._random.random() < speculation.acceptance:
            self.counters.accepted_at[accepted] += 1
            accepted += 1
        self.counters.drafts += 1
        self.counters.draft_tokens += speculation.draft_tokens
        self.counters.accepted_tokens += accepted
        return min(accepted, len(sequence.answer.tokens) - sequence.emitted - 1)

    def _room(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for ``tokens`` tokens; preempts the youngest sequences when none are left. False: preempted itself."""
        blocks = -(-tokens // self.settings.block_tokens)
        needed = sum(max(0, blocks - len(table)) for table in sequence.tables)
        while needed > self.cache.free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        for table in sequence.tables:
            table.extend(self.cache.fresh() for _ in range(blocks - len(table)))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        self.running.remove(sequence)
        self._free(sequence)
        sequence.computed = 0
        sequence.charged_t0 = False
        sequence.light_start = False
        self.waiting.appendleft(sequence)

    def _advance(self, sequence: Sequence, computed: int) -> None:
        """Tokens up to ``computed`` have KV now: announce the blocks that became full."""
        size = self.settings.block_tokens
        first, last = sequence.computed // size, computed // size
        sequence.computed = computed
        if last == first:
            return
        sequence.extend_hashes(size, computed)
        for group in range(len(self.settings.groups)):
            self._commit(sequence, group, first, last)
        self._leave_window(sequence, last)

    def _commit(self, sequence: Sequence, group: int, first: int, last: int) -> None:
        if sequence.record.stale:
            return  # a real engine would even offer the wrong data to others
        table = sequence.tables[group]
        fresh = [index for index in range(first, last) if (block := table[index]) is not None and block.key is None]
        if not fresh:
            return
        for index in fresh:
            block = table[index]
            if block is not None:
                self.cache.commit(block, (sequence.hashes[index], group))
        self._announce(sequence, group, fresh, "GPU")
        if self.host.capacity:
            new = [index for index in fresh if self.host.store((sequence.hashes[index], group))]
            self._announce(sequence, group, new, "CPU")

    def _announce(self, sequence: Sequence, group: int, indices: Seq[int], medium: str) -> None:
        """One event per run of neighbouring blocks."""
        run: list[int] = []
        for index in [*indices, -1]:
            if run and index != run[-1] + 1:
                self._events.append(self._stored(sequence, group, run[0], run[-1] + 1, medium))
                run = []
            run.append(index)

    def _stored(self, sequence: Sequence, group: int, first: int, last: int, medium: str) -> Event:
        size = self.settings.block_tokens
        keys = [extra_keys(sequence.adapter, sequence.cache_salt, index) for index in range(first, last)]
        event: Event = {
            "type": "BlockStored",
            "block_hashes": [event_hash(sequence.hashes[index]) for index in range(first, last)],
            "parent_block_hash": event_hash(sequence.hashes[first - 1]) if first else None,
            "token_ids": list(sequence.tokens[first * size : last * size]),
            "block_size": size,
            "lora_id": _adapter_number(sequence.adapter) if sequence.adapter else None,
            "medium": medium,
            "lora_name": sequence.adapter,
            "extra_keys": [list(key) if key else None for key in keys] if any(keys) else None,
            "group_idx": group,
        }
        if sequence.session is not None:
            event["session_id"] = sequence.session
        return event

    def _leave_window(self, sequence: Sequence, full_blocks: int) -> None:
        """Windowed groups let blocks go that no later token looks at."""
        for group, spec in enumerate(self.settings.groups):
            if spec.window_tokens is None:
                continue
            table = sequence.tables[group]
            gone = []
            for index in range(full_blocks - self.cache.window_blocks(spec) - 1, -1, -1):
                block = table[index]
                if block is None:
                    break
                gone.append(block)
                table[index] = None
            self.cache.release(gone[::-1])

    def _emit(self, sequence: Sequence, count: int) -> None:
        now = self.clock.now()
        answer = sequence.answer
        count = min(count, len(answer.tokens) - sequence.emitted)
        if sequence.emitted == 0:
            sequence.record.first_token_s = now
            self.counters.first_token_s.observe(max(0.0, now - sequence.arrived))
        else:
            for _ in range(count):
                self.counters.inter_token_s.observe(max(0.0, (now - sequence.last_emit) / count))
        sequence.last_emit = now
        sequence.tokens.extend(answer.tokens[sequence.emitted : sequence.emitted + count])
        sequence.emitted += count
        sequence.record.output_tokens = sequence.emitted
        self.counters.generation_tokens += count
        self.books.generated_tokens += count
        if sequence.emitted >= len(answer.tokens):
            self.running.remove(sequence)
            self._end(sequence, _outcome(answer.finish))
        sequence.progress.set()

    def _end(self, sequence: Sequence, outcome: Outcome) -> None:
        sequence.finish = outcome
        sequence.record.outcome = outcome
        sequence.record.finished_s = self.clock.now()
        self.counters.finished[outcome] += 1
        if outcome == "abort":
            self.books.aborted += 1
        elif outcome == "error":
            self.books.failed += 1
        else:
            self.books.finished += 1
            self.counters.whole_s.observe(max(0.0, sequence.record.finished_s - sequence.arrived))
        if sequence.pull is not None:
            self._background(sequence.pull.drop())
            sequence.pull = None
        if sequence.keep and outcome not in ("abort", "error") and sequence.tables:
            sequence.kept = [[block for block in table if block is not None] for table in sequence.tables]
            sequence.tables = []
        else:
            self._free(sequence)
        sequence.progress.set()
        self._wake.set()

    def _free(self, sequence: Sequence) -> None:
        for table in sequence.tables:
            self.cache.release([block for block in table if block is not None])
        sequence.tables = []

    # --- events --------------------------------------------------------------------------------------------------

    def _evicted(self, key: Key) -> None:
        self._removed(key, "GPU")

    def _host_evicted(self, key: Key) -> None:
        self._removed(key, "CPU")

    def _removed(self, key: Key, medium: str) -> None:
        digest, group = key
        self._events.append(
            {"type": "BlockRemoved", "block_hashes": [event_hash(digest)], "medium": medium, "group_idx": group}
        )

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._publish(events)

    def _background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _outcome(finish: str) -> Literal["stop", "length", "tool_calls"]:
    return "length" if finish == "length" else "tool_calls" if finish == "tool_calls" else "stop"


def _adapter_number(name: str) -> int:
    """A small number for an adapter, the same in every process."""
    return 1 + zlib.crc32(name.encode()) % 100_000
