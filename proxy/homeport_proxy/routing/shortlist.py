"""Which places are worth pricing: all of a small fleet; of a large one the warm, the least loaded and the home."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import attrgetter

import xxhash

from homeport_proxy.routing.index.residency import Residency
from homeport_proxy.routing.place import Place
from homeport_proxy.routing.views import RequestView, Role

SMALL_FLEET = 16
_LEAST_LOADED = 4
_WARMEST = 4
_BURDEN = attrgetter("load.burden_s")
_USABLE = ("up", "unknown")


class Shortlist:
    """Eligible places by model and adapter, and the few of them that can win.

    In a fleet of more than ``SMALL_FLEET`` only the session's own places, the warmest and the least loaded are priced:
    any other is neither warmer than the former nor freer than the latter. Equally loaded places are taken in name
    order from a point that the session's hash gives, so that proxies agree and new sessions spread.
    """

    def __init__(self) -> None:
        self._eligible: dict[tuple[str, str | None], list[Place]] = {}
        self._limited = False
        self._longest: int | None = None
        self._roles: tuple[Role, ...] = ()

    def changed(self, places: Iterable[Place]) -> None:
        """The fleet is another."""
        self._eligible.clear()
        limits = [place.spec.max_model_len for place in places]
        self._limited = any(limit is not None for limit in limits)
        self._longest = max((limit for limit in limits if limit is not None), default=None) if all(limits) else None
        self._roles = tuple(dict.fromkeys(place.spec.role for place in places))

    @property
    def longest(self) -> int | None:
        """The longest context (tokens) that any place takes; None: not known of all."""
        return self._longest

    def eligible(self, places: Mapping[str, Place], request: RequestView) -> Sequence[Place]:
        """Places that can serve the request's model, adapter and length, by name."""
        key = (request.model, request.adapter)
        found = self._eligible.get(key)
        if found is None:
            named = sorted(places.values(), key=lambda place: place.spec.name)
            found = [place for place in named if place.serves(request.model, request.adapter)]
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
        start = xxhash.xxh3_64_intdigest(request.session.encode()) % len(eligible)
        usable = [place for place in eligible if place.state in _USABLE and place.cool_until_s <= now_s]
        usable = usable[start:] + usable[:start]
        picked = {own.spec.name: own} if own is not None and own in eligible else {}
        other, mostly = cached.other, cached.mostly
        warm_tokens = {name: tokens for name, tokens in other.items() if tokens > mostly}
        colder = len(warm_tokens) < len(other)
        for role in self._roles:
            members = [place for place in usable if place.spec.role == role] if len(self._roles) > 1 else usable
            warm = [place for place in members if place.spec.name in warm_tokens] if warm_tokens else []
            if len(warm) > _WARMEST:
                warm.sort(key=lambda place: -warm_tokens[place.spec.name])
            free = sorted(members, key=_BURDEN)
            # what most places hold (a shared head) makes none of them warm, but the others are colder
            mild = (place for place in free if other.get(place.spec.name, mostly) >= mostly) if colder else ()
            for place in (*warm[:_WARMEST], *islice(mild, _LEAST_LOADED), *free[:_LEAST_LOADED]):
                picked[place.spec.name] = place
        return list(picked.values()) if any(place.spec.role != "prefill" for place in picked.values()) else eligible
