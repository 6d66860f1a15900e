"""Prefix affinity with bounded load: the place that holds most of this prompt beyond what all places hold.

``lead(b) = cached(b) - min(cached)``: the system prompt and tools that everybody holds say nothing about where a
session belongs. Take the largest lead whose ``load(b) <= load_bound * mean(load) + one request``; without any lead
(a miss) the least loaded place.

Knobs: ``load_bound`` (1.25).

Rejected: hashing the first N characters (agents share them: everything lands on one place); on a miss the place with
the smallest tree (it stays smallest as long as it is slow, and draws everything).
"""

from __future__ import annotations

from collections.abc import Sequence

from homeport_proxy.routing.policies.choice import Choice, best, hosts
from homeport_proxy.routing.policies.least_tokens import load_s
from homeport_proxy.routing.views import PlaceView, RequestView, RoutingSettings


def choose(
    request: RequestView, places: Sequence[PlaceView], now_s: float, seed: int, settings: RoutingSettings
) -> Choice:
    """The warmest place within the bound, else the least loaded."""
    places = hosts(places)
    loads = {place.name: load_s(place) for place in places}
    allowance = max(request.prompt_tokens / place.rates.tokens_per_s for place in places)
    bound = settings.load_bound * sum(loads.values()) / len(places) + allowance
    floor = min(place.expected_cached_tokens for place in places)
    within = [place for place in places if loads[place.name] <= bound] or list(places)
    lead = max(place.expected_cached_tokens for place in within) - floor
    if lead <= 0:
        return Choice(best(request.session, [(loads[place.name], place) for place in places]), why="no prefix held")
    scored = [(-float(place.expected_cached_tokens), place) for place in within]
    return Choice(best(request.session, scored), why="longest prefix held")
