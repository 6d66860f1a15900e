"""Attempts: a prefill leg and a decode leg as one try with states, and what may be tried again after it failed.

Rules. A refused or reset connection, 429, 502 and 503 are tried on one other backend until the client got its first
byte; a connection that never took the request costs nothing and does not count. A read timeout is never tried again:
the engine may still be generating. A prefill leg that fails makes the decode engine prefill by itself; its 4xx is the
answer. Hand-off parameters are used once and only within their lease: a retry after 429 or 503, with which an engine
turns a request away before it looks at it, takes them along; any other that reached an engine prefills afresh. A
prefill that was handed out is always followed by its decode request, even if only to be aborted: otherwise
its KV stays pinned on the prefill engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import cast

from homeport.fingerprint import Api, JsonValue
from homeport_engines.base import LEASE_MARGIN_S, BodyEdits, HandoffParams, KvTransfer, Leg
from homeport_engines.base import Handoff as Pair
from homeport_proxy import headers as header_rules
from homeport_proxy.bounded import Bounded
from homeport_proxy.breaker import Result, classify
from homeport_proxy.config import Timeouts
from homeport_proxy.downstream import Downstream
from homeport_proxy.engines import Engine, Engines
from homeport_proxy.errors import no_backend, upstream_error, upstream_timeout
from homeport_proxy.exchange import Exchange, LegPart, LegRecord, State
from homeport_proxy.health import Health, Part
from homeport_proxy.ids import mint
from homeport_proxy.job import Job
from homeport_proxy.patience import Patience, Watch
from homeport_proxy.placer import Placer
from homeport_proxy.relay import Plan, Refused, Relay
from homeport_proxy.routing.views import Decision, Ticket
from homeport_proxy.splice import NotAnObjectError, document_of
from homeport_proxy.upstream import Collector, Connection, Head, Receiver, UpstreamError

REFUSALS = frozenset({429, 502, 503})
TURNED_AWAY = frozenset({429, 503})
"""Refusals after which hand-off parameters are still unused; behind a 502 some engine may have read the blocks."""
READBACK_S = 15.0
"""A prefill leg that reads the last turn back is given up after this long; the decode engine then prefills itself."""
LAST_TURNS_KEPT = 10_000
_AS_IT_IS = Leg(BodyEdits())
"""The request of an engine that does all by itself."""
LINGER_S = 0.5
"""How long an abandoned decode request is given to reach its engine before it is aborted there."""


@dataclass(slots=True)
class Held:
    """Hand-off parameters in hand: from whom, for which choreography, and until when they may be used."""

    pair: Pair
    transfer: KvTransfer
    params: HandoffParams
    expires_s: float | None

    def usable(self, now_s: float) -> bool:
        """Whether a decode engine reached now still finds the blocks."""
        return self.expires_s is None or now_s < self.expires_s


@dataclass(slots=True)
class LastTurn:
    """What a session's last answer left at its decode engine: read back once by the next turn's prefill, in time."""

    transfer: KvTransfer
    params: Mapping[str, JsonValue]
    expires_s: float


class PrefillFailedError(Exception):
    """The prefill leg gave nothing to hand over; the text says why. ``answer`` is its 4xx, to be passed on."""

    def __init__(self, why: str, answer: Refused | None = None) -> None:
        super().__init__(why)
        self.answer = answer


@dataclass(slots=True)
class Desk:
    """What attempts work with, one per process."""

    engines: Engines
    health: Health
    placer: Placer
    timeouts: Callable[[], Timeouts]
    on_gap: Callable[[float], None] | None = None
    watch: Watch = field(default_factory=Watch)
    orphans: Orphans = field(default_factory=lambda: Orphans())
    last_turns: Bounded[str, LastTurn] = field(default_factory=lambda: Bounded(LAST_TURNS_KEPT))


class Orphans:
    """Decode requests sent only so that their prefill engine may free its blocks; aborted shortly after."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def count(self) -> int:
        """Requests not yet aborted."""
        return len(self._tasks)

    def free(self, engine: Engine, message: tuple[bytes, bytes]) -> None:
        """Send a decode request that nobody waits for, then abort it."""
        self._spawn(self._send(engine, message))

    def linger(self, connection: Connection, sent_s: float) -> None:
        """Abort a decode request whose client left, but not before it can have reached its engine."""
        listener = Collector(0)
        connection.take_over(listener)
        remaining_s = max(0.0, sent_s + LINGER_S - asyncio.get_running_loop().time())
        self._spawn(self._abort_later(connection, listener, remaining_s))

    async def close(self) -> None:
        """Wait for those under way."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, engine: Engine, message: tuple[bytes, bytes]) -> None:
        try:
            connection = await engine.pool.acquire(fresh=True)
        except UpstreamError:
            return  # nobody to tell: the lease ends by itself
        listener = Collector(0)
        connection.send(*message, listener)
        await self._abort_later(connection, listener, LINGER_S)

    async def _abort_later(self, connection: Connection, listener: Collector, wait_s: float) -> None:
        try:
            await asyncio.wait([listener.headed], timeout=wait_s)
        finally:
            connection.abort()


class Attempt:
    """One try at one decision. As a context it gives back whatever is open when it is left, however it is left."""

    def __init__(self, desk: Desk, exchange: Exchange, job: Job, downstream: Downstream, decision: Decision) -> None:
        self._desk = desk
        self._exchange = exchange
        self._job = job
        self._down = downstream
        self._decision = decision
        self._loop = asyncio.get_running_loop()
        self._open: dict[Connection, tuple[LegRecord, Part]] = {}
        self._decoding: Connection | None = None
        self.held: Held | None = None
        self.relay: Relay | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort_open()
        self.relay = None  # it asks this attempt back: a circle that would keep the body until Python looks for such
        if self.held is not None and isinstance(error, asyncio.CancelledError):
            _free(self._desk, self._exchange, self._job, self.held)
            self.held = None

    def _abort_open(self) -> None:
        for connection, (leg, part) in list(self._open.items()):
            self._tell(leg, part, Result.NEUTRAL)
            if connection is self._decoding and leg.state is State.SENT and not connection.closed:
                self._desk.orphans.linger(connection, leg.started_s)
            else:
                connection.abort()
        self._open.clear()
        self._decoding = None

    # one attempt

    async def run(self, held: Held | None) -> Refused | UpstreamError | None:
        """None when the client has its answer. Raises :class:`PrefillFailedError` only with a 4xx to pass on."""
        self.held = held
        prefill_place = self._decision.prefill_place
        serving = self._desk.engines.of(self._decision.place)
        if self.held is None and prefill_place is not None:
            prefilling = self._desk.engines.of(prefill_place)
            transfer = prefilling.transfer
            if transfer is not None and self._job.raws is not None:
                try:
                    pair = await self._pair(prefilling, serving)
                    if transfer.order == "concurrent":
                        return await self._both(prefilling, serving, pair, transfer)
                    await self._prefill(prefilling, pair, transfer)
                except PrefillFailedError as failure:
                    if failure.answer is not None:
                        return failure.answer
                    await self._alone(str(failure))
            else:
                await self._alone("its prefill engine cannot hand over")
        return await self._serve(serving)

    async def _alone(self, why: str) -> None:
        exchange = self._exchange
        exchange.prefill_skipped = why
        exchange.kv_transfer = "failed"
        if exchange.ticket is not None:
            exchange.decision = await self._desk.placer.without_prefill(exchange.ticket, why)

    async def _pair(self, prefilling: Engine, serving: Engine) -> Pair:
        engines = self._desk.engines
        try:
            return Pair(mint(128), await engines.address(prefilling), await engines.address(serving))
        except UpstreamError as fault:
            raise PrefillFailedError(f"prefill on {prefilling.place} failed: {fault}") from None

    # the prefill leg

    async def _prefill(self, engine: Engine, pair: Pair, transfer: KvTransfer) -> None:
        """Prefill first, and keep what came back."""
        started_s = self._loop.time()
        last_turn = self._last_turn(engine, transfer)
        leg = transfer.prefill_leg(self._text_api, pair, last_turn)
        document = await self._prefill_answer(engine, leg, None if last_turn is None else READBACK_S)
        params = transfer.accept(self._text_api, document)
        done_s = self._loop.time()
        self._exchange.prefill_s = done_s - started_s
        self._exchange.prompt_tokens_counted = params.prompt_tokens if params else None
        if self._exchange.ticket is not None:
            self._desk.placer.prefill_done(self._exchange.ticket, params.cached_tokens if params else None)
        if params is None:
            self._exchange.prefill_skipped = f"{engine.place} had nothing to hand over"
            return
        self._exchange.legs[-1].state = State.HANDED_OFF
        # the lease counts from when the engine finished; its answer took at most this long to come
        lease_s = _lease_s(engine, transfer)
        expires_s = None if lease_s is None else done_s + lease_s
        self.held = Held(pair, transfer, params, expires_s)

    def _last_turn(self, engine: Engine, transfer: KvTransfer) -> Mapping[str, JsonValue] | None:
        """What this session's last answer left behind for the prefill engine to read back: used once, as they are."""
        if not self._reads_back(engine):
            return None
        last = self._desk.last_turns.pop(self._exchange.session)
        usable = last is not None and last.transfer is transfer and self._loop.time() < last.expires_s
        return last.params if last is not None and usable else None

    def _reads_back(self, engine: Engine) -> bool:
        """Whether the engine takes part in read-back, and the session's next turn will go on from this request."""
        identity = self._exchange.identity
        main = identity is not None and identity.kind != "side"
        return main and engine.member is not None and engine.member.backend.kv_readback

    async def _prefill_answer(self, engine: Engine, leg: Leg, within_s: float | None = None) -> Mapping[str, JsonValue]:
        try:
            head, body = await self.collected(engine, leg, "prefill", within_s)
        except UpstreamError as fault:
            self._desk.engines.forget_ids(engine)
            raise PrefillFailedError(f"prefill on {engine.place} failed: {fault}") from None
        if head.status == 429 or head.status >= 500:
            raise PrefillFailedError(f"prefill on {engine.place} answered {head.status}")
        if head.status >= 400:
            raise PrefillFailedError(f"{engine.place} answered {head.status}", Refused(head, body))
        try:
            return document_of(body)
        except NotAnObjectError:
            raise PrefillFailedError(f"prefill on {engine.place} answered something else than JSON") from None

    async def collected(
        self, engine: Engine, leg: Leg, part: LegPart, within_s: float | None = None
    ) -> tuple[Head, bytes]:
        """The whole answer to a leg of which the client sees nothing, given up after ``within_s`` (None: when a first
        token would be). Raises UpstreamError."""
        record = self._record(engine, part)
        try:
            head, body = await self._collect(engine, leg, record, within_s)
        except UpstreamError as fault:
            record.error, record.ended_s = str(fault), self._loop.time()
            raise
        record.status = head.status
        return head, body

    async def _collect(self, engine: Engine, leg: Leg, record: LegRecord, within_s: float | None) -> tuple[Head, bytes]:
        message = self._job.for_engine(engine, leg, record.engine_request_id)
        part: Part = "prefill" if record.part == "prefill" else "serve"
        for fresh in (False, True):
            answer = Collector()
            connection = await self._send(engine, message, answer, record, part, fresh=fresh)
            patience = Patience(self._desk.watch, connection, within_s or self._first_token_s(), lambda: True)
            try:
                head, body = await answer.finished()
            except UpstreamError as fault:
                self._open.pop(connection, None)
                if _stale(connection, fault) and not fresh:
                    self._tell(record, part, Result.NEUTRAL)
                    continue
                self._tell(record, part, Result.FAILURE)
                raise
            finally:
                patience.stop()
            self._open.pop(connection, None)
            record.ended_s = self._loop.time()
            self._tell(record, part, classify(head.status), head)
            return head, body
        raise AssertionError("unreachable")

    # both legs at once

    async def _both(
        self, prefilling: Engine, serving: Engine, pair: Pair, transfer: KvTransfer
    ) -> Refused | UpstreamError | None:
        """The first failure cancels the other leg; the prefill engine's own 4xx is the answer."""
        started_s = self._loop.time()
        found: list[HandoffParams | None] = []
        prefill = asyncio.create_task(self._prefill_answer(prefilling, transfer.prefill_leg(self._text_api, pair)))
        serve = asyncio.create_task(self._serve_leg(serving, transfer.decode_leg(self._text_api, pair, None), found))
        try:
            await asyncio.wait([prefill, serve], return_when=asyncio.FIRST_COMPLETED)
            if prefill.done():
                found.append(self._handed_over(prefilling, prefill, transfer, started_s))
                if self.relay is not None:
                    self.relay.release()
            result = await serve
            if result is None and (own := asyncio.current_task()) is not None:
                own.uncancel()  # a client that hung up on its whole answer: the leg has taken that up already
            self._note_transfer(result)
            return result
        finally:
            for task in (prefill, serve):
                task.cancel()
            await asyncio.gather(prefill, serve, return_exceptions=True)
            self._abort_open()

    def _handed_over(
        self, engine: Engine, prefill: asyncio.Task[Mapping[str, JsonValue]], transfer: KvTransfer, started_s: float
    ) -> HandoffParams | None:
        """What the finished prefill leg said. Its failure counts only while the decode engine has sent nothing: an
        answer under way shows that the KV arrived."""
        try:
            params = transfer.accept(self._text_api, prefill.result())
        except PrefillFailedError:
            if self.relay is None or not self.relay.has_answer:
                raise
            params = None
        self._exchange.prefill_s = self._loop.time() - started_s
        self._mark_handed_off(engine.place)
        if self._exchange.ticket is not None:
            self._desk.placer.prefill_done(self._exchange.ticket, params.cached_tokens if params else None)
        return params

    def _mark_handed_off(self, place: str) -> None:
        for leg in self._exchange.legs:
            if leg.part == "prefill" and leg.place == place and leg.error is None:
                leg.state = State.HANDED_OFF

    # the leg that answers

    async def _serve(self, engine: Engine) -> Refused | UpstreamError | None:
        held = self.held
        if held is not None and engine.transfer is not held.transfer:
            _free(self._desk, self._exchange, self._job, held)
            held = self.held = None
        elif held is not None and not held.usable(self._loop.time()):
            held = self.held = None
        if held is None:
            return await self._serve_leg(engine, _AS_IT_IS, None)
        leg = held.transfer.decode_leg(self._text_api, held.pair, held.params)
        result = await self._serve_leg(engine, leg, [held.params])
        self._note_transfer(result)
        if isinstance(result, Refused) and result.head.status in TURNED_AWAY:
            self.held = held
        return result

    def _note_transfer(self, result: Refused | UpstreamError | None) -> None:
        if result is None:
            self._exchange.kv_transfer = "failed" if self._exchange.error else "ok"

    async def _serve_leg(
        self, engine: Engine, leg: Leg, handed: list[HandoffParams | None] | None
    ) -> Refused | UpstreamError | None:
        record = self._record(engine, "serve")
        message = self._job.for_engine(engine, leg, record.engine_request_id)
        for fresh in (False, True):
            self.relay = relay = Relay(self._exchange, record, self._down, self._plan(engine, record, handed))
            try:
                connection = await self._send(engine, message, relay, record, "serve", fresh=fresh)
            except UpstreamError as fault:
                record.error = str(fault)
                return fault
            if handed is not None:
                self._decoding = connection
                self.held = None  # on their way: single use
            patience = self._patience(connection, relay, engine)
            try:
                result = await relay.finished()
            finally:
                patience.stop()
                if not isinstance(relay.result, Refused):
                    self._exchange.usage = relay.usage
            self._open.pop(connection, None)
            self._decoding = None
            if isinstance(result, UpstreamError):
                if _stale(connection, result) and not fresh:
                    self._tell(record, "serve", Result.NEUTRAL)
                    continue
                self._tell(record, "serve", Result.FAILURE)
            elif isinstance(result, Refused):
                self._tell(record, "serve", classify(result.head.status), result.head)
            return result
        raise AssertionError("unreachable")

    def _plan(self, engine: Engine, record: LegRecord, handed: list[HandoffParams | None] | None) -> Plan:
        exchange, desk = self._exchange, self._desk
        transfer = engine.transfer
        readback_s = transfer.readback_s if transfer is not None and self._reads_back(engine) else None

        def answer_headers(head: Head, stream: bool) -> bytes:
            self._tell(record, "serve", classify(head.status), head)
            return header_rules.to_client(head, header_rules.of_exchange(exchange), stream=stream)

        def keep(params: Mapping[str, JsonValue]) -> None:
            if transfer is not None and readback_s is not None and params.get("remote_block_ids"):
                expires_s = self._loop.time() + readback_s
                desk.last_turns.put(exchange.session, LastTurn(transfer, params, expires_s))

        plan = Plan(self._job.api, answer_headers, REFUSALS, hide_usage=self._job.hide_usage, on_gap=desk.on_gap)
        if exchange.ticket is not None:
            plan.on_first_token = partial(desk.placer.first_token, exchange.ticket)
        if handed is not None:
            plan.fix_usage = True
            plan.ready = lambda: bool(handed)
            plan.cached = lambda: handed[0].cached_tokens if handed and handed[0] is not None else None
        elif exchange.found_tokens is not None and engine.place in exchange.found_tokens:
            plan.fix_usage = True
            plan.cached = partial(exchange.found_tokens.get, engine.place)
        if readback_s is not None:
            plan.on_params = keep
        return plan

    def _patience(self, connection: Connection, relay: Relay, engine: Engine) -> Patience:
        timeouts = self._desk.timeouts()
        streamed = self._job.stream
        health, member = self._desk.health, engine.member

        def overdue() -> bool:
            # without a stream the first token cannot be seen: wait for a healthy engine as long as it takes
            return streamed or member is None or health.state(member) == "down"

        watch = self._desk.watch
        return Patience(watch, connection, self._first_token_s(), overdue, idle_s=timeouts.idle_s, relay=relay)

    def _first_token_s(self) -> float:
        expected = self._decision.expected_cached_tokens or 0
        uncached = max(0, self._exchange.prompt_tokens_estimate - expected)
        return self._desk.timeouts().first_token_s + uncached / SLOWEST_PREFILL_TOKENS_PER_S

    # sending

    def _record(self, engine: Engine, part: LegPart) -> LegRecord:
        number = len(self._exchange.legs)
        record = LegRecord(engine.place, part, f"{self._exchange.request_id[:96]}-{number}-{mint(32)}")
        self._exchange.legs.append(record)
        return record

    async def _send(
        self,
        engine: Engine,
        message: tuple[bytes, bytes],
        receiver: Receiver,
        record: LegRecord,
        part: Part,
        *,
        fresh: bool,
    ) -> Connection:
        self._desk.health.sent(engine.place, part)
        record.told = False
        try:
            engine.pool.connect_s = self._desk.timeouts().connect_s
            connection = await engine.pool.acquire(fresh=fresh)
        except UpstreamError as fault:
            self._tell(record, part, Result.FAILURE if fault.timed_out else Result.REFUSED)
            raise
        except asyncio.CancelledError:
            self._tell(record, part, Result.NEUTRAL)
            raise
        record.started_s = self._loop.time()
        record.state = State.SENT
        self._open[connection] = (record, part)
        connection.send(*message, receiver, head_only=self._job.method == "HEAD")
        return connection

    def _tell(self, record: LegRecord, part: Part, result: Result, head: Head | None = None) -> None:
        """Health hears of every sent leg exactly once."""
        if record.told:
            return
        record.told = True
        retry_after_s = _retry_after_s(head) if head is not None and head.status in TURNED_AWAY else None
        self._desk.health.ended(record.place, part, result, retry_after_s=retry_after_s)

    @property
    def _text_api(self) -> Api:
        return cast("Api", self._job.api.name)


