"""What the cost policy charges: waste is what is computed again, not what a slower engine takes longer."""

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct

from homeport_proxy.routing.cost import cache_paces, load_price_s, prefill_s, shadow_factor, tiered_prefill_s
from homeport_proxy.routing.disaggregate import best_prefill
from homeport_proxy.routing.policies.cost import choose
from homeport_proxy.routing.views import PlaceView, Rates, RoutingSettings
from routing.routing_kit import request

SETTINGS = RoutingSettings()
FAST, SLOW = Rates(tokens_per_s=20_000.0), Rates(tokens_per_s=10_000.0)
PROMPT = request("s", 300)
TOKENS = PROMPT.prompt_tokens
RHO = 0.8


def place(name: str, rates: Rates, cached_tokens: int = 0, **more: object) -> PlaceView:
    """A place that is up, in a cluster of load ``RHO``."""
    view = PlaceView(name, name, "mixed", rates=rates, cached_tokens=cached_tokens, rho=RHO)
    for key, value in more.items():
        setattr(view, key, value)
    return view


def test_a_slow_engine_is_charged_for_its_own_seconds_only() -> None:
    longer_s = prefill_s(SLOW, TOKENS, 0) - prefill_s(FAST, TOKENS, 0)
    for wait_s, chosen in ((0.9 * longer_s, "fast"), (1.1 * longer_s, "slow")):
        places = [place("fast", FAST, wait_s=wait_s, rho=0.0), place("slow", SLOW, rho=0.0)]
        choice = choose(PROMPT, places, 0.0, 0, SETTINGS)
        assert choice.place.name == chosen
        assert choice.costs["slow"].shadow_s == 0.0


def test_load_counts_by_how_fast_it_fills_the_places_cache() -> None:
    small, large = (place(name, FAST, kv_capacity_tokens=tokens) for name, tokens in (("a", 100_000), ("b", 300_000)))
    fast, slow = (place(name, rates, kv_capacity_tokens=200_000) for name, rates in (("a", FAST), ("b", SLOW)))
    for places, ratio in (((small, large), 3.0), ((fast, slow), 2.0)):
        costs = choose(PROMPT, places, 0.0, 0, SETTINGS).costs
        assert costs["a"].load_s == pytest.approx(ratio * costs["b"].load_s)
        assert costs["a"].load_s + costs["b"].load_s == pytest.approx(2 * SETTINGS.tau_first_s * RHO)


