"""Which places are worth pricing: all of a small fleet; of a large one the warm, the least loaded and the home."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import nsmallest
from operator import attrgetter

import xxhash

from homeport_proxy.routing.place import Place
from homeport_proxy.routing.views import RequestView, Role

SMALL_FLEET = 16
_LEAST_LOADED = 6
_WARMEST = 4
_BURDEN = attrgetter("load.burden_s")


class Shortlist:
    """Eligible places by model and adapter, and the few of them that can win.

    In a fleet of more than ``SMALL_FLEET`` only the session's own places, the warmest and the least loaded are priced:
    any other is neither warmer than the former nor freer than the latter. Equally loaded places are taken in name
    order from a point that the session's hash gives, so that proxies agree and new sessions spread.
    """

    def __init__(self) -> None:
        self._eligible: dict[tuple[str, str | None], list[Place]] = {}
        self._limited = False

    def changed(self) -> None:
        """The fleet is another."""
        self._eligible.clear()
        self._limited = False

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
            self._limited |= any(place.spec.max_model_len is not None for place in found)
        tokens = request.prompt_tokens
        return [place for place in found if place.fits(tokens)] if self._limited else found

    def pick(
        self,
        eligible: Sequence[Place],
        request: RequestView,
        own: Collection[str | None],
        cached_tokens: Mapping[str, int],
        now_s: float,
    ) -> Sequence[Place]:
        """The places to price, of each role; ``own``: the session's home, its parent's."""
        if len(eligible) <= SMALL_FLEET:
            return eligible
        usable = [place for place in eligible if place.state in ("up", "unknown") and place.cool_until_s <= now_s]
        start = xxhash.xxh3_64_intdigest(request.session.encode()) % max(len(usable), 1)
        turned = usable[start:] + usable[:start]
        picked = {place.spec.name: place for place in eligible if place.spec.name in own}
        # what all places hold of the prompt (the shared head) makes none of them warm
        floor = min(cached_tokens.values()) if len(cached_tokens) >= len(eligible) else 0
        warm_tokens = {name: tokens for name, tokens in cached_tokens.items() if tokens > floor}
        roles: set[Role] = {place.spec.role for place in usable}
        for role in roles:
            members = [place for place in turned if place.spec.role == role] if len(roles) > 1 else turned
            warm = [place for place in members if place.spec.name in warm_tokens] if warm_tokens else []
            if len(warm) > _WARMEST:
                warm = nsmallest(_WARMEST, warm, key=lambda place: -warm_tokens[place.spec.name])
            for place in (*warm, *nsmallest(_LEAST_LOADED, members, key=_BURDEN)):
                picked[place.spec.name] = place
        return list(picked.values()) if any(place.spec.role != "prefill" for place in picked.values()) else eligible