def _lease_s(engine: Engine, transfer: KvTransfer) -> float | None:
    """For how long parameters of this prefill engine may be used: its lease less what a decode engine needs to be
    reached; None: for good."""
    own = engine.member.backend.kv_lease_s if engine.member is not None else None
    if transfer.lease_s is None or own is None:
        return transfer.lease_s
    return own - min(LEASE_MARGIN_S, own / 2)


SLOWEST_PREFILL_TOKENS_PER_S = 100.0
"""Prefill speed that the first-token deadline allows for on top of ``first_token_s``."""


async def answer(desk: Desk, exchange: Exchange, job: Job, downstream: Downstream) -> None:
    """Bring the client an answer to a placed request, with the retries the rules allow.

    Raises ProxyError when nothing was sent to the client and nobody answered.
    """
    ticket = exchange.ticket
    assert ticket is not None
    tried: set[str] = set()
    refusal: Refused | None = None
    fault: UpstreamError | None = None
    held: Held | None = None
    second_chance = True
    while True:
        decision = exchange.decision = _decision(ticket)
        with Attempt(desk, exchange, job, downstream, decision) as attempt:
            result = await attempt.run(held)
            held, attempt.held = attempt.held, None
        if result is None or downstream.started:
            return
        tried.add(decision.place)
        spent = isinstance(result, Refused) or result.sent
        if spent or (refusal is None and fault is None):
            refusal = result if isinstance(result, Refused) else None
            fault = None if isinstance(result, Refused) else result
        if spent and (not second_chance or not _may_be_tried_again(result)):
            break
        second_chance = second_chance and not spent
        try:
            again = await desk.placer.again(ticket, frozenset(tried))
        except asyncio.CancelledError:
            if held is not None:
                _free(desk, exchange, job, held)
            raise
        if again is None:
            break
        exchange.retries += 1
    if held is not None:
        _free(desk, exchange, job, held)
    _give_up(exchange, downstream, refusal, fault)