@pytest.mark.parametrize(
    ("home", "price_s"),
    [
        (None, SETTINGS.tau_first_s + 9 * SETTINGS.tau_more_s),
        ({"cached_tokens": TOKENS // 2}, SETTINGS.tau_later_s),
        ({"cached_tokens": TOKENS // 2, "rewritten": True}, SETTINGS.tau_first_s + 9 * SETTINGS.tau_more_s),
        ({"cached_tokens": 0}, SETTINGS.tau_first_s + 9 * SETTINGS.tau_more_s),
        ({"cached_tokens": None}, SETTINGS.tau_later_s),
        ({"cached_tokens": 0, "unseen": True}, SETTINGS.tau_later_s),
    ],
)
def test_who_begins_is_charged_for_the_load_of_what_will_follow(home: dict[str, object] | None, price_s: float) -> None:
    at_home = place("home", FAST, **(home or {}), home=home is not None)
    beginning = replace_struct(PROMPT, session_requests=10.0)
    costs = choose(beginning, [at_home, place("other", FAST)], 0.0, 0, SETTINGS).costs
    assert costs["home"].load_s == pytest.approx(price_s * RHO)


@pytest.mark.parametrize(
    ("what", "price_s"),
    [
        ({"homed": True}, SETTINGS.tau_later_s),  # its home is down or refused it: this once
        ({"kind": "side"}, SETTINGS.tau_later_s),
        ({"kind": "subagent"}, SETTINGS.tau_first_s),
    ],
)
def test_who_commits_no_place_is_not_charged_for_what_will_follow(what: dict[str, object], price_s: float) -> None:
    assert load_price_s(SETTINGS, replace_struct(PROMPT, session_requests=10.0, **what), None) == price_s


@pytest.mark.parametrize(("tokens", "price_s"), [(255, SETTINGS.tau_later_s), (256, SETTINGS.tau_first_s)])
def test_hardly_anything_begins_nothing(tokens: int, price_s: float) -> None:
    short = replace_struct(PROMPT, prompt_tokens=tokens, homed=True)
    assert load_price_s(SETTINGS, short, place("home", FAST, home=True)) == price_s


def test_a_capacity_that_is_not_known_is_taken_as_the_others() -> None:
    rates = (FAST, SLOW)
    known = [place(str(n), rate, kv_capacity_tokens=2_600_000) for n, rate in enumerate(rates)]
    partly = [*known[:1], place("1", SLOW)]
    unknown = [place(str(n), rate) for n, rate in enumerate(rates)]
    assert cache_paces(known) == pytest.approx([4 / 3, 2 / 3])
    assert cache_paces(partly) == cache_paces(known)
    assert cache_paces(unknown) == pytest.approx(cache_paces(known))


def test_a_home_that_prefills_only_by_now_is_no_home() -> None:
    home = place("p", FAST, TOKENS // 2, home=True)
    home.role = "prefill"
    assert choose(PROMPT, [home, place("other", FAST)], 0.0, 0, SETTINGS).place.name == "other"


def test_what_lies_in_a_tier_at_home_is_not_gone() -> None:
    home = place("home", FAST, home=True, host_tokens=TOKENS * 9 // 10)
    assert not home.begins_anew(TOKENS)
    assert not home.nothing_to_lose(place("other", FAST), TOKENS)
    home.host_tokens = 0
    assert home.begins_anew(TOKENS)
    assert home.nothing_to_lose(place("other", FAST), TOKENS)


@pytest.mark.parametrize(("warm", "cold"), [(FAST, FAST), (FAST, SLOW), (SLOW, FAST)])
def test_what_lies_elsewhere_is_charged_at_the_places_own_speed(warm: Rates, cold: Rates) -> None:
    cached = TOKENS // 2
    choice = choose(PROMPT, [place("warm", warm, cached), place("cold", cold)], 0.0, 0, SETTINGS)
    again_s = prefill_s(cold, TOKENS, 0) - prefill_s(cold, TOKENS - cached, cached)
    assert choice.costs["warm"].shadow_s == 0.0
    assert choice.costs["cold"].shadow_s == pytest.approx(shadow_factor(SETTINGS, RHO) * again_s)


def test_what_can_be_loaded_from_a_tier_is_not_lost_there() -> None:
    rates = replace(FAST, load_tokens_per_s=100_000.0)
    views = [place("tier", rates, host_tokens=TOKENS // 2), place("cold", rates)]
    choice = choose(PROMPT, views, 0.0, 0, SETTINGS)
    again_s = prefill_s(rates, TOKENS, 0) - tiered_prefill_s(rates, TOKENS, 0, TOKENS // 2)
    assert choice.costs["tier"].shadow_s == 0.0
    assert choice.costs["cold"].shadow_s == pytest.approx(shadow_factor(SETTINGS, RHO) * again_s)


def test_a_slow_prefill_engine_is_charged_for_its_own_seconds_only() -> None:
    longer_s = prefill_s(SLOW, TOKENS, 0) - prefill_s(FAST, TOKENS, 0)
    for wait_s, chosen in ((0.9 * longer_s, "fast"), (1.1 * longer_s, "slow")):
        places = [place("fast", FAST, wait_s=wait_s, rho=0.0), place("slow", SLOW, rho=0.0)]
        plan = best_prefill(PROMPT, places, 0.0, SETTINGS)
        assert plan.place is not None
        assert plan.place.name == chosen
