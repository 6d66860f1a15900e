"""A fleet's places from the least burdened up, kept in order as their loads change."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence

from homeport_proxy.routing.load import PlaceLoad
from homeport_proxy.routing.place import Place


class Freest:
    """``places`` in the order of ``load.burden_s`` and what is held for them (``held_s`` of a name); those equal to the
    last bit in the order they came in.

    Loads note in ``weighed`` that they changed; only these are put elsewhere before the next look, so that a look costs
    what is looked at and not the fleet.
    """

    def __init__(self, places: Sequence[Place], held_s: Callable[[str], float]) -> None:
        self._places = places
        self._held_s = held_s
        self._loads = {place.load: position for position, place in enumerate(places)}
        self._burdens = [self._burden_s(place) for place in places]
        self._order = sorted((burden_s, position) for position, burden_s in enumerate(self._burdens))
        self._weighed: set[PlaceLoad] = set()
        for place in places:
            place.load.weighed = self._weighed

    def since(self, start: int) -> Iterator[Place]:
        """All places; equals from the ``start``-th place on, round to the one before it."""
        self._reorder()
        order, places, at = self._order, self._places, 0
        while at < len(order):
            burden_s, position = order[at]
            end = at + 1
            if end == len(order) or order[end][0] != burden_s:
                yield places[position]
            else:
                end = bisect_right(order, (burden_s, len(places)), end)
                turn = bisect_left(order, (burden_s, start), at, end)
                for _, position in order[turn:end] + order[at:turn]:
                    yield places[position]
            at = end

    def _burden_s(self, place: Place) -> float:
        return place.load.burden_s + self._held_s(place.spec.name)

    def _reorder(self) -> None:
        order, burdens = self._order, self._burdens
        while self._weighed:
            load = self._weighed.pop()
            position = self._loads[load]
            burden_s = self._burden_s(self._places[position])
            if burden_s != burdens[position]:
                del order[bisect_left(order, (burdens[position], position))]
                burdens[position] = burden_s
                insort(order, (burden_s, position))
