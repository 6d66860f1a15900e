"""The router: books of places, sessions, queues and index around the pure decision. No I/O; the caller brings time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import count
from zlib import crc32

from msgspec.structs import replace

from homeport_engines.base import EngineStats
from homeport_engines.vllm.kv import KvBatch
from homeport_proxy.routing.causes import PromptTrace, book
from homeport_proxy.routing.cost import prefill_s, tiered_prefill_s
from homeport_proxy.routing.decide import dearer_by_s, decide
from homeport_proxy.routing.decisions import Shadows, recorded
from homeport_proxy.routing.flight import Flight
from homeport_proxy.routing.index import Index
from homeport_proxy.routing.index.combined import PrefixIndex
from homeport_proxy.routing.learning import learn_index, learn_speeds, scoped, sight
from homeport_proxy.routing.place import ForeignLoad, Place
from homeport_proxy.routing.policies import Policy
from homeport_proxy.routing.queue import NOBODY, Held, VirtualQueues
from homeport_proxy.routing.sessions import Session, SessionTable
from homeport_proxy.routing.shortlist import Shortlist
from homeport_proxy.routing.slices import begun, part_tokens
from homeport_proxy.routing.status import router_status, session_view
from homeport_proxy.routing.views import (
    USABLE,
    Decision,
    DecisionRecord,
    NoPlaceError,
    Outcome,
    PlaceSpec,
    PlaceView,
    PrefixKeys,
    RequestView,
    RouterStatus,
    RoutingSettings,
    SessionView,
    State,
    Ticket,
    Word,
)


class Router:
    """Places requests: ``arrive``, then ``due`` until decided, ``first_token``, ``finished`` or ``cancel``.

    Every time is the caller's ``now_s`` (any monotonic seconds); ``seed`` makes random policies repeatable; ``log``
    gets one record per decision. ``policy`` overrides the settings' by a rule of the caller's, ``index`` the index
    (comparisons and bounds in the simulator).
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
        self._policy = policy
        self._places: dict[str, Place] = {}
        self._sessions = SessionTable(settings.idle_ttl_s, settings.max_sessions)
        self._queues = VirtualQueues(settings, self._held_other)
        self._index: Index = index or PrefixIndex(settings.index_bytes, settings.default_kv_tokens)
        self._flights: dict[Ticket, Flight] = {}
        self._ready: list[Ticket] = []
        self._guarded: deque[Ticket] = deque()
        self._keys = count(1)
        self._shadows = Shadows(settings.shadow)
        self._shortlist = Shortlist(self._queues.held_s)

    def reconfigure(self, settings: RoutingSettings) -> None:
        """Take a reloaded file's settings; what is known stays, within the new bounds."""
        if settings.shadow != self.settings.shadow:
            self._shadows = Shadows(settings.shadow)
        self.settings = settings
        self._sessions.reconfigure(settings.idle_ttl_s, settings.max_sessions)
        self._queues.settings = settings
        if isinstance(self._index, PrefixIndex):
            self._index.set_budget(settings.index_bytes)

    # -- places ------------------------------------------------------------------------------------------------------

    def set_places(self, places: Sequence[PlaceSpec]) -> None:
        """The fleet as configured or discovered; places that stay keep their state, load, index and learned rates."""
        wanted = {spec.name: spec for spec in places}
        for name in [name for name in self._places if name not in wanted]:
            del self._places[name]
            self._index.drop_place(name)
        for name, spec in wanted.items():
            place = self._places.get(name)
            if place is None:
                place = self._places[name] = Place(spec, self.settings.load_window_s)
            else:
                place.renew(spec)
            self._index.set_place(name, place.view.kv_capacity_tokens)
        self._shortlist.changed(self._places.values())

    def set_state(self, backend: str, state: State, now_s: float) -> None:
        """A backend's health changed, for all of its ranks."""
        for place in self._of(backend):
            if state == "down" and place.state != "down":
                place.down_since_s = now_s
                # it may come back as another process: its events are followed from the start again
                self._index.suspect(place.spec.name)
            elif state != "down":
                place.down_since_s = None
            place.state = state

    def cool(self, backend: str, until_s: float) -> None:
        """The engine asked for a pause: no new sessions until then; the sessions at home there still come."""
        for place in self._of(backend):
            place.cool_until_s = max(place.cool_until_s, until_s)

    def observe_stats(self, place: str, stats: EngineStats, now_s: float) -> None:
        """An engine's telemetry: its real KV capacity, how well it speculates, and whether it restarted."""
        known = self._places.get(place)
        if known is None:
            return
        if known.restarted(stats):
            known.cold_since_s = now_s
            self._index.forget(place)
        known.stats = stats
        if stats.kv_capacity_tokens and stats.kv_capacity_tokens != known.view.kv_capacity_tokens:
            known.view.kv_capacity_tokens = stats.kv_capacity_tokens
            self._index.set_place(place, stats.kv_capacity_tokens)
        if stats.spec is not None and stats.spec.drafts:
            known.view.tokens_per_step = 1.0 + stats.spec.accepted_tokens / stats.spec.drafts

    def kv_events(self, place: str, batch: KvBatch) -> int | None:
        """A batch of an engine's KV events; returns the sequence to replay from when some are missing."""
        return self._events().take(place, batch)

    def kv_replayed(self, place: str, batches: Sequence[KvBatch]) -> int | None:
        """The answer to a replay request (empty: the engine has nothing, or did not answer)."""
        return self._events().replayed(place, batches)

    def kv_connected(self, place: str) -> None:
        """A new connection to the place's events: what was heard over the old one no longer counts."""
        self._events().suspect(place)

    def kv_follow(self, place: str, on: bool = True) -> None:
        """The place's KV events are subscribed to (or no longer)."""
        (self._events().follow if on else self._events().unfollow)(place)

    def block_tokens(self, place: str) -> int | None:
        """The engine's block size by its events: prompts hashed in blocks of this size use the exact index."""
        return self._events().block_tokens(place)

    # -- one request -------------------------------------------------------------------------------------------------

    def arrive(self, request: RequestView, now_s: float) -> Ticket:
        """Take a request; it is decided by the next ``due``, or held. Raises NoPlaceError when nothing can take it."""
        session = self._sessions.known_or_new(request.session, now_s)
        request = self._as_known(request, session)
        ticket = Ticket(request, now_s)
        decision = self._decide(request, session, now_s)
        flight = self._flights[ticket] = Flight(next(self._keys), request, session, session.last_used_s)
        session.open_requests += 1
        guarded = self._guards(session, request)
        if request.kind != "side":
            self._sessions.used(session, now_s)
        if guarded:
            ticket.held_reason = "overload: new sessions wait until running ones need less cache"
            self._guarded.append(ticket)
            return ticket
        self._enter(ticket, flight, decision, now_s, now_s)
        return ticket

    @property
    def holding(self) -> bool:
        """Whether any ticket waits for ``due``."""
        return bool(self._ready or self._guarded or len(self._queues))

    def due(self, now_s: float) -> list[Ticket]:
        """Tickets decided by now, their load taken. One without a decision was refused (``ticket.refused``)."""
        decided, self._ready = [ticket for ticket in self._ready if not ticket.closed], []
        while self._guarded and not self._overloaded():
            decided += self._decide_anew(self._guarded.popleft(), now_s, now_s)
        if not len(self._queues):
            return decided
        for name in self._queues.waiting():
            place = self._places.get(name)
            if place is None or place.state not in USABLE:
                for held in self._queues.at(name):
                    decided += self._place_anew(held, now_s)
        for name in self._queues.waiting():
            decided += self._serve(name, now_s)
        if len(self._queues):
            decided += self._rebalance(now_s)
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
        self._let_go(flight, now_s)
        try:
            decision = self._decide(ticket.request, flight.session, now_s, exclude)
        except NoPlaceError:
            return None
        if flight.session.context_tokens == 0:
            # nothing of the session lies at the home that refused its very first request
            home = decision.place if ticket.request.kind != "side" else flight.session.home
        else:
            home = flight.session.home
        self._bind(ticket, flight, replace(decision, home=home), now_s)
        return ticket.decision

    def without_prefill(self, ticket: Ticket, now_s: float, why: str) -> Decision:
        """The prefill leg failed or is gone: the decode place prefills by itself; the word stays."""
        decision = ticket.decision
        if decision is None:
            raise ValueError("without_prefill before the ticket was decided")
        flight = self._flights.get(ticket)
        expected = decision.expected_cached_tokens
        if flight is not None and flight.host is not None:
            flight.end_prefill(self._index, now_s, ran=False)
            expected = flight.begin_prefill(flight.host, self._index, now_s)
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
            flight.end_prefill(self._index, now_s, ran=True)
            flight.handed_over_s = now_s

    def sliced(self, ticket: Ticket, now_s: float, *, cached_tokens: int | None, ok: bool) -> None:
        """The part of the prompt that ``part_tokens`` named was prefilled (of it ``cached_tokens`` were found, where
        the engine said so), or could not be: then the request is sliced no more. It is held until ``due`` returns it.
        """
        flight = self._flights.get(ticket)
        if flight is None or (part := flight.part) is None or (rest := flight.held) is None or part.prefiller is None:
            return
        flight.part, ticket.part_tokens = None, None
        self._queues.remove(rest)
        part.end_prefill(self._index, now_s, ran=ok)
        if ok and part.burst is not None:
            if cached_tokens is not None:
                part.burst.parts[part.key] = (max(part.request.prompt_tokens - cached_tokens, 0), cached_tokens)
            part.prefiller.learn_prefill(part.burst, now_s)
        flight.whole |= not ok
        if part.prefiller.spec.name in self._places:  # else it is decided anew
            if ok:
                flight.keep(part, part.prefiller, self._index)
            rest.work_s, rest.uncached_tokens = self._work(part.prefiller, ticket.request)
        self._queues.push(rest)

    def first_token(self, ticket: Ticket, now_s: float) -> None:
        """The first token came: the prefill is over."""
        flight = self._flights.get(ticket)
        if flight is None or ticket.first_token_s is not None:
            return
        ticket.first_token_s = now_s
        flight.end_prefill(self._index, now_s, ran=True)
        self._lies_at_host(ticket, flight)

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
        """The answer is complete (or failed): release everything, once; say where the prompt's tokens came from.

        ``prompt_tokens``, ``cached_tokens``, ``output_tokens``: as the engine reported them, None when it did not.
        """
        flight = self._flights.pop(ticket, None)
        if flight is None:
            return Outcome(prompt_tokens, cached_tokens)
        if prompt_tokens and flight.trace is not None:
            flight.trace.tokens = prompt_tokens  # what the next turn repeats is known now, no longer estimated
        if ok and flight.host is not None:
            if ticket.first_token_s is None:  # an answer that is not streamed has no first token to tell of
                self._lies_at_host(ticket, flight)
            learn_speeds(ticket, flight, self._places, now_s, cached_tokens, output_tokens or 0)
            if prompt_tokens and cached_tokens is not None:
                learn_index(flight, self._index, prompt_tokens, cached_tokens, now_s)
            if ticket.request.kind != "side":
                tokens = prompt_tokens or ticket.request.prompt_tokens
                self._sessions.grew(flight.session, tokens, tokens + (output_tokens or 0))
        self._close(ticket, flight, now_s)
        causes = book(prompt_tokens, cached_tokens, flight.sight)
        return Outcome(prompt_tokens, cached_tokens, causes, flight.found if flight.sight else None)

    def cancel(self, ticket: Ticket, now_s: float) -> None:
        """The client left or the request failed: release everything, once."""
        flight = self._flights.pop(ticket, None)
        if flight is not None:
            self._close(ticket, flight, now_s)

    # -- what others know --------------------------------------------------------------------------------------------

    def adopt(self, session: str, home: str, now_s: float) -> bool:
        """Take over a session's home from another proxy; False when that place is not known here. Counts no move."""
        if not self._can_be_home(home):
            return False
        kept = self._sessions.keep(session, now_s)
        kept.unseen |= kept.home != home
        self._sessions.settle(kept, home)
        return True

    def foreign_load(self, place: str, *, requests: int, prefill_tokens: int, decode_tokens: int) -> None:
        """What other proxies have in flight at a place now; it counts in decisions, not in the status."""
        if (known := self._places.get(place)) is not None:
            known.foreign = ForeignLoad(requests, prefill_tokens, decode_tokens)

    def set_share(self, backend: str, share: float) -> None:
        """Slow start: a backend gives only this share of its speed (0 < share <= 1) for now."""
        for place in self._of(backend):
            place.share = share

    # -- sessions ----------------------------------------------------------------------------------------------------

    def finish_session(self, session: str, now_s: float) -> bool:
        """The client says that the session is over; False when it is not known."""
        return self._sessions.finish(session)

    def session(self, session: str, now_s: float | None = None) -> SessionView | None:
        """The session as known, or None. Without ``now_s`` as it was at its last use."""
        known = self._sessions.get(session)
        if known is None:
            return None
        at_s = known.last_used_s if now_s is None else now_s
        return session_view(known, self._places, self._index, self.settings.idle_ttl_s, at_s)

    def status(self, now_s: float) -> RouterStatus:
        """The router at a glance."""
        return router_status(
            self._places, self._sessions, self._queues, self._index, self._shadows, len(self._guarded), now_s
        )

    # -- inside ------------------------------------------------------------------------------------------------------

    def _as_known(self, request: RequestView, session: Session) -> RequestView:
        """The request with what is known of its session, its scope's own digests, and the prompt length that the
        session's last answer tells."""
        prefix, prompt_tokens = request.prefix, request.prompt_tokens
        salt = scoped(request)
        if salt:
            keys = [key ^ salt for key in prefix.text_blocks]
            prefix = PrefixKeys(keys, prefix.text_block_chars, prefix.token_blocks)
        if request.prompt_estimated and session.prompt_tokens and session.trace is not None:
            tokens = session.trace.continued_tokens(prefix.text_blocks)
            if tokens is not None:
                longest = self._shortlist.longest
                prompt_tokens = tokens if longest is None else min(tokens, longest - 1)
        return replace(
            request,
            prefix=prefix,
            prompt_tokens=prompt_tokens,
            session_requests=self._sessions.mean_requests,
            homed=session.home is not None and self._can_be_home(session.home),
        )

    def _lies_at_host(self, ticket: Ticket, flight: Flight) -> None:
        """After a separate prefill: the prompt's KV is now known to lie at the decode engine as well."""
        if flight.host is not None and flight.prefiller is not flight.host:
            self._index.sent(flight.host.spec.name, ticket.request, flight.key)
            self._index.settled(flight.host.spec.name, flight.key)

    def _held_other(self, name: str) -> None:
        """What is held for a place is not what it was."""
        if (place := self._places.get(name)) is not None:
            place.load.weighed.add(place.load)

    def _can_be_home(self, name: str) -> bool:
        """Whether it is a place of the fleet that can decode."""
        place = self._places.get(name)
        return place is not None and place.spec.role != "prefill"

    def _of(self, backend: str) -> list[Place]:
        return [place for place in self._places.values() if place.spec.backend == backend]

    def _events(self) -> PrefixIndex:
        if not isinstance(self._index, PrefixIndex):
            raise TypeError("this router's index takes no KV events")
        return self._index

    def _views(self, request: RequestView, session: Session, exclude: Collection[str], now_s: float) -> list[PlaceView]:
        index, queues, home = self._index, self._queues.joined(), session.home
        eligible = self._shortlist.eligible(request)
        if exclude:
            names = set(exclude)
            eligible = [one for one in eligible if not names & {one.spec.name, one.spec.backend}]
        if not eligible:
            raise NoPlaceError(
                f"no backend left that serves {request.model!r} with {request.prompt_tokens} prompt tokens"
                + (f" and adapter {request.adapter!r}" if request.adapter else "")
            )
        cached = index.cached_by_place(request)
        parent = self._sessions.get(request.parent) if request.parent and home is None else None
        parent_home = parent.home if parent is not None else None
        views = []
        tokenised = bool(request.prefix.token_blocks)
        indexed = tokenised or bool(request.prefix.text_blocks)
        other, mostly, far = cached.other, cached.mostly, request.rtt_s
        own = self._places.get(home or parent_home or "")
        for place in self._shortlist.pick(eligible, request, own, cached, now_s):
            name = place.spec.name
            view = place.refresh(now_s)
            queue = queues.get(name)
            view.queued_ranks, view.queued_works_s = (queue.ranks, queue.works) if queue is not None else NOBODY
            view.cached_tokens = other.get(name, mostly) if indexed else None
            view.host_tokens = index.host_tokens(name, request) if tokenised else 0
            view.rtt_s = place.rates.rtt_s + far.get(place.spec.backend, 0.0) if far else place.rates.rtt_s
            view.confidence = place.confidence.of(request.api)
            view.parent = name == parent_home
            view.home = view.unseen = view.rewritten = view.bound = False
            view.dearer_times = 0
            if name == home:
                self._view_home(view, session, request, cached.at(name), now_s)
            views.append(view)
        return views

    def _view_home(
        self, view: PlaceView, session: Session, request: RequestView, cached_tokens: int, now_s: float
    ) -> None:
        view.home = True
        view.unseen = session.unseen
        view.rewritten = _rewritten(session, request, cached_tokens)
        view.bound = now_s - session.last_used_s < self.settings.drain_idle_s and not view.rewritten
        view.dearer_times = session.dearer_times

    def _decide(self, request: RequestView, session: Session, now_s: float, exclude: Collection[str] = ()) -> Decision:
        if session.home is not None and not self._can_be_home(session.home):
            self._sessions.settle(session, None)
            session.homeless = True
        views = self._views(request, session, exclude, now_s)
        seed = self._seed + flight_seed(request.request_id)
        refused = tuple(sorted(exclude))
        decision = decide(request, views, now_s, seed, self.settings, self._policy, refused, session.homeless)
        shadows = self._shadows.decide(request, views, now_s, seed, self.settings, decision)
        if self._log is not None:
            homeless = session.homeless
            self._log(recorded(request, views, now_s, seed, self.settings, decision, refused, homeless, shadows))
        return decision

    def _enter(self, ticket: Ticket, flight: Flight, decision: Decision, now_s: float, since_s: float) -> Held | None:
        """Into the queue of the place that will prefill, or (without late binding) straight through."""
        worker = self._places[decision.prefill_place or decision.place]
        priced = decision.costs.get(worker.spec.name) if decision.prefill_place is None else None
        if priced is not None and priced.cached_tokens is not None:
            work_s, uncached_tokens = priced.prefill_s, ticket.request.prompt_tokens - priced.cached_tokens
        else:
            work_s, uncached_tokens = self._work(worker, ticket.request)
        worker.load.offer(work_s, now_s)
        if not self.settings.late_binding:
            self._bind(ticket, flight, decision, now_s)
            self._ready.append(ticket)
            return None
        held = flight.held = Held(ticket, decision, worker.spec.name, work_s, uncached_tokens, since_s)
        self._queues.push(held)
        return held

    def _work(self, worker: Place, request: RequestView) -> tuple[float, int]:
        """Predicted prefill of a request at ``worker``: seconds, uncached tokens."""
        name = worker.spec.name
        cached = int(self._index.cached_tokens(name, request) * worker.confidence.of(request.api))
        host_tokens = self._index.host_tokens(name, request)
        prompt_tokens = request.prompt_tokens
        return tiered_prefill_s(worker.rates, prompt_tokens, cached, host_tokens), prompt_tokens - cached

    def _serve(self, name: str, now_s: float) -> list[Ticket]:
        """Send a place its next requests, as long as it has little prefill left."""
        decided = []
        load, settings = self._places[name].load, self.settings
        while (held := self._queues.first(name, now_s)) is not None:
            if not load.takes(held.uncached_tokens, settings.hold_below_s, settings.step_tokens, now_s):
                break
            if held.decision.place not in self._places:  # it waits for a prefill place; where it was to decode is gone
                decided += self._place_anew(held, now_s)
                continue
            flight = self._flights[held.ticket]
            flight.held = None
            if (tokens := self._part_tokens(held, flight)) is not None:
                self._begin_part(held, flight, tokens, now_s)
            else:
                self._queues.take(held, held.work_s)
                self._bind(held.ticket, flight, held.decision, now_s)
            decided.append(held.ticket)
        return decided

    def _part_tokens(self, held: Held, flight: Flight) -> int | None:
        """How much of a held prompt is prefilled first, by itself; None: all of it goes."""
        request = held.ticket.request
        short = held.work_s <= self.settings.slice_s
        if short or not request.sliceable or flight.whole or held.decision.prefill_place is not None:
            return None
        cached_tokens = self._index.cached_tokens(held.place, request)
        rates, held_s = self._places[held.place].rates, self._queues.held_s(held.place) - held.work_s
        return part_tokens(rates, self.settings, request.prompt_tokens, cached_tokens, held_s)

    def _begin_part(self, held: Held, flight: Flight, tokens: int, now_s: float) -> None:
        """Take the load of a part; the session's home and the rest of the load wait for the request itself."""
        ticket, worker = held.ticket, self._places[held.place]
        if flight.prefiller is not worker:
            flight.foresee(worker, self._index)
        if flight.sight is None:
            flight.sight = sight(flight, self._index, self._places, now_s, self._sessions.ttl_s(flight.session))
        part = flight.part = Flight(next(self._keys), begun(ticket.request, tokens), flight.session, now_s)
        part.begin_prefill(worker, self._index, now_s)
        flight.let_go(self._index)
        flight.parts += 1
        part_s = prefill_s(worker.rates, part.uncached, part.cached)
        self._queues.take(held, part_s)
        rest_s = max(held.work_s - part_s, 0.0)
        flight.held = Held(ticket, held.decision, held.place, rest_s, held.uncached_tokens, held.since_s, begun=True)
        self._queues.push(flight.held, parked=True)
        ticket.decision = replace(held.decision, expected_cached_tokens=flight.found)
        ticket.part_tokens, ticket.decided_s = tokens, now_s

    def _rebalance(self, now_s: float) -> list[Ticket]:
        """An idle place takes a held request when its own prefill, waste priced, beats the wait at the other place."""
        below = self.settings.hold_below_s
        waiting = set(self._queues.waiting())
        idle = [
            name
            for name, place in self._places.items()
            if name not in waiting and place.state in USABLE and place.load.backlog_s(now_s) <= below
        ]
        if not idle:
            return []
        decided: list[Ticket] = []
        for held in self._queues.movable():
            costs = held.decision.costs
            own = costs.get(held.decision.place)
            if own is None or held.begun or held.place != held.decision.place:
                continue
            wait_s = self._places[held.place].load.prefill_left_s(now_s) + self._queues.ahead_s(held)
            for name in idle:
                other = costs.get(name)
                if other is None:
                    continue
                if other.prefill_s + other.shadow_s < wait_s + own.prefill_s + own.shadow_s:
                    decided += self._place_anew(held, now_s)
                    idle = [name for name in idle if self._places[name].load.backlog_s(now_s) <= below]
                    break
            if not idle:
                break
        return decided

    def _place_anew(self, held: Held, now_s: float) -> list[Ticket]:
        """Decide a held request again. That may let others go."""
        self._queues.remove(held)
        return self._decide_anew(held.ticket, held.since_s, now_s)

    def _decide_anew(self, ticket: Ticket, since_s: float, now_s: float) -> list[Ticket]:
        """Decide a held request again; returns it when it went to an engine at once, or was refused."""
        flight = self._flights[ticket]
        flight.held = None
        try:
            decision = self._decide(ticket.request, flight.session, now_s)
        except NoPlaceError as error:
            ticket.refused = str(error)
            return [ticket]
        held = self._enter(ticket, flight, decision, now_s, since_s)
        return self._serve(held.place, now_s) if held is not None else []

    def _bind(self, ticket: Ticket, flight: Flight, decision: Decision, now_s: float) -> None:
        """Take the load of a decision, before anything is sent."""
        request, session, index = ticket.request, flight.session, self._index
        host = self._places[decision.place]
        prefiller = self._places[decision.prefill_place] if decision.prefill_place else host
        flight.begin_decode(host, index)
        cached = flight.begin_prefill(prefiller, index, now_s)
        if flight.sight is None:
            flight.sight = sight(flight, index, self._places, now_s, self._sessions.ttl_s(session))
        prefill_cached = cached if decision.prefill_place else None
        if cached != decision.expected_cached_tokens or prefill_cached != decision.prefill_cached_tokens:
            decision = replace(decision, expected_cached_tokens=cached, prefill_cached_tokens=prefill_cached)
        ticket.decision, ticket.part_tokens = decision, None
        ticket.decided_s = now_s
        ticket.attempts = (*ticket.attempts, decision.place)
        if request.kind == "side":
            return
        self._settle(session, decision)
        session.unseen = False
        session.last_place = prefiller.spec.name
        session.halves = {
            size: blocks[(len(blocks) - 1) // 2] for size, blocks in request.prefix.token_blocks.items() if blocks
        }
        session.trace = flight.trace = PromptTrace(request.prefix.text_blocks, request.prompt_tokens)

    def _settle(self, session: Session, decision: Decision) -> None:
        """The session's home and how often it was the dearer one, after a decision."""
        if decision.home is not None and decision.home in self._places and decision.home != session.home:
            if session.home is not None or session.homeless:
                session.moves += 1
            session.homeless = False
            self._sessions.settle(session, decision.home)
        if decision.word is Word.HOME:
            session.dearer_times = 0
        elif decision.word is Word.SPILL:
            dear = dearer_by_s(decision.costs, session.home, decision.place) > self.settings.move_margin_s
            session.dearer_times = session.dearer_times + 1 if dear else 0

    def _let_go(self, flight: Flight, now_s: float) -> None:
        """Its place in a queue and all load that is still held for it."""
        if flight.held is not None:
            self._queues.remove(flight.held)
            flight.held = None
        flight.release(self._index, now_s)

    def _close(self, ticket: Ticket, flight: Flight, now_s: float) -> None:
        self._let_go(flight, now_s)
        if ticket in self._guarded:
            self._guarded.remove(ticket)
        if flight.trace is not None:
            flight.trace.condense()
        self._sessions.release(flight.session, now_s, renew=ticket.request.kind != "side")
        if ticket.request.final:
            self._sessions.finish(flight.session.name)
        ticket.closed = True

    def _guards(self, session: Session, request: RequestView) -> bool:
        return request.kind == "main" and not session.requests and self._overloaded()

    def _overloaded(self) -> bool:
        limit = self.settings.overload_context
        if limit is None:
            return False
        capacity = sum(
            place.view.kv_capacity_tokens or self.settings.default_kv_tokens
            for place in self._places.values()
            if place.spec.role != "prefill"
        )
        return self._sessions.context_tokens > limit * capacity


def flight_seed(request_id: str) -> int:
    """A request's own seed: random policies repeat whatever else happens around it."""
    return crc32(request_id.encode("utf-8", "replace"))


def _rewritten(session: Session, request: RequestView, cached_tokens: int) -> bool:
    """Whether the prompt repeats less than half of the session's last one (looked at only when little is cached)."""
    last = session.trace
    if last is None or cached_tokens * 2 >= last.tokens or not request.prefix.text_blocks:
        return False
    return last.shared_tokens(request.prefix.text_blocks, request.prompt_tokens) * 2 < last.tokens
