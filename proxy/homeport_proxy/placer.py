"""The door to the routers: asks, waits while a request is held, wakes the routers when a decision is due."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from homeport_proxy.bounded import Bounded
from homeport_proxy.errors import overloaded
from homeport_proxy.region import RegionView, ranking
from homeport_proxy.routing.router import Router
from homeport_proxy.routing.views import (
    USABLE,
    Decision,
    NoPlaceError,
    Outcome,
    RequestView,
    RouterStatus,
    SessionView,
    Ticket,
)
from homeport_proxy.state import State

ENDED_KEPT = 10_000
"""Sessions remembered after their end, so that ending one twice is no error."""


class Placed(NamedTuple):
    """A decided ticket, and its session as it was before this request came (None: not known)."""

    ticket: Ticket
    before: SessionView | None


class Placer(Protocol):
    """What the data plane asks of placement, in this process or over a worker's socket.

    Every ticket from ``place`` must be given back by ``finished`` or ``cancel``; both may be called more than once.
    """

    async def place(self, region: str, request: RequestView) -> Placed:
        """A ticket with its decision made. Raises NoPlaceError, or ProxyError 503 when too many wait."""

    async def again(self, ticket: Ticket, exclude: frozenset[str]) -> Decision | None: ...

    async def without_prefill(self, ticket: Ticket, why: str) -> Decision: ...

    def prefill_done(self, ticket: Ticket, cached_tokens: int | None) -> None: ...

    async def sliced(self, ticket: Ticket, cached_tokens: int | None, *, ok: bool) -> None:
        """The part that ``ticket.part_tokens`` named was prefilled, or could not be; returns when the ticket is due
        again. Raises NoPlaceError."""

    def first_token(self, ticket: Ticket) -> None: ...

    def finished(
        self,
        ticket: Ticket,
        *,
        prompt_tokens: int | None,
        cached_tokens: int | None,
        output_tokens: int | None,
        ok: bool,
    ) -> Outcome: ...

    def cancel(self, ticket: Ticket) -> None: ...


class LocalPlacer:
    """Placement by routers of this process, one per region whose backends this proxy reaches itself.

    ``max_waiting`` bounds the requests held; it is asked anew each time, so that a reload changes it. ``state``: where
    homes are shared with other proxies. A home settled elsewhere is taken over; while the others cannot be heard, a
    new session goes where a hash of it and the usable places says, so that all proxies send it to the same one.
    """

    def __init__(
        self,
        routers: Mapping[str, Router],
        max_waiting: Callable[[], int],
        state: State,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routers = routers
        self._state = state
        self._max_waiting = max_waiting
        self._clock = clock
        self._home: dict[Ticket, Router] = {}
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._timers: dict[Router, asyncio.TimerHandle] = {}
        self._ended: Bounded[str, bool] = Bounded(ENDED_KEPT)
        self._pumping: set[Router] = set()

    @property
    def waiting(self) -> int:
        """Requests held now."""
        return len(self._waiting)

    @property
    def open_tickets(self) -> int:
        """Tickets not yet given back."""
        return len(self._home)

    async def place(self, region: str, request: RequestView) -> Placed:
        router = self._routers.get(region)
        if router is None:
            raise NoPlaceError(f"region {region!r} has no backends here")
        if len(self._waiting) >= self._max_waiting() > 0:
            raise overloaded(f"{len(self._waiting)} requests wait for an engine already; try again shortly")
        shared = self._state.shared and request.kind != "side"
        known = await self._follow(router, request) if shared else None
        before = router.session(request.session, self._clock())
        ticket = router.arrive(request, self._clock())
        self._home[ticket] = router
        self._pump(router)
        if ticket.decision is None and ticket.refused is None:
            self._waiting[ticket] = asyncio.get_running_loop().create_future()
        await self._due(ticket)
        home = ticket.decision.home if ticket.decision else None
        if shared and home is not None:
            await self._state.settled(request.session, home, known, router.settings.idle_ttl_s)
        return Placed(ticket, before)

    async def again(self, ticket: Ticket, exclude: frozenset[str]) -> Decision | None:
        router = self._home.get(ticket)
        if router is None:
            return None
        decision = router.again(ticket, exclude, self._clock())
        self._pump_soon(router)
        return decision

    async def without_prefill(self, ticket: Ticket, why: str) -> Decision:
        router = self._home[ticket]
        decision = router.without_prefill(ticket, self._clock(), why)
        self._pump_soon(router)
        return decision

    def prefill_done(self, ticket: Ticket, cached_tokens: int | None) -> None:
        if (router := self._home.get(ticket)) is not None:
            router.prefill_done(ticket, self._clock(), cached_tokens)
            self._pump_soon(router)

    async def sliced(self, ticket: Ticket, cached_tokens: int | None, *, ok: bool) -> None:
        router = self._home.get(ticket)
        if router is None or ticket.closed:
            return
        before = ticket.decision.home if ticket.decision else None
        self._waiting[ticket] = asyncio.get_running_loop().create_future()
        router.sliced(ticket, self._clock(), cached_tokens=cached_tokens, ok=ok)
        self._pump(router)
        await self._due(ticket)
        home = ticket.decision.home if ticket.decision else None
        if self._state.shared and home is not None and home != before:
            await self._state.settled(ticket.request.session, home, before, router.settings.idle_ttl_s)

    def first_token(self, ticket: Ticket) -> None:
        if (router := self._home.get(ticket)) is not None:
            router.first_token(ticket, self._clock())
            self._pump_soon(router)

    def finished(
        self,
        ticket: Ticket,
        *,
        prompt_tokens: int | None,
        cached_tokens: int | None,
        output_tokens: int | None,
        ok: bool,
    ) -> Outcome:
        router = self._home.pop(ticket, None)
        if router is None:
            return Outcome(prompt_tokens, cached_tokens)
        outcome = router.finished(
            ticket,
            self._clock(),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            ok=ok,
        )
        if ticket.request.final:
            self._ended.put(ticket.request.session, True)
        self._pump_soon(router)
        return outcome

    def cancel(self, ticket: Ticket) -> None:
        if (router := self._home.pop(ticket, None)) is not None:
            router.cancel(ticket, self._clock())
            self._pump_soon(router)

    async def finish_session(self, session: str) -> bool:
        """End a session; False when it is not known, nor was ended lately."""
        self._state.ended(session)
        known = [router.finish_session(session, self._clock()) for router in self._routers.values()]
        if True in known:
            self._ended.put(session, True)
        return self._ended.get(session) is not None

    async def session(self, session: str) -> SessionView | None:
        """What is known of a session; None when it is unknown."""
        now_s = self._clock()
        found = [view for router in self._routers.values() if (view := router.session(session, now_s)) is not None]
        return max(found, key=lambda view: view.last_used_s, default=None)

    def wake(self) -> None:
        """Something changed outside (a backend's state, the set of places): held requests may move now."""
        if not self._home:
            return
        for router in self._routers.values():
            self._pump_soon(router)

    def close(self) -> None:
        """Stop the timers; held requests are the callers' to cancel."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    async def _follow(self, router: Router, request: RequestView) -> str | None:
        """Take over the session's home from the other proxies, or agree with them by hash when they are silent; returns
        what they know."""
        home = known = await self._state.home_of(request.session)
        if home is None and self._state.alone and router.session(request.session) is None:
            home = _by_hash(router.status(self._clock()), request)
        if home is not None:
            router.adopt(request.session, home, self._clock())
        return known

    async def _due(self, ticket: Ticket) -> None:
        """Wait while the ticket is held; it is cancelled when it was refused, or who waits for it."""
        try:
            if (due := self._waiting.get(ticket)) is not None:
                try:
                    await due
                finally:
                    del self._waiting[ticket]
            if ticket.refused is not None:
                raise NoPlaceError(ticket.refused)
        except BaseException:
            self.cancel(ticket)
            raise

    def _pump_soon(self, router: Router) -> None:
        if router.holding and router not in self._pumping:
            self._pumping.add(router)
            asyncio.get_running_loop().call_soon(self._pump, router)

    def _pump(self, router: Router) -> None:
        self._pumping.discard(router)
        now_s = self._clock()
        for ticket in router.due(now_s):
            future = self._waiting.get(ticket)
            if future is not None and not future.done():
                future.set_result(None)
        if (timer := self._timers.pop(router, None)) is not None:
            timer.cancel()
        due_s = router.next_due_s(now_s)
        if due_s is not None:
            delay_s = max(0.001, due_s - now_s)
            self._timers[router] = asyncio.get_running_loop().call_later(delay_s, self._pump, router)


def _by_hash(status: RouterStatus, request: RequestView) -> str | None:
    """The place that rendezvous hashing names among those that can answer clients now."""
    usable = [place for place in status.places.values() if place.role != "prefill" and place.state in USABLE]
    order = ranking(request.session, [RegionView(place.name) for place in usable])
    return order[0].name if order else None
