"""Round robin without a counter: a uniform seeded draw.

``place = places[Random(seed).randrange(n)]``. A shared counter would make the choice depend on other requests' history,
so two proxies or a replayed log would disagree; a uniform draw has the same load in the mean and replays from its seed.

Knobs: none. Rejected: always the first among equals (one engine takes all traffic when the others look the same).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from homeport_proxy.routing.policies.choice import Choice, hosts
from homeport_proxy.routing.views import PlaceView, RequestView, RoutingSettings


def choose(
    request: RequestView, places: Sequence[PlaceView], now_s: float, seed: int, settings: RoutingSettings
) -> Choice:
    """A uniform draw."""
    places = hosts(places)
    return Choice(places[Random(seed).randrange(len(places))], why="next in turn")
