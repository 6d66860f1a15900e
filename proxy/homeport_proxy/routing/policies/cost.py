"""Cost: the place where this request's tokens start soonest, recomputation charged at its price for everybody.

For each place b, in seconds::

    J(b) = wait(b) + P(b) + k * (P(b) - P*(b)) + tau * rho(b) + rtt(b) + transfer(b) + w * slowdown(b)

- ``wait(b)``: prefill left on the engine plus the held requests that go first (late binding's order).
- ``P(b) = T0 + u / R * (1 + (c + u / 2) / A)`` for u uncached after c cached tokens; c is the index's figure
  discounted by its confidence.
- ``P*(b)``: the same at b, were as much cached there as at the warmest place: ``P - P*`` is what b computes again.
- ``k = k0 + k1 * rho / (1 - rho)``: shadow price of seconds computed twice, rising with the cluster's load.
- ``tau * rho(b)``: the place's own offered load, so that sessions start where there is room to grow
  (``tau_first_s`` for a session's first request, ``tau_later_s`` after).
- ``slowdown(b)``: what joining the decode batch costs this request and its neighbours over the whole answer;
  ``decode_weight`` makes it seconds to a first token.
- On a decode place with separate prefill: prefill by the cheapest prefill place plus the transfer of what the decode
  place lacks, or by the decode place itself when little is uncached (see ``disaggregate``).

The home is kept when it costs at most ``home_margin_s`` more than the best; no more than the best when nothing of the
session would be lost there. Ties go by rendezvous hash.

Knobs: ``k0``, ``k1``, ``tau_first_s``, ``tau_later_s``, ``decode_weight``, ``load_window_s``, ``home_margin_s``.

Rejected: a balance-first rule with cache as a bonus (loses the cache on agentic traffic: hit 0.34 to 0.72 where 0.94
is possible); ``P(b) - P_min`` as what is wasted (who is slower, or whose learned speed is off, is charged k times for
being slow: the fast engines fill up while it idles); a global imbalance switch (one hot place makes everybody lose
locality); a fixed penalty in tokens (right at one load only).
"""

from __future__ import annotations

from collections.abc import Sequence

from homeport_proxy.routing.cost import (
    cluster_rho,
    decode_slowdown_s,
    queue_wait_s,
    shadow_factor,
    tiered_prefill_s,
    wasted_s,
)
from homeport_proxy.routing.disaggregate import prefill_plan
from homeport_proxy.routing.policies.choice import Choice, best
from homeport_proxy.routing.views import Cost, PlaceView, RequestView, RoutingSettings

TIE_S = 1e-3


def choose(
    request: RequestView, places: Sequence[PlaceView], now_s: float, seed: int, settings: RoutingSettings
) -> Choice:
    """The place of the lowest cost; ``places`` may include prefill places, which only serve decode places' prefills."""
    prefills = [place for place in places if place.role == "prefill"]
    hosts = [place for place in places if place.role != "prefill"] if prefills else places
    rho = cluster_rho([place.rho for place in places if place.role != "decode"] or [place.rho for place in hosts])
    k = shadow_factor(settings, rho)
    prompt, output = request.prompt_tokens, request.expected_output_tokens

    home: PlaceView | None = None
    parts: list[tuple[PlaceView, PlaceView, float, float, float, int]] = []
    for place in hosts:
        if place.home:
            home = place
        cached = int((place.cached_tokens or 0) * place.confidence)  # expected_cached_tokens, without a call per place
        if place.role == "decode" and prefills:
            plan = prefill_plan(request, place, prefills, now_s, settings)
            parts.append((place, plan.place or place, plan.wait_s, plan.work_s, plan.transfer_s, plan.cached_tokens))
            continue
        work_s = tiered_prefill_s(place.rates, prompt, cached, place.host_tokens)
        wait_s = place.wait_s
        if place.queued_ranks:
            wait_s += queue_wait_s(place, work_s, now_s, settings)
        parts.append((place, place, wait_s, work_s, 0.0, cached))
    most, most_cached = max([(cached + worker.host_tokens, cached) for _, worker, _, _, _, cached in parts])

    tau_s = settings.tau_first_s if home is None else settings.tau_later_s
    costs: dict[str, Cost] = {}
    scored: list[tuple[float, PlaceView]] = []
    for place, worker, wait_s, work_s, transfer_s, cached in parts:
        colder = cached < most_cached or cached + worker.host_tokens < most
        shadow_s = k * wasted_s(work_s, worker.rates, prompt, most_cached, most - most_cached) if colder else 0.0
        load_s = tau_s * worker.rho
        slow_s = settings.decode_weight * decode_slowdown_s(place, prompt, output) if place.requests else 0.0
        total_s = wait_s + work_s + shadow_s + load_s + transfer_s + slow_s + place.rtt_s
        costs[place.name] = Cost(total_s, wait_s, work_s, shadow_s, load_s, transfer_s, slow_s, place.rtt_s, cached)
        scored.append((total_s, place))
    chosen = best(request.session, scored, TIE_S)
    # what other proxies sent to a home is in no index here, so that it looks dearer than it is
    unseen = home is not None and home.unseen
    margin_s = settings.move_margin_s if unseen or request.kind == "side" else settings.home_margin_s
    if home is None and not costs[chosen.name].cached_tokens:
        # nothing of this prompt lies anywhere: a sub-agent may as well start beside its parent
        parent = next((place for total_s, place in scored if place.parent), None)
        if parent is not None and costs[parent.name].total_s <= costs[chosen.name].total_s + margin_s:
            chosen = parent
    if home is not None and home is not chosen:
        if request.kind != "side" and home.nothing_to_lose(chosen, prompt):
            margin_s = TIE_S
        if costs[home.name].total_s <= costs[chosen.name].total_s + margin_s:
            chosen = home
    return Choice(chosen, costs)
