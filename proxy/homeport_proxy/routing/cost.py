"""Predicted seconds: prefill, waiting, decode slowdown, the shadow price of work done twice."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from homeport_proxy.routing.views import PlaceView, Rates, RequestView, RoutingSettings

LEAST_FIXED_S = 0.02
"""Of any prefill at least: else a burst of short prompts would pile on one place."""

_LEAST_TOKENS = 256
"""Of a prompt that may begin its session anew."""


def fixed_s(rates: Rates) -> float:
    """``T0``: seconds that every prefill takes, however short."""
    return rates.t0_s if rates.t0_s > LEAST_FIXED_S else LEAST_FIXED_S


def prefill_s(rates: Rates, uncached_tokens: int, cached_tokens: int) -> float:
    """Seconds to prefill ``uncached_tokens`` after ``cached_tokens``: linear work plus attention.

    ``T0 + u / R * (1 + (c + u / 2) / A)``, ``T0`` as :func:`fixed_s`.
    """
    return tiered_prefill_s(rates, cached_tokens + uncached_tokens, cached_tokens, 0)


def tiered_prefill_s(rates: Rates, prompt_tokens: int, cached_tokens: int, host_tokens: int) -> float:
    """Seconds until a prompt is prefilled, when ``host_tokens`` after the cached ones may be loaded from a tier.

    A token in a tier costs the cheaper of loading and computing it again (:func:`prefill_s`).
    """
    uncached_tokens = prompt_tokens - cached_tokens
    attention = 1.0 + (cached_tokens + uncached_tokens / 2) / rates.attention_tokens
    t0_s = rates.t0_s if rates.t0_s > LEAST_FIXED_S else LEAST_FIXED_S  # fixed_s, of which there are many a decision
    computed_s = t0_s + uncached_tokens / rates.tokens_per_s * attention
    if not host_tokens:
        return computed_s
    held = min(cached_tokens + host_tokens, max(prompt_tokens - 1, 0))
    loaded_s = (held - cached_tokens) / rates.load_tokens_per_s + prefill_s(rates, prompt_tokens - held, held)
    return min(computed_s, loaded_s)


def wasted_s(work_s: float, rates: Rates, prompt_tokens: int, cached_tokens: int, host_tokens: int) -> float:
    """Of ``work_s`` at a place of these rates what recomputes tokens that lie at another (``cached_tokens`` there, then
    ``host_tokens`` in a tier). At the place's own speed: an engine that is slower than others wastes nothing by that.
    """
    return max(work_s - tiered_prefill_s(rates, prompt_tokens, cached_tokens, host_tokens), 0.0)


def decode_step_s(rates: Rates, sequences: int, context_tokens: int) -> float:
    """Seconds of one decode step of ``sequences`` with ``context_tokens`` in all."""
    return rates.step_s + sequences * rates.per_sequence_s + context_tokens * rates.per_context_token_s


def shadow_factor(settings: RoutingSettings, rho: float) -> float:
    """Seconds that one second of recomputation costs everybody else, at cluster load ``rho`` (1 = saturated)."""
    load = min(max(rho, 0.0), 0.95)
    return settings.k0 + settings.k1 * load / (1.0 - load)


def queue_wait_s(place: PlaceView, own_prefill_s: float, now_s: float, settings: RoutingSettings) -> float:
    """Predicted prefill (s) of the requests held for ``place`` that go before one of ``own_prefill_s`` arriving now."""
    ranks = place.queued_ranks
    return (
        sum(place.queued_works_s[: bisect_right(ranks, own_prefill_s + settings.age_weight * now_s)]) if ranks else 0.0
    )


def decode_slowdown_s(place: PlaceView, prompt_tokens: int, output_tokens: int) -> float:
    """Seconds by which this request's own decoding and its neighbours' are slowed by joining the place's batch.

    The others' sequences and context lengthen each of its steps, its own lengthen each of theirs; speculative
    acceptance shortens all decoding by the tokens a step yields.
    """
    rates, others = place.rates, place.requests
    theirs_s = others * rates.per_sequence_s + place.decode_tokens * rates.per_context_token_s
    own_s = rates.per_sequence_s + prompt_tokens * rates.per_context_token_s
    return output_tokens / max(place.tokens_per_step, 1.0) * (theirs_s + others * own_s)


def cache_paces(places: Sequence[PlaceView]) -> Sequence[float]:
    """How fast each place fills its cache while it prefills, over the mean of the places: fast engines push out sooner
    what they hold, for their caches are no larger. A capacity that is not known is taken as the mean of the others'."""
    known = [place.kv_capacity_tokens for place in places if place.kv_capacity_tokens]
    usual = sum(known) / len(known) if known else 1.0
    paces = [place.rates.tokens_per_s / (place.kv_capacity_tokens or usual) for place in places]
    mean = sum(paces) / len(paces)
    return [pace / mean for pace in paces]


def load_price_s(settings: RoutingSettings, request: RequestView, home: PlaceView | None) -> float:
    """Seconds charged per unit of a place's offered load: where a session begins, more the more will follow.

    ``home``: the session's, when it is among the places; who goes elsewhere because it is down, commits no place. Nor
    does a prompt so short that hardly anything of it is ever cached: its session would be at home nowhere.
    """
    prompt_tokens = request.prompt_tokens
    if home is not None:
        begins = prompt_tokens >= _LEAST_TOKENS and home.begins_anew(prompt_tokens)
    else:
        begins = not request.homed
    if not begins or request.kind == "side":
        return settings.tau_later_s
    more = request.session_requests - 1.0 if request.kind == "main" else 0.0  # a sub-agent belongs beside its parent
    return settings.tau_first_s + settings.tau_more_s * more


def cluster_rho(rhos: Sequence[float]) -> float:
    """Mean offered prefill load, of those of the places that prefill (1 = all of their time)."""
    return sum(rhos) / len(rhos) if rhos else 0.0
