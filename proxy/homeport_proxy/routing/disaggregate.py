"""Two legs: a decode place was chosen; does a separate engine prefill for it, and which one?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from homeport_proxy.routing.cost import (
    cache_paces,
    cluster_rho,
    queue_wait_s,
    shadow_factor,
    tiered_prefill_s,
    wasted_s,
)
from homeport_proxy.routing.ties import rank
from homeport_proxy.routing.views import PlaceView, RequestView, RoutingSettings


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Who prefills for a decode place, and what that takes. ``place`` is None when the decode place does it itself."""

    place: PlaceView | None
    wait_s: float
    work_s: float
    transfer_s: float
    cached_tokens: int
    why: str


def threshold_tokens(decode: PlaceView, prefill: PlaceView, settings: RoutingSettings) -> float:
    """Uncached tokens up to which the decode place prefills by itself.

    ``min_uncached * (1 + 4 * wait_p) / (1 + 4 * wait_d)``: rises with the prefill queue, falls with the decode
    engine's own. ``min_uncached_tokens`` of 1 or less means: always separate when anything is uncached.
    """
    base = float(settings.min_uncached_tokens)
    if base <= 1:
        return 0.0
    scale = settings.queue_scale_per_s
    return base * (1.0 + scale * _backlog_s(prefill)) / (1.0 + scale * _backlog_s(decode))


def prefill_plan(
    request: RequestView,
    decode: PlaceView,
    prefills: Sequence[PlaceView],
    now_s: float,
    settings: RoutingSettings,
) -> PrefillPlan:
    """The decode place's own prefill, or the best prefill place of its pool."""
    prompt = request.prompt_tokens
    cached = decode.expected_cached_tokens
    uncached = prompt - cached
    paired = [place for place in prefills if place.pool == decode.pool and place.kv_transfer and decode.kv_transfer]
    if request.split_refused is not None:
        return _own(request, decode, now_s, settings, request.split_refused)
    if not paired:
        return _own(request, decode, now_s, settings, "no prefill engine is available")
    chosen = best_prefill(request, paired, now_s, settings)
    if uncached <= threshold_tokens(decode, chosen.place or decode, settings):
        return _own(request, decode, now_s, settings, f"{uncached} uncached tokens are prefilled where they decode")
    transfer_s = uncached / decode.rates.transfer_tokens_per_s
    return replace(chosen, transfer_s=transfer_s)


def best_prefill(
    request: RequestView, places: Sequence[PlaceView], now_s: float, settings: RoutingSettings
) -> PrefillPlan:
    """The prefill place of the lowest ``wait + P + k * (P - P*) + tau * rho * c + rtt``; ties by rendezvous hash.

    ``c``: how fast its cache fills, over the mean of the places.
    """
    k = shadow_factor(settings, cluster_rho([place.rho for place in places]))
    plans = []
    for place, pace in zip(places, cache_paces(places), strict=True):
        cached = place.expected_cached_tokens
        work_s = tiered_prefill_s(place.rates, request.prompt_tokens, cached, place.host_tokens)
        wait_s = place.wait_s + queue_wait_s(place, work_s, now_s, settings)
        load_s = settings.tau_later_s * place.rho * pace
        plans.append((place, wait_s, work_s, cached, load_s))
    most, most_cached = max((cached + place.host_tokens, cached) for place, _, _, cached, _ in plans)

    def total(plan: tuple[PlaceView, float, float, int, float]) -> tuple[float, int]:
        place, wait_s, work_s, _, load_s = plan
        shadow_s = k * wasted_s(work_s, place.rates, request.prompt_tokens, most_cached, most - most_cached)
        cost_s = wait_s + work_s + shadow_s + load_s + place.rtt_s
        return round(cost_s, 3), -rank(request.session, place.name)

    place, wait_s, work_s, cached, _ = min(plans, key=total)
    return PrefillPlan(place, wait_s, work_s, 0.0, cached, "separate prefill")


def _own(request: RequestView, decode: PlaceView, now_s: float, settings: RoutingSettings, why: str) -> PrefillPlan:
    cached = decode.expected_cached_tokens
    work_s = tiered_prefill_s(decode.rates, request.prompt_tokens, cached, decode.host_tokens)
    wait_s = decode.wait_s + queue_wait_s(decode, work_s, now_s, settings)
    return PrefillPlan(None, wait_s, work_s, 0.0, cached, why)


def _backlog_s(place: PlaceView) -> float:
    return place.wait_s + sum(place.queued_works_s)
