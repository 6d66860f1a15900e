"""Placement policies: one file each, all with the same interface; pure functions of the snapshot they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from homeport_proxy.routing.policies import cost, least_tokens, prefix, round_robin, session
from homeport_proxy.routing.policies.choice import Choice
from homeport_proxy.routing.views import PlaceView, RequestView, RoutingSettings

Policy = Callable[[RequestView, Sequence[PlaceView], float, int, RoutingSettings], Choice]
"""Chooses one of the places given, which all can serve the request (never empty)."""

POLICIES: Mapping[str, Policy] = {
    "cost": cost.choose,
    "session": session.choose,
    "prefix": prefix.choose,
    "least-tokens": least_tokens.choose,
    "round-robin": round_robin.choose,
}

__all__ = ["POLICIES", "Choice", "Policy"]
