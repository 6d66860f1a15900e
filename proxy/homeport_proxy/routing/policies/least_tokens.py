"""Least tokens: the place with the fewest tokens in flight, relative to its speed.

``load(b) = (prefill_tokens(b) + decode_tokens(b) + queued(b) * R) / R`` (seconds of prefill it stands for; R the
place's prefill rate in tokens/s, so that a slow engine counts as fuller).

Knobs: none. Ignores caches altogether: the baseline that balances perfectly and recomputes everything.

Rejected: fewest requests (one request of 100,000 tokens weighs as much as one of 200); engine-reported queue length
(late by a polling interval, and absent on many engines).
"""

from __future__ import annotations

from collections.abc import Sequence

from homeport_proxy.routing.policies.choice import Choice, best, hosts
from homeport_proxy.routing.views import PlaceView, RequestView, RoutingSettings


def load_s(place: PlaceView) -> float:
    """Tokens in flight and held work of a place, as seconds of its prefill."""
    return (place.prefill_tokens + place.decode_tokens) / place.rates.tokens_per_s + sum(place.queued_works_s)


def choose(
    request: RequestView, places: Sequence[PlaceView], now_s: float, seed: int, settings: RoutingSettings
) -> Choice:
    """The least loaded place; ties by rendezvous hash."""
    places = hosts(places)
    return Choice(best(request.session, [(load_s(place), place) for place in places]), why="fewest tokens in flight")
