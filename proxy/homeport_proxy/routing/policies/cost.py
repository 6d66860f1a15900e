"""Cost: the place where this request's tokens start soonest, recomputation charged at its price for everybody.

For each place b, in seconds::

    J(b) = wait(b) + P(b) + k * (P(b) - P*(b)) + tau * rho(b) * c(b) + rtt(b) + transfer(b) + w * slowdown(b)

- ``wait(b)``: prefill left on the engine plus the held requests that go first (late binding's order).
- ``P(b) = T0 + u / R * (1 + (c + u / 2) / A)`` for u uncached after c cached tokens; c is the index's figure
  discounted by its confidence.
- ``P*(b)``: the same at b, were as much cached there as at the warmest place: ``P - P*`` is what b computes again.
- ``k = k0 + k1 * rho / (1 - rho)``: shadow price of seconds computed twice, rising with the cluster's load.
- ``tau * rho(b) * c(b)``: the place's own offered load, so that sessions start where there is room to grow.
  ``c(b)``: the share of its cache that b fills in a second of prefill, over the mean of the places: the same seconds
  of load push out more of what a fast engine holds, or one with a small cache. ``tau`` is ``tau_later_s``; for a
  session's first request, or one that begins anew, ``tau_first_s + tau_more_s * (n - 1)`` where sessions bring n
  requests of late: it commits the place to all that follows.
- ``slowdown(b)``: what joining the decode batch costs this request and its neighbours over the whole answer;
  ``decode_weight`` makes it seconds to a first token.
- On a decode place with separate prefill: prefill by the cheapest prefill place plus the transfer of what the decode
  place lacks, or by the decode place itself when little is uncached (see ``disaggregate``).

The home is kept when it costs at most ``home_margin_s`` more than the best; no more than the best when nothing of the
session would be lost there. Ties go by rendezvous hash.

Knobs: ``k0``, ``k1``, ``tau_first_s``, ``tau_later_s``, ``tau_more_s``,
``decode_weight``, ``load_window_s``, ``home_margin_s``.

Rejected: a balance-first rule with cache as a bonus (loses the cache on agentic traffic: hit 0.34 to 0.72 where 0.94
is possible); ``P(b) - P_min`` as what is wasted (who is slower, or whose learned speed is off, is charged k times for
being slow: the fast engines fill up while it idles); a global imbalance switch (one hot place makes everybody lose
locality); a fixed penalty in tokens (right at one load only).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from homeport_proxy.routing.cost import (
    cache_paces,
    cluster_rho,
    decode_slowdown_s,
    load_price_s,
    queue_wait_s,
    shadow_factor,
    tiered_prefill_s,
    wasted_s,
)
from homeport_proxy.routing.disaggregate import prefill_plan
from homeport_proxy.routing.policies.choice import Choice, best
from homeport_proxy.routing.views import Cost, PlaceView, RequestView, RoutingSettings

TIE_S = 1e-3


_Work = tuple[PlaceView, PlaceView, float, float, float, int]
"""A request's prefill for a place: the place, the one that prefills, seconds to wait, to prefill and to transfer,
cached tokens."""


def choose(
    request: RequestView, places: Sequence[PlaceView], now_s: float, seed: int, settings: RoutingSettings
) -> Choice:
    """The place of the lowest cost; ``places`` may include prefill places, which only serve decode places' prefills."""
    works = _works(request, places, now_s, settings)
    home = next((work[0] for work in works if work[0].home), None)
    prompt, output = request.prompt_tokens, request.expected_output_tokens
    rhos = [place.rho for place in places if place.role != "decode"] or [work[0].rho for work in works]
    k = shadow_factor(settings, cluster_rho(rhos))
    tau_s, paces = load_price_s(settings, request, home), cache_paces([work[1] for work in works])
    most, most_cached = max([(cached + worker.host_tokens, cached) for _, worker, _, _, _, cached in works])
    costs: dict[str, Cost] = {}
    scored: list[tuple[float, PlaceView]] = []
    for (place, worker, wait_s, work_s, transfer_s, cached), pace in zip(works, paces, strict=True):
        colder = cached < most_cached or cached + worker.host_tokens < most
        shadow_s = k * wasted_s(work_s, worker.rates, prompt, most_cached, most - most_cached) if colder else 0.0
        load_s = tau_s * worker.rho * pace
        slow_s = settings.decode_weight * decode_slowdown_s(place, prompt, output) if place.requests else 0.0
        total_s = wait_s + work_s + shadow_s + load_s + transfer_s + slow_s + place.rtt_s
        costs[place.name] = Cost(total_s, wait_s, work_s, shadow_s, load_s, transfer_s, slow_s, place.rtt_s, cached)
        scored.append((total_s, place))
    chosen = best(request.session, scored, TIE_S)
    if home is not None:
        return Choice(_home_or(chosen, home, request, costs, settings), costs)
    if not costs[chosen.name].cached_tokens:
        # nothing of this prompt lies anywhere: a sub-agent may as well start beside its parent
        parent = next((place for _, place in scored if place.parent), None)
        dearest_s = costs[chosen.name].total_s + _margin_s(request, settings)
        if parent is not None and costs[parent.name].total_s <= dearest_s:
            chosen = parent
    return Choice(chosen, costs)


def _works(
    request: RequestView, places: Sequence[PlaceView], now_s: float, settings: RoutingSettings
) -> Sequence[_Work]:
    """The prefill that each place which can decode would have to wait for."""
    prompt = request.prompt_tokens
    prefills = [place for place in places if place.role == "prefill"]
    works: list[_Work] = []
    for place in places:
        if place.role == "prefill":
            continue
        worker, transfer_s = place, 0.0
        if place.role == "decode" and prefills:
            plan = prefill_plan(request, place, prefills, now_s, settings)
            worker, transfer_s = plan.place or place, plan.transfer_s
            wait_s, work_s, cached = plan.wait_s, plan.work_s, plan.cached_tokens
        else:
            cached = int((place.cached_tokens or 0) * place.confidence)  # expected_cached_tokens without a call
            wait_s, work_s = place.wait_s, tiered_prefill_s(place.rates, prompt, cached, place.host_tokens)
            if place.queued_ranks:
                wait_s += queue_wait_s(place, work_s, now_s, settings)
        works.append((place, worker, wait_s, work_s, transfer_s, cached))
    return works


def _margin_s(request: RequestView, settings: RoutingSettings) -> float:
    return settings.move_margin_s if request.kind == "side" else settings.home_margin_s


def _home_or(
    chosen: PlaceView, home: PlaceView, request: RequestView, costs: Mapping[str, Cost], settings: RoutingSettings
) -> PlaceView:
    """The session's home, unless ``chosen`` is cheaper by a margin."""
    margin_s = _margin_s(request, settings)
    if home.unseen:
        # what other proxies sent to it is in no index here, so that it looks dearer than it is
        margin_s = settings.move_margin_s
    if request.kind != "side" and home.nothing_to_lose(chosen, request.prompt_tokens):
        margin_s = TIE_S
    return home if costs[home.name].total_s <= costs[chosen.name].total_s + margin_s else chosen
