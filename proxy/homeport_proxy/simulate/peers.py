"""Other routers' rules as their sources state them, in our policy interface, for the side by side.

Their knobs are module constants or fields, so that the benchmark can tune them as it tunes ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from statistics import fmean, pstdev

from homeport_proxy.routing.cost import prefill_s
from homeport_proxy.routing.policies import Choice, Policy
from homeport_proxy.routing.policies.choice import best, hosts
from homeport_proxy.routing.ties import rank
from homeport_proxy.routing.views import PlaceView, RequestView, RoutingSettings

ONE_CACHE = "one-cache"
"""The bound beside them: no rule, but one cache that all replicas share."""


def _share(place: PlaceView, request: RequestView) -> float:
    return (place.cached_tokens or 0) / max(request.prompt_tokens, 1)


@dataclass(frozen=True, slots=True)
class Sglang:
    """sglang / vllm-router ``cache_aware``: imbalanced when ``max - min > absolute`` and ``max > relative * min``
    running requests: fewest requests; else the longest match above ``match``; else fewest requests."""

    absolute: int = 64
    relative: float = 1.5
    match: float = 0.3

    def __call__(
        self, request: RequestView, places: Sequence[PlaceView], now_s: float, seed: int, settings: RoutingSettings
    ) -> Choice:
        places = hosts(places)
        counts = [place.requests for place in places]
        imbalanced = max(counts) - min(counts) > self.absolute and max(counts) > self.relative * min(counts)
        warmest = max(places, key=lambda place: (_share(place, request), -place.requests))
        if not imbalanced and _share(warmest, request) > self.match:
            return Choice(warmest)
        return Choice(_fewest(places, Random(seed)))


@dataclass(frozen=True, slots=True)
class LlmD:
    """llm-d's default scorers: ``w_queue * queue + w_kv * kv_free + w_prefix * prefix_share``, each in 0..1."""

    queue: float = 2.0
    kv: float = 2.0
    prefix: float = 3.0

    def __call__(
        self, request: RequestView, places: Sequence[PlaceView], now_s: float, seed: int, settings: RoutingSettings
    ) -> Choice:
        places = hosts(places)
        waiting = [place.waiting for place in places]
        low, high = min(waiting), max(waiting)
        scored = []
        for place, queue in zip(places, waiting, strict=True):
            free_queue = 1.0 if high == low else (high - queue) / (high - low)
            free_kv = 1.0 - min(1.0, place.decode_tokens / (place.kv_capacity_tokens or 1_000_000))
            score = self.queue * free_queue + self.kv * free_kv + self.prefix * _share(place, request)
            scored.append((-score, place))
        return Choice(best(request.session + request.request_id, scored))


@dataclass(frozen=True, slots=True)
class LlmDLatency:
    """llm-d's latency scorer: among the places with a prefix share of at least ``strong`` (then ``weak``), unless their
    predicted TTFT exceeds the others' by ``penalty_s``, the lowest predicted TTFT."""

    penalty_s: float = 5.0
    strong: float = 0.99
    weak: float = 0.80

    def __call__(
        self, request: RequestView, places: Sequence[PlaceView], now_s: float, seed: int, settings: RoutingSettings
    ) -> Choice:
        places = hosts(places)
        ttft = {place.name: predicted_ttft_s(place, request) for place in places}
        best_s = min(ttft.values())
        for share in (self.strong, self.weak):
            warm = [place for place in places if _share(place, request) >= share]
            if warm and min(ttft[place.name] for place in warm) <= best_s + self.penalty_s:
                places = warm
                break
        return Choice(best(request.session + request.request_id, [(ttft[place.name], place) for place in places]))


def predicted_ttft_s(place: PlaceView, request: RequestView) -> float:
    """Prefill left, held work and own prefill, seconds."""
    cached = place.cached_tokens or 0
    return place.wait_s + sum(place.queued_works_s) + prefill_s(place.rates, request.prompt_tokens - cached, cached)


@dataclass(frozen=True, slots=True)
class Dynamo:
    """dynamo's KV router: lowest ``scale * max(prefill_blocks + new - overlap, 0) + decode_blocks``."""

    scale: float = 1.0
    block_tokens: int = 512

    def __call__(
        self, request: RequestView, places: Sequence[PlaceView], now_s: float, seed: int, settings: RoutingSettings
    ) -> Choice:
        places = hosts(places)
        new = request.prompt_tokens / self.block_tokens
        scored = []
        for place in places:
            overlap = (place.cached_tokens or 0) / self.block_tokens
            prefill = max(place.prefill_tokens / self.block_tokens + new - overlap, 0.0)
            scored.append((self.scale * prefill + place.decode_tokens / self.block_tokens, place))
        return Choice(best(request.session + request.request_id, scored))


