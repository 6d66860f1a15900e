"""The proxy at a glance as plain values: what ``GET /homeport/v1/status`` answers. Unknown is null."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from homeport import __version__
from homeport.ledger import Totals
from homeport_proxy.config import without_password
from homeport_proxy.fleet import Member
from homeport_proxy.peers import Peer
from homeport_proxy.routing.views import PlaceStatus

if TYPE_CHECKING:
    from homeport_proxy.control import Control

Doc = dict[str, object]


def status(control: Control, totals: Totals | None) -> Doc:
    """The whole document; ``totals`` are the ledger's sums."""
    regions: dict[str, object] = {}
    for name, region in control.config.regions.items():
        peer = control.regions.peers.get(name)
        regions[name] = _peer(control, peer) if peer else _local(control, name, region.rtt_ms)
    return {
        "version": __version__,
        "region": control.config.region,
        "ready": control.ready(),
        "uptime_s": round(time.time() - control.started_unix_s, 1),
        "models": list(control.fleet.models()),
        "regions": regions,
        "sessions": control.session_count(),
        "waiting": control.placer.waiting,
        "savings": savings(totals),
        "cached_share_over_time": [list(slot) for slot in control.account.shares],
        "degraded": list(control.degraded()),
    }


def savings(totals: Totals | None) -> Doc:
    """What the cache saved, by the ledger; null where nothing is known."""
    if totals is None:
        return dict[str, object].fromkeys(_SAVINGS)
    return {
        "requests": totals.requests,
        "input_tokens": totals.input_tokens,
        "cached_tokens": totals.cached_tokens,
        "cached_share": totals.cached_share,
        "lost_tokens": totals.lost_tokens,
        "output_tokens": totals.output_tokens,
        "cost_usd": None if totals.cost_usd is None else str(totals.cost_usd),
        "saved_usd": None if totals.saved_usd is None else str(totals.saved_usd),
    }


_SAVINGS = (
    "requests",
    "input_tokens",
    "cached_tokens",
    "cached_share",
    "lost_tokens",
    "output_tokens",
    "cost_usd",
    "saved_usd",
)


def backends(control: Control, region: str) -> list[Doc]:
    """The region's backends, one entry per place."""
    router = control.router_status(region)
    return [
        _backend(control, member, place, router.places.get(place) if router else None)
        for member in control.fleet.members.values()
        if member.region == region
        for place in member.place_names()
    ]


def _local(control: Control, name: str, rtt_ms: float | None) -> Doc:
    members = [m for m in control.fleet.members.values() if m.region == name]
    states = [control.health.state(m) for m in members if m.backend.role != "prefill"]
    return {
        "kind": "local",
        "up": any(state in ("up", "draining") for state in states) if any(s != "unknown" for s in states) else None,
        "draining": name in control.regions.draining,
        "rtt_ms": 0.0 if name == control.config.region else rtt_ms,
        "backends": backends(control, name),
    }


def _peer(control: Control, peer: Peer) -> Doc:
    report = peer.report
    return {
        "kind": "peer",
        "url": without_password(peer.url),
        "up": peer.up,
        "draining": peer.name in control.regions.draining or bool(report and report.draining),
        "rtt_ms": round(peer.rtt_s * 1000, 3) if peer.recent_rtt_s else peer.region.rtt_ms,
        "inflight_tokens": report.inflight_tokens if report else None,
        "wait_s": report.wait_s if report else None,
        "backends": list(report.backends) if report else [],
        "error": peer.error,
    }


def _backend(control: Control, member: Member, name: str, place: PlaceStatus | None) -> Doc:
    return {
        "name": name,
        "url": member.backend.url,
        "role": member.backend.role,
        "engine": member.backend.engine,
        "pool": member.backend.pool,
        "models": None if member.models is None else sorted(member.models),
        "state": control.health.state(member),
        "inflight": {
            "requests": place.requests if place else None,
            "prefill_tokens": place.prefill_tokens if place else None,
            "decode_tokens": place.decode_tokens if place else None,
        },
        "queued": place.queued if place else None,
        "sessions": place.sessions if place else None,
        "hit_ratio": None if place is None or place.hit_ratio is None else round(place.hit_ratio, 4),
        "index": place.index if place else "none",
        "index_confidence": place.confidence if place else None,
        "spec_acceptance": place.spec_acceptance if place else None,
        "kv_usage": _kv_usage(member, name),
        "notes": list(member.notes.values()),
    }


def _kv_usage(member: Member, place: str) -> float | None:
    rank = place.partition("/dp")[2]
    stats = member.stats.get(int(rank) if rank else 0)
    return stats.kv_usage if stats else None
