"""Which places are worth pricing: all of a small fleet; of a large one the warm, the least loaded and the home."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import xxhash

from homeport_proxy.routing.freest import Freest
from homeport_proxy.routing.index.residency import Residency
from homeport_proxy.routing.place import Place
from homeport_proxy.routing.views import USABLE, RequestView, Role

SMALL_FLEET = 16
_LEAST_LOADED = 2
_WARMEST = 4


class Shortlist:
    """Eligible places by model and adapter, and the few of them that can win.

    In a fleet of more than ``SMALL_FLEET`` only the session's own places, the warmest and the least loaded are priced:
    any other is neither warmer than the former nor freer than the latter. Equally loaded places are taken in name
    order from a point that the session's hash gives, so that proxies agree and new sessions spread. ``held_s``: what is
    held for a place and not yet sent (s of predicted prefill).
    """

    def __init__(self, held_s: Callable[[str], float]) -> None:
        self._held_s = held_s
        self._limited = False
        self._longest: int | None = None
        self.changed(())

    def changed(self, places: Collection[Place]) -> None:
        """The fleet is another."""
        named = sorted(places, key=lambda place: place.spec.name)
        limits = [place.spec.max_model_len for place in named]
        self._limited = any(limit is not None for limit in limits)
        self._longest = max((limit for limit in limits if limit is not None), default=None) if all(limits) else None
        self._roles: Sequence[Role] = tuple(dict.fromkeys(place.spec.role for place in places))
        self._eligible: dict[tuple[str, str | None], list[Place]] = {}
        self._places = {place.spec.name: place for place in named}
        self._positions = {place: position for position, place in enumerate(named)}
        self._freest = Freest(named, self._held_s)

    @property
    def longest(self) -> int | None:
        """The longest context (tokens) that any place takes; None: not known of all."""
        return self._longest

    def eligible(self, request: RequestView) -> Sequence[Place]:
        """Places that can serve the request's model, adapter and length, by name."""
        key = (request.model, request.adapter)
        found = self._eligible.get(key)
        if found is None:
            found = [place for place in self._positions if place.serves(request.model, request.adapter)]
            if len(self._eligible) > 256:
                self._eligible.clear()  # wildcards make model names endless
            self._eligible[key] = found
        tokens = request.prompt_tokens
        return [place for place in found if place.fits(tokens)] if self._limited else found

    def pick(
        self,
        eligible: Sequence[Place],
        request: RequestView,
        own: Place | None,
        cached: Residency,
        now_s: float,
    ) -> Sequence[Place]:
        """The places to price, of each role; ``own``: the session's home, else its parent's."""
        if len(eligible) <= SMALL_FLEET:
            return eligible
        # None: all of them, which is nearly always so
        members = set(eligible) if len(eligible) < len(self._positions) else None
        picked = [own] if own is not None and (members is None or own in members) else []
        start = self._positions[eligible[xxhash.xxh3_64_intdigest(request.session.encode()) % len(eligible)]]
        for role in self._roles:

            def usable(place: Place, role: Role = role) -> bool:
                return (
                    place.spec.role == role
                    and place.state in USABLE
                    and place.cool_until_s <= now_s
                    and (members is None or place in members)
                )

            picked += self._warmest(cached, usable, start)
            picked += self._least_loaded(cached, usable, start)
        return list(dict.fromkeys(picked)) if any(place.spec.role != "prefill" for place in picked) else eligible

    def _warmest(self, cached: Residency, usable: Callable[[Place], bool], start: int) -> Sequence[Place]:
        """Those that hold most of the prompt; what most places hold (a shared head) makes none of them warm."""
        tokens = {
            place: tokens
            for name, tokens in cached.other.items()
            if tokens > cached.mostly and (place := self._places.get(name)) is not None and usable(place)
        }
        if len(tokens) <= 1:
            return list(tokens)
        warm = sorted(tokens, key=lambda place: (self._positions[place] - start) % len(self._positions))
        if len(warm) > _WARMEST:
            warm.sort(key=lambda place: -tokens[place])
        return warm[:_WARMEST]

    def _least_loaded(self, cached: Residency, usable: Callable[[Place], bool], start: int) -> Sequence[Place]:
        """Those with least to do, after those with least to do that hold what most places do, where some do not."""
        other, mostly = cached.other, cached.mostly
        free: list[Place] = []
        mild: list[Place] = []
        enough = _LEAST_LOADED if any(tokens < mostly for tokens in other.values()) else 0
        for place in self._freest.since(start):
            if not usable(place):
                continue
            if len(free) < _LEAST_LOADED:
                free.append(place)
            if len(mild) < enough and other.get(place.spec.name, mostly) >= mostly:
                mild.append(place)
            if len(free) == _LEAST_LOADED and len(mild) == enough:
                break
        return mild + free
