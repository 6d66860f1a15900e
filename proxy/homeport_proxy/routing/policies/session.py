"""Session ring with bounded load: each session at the place that its hash likes best and that is not too full.

Walk the places in the order of ``rank(session, place)``; take the first with
``load(b) <= load_bound * mean(load) + one request``, load in seconds of prefill in flight and held (see least_tokens).

Knobs: ``load_bound`` (1.25): how far above the mean a place may be. The home is not consulted: the hash *is* the home,
so that any number of proxies agree without a word. When a place goes, only its sessions move (rendezvous).

Rejected: bound by requests (agents mix prompts of 200 and 100,000 tokens: it never recovered from a lost replica on
agentic traffic); a ring of virtual nodes (uneven at small n, and no simpler).
"""

from __future__ import annotations

from collections.abc import Sequence

from homeport_proxy.routing.policies.choice import Choice, hosts
from homeport_proxy.routing.policies.least_tokens import load_s
from homeport_proxy.routing.ties import rank
from homeport_proxy.routing.views import PlaceView, RequestView, RoutingSettings


def choose(
    request: RequestView, places: Sequence[PlaceView], now_s: float, seed: int, settings: RoutingSettings
) -> Choice:
    """The best-liked place within the bound."""
    places = hosts(places)
    loads = {place.name: load_s(place) for place in places}
    allowance = max(request.prompt_tokens / place.rates.tokens_per_s for place in places)
    bound = settings.load_bound * sum(loads.values()) / len(places) + allowance
    liked = sorted(places, key=lambda place: rank(request.session, place.name), reverse=True)
    for position, place in enumerate(liked):
        if loads[place.name] <= bound:
            return Choice(place, why="session hash" if position == 0 else "session hash, fuller places passed over")
    return Choice(min(liked, key=lambda place: loads[place.name]), why="least loaded")