@dataclass(frozen=True, slots=True)
class Preble:
    """Preble's E2: exploit the longest match when more is cached than not, else explore by lowest
    ``load over the window + eviction cost + own prefill`` (seconds of prefill)."""

    ratio: float = 1.0

    def __call__(
        self, request: RequestView, places: Sequence[PlaceView], now_s: float, seed: int, settings: RoutingSettings
    ) -> Choice:
        places = hosts(places)
        longest = max(place.cached_tokens or 0 for place in places)
        if longest > self.ratio * (request.prompt_tokens - longest):
            warm = [place for place in places if (place.cached_tokens or 0) == longest]
            return Choice(min(warm, key=lambda place: place.rho))
        scored = []
        for place in places:
            cached = place.cached_tokens or 0
            own_s = prefill_s(place.rates, request.prompt_tokens - cached, cached)
            scored.append((place.rho * settings.load_window_s + own_s, place))
        return Choice(best(request.session, scored))


@dataclass(frozen=True, slots=True)
class Chwbl:
    """KubeAI's consistent hashing with bounded loads by request count: ``load <= bound * (total + 1) / n``."""

    bound: float = 1.25

    def __call__(
        self, request: RequestView, places: Sequence[PlaceView], now_s: float, seed: int, settings: RoutingSettings
    ) -> Choice:
        places = hosts(places)
        limit = self.bound * (sum(place.requests for place in places) + 1) / len(places)
        for place in sorted(places, key=lambda place: rank(request.session, place.name), reverse=True):
            if place.requests + 1 <= max(limit, 1.0):
                return Choice(place)
        return Choice(_fewest(places, Random(seed)))


@dataclass(frozen=True, slots=True)
class AIBrix:
    """AIBrix: of the places with at most ``mean + spread * sigma`` running requests the longest match; none: fewest."""

    spread: float = 1.0

    def __call__(
        self, request: RequestView, places: Sequence[PlaceView], now_s: float, seed: int, settings: RoutingSettings
    ) -> Choice:
        places = hosts(places)
        counts = [place.requests for place in places]
        limit = fmean(counts) + self.spread * pstdev(counts)
        warm = [place for place in places if place.requests <= limit and place.cached_tokens]
        if not warm:
            return Choice(_fewest(places, Random(seed)))
        return Choice(max(warm, key=lambda place: (place.cached_tokens or 0, -place.requests)))


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """The one of two drawn places that has fewer requests in flight."""

    def __call__(
        self, request: RequestView, places: Sequence[PlaceView], now_s: float, seed: int, settings: RoutingSettings
    ) -> Choice:
        places, rng = hosts(places), Random(seed)
        return Choice(_fewest(rng.sample(places, min(2, len(places))), rng))


@dataclass(frozen=True, slots=True)
class SessionRing:
    """Each session at its hash's place, whatever the load there."""

    def __call__(
        self, request: RequestView, places: Sequence[PlaceView], now_s: float, seed: int, settings: RoutingSettings
    ) -> Choice:
        return Choice(max(hosts(places), key=lambda place: rank(request.session, place.name)))


@dataclass(slots=True)
class Turns:
    """Round robin: one place after the other."""

    turn: Iterator[int] = field(default_factory=count)

    def __call__(
        self, request: RequestView, places: Sequence[PlaceView], now_s: float, seed: int, settings: RoutingSettings
    ) -> Choice:
        places = hosts(places)
        return Choice(places[next(self.turn) % len(places)])


@dataclass(frozen=True, slots=True)
class LeastRequests:
    """Fewest requests in flight; ties at random. What an open-loop trace's load is calibrated with."""

    def __call__(
        self, request: RequestView, places: Sequence[PlaceView], now_s: float, seed: int, settings: RoutingSettings
    ) -> Choice:
        return Choice(_fewest(hosts(places), Random(seed)))


def _fewest(places: Sequence[PlaceView], rng: Random) -> PlaceView:
    fewest = min(place.requests for place in places)
    return rng.choice([place for place in places if place.requests == fewest])


PEERS: dict[str, Callable[[], Policy]] = {
    "sglang": Sglang,
    "llm-d": LlmD,
    "llm-d-latency": LlmDLatency,
    "dynamo": Dynamo,
    "preble": Preble,
    "chwbl": Chwbl,
    "aibrix": AIBrix,
    "power-of-two": PowerOfTwo,
    "session-ring": SessionRing,
    "turns": Turns,
    "least-requests": LeastRequests,
}
"""Peers' rules by the name `homeport replay --policy` takes."""
