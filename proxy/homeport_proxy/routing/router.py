"""The router: books of places, sessions, queues and index around the pure decision. No I/O; the caller brings time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from random import Random

from homeport_engines.base import EngineStats
from homeport_proxy.routing.cost import prefill_s
from homeport_proxy.routing.decide import dearer_by_s, decide
from homeport_proxy.routing.index import Index
from homeport_proxy.routing.index.approximate import ApproximateIndex
from homeport_proxy.routing.place import Place
from homeport_proxy.routing.policies import Policy
from homeport_proxy.routing.queue import Held, VirtualQueues
from homeport_proxy.routing.sessions import Session, SessionTable
from homeport_proxy.routing.views import (
    Decision,
    DecisionRecord,
    NoPlaceError,
    Outcome,
    PlaceSpec,
    PlaceStatus,
    PlaceView,
    RequestView,
    RouterStatus,
    RoutingSettings,
    SessionView,
    State,
    Ticket,
    Word,
)


class Flight:
    """What one ticket holds: its queue slot, then its prefill and decode load. Each is released once."""

    __slots__ = (
        "context",
        "decoding",
        "expected",
        "held",
        "host",
        "key",
        "prefiller",
        "prefilling",
        "session",
        "uncached",
        "work_s",
    )

    def __init__(self, key: int, session: Session) -> None:
        self.key = key
        self.session = session
        self.held: Held | None = None
        self.host: Place | None = None
        self.prefiller: Place | None = None
        self.prefilling = False
        self.decoding = False
        self.work_s = 0.0
        self.uncached = 0
        self.context = 0
        self.expected: int | None = None


class Router:
    """Places requests: ``arrive``, then ``due`` until decided, ``first_token``, ``finished`` or ``cancel``.

    Every time is the caller's ``now_s`` (any monotonic seconds); ``seed`` makes random policies repeatable; ``log``
    gets one record per decision.
    """

    def __init__(
        self,
        settings: RoutingSettings,
        *,
        seed: int = 0,
        log: Callable[[DecisionRecord], None] | None = None,
        policy: Policy | None = None,
        index: Index | None = None,
    ) -> None:
        self.settings = settings
        self._seed = seed
        self._log = log
        self._rng = Random(seed)
        self._places: dict[str, Place] = {}
        self._sessions = SessionTable(settings.idle_ttl_s, settings.max_sessions)
        self._queues = VirtualQueues(settings)
        self._policy = policy
        self._index: Index = index or ApproximateIndex(settings.index_bytes, settings.default_kv_tokens)
        self._flights: dict[Ticket, Flight] = {}
        self._ready: list[Ticket] = []
        self._keys = count(1)

    # -- places ------------------------------------------------------------------------------------------------------

    def set_places(self, places: Sequence[PlaceSpec]) -> None:
        """The fleet as configured or discovered; places that stay keep their state, load and index."""
        wanted = {spec.name: spec for spec in places}
        for name in [name for name in self._places if name not in wanted]:
            del self._places[name]
            self._index.drop_place(name)
        for name, spec in wanted.items():
            place = self._places.get(name)
            if place is None:
                self._places[name] = Place(spec, self.settings.load_window_s)
            else:
                place.renew(spec)
            self._index.set_place(name, spec.kv_capacity_tokens)

    def set_state(self, backend: str, state: State, now_s: float) -> None:
        """A backend's health changed, for all of its ranks."""
        for place in self._of(backend):
            if state == "down" and place.state != "down":
                place.down_since_s = now_s
            elif state != "down":
                place.down_since_s = None
            place.state = state

    def cool(self, backend: str, until_s: float) -> None:
        """The engine asked for a pause: no new sessions until then; the sessions at home there still come."""
        for place in self._of(backend):
            place.cool_until_s = max(place.cool_until_s, until_s)

    def observe_stats(self, place: str, stats: EngineStats, now_s: float) -> None:
        """An engine's telemetry: its real KV capacity and how well it speculates."""
        known = self._places.get(place)
        if known is None:
            return
        known.stats = stats
        if stats.kv_capacity_tokens:
            known.view.kv_capacity_tokens = stats.kv_capacity_tokens
            self._index.set_place(place, stats.kv_capacity_tokens)
        if stats.spec is not None and stats.spec.drafts:
            known.view.tokens_per_step = 1.0 + stats.spec.accepted_tokens / stats.spec.drafts

    # -- one request -------------------------------------------------------------------------------------------------

    def arrive(self, request: RequestView, now_s: float) -> Ticket:
        """Take a request; it is decided by the next ``due``, or held. Raises NoPlaceError when nothing can take it."""
        ticket = Ticket(request, now_s)
        session = self._sessions.open(request.session, now_s)
        decision = self._decide(request, session, frozenset(), now_s)
        flight = self._flights[ticket] = Flight(next(self._keys), session)
        if request.kind != "side":
            self._sessions.used(session, now_s)
        session.open_requests += 1
        worker = self._places[decision.prefill_place or decision.place]
        work_s = self._work_s(worker, request)
        worker.load.offer(work_s, now_s)
        if self.settings.late_binding:
            flight.held = Held(ticket, decision, worker.spec.name, work_s, now_s)
            self._queues.push(flight.held)
        else:
            self._bind(ticket, flight, decision, now_s)
            self._ready.append(ticket)
        return ticket

    def due(self, now_s: float) -> list[Ticket]:
        """Tickets decided by now, their load taken. One without a decision was refused (``ticket.refused``)."""
        decided, self._ready = self._ready, []
        for name in list(self._queues.waiting()):
            place = self._places.get(name)
            if place is None or place.state not in ("up", "unknown"):
                decided += self._replace(name, now_s)
        for name in list(self._queues.waiting()):
            place = self._places[name]
            while place.load.prefill_left_s(now_s) <= self.settings.hold_below_s:
                held = self._queues.first(name, now_s)
                if held is None:
                    break
                self._queues.take(held)
                decided.append(self._release(held, held.decision, now_s))
        if len(self._queues):
            decided += self._steal(now_s)
        return decided

    def next_due_s(self, now_s: float) -> float | None:
        """When ``due`` may have something new if nothing else happens; None when nothing is held."""
        if self._ready:
            return now_s
        times = [
            self._places[name].load.next_change_s(self.settings.hold_below_s, now_s)
            for name in self._queues.waiting()
            if name in self._places
        ]
        return min(times, default=None)

    def again(self, ticket: Ticket, exclude: frozenset[str], now_s: float) -> Decision | None:
        """An attempt failed before its first byte: the next place outside ``exclude`` (places or backends), or None.

        The session's home stays: short trouble moves nobody.
        """
        flight = self._flights.get(ticket)
        if flight is None:
            return None
        self._let_go(flight, now_s, ran=False)
        try:
            decision = self._decide(ticket.request, flight.session, exclude, now_s)
        except NoPlaceError:
            return None
        failed = ", ".join(sorted(exclude)) or "the first choice"
        home = flight.session.home
        decision = replace(decision, word=Word.FAILOVER, reason=f"{failed} refused the request", home=home)
        self._bind(ticket, flight, decision, now_s)
        return decision

    def without_prefill(self, ticket: Ticket, now_s: float, why: str) -> Decision:
        """The prefill leg failed or is gone: the decode place prefills by itself; the word stays."""
        decision = ticket.decision
        if decision is None:
            raise ValueError("without_prefill before the ticket was decided")
        flight = self._flights.get(ticket)
        expected = decision.expected_cached_tokens
        if flight is not None and flight.host is not None:
            self._end_prefill(flight, now_s, ran=False)
            expected = self._index.cached_tokens(flight.host.spec.name, ticket.request)
            self._begin_prefill(flight, flight.host, ticket.request, expected, now_s)
        ticket.decision = replace(
            decision,
            prefill_place=None,
            prefill_cached_tokens=None,
            expected_cached_tokens=expected,
            reason=f"{decision.reason}; {why}",
        )
        return ticket.decision

    def prefill_done(self, ticket: Ticket, now_s: float, cached_tokens: int | None) -> None:
        """The remote prefill leg answered: its engine is free for the next one."""
        flight = self._flights.get(ticket)
        if flight is not None:
            self._end_prefill(flight, now_s, ran=True)

    def first_token(self, ticket: Ticket, now_s: float) -> None:
        """The first token came: the prefill is over."""
        flight = self._flights.get(ticket)
        if flight is None or ticket.first_token_s is not None:
            return
        ticket.first_token_s = now_s
        self._end_prefill(flight, now_s, ran=True)

    def finished(
        self,
        ticket: Ticket,
        now_s: float,
        *,
        prompt_tokens: int | None,
        cached_tokens: int | None,
        output_tokens: int | None,
        ok: bool,
    ) -> Outcome:
        """The answer is complete (or failed): release everything, once; say where the prompt's tokens came from."""
        flight = self._flights.pop(ticket, None)
        if flight is None:
            return Outcome(prompt_tokens, cached_tokens)
        expected = flight.expected
        if ok and flight.host is not None:
            self._learn(ticket, flight, prompt_tokens, cached_tokens, output_tokens)
        self._close(ticket, flight, now_s)
        return Outcome(prompt_tokens, cached_tokens, {}, expected)

    def cancel(self, ticket: Ticket, now_s: float) -> None:
        """The client left or the request failed: release everything, once."""
        flight = self._flights.pop(ticket, None)
        if flight is not None:
            self._close(ticket, flight, now_s)

    # -- sessions ----------------------------------------------------------------------------------------------------

    def finish_session(self, session: str, now_s: float) -> bool:
        """The client says that the session is over; False when it is not known."""
        return self._sessions.finish(session)

    def session(self, session: str) -> SessionView | None:
        """The session as known, or None."""
        known = self._sessions.get(session)
        if known is None:
            return None
        return SessionView(
            session=session,
            home=known.home,
            requests=known.requests,
            open_requests=known.open_requests,
            context_tokens=known.context_tokens,
            last_used_s=known.last_used_s,
            moves=known.moves,
            warm=known.requests > 0,
            keep_s=None,
        )

    def status(self, now_s: float) -> RouterStatus:
        """The router at a glance."""
        places = {}
        for name, place in self._places.items():
            spec_stats = place.stats.spec if place.stats else None
            places[name] = PlaceStatus(
                name=name,
                backend=place.spec.backend,
                role=place.spec.role,
                state=place.state,
                requests=place.load.requests,
                queued=len(self._queues.at(name)),
                prefill_tokens=place.load.prefill_tokens,
                decode_tokens=place.load.decode_tokens,
                sessions=self._sessions.at_home.get(name, 0),
                hit_ratio=place.cached_tokens / place.prompt_tokens if place.prompt_tokens else None,
                index="approximate",
                confidence=place.view.confidence,
                rates=place.rates,
                spec_acceptance=spec_stats.acceptance if spec_stats else None,
            )
        return RouterStatus(places, len(self._sessions), len(self._queues), self._index.bytes)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _of(self, backend: str) -> list[Place]:
        return [place for place in self._places.values() if place.spec.backend == backend]

    def _views(self, request: RequestView, session: Session, exclude: frozenset[str], now_s: float) -> list[PlaceView]:
        views = []
        cached = self._index.cached_tokens
        for name, place in self._places.items():
            if name in exclude or place.spec.backend in exclude:
                continue
            if not place.serves(request.model, request.adapter, request.prompt_tokens):
                continue
            view = place.refresh(now_s)
            view.queued = self._queues.work(name)
            view.cached_tokens = cached(name, request)
            view.home = name == session.home
            view.dearer_times = session.dearer_times if view.home else 0
            views.append(view)
        if not views:
            raise NoPlaceError(f"no backend serves {request.model!r} for {request.prompt_tokens} prompt tokens")
        return views

    def _decide(self, request: RequestView, session: Session, exclude: frozenset[str], now_s: float) -> Decision:
        if session.home is not None and session.home not in self._places:
            self._sessions.settle(session, None)
        views = self._views(request, session, exclude, now_s)
        return decide(request, views, now_s, self._rng, self.settings, self._policy)

    def _work_s(self, worker: Place, request: RequestView) -> float:
        cached = self._index.cached_tokens(worker.spec.name, request)
        return prefill_s(worker.rates, request.prompt_tokens - cached, cached)

    def _release(self, held: Held, decision: Decision, now_s: float) -> Ticket:
        ticket = held.ticket
        flight = self._flights[ticket]
        flight.held = None
        self._bind(ticket, flight, decision, now_s)
        return ticket

    def _bind(self, ticket: Ticket, flight: Flight, decision: Decision, now_s: float) -> None:
        """Take the load of a decision, before anything is sent."""
        request = ticket.request
        host = self._places[decision.place]
        prefiller = self._places[decision.prefill_place] if decision.prefill_place else host
        cached = self._index.cached_tokens(prefiller.spec.name, request)
        decision = replace(decision, expected_cached_tokens=cached)
        flight.host = host
        flight.expected = cached
        flight.context = request.prompt_tokens + request.expected_output_tokens
        host.load.begin_decode(flight.context)
        flight.decoding = True
        self._begin_prefill(flight, prefiller, request, cached, now_s)
        self._index.sent(host.spec.name, request)
        if prefiller is not host:
            self._index.sent(prefiller.spec.name, request)
        session = flight.session
        if decision.home is not None and decision.home in self._places and request.kind != "side":
            if session.home is not None and decision.home != session.home:
                session.moves += 1
            self._sessions.settle(session, decision.home)
        if decision.word is Word.HOME:
            session.dearer_times = 0
        elif decision.word is Word.SPILL and request.kind != "side":
            dear = dearer_by_s(decision.costs, session.home, decision.place) > self.settings.move_margin_s
            session.dearer_times = session.dearer_times + 1 if dear else 0
        session.last_place = decision.place
        ticket.decision = decision
        ticket.decided_s = now_s
        ticket.attempts = (*ticket.attempts, decision.place)

    def _begin_prefill(self, flight: Flight, worker: Place, request: RequestView, cached: int, now_s: float) -> None:
        flight.prefiller = worker
        flight.uncached = request.prompt_tokens - cached
        flight.work_s = prefill_s(worker.rates, flight.uncached, cached)
        worker.load.begin_prefill(flight.key, flight.work_s, flight.uncached, now_s)
        flight.prefilling = True

    def _end_prefill(self, flight: Flight, now_s: float, *, ran: bool) -> None:
        if flight.prefilling and flight.prefiller is not None:
            flight.prefilling = False
            flight.prefiller.load.end_prefill(flight.key, flight.uncached, now_s, ran=ran)

    def _let_go(self, flight: Flight, now_s: float, *, ran: bool) -> None:
        self._end_prefill(flight, now_s, ran=ran)
        if flight.decoding and flight.host is not None:
            flight.decoding = False
            flight.host.load.end_decode(flight.context)
        if flight.held is not None:
            self._queues.remove(flight.held)
            flight.held = None

    def _close(self, ticket: Ticket, flight: Flight, now_s: float) -> None:
        self._let_go(flight, now_s, ran=False)
        self._sessions.release(flight.session, now_s)
        if ticket.request.final:
            self._sessions.finish(flight.session.name)
        ticket.closed = True

    def _learn(
        self,
        ticket: Ticket,
        flight: Flight,
        prompt_tokens: int | None,
        cached_tokens: int | None,
        output_tokens: int | None,
    ) -> None:
        session = flight.session
        if ticket.request.kind != "side":
            session.prompt_tokens = prompt_tokens or ticket.request.prompt_tokens
            session.context_tokens = session.prompt_tokens + (output_tokens or 0)
        if prompt_tokens and cached_tokens is not None and flight.prefiller is not None:
            flight.prefiller.prompt_tokens += prompt_tokens
            flight.prefiller.cached_tokens += cached_tokens

    def _replace(self, name: str, now_s: float) -> list[Ticket]:
        """A queue's place is gone: decide its requests anew."""
        decided = []
        for held in list(self._queues.at(name)):
            self._queues.remove(held)
            ticket = held.ticket
            flight = self._flights[ticket]
            flight.held = None
            try:
                decision = self._decide(ticket.request, flight.session, frozenset(), now_s)
            except NoPlaceError as error:
                ticket.refused = str(error)
                decided.append(ticket)
                continue
            worker = self._places[decision.prefill_place or decision.place]
            work_s = self._work_s(worker, ticket.request)
            flight.held = Held(ticket, decision, worker.spec.name, work_s, held.since_s)
            self._queues.push(flight.held)
        return decided

    def _steal(self, now_s: float) -> list[Ticket]:
        return []
