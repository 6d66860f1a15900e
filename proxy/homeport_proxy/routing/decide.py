"""One decision: which place, which prefill place, in which word. Pure: a function of the snapshot it is given."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from homeport_proxy.routing.disaggregate import prefill_plan
from homeport_proxy.routing.policies import POLICIES, Choice, Policy
from homeport_proxy.routing.views import (
    USABLE,
    Cost,
    Decision,
    NoPlaceError,
    PlaceView,
    RequestView,
    RoutingSettings,
    Word,
)


def decide(
    request: RequestView,
    places: Sequence[PlaceView],
    now_s: float,
    seed: int,
    settings: RoutingSettings,
    policy: Policy | None = None,
    refused: Collection[str] = (),
    homeless: bool = False,
) -> Decision:
    """Choose among ``places`` (all serve the request's model, adapter and length; any state).

    Raises :class:`NoPlaceError` when none is usable. When every place is down they are tried all the same: a health
    check that is wrong everywhere must not lock everybody out. ``policy`` overrides the settings' (comparisons).
    ``refused``: places that failed this request before; they are not among ``places``, and no home changes for it.
    ``homeless``: the session had a home that left the fleet.
    """
    home = next((place for place in places if place.home), None)
    usable = _usable(places, home)
    choice = (policy or POLICIES[settings.policy])(request, usable, now_s, seed, settings)
    place = choice.place
    plan = None
    if place.role == "decode":
        plan = prefill_plan(request, place, [one for one in usable if one.role == "prefill"], now_s, settings)
    worker = place if plan is None or plan.place is None else plan.place
    word, reason, new_home = _word(request, choice, worker, home, settings)
    if homeless and home is None and new_home is not None:
        word, reason = Word.MOVED, "its home left the fleet"
    if refused:
        word, reason = Word.FAILOVER, f"{', '.join(sorted(refused))} refused the request"
        new_home = home.name if home is not None else None
    prefill_place = None
    prefill_cached = None
    if plan is not None:
        reason = f"{reason}; {plan.why}"
        if plan.place is not None:
            prefill_place = plan.place.name
            prefill_cached = plan.cached_tokens
    # with a separate prefill the tokens found cached are the prefill engine's
    expected = _expected(place) if prefill_place is None else prefill_cached
    return Decision(
        place=place.name,
        word=word,
        reason=reason,
        prefill_place=prefill_place,
        expected_cached_tokens=expected,
        prefill_cached_tokens=prefill_cached,
        home=new_home,
        costs=choice.costs,
    )


def _expected(place: PlaceView) -> int | None:
    return None if place.cached_tokens is None else place.expected_cached_tokens


def _usable(places: Sequence[PlaceView], home: PlaceView | None) -> Sequence[PlaceView]:
    for place in places:
        if place.state not in USABLE or place.cooling or place.role != "mixed":
            break
    else:
        if places:  # nearly always so: the lists below would all be this one
            return places
    hosts = [place for place in places if place.role != "prefill"]
    if not hosts:
        raise NoPlaceError("no backend that can decode serves this model")
    open_hosts = [place for place in hosts if place.state in USABLE or _bound(place)]
    if not open_hosts:
        open_hosts = [place for place in hosts if place.state == "down"]
        if not open_hosts:
            raise NoPlaceError("every backend of this model is draining; undrain one or add another")
    # an engine that asked for a pause gets no new sessions; its own sessions' next requests still come
    rested = [place for place in open_hosts if not place.cooling or place is home]
    prefills = [place for place in places if place.role == "prefill" and place.state in USABLE]
    return (rested or open_hosts) + ([place for place in prefills if not place.cooling] or prefills)


def _bound(place: PlaceView) -> bool:
    """A draining place takes no new sessions; those that are active there go on."""
    return place.state == "draining" and place.bound


def _word(
    request: RequestView, choice: Choice, worker: PlaceView, home: PlaceView | None, settings: RoutingSettings
) -> tuple[Word, str, str | None]:
    place = choice.place
    expected = place.expected_cached_tokens
    held = f"{expected} of {request.prompt_tokens} tokens expected cached"
    if home is None:
        why = choice.why or _cheapest(choice, worker)
        kept = None if request.kind == "side" else place.name
        return Word.PLACED, f"first request of the session, {why}", kept
    if place is home:
        return Word.HOME, f"home, {held}", home.name
    if home.state == "drained" or (home.state == "draining" and not home.bound):
        return Word.MOVED, f"home {home.name} is {home.state}", home.name if request.kind == "side" else place.name
    if home.state != "down" and request.kind != "side" and home.nothing_to_lose(place, request.prompt_tokens):
        return Word.MOVED, f"nothing of it is cached at home {home.name}", place.name
    if home.state == "down":
        gone = home.down_s >= settings.gone_after_s and request.kind != "side"
        return Word.FAILOVER, f"home {home.name} is down", place.name if gone else home.name
    margin_s = dearer_by_s(choice.costs, home.name, place.name)
    if request.kind != "side" and home.dearer_times + 1 >= settings.move_after and margin_s > settings.move_margin_s:
        now = f", now by {margin_s:.1f} s" if worker.learned else ""
        return Word.MOVED, f"home {home.name} was dearer {home.dearer_times + 1} times running{now}", place.name
    longer = f"{margin_s:.1f} s longer" if worker.learned else "longer"
    return Word.SPILL, f"home {home.name} would take {longer}, this once", home.name


def dearer_by_s(costs: Mapping[str, Cost], home: str | None, place: str) -> float:
    """Seconds by which ``home`` costs more than ``place``; 0 when the policy does not price them."""
    if home is None or home not in costs or place not in costs:
        return 0.0
    return costs[home].total_s - costs[place].total_s


def _cheapest(choice: Choice, worker: PlaceView) -> str:
    """Why the policy chose as it did; ``worker`` is the place that prefills."""
    cost = choice.costs.get(choice.place.name)
    if cost is None:
        return "chosen by policy"
    if not worker.learned:
        return f"the speed of {worker.name} is not known yet"
    return f"predicted to start in {cost.wait_s + cost.prefill_s + cost.transfer_s:.2f} s"
