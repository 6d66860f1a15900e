"""The router at a glance: places, sessions, what is degraded, which role is short. Unknown is None."""

from __future__ import annotations

from collections.abc import Mapping

from homeport_proxy.routing.calibration import Confidence
from homeport_proxy.routing.decisions import Shadows
from homeport_proxy.routing.index import Index
from homeport_proxy.routing.place import Place
from homeport_proxy.routing.queue import VirtualQueues
from homeport_proxy.routing.sessions import Session, SessionTable
from homeport_proxy.routing.views import USABLE, IndexState, PlaceStatus, RouterStatus, SessionView

_BUSY = 0.8
_SLACK = 0.4
_EVENTS_S = 1.0
"""KV events have arrived this long after the answer that they belong to."""


def router_status(
    places: Mapping[str, Place],
    sessions: SessionTable,
    queues: VirtualQueues,
    index: Index,
    shadows: Shadows,
    guarded: int,
    now_s: float,
) -> RouterStatus:
    """Everything at once."""
    shown = {name: _place(name, place, sessions, queues, index) for name, place in places.items()}
    degraded = [
        f"index of {name}: its engine reports {status.confidence:.0%} of the cached tokens expected"
        for name, status in shown.items()
        if status.confidence < Confidence.DEGRADED_BELOW
    ]
    degraded += [
        f"index of {name}: KV events are missing"
        for name, status in shown.items()
        if index.state(name) == "degraded" and status.confidence >= Confidence.DEGRADED_BELOW
    ]
    if guarded:
        degraded.append(f"overload guard: {guarded} new sessions wait")
    wanted = wanted_roles(places, now_s)
    degraded += [f"pool {pool}: more {role} engines are wanted" for pool, role in wanted.items()]
    degraded += _without_prefill(places)
    return RouterStatus(
        shown, len(sessions), len(queues) + guarded, index.bytes, tuple(degraded), wanted, shadows.report()
    )


def _place(name: str, place: Place, sessions: SessionTable, queues: VirtualQueues, index: Index) -> PlaceStatus:
    spec_stats = place.stats.spec if place.stats is not None else None
    confidence = place.confidence.least
    state: IndexState = "degraded" if confidence < Confidence.DEGRADED_BELOW else index.state(name)
    return PlaceStatus(
        name=name,
        backend=place.spec.backend,
        role=place.spec.role,
        state=place.state,
        requests=place.load.requests,
        queued=queues.count(name),
        prefill_tokens=place.load.prefill_tokens,
        decode_tokens=place.load.decode_tokens,
        sessions=sessions.at_home.get(name, 0),
        hit_ratio=place.cached_tokens / place.prompt_tokens if place.prompt_tokens else None,
        index=state,
        confidence=confidence,
        rates=place.rates,
        spec_acceptance=spec_stats.acceptance if spec_stats is not None else None,
    )


def session_view(
    session: Session, places: Mapping[str, Place], index: Index, idle_ttl_s: float, now_s: float
) -> SessionView:
    """A session for the admin API and the cache header. Warm: its home has neither been down nor lost its cache since,
    still holds the first half of its last prompt as far as events tell, and was not left alone for longer than what is
    not touched stays there. Nobody keeps a prefix past ``idle_ttl_s``: then the session itself is forgotten."""
    home = places.get(session.home) if session.home is not None else None
    keep_s = None
    if home is not None and home.state != "down" and home.cold_since_s < session.last_used_s:
        keep_s = min(home.turnover_s() or idle_ttl_s, idle_ttl_s)
    idle_s = 0.0 if session.open_requests else now_s - session.last_used_s
    warm = home is not None and keep_s is not None and idle_s <= keep_s
    if warm and home is not None and idle_s > _EVENTS_S:
        warm = not index.lost(home.spec.name, session.halves)
    return SessionView(
        session=session.name,
        home=session.home,
        requests=session.requests,
        open_requests=session.open_requests,
        context_tokens=session.context_tokens,
        last_used_s=session.last_used_s,
        moves=session.moves,
        warm=warm,
        keep_s=keep_s if warm else None,
    )


def wanted_roles(places: Mapping[str, Place], now_s: float) -> dict[str, str]:
    """By pool of separate prefill and decode engines, the role that is short; a wrong ratio costs more than any
    threshold can win back."""
    wanted = {}
    for pool in {place.spec.pool for place in places.values() if place.spec.role == "prefill"}:
        members = [place for place in places.values() if place.spec.pool == pool]
        prefill = [place.load.rho(now_s) for place in members if place.spec.role == "prefill"]
        decode = [
            place.load.decode_tokens / place.view.kv_capacity_tokens
            for place in members
            if place.spec.role == "decode" and place.view.kv_capacity_tokens
        ]
        if not prefill or not decode:
            continue
        busy, full = sum(prefill) / len(prefill), sum(decode) / len(decode)
        if busy > _BUSY and full < _SLACK:
            wanted[pool] = "prefill"
        elif full > _BUSY and busy < _SLACK:
            wanted[pool] = "decode"
    return wanted


def _without_prefill(places: Mapping[str, Place]) -> list[str]:
    """Pools whose prefill engines are all gone: every decode engine prefills for itself."""
    gone = []
    for pool in sorted({place.spec.pool for place in places.values() if place.spec.role == "prefill"}):
        prefills = [place for place in places.values() if place.spec.pool == pool and place.spec.role == "prefill"]
        if all(place.state not in USABLE for place in prefills):
            gone.append(f"pool {pool}: no prefill engine is up, decode engines prefill by themselves")
    return gone