def _may_be_tried_again(result: Refused | UpstreamError) -> bool:
    """Not an answer that stands as it is, and not silence: behind that an engine may still be generating."""
    return result.head.status in REFUSALS if isinstance(result, Refused) else not result.timed_out


def _free(desk: Desk, exchange: Exchange, job: Job, held: Held) -> None:
    """The client left with parameters in our hand: let the decode engine tell the prefill engine to free."""
    if not held.usable(asyncio.get_running_loop().time()):
        return
    try:
        engine = desk.engines.of(held.pair.decode.name)
    except KeyError:
        return  # the backend is gone from the configuration
    leg = held.transfer.decode_leg(cast("Api", job.api.name), held.pair, held.params)
    request_id = f"{exchange.request_id[:96]}-free-{mint(32)}"
    desk.orphans.free(engine, job.for_engine(engine, leg, request_id))


def _decision(ticket: Ticket) -> Decision:
    assert ticket.decision is not None
    return ticket.decision


def _give_up(exchange: Exchange, downstream: Downstream, refusal: Refused | None, fault: UpstreamError | None) -> None:
    if refusal is not None:
        head = refusal.head
        exchange.status = head.status
        added = header_rules.to_client(head, header_rules.of_exchange(exchange), stream=False)
        exchange.headers_sent_s = asyncio.get_running_loop().time()
        downstream.whole(head.status, added, refusal.body)
        return
    assert fault is not None
    if not fault.sent:
        raise no_backend(f"No engine took the connection: {fault}.")
    if fault.timed_out:
        raise upstream_timeout(f"The engine gave no answer in time: {fault}.")
    raise upstream_error(f"The engine failed: {fault}.", may_be_generating=False)


def _stale(connection: Connection, fault: UpstreamError) -> bool:
    """A pooled connection that its engine had closed: nothing came back, so the request may be sent once more."""
    return connection.served > 1 and not fault.answered and not fault.timed_out


def _retry_after_s(head: Head) -> float | None:
    value = head.get(b"retry-after")
    try:
        return max(0.0, float(value)) if value is not None else None
    except ValueError:
        return None
