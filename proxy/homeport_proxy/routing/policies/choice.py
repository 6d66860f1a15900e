"""What a policy answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from homeport_proxy.routing.ties import rank
from homeport_proxy.routing.views import Cost, PlaceView


@dataclass(frozen=True, slots=True)
class Choice:
    """The place chosen, what each place would have cost (when the policy prices them), and a word on why."""

    place: PlaceView
    costs: Mapping[str, Cost] = field(default_factory=dict)
    why: str = ""


def best(session: str, scored: Sequence[tuple[float, PlaceView]], tolerance: float = 1e-9) -> PlaceView:
    """The place of the lowest score; among equals (within ``tolerance``) the session's rendezvous choice."""
    lowest = min([score for score, _ in scored])
    equals = [place for score, place in scored if score <= lowest + tolerance]
    if len(equals) == 1:
        return equals[0]
    return max(equals, key=lambda place: rank(session, place.name))


def hosts(places: Sequence[PlaceView]) -> list[PlaceView]:
    """The places that can decode: a prefill engine only ever serves another place's prefill."""
    return [place for place in places if place.role != "prefill"]
