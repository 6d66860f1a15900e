"""Speeds learned from first tokens, and an index believed as far as it is right."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeport_engines.base import EngineStats, SpecStats
from homeport_proxy.routing.calibration import Confidence, PrefillRates, learned_step, learned_transfer
from homeport_proxy.routing.cost import decode_step_s, prefill_s, tiered_prefill_s
from homeport_proxy.routing.place import Place
from homeport_proxy.routing.views import PlaceSpec, Rates, RoutingSettings
from routing.routing_kit import Fleet, request, spec


def mix(rng: Random) -> tuple[int, int]:
    return rng.choice([300, 1_000, 4_000, 20_000, 60_000]), rng.choice([0, 5_000, 50_000, 120_000])


@pytest.mark.parametrize(
    ("true_rate", "true_attention", "noise"),
    [
        (16_000, 53_000, 0.0),
        (60_000, 90_000, 0.1),
        (9_000, 30_000, 0.3),
        (250, 20_000, 0.2),
    ],
)
def test_prefill_rates_are_learned(true_rate: float, true_attention: float, noise: float) -> None:
    rng = Random(3)
    true = Rates(tokens_per_s=true_rate, attention_tokens=true_attention)
    learner = PrefillRates(Rates())
    for _ in range(150):
        uncached, cached = mix(rng)
        learner.observe([(uncached, cached)], prefill_s(true, uncached, cached) * (1 + noise * rng.uniform(-1, 1)))
    for uncached, cached in [(1_000, 50_000), (20_000, 0), (4_000, 120_000)]:
        predicted = prefill_s(learner.rates, uncached, cached)
        assert predicted == pytest.approx(prefill_s(true, uncached, cached), rel=0.15 + noise / 2)


def test_outliers_do_not_bend_the_rates() -> None:
    rng = Random(5)
    true = Rates(tokens_per_s=20_000)
    learner = PrefillRates(true)
    for number in range(200):
        uncached, cached = mix(rng)
        stalled = 20.0 if number % 10 == 0 else 0.0
        learner.observe([(uncached, cached)], prefill_s(true, uncached, cached) + stalled)
    assert prefill_s(learner.rates, 20_000, 5_000) == pytest.approx(prefill_s(true, 20_000, 5_000), rel=0.25)


def test_another_engine_behind_the_name_is_noticed_within_ten_requests() -> None:
    learner = PrefillRates(Rates())
    slow = Rates(tokens_per_s=1_000)
    for _ in range(50):
        learner.observe([(4_000, 0)], prefill_s(Rates(), 4_000, 0))
    for _ in range(10):
        learner.observe([(4_000, 0)], prefill_s(slow, 4_000, 0))
    assert prefill_s(learner.rates, 4_000, 0) == pytest.approx(prefill_s(slow, 4_000, 0), rel=0.3)


@given(
    st.lists(st.integers(600, 3_000), min_size=1, max_size=6).flatmap(
        lambda sizes: st.tuples(st.just(sizes), st.permutations(range(len(sizes))))
    )
)
@settings(max_examples=60, deadline=None)
def test_prompts_computed_in_one_step_teach_one_speed(case: tuple[list[int], list[int]]) -> None:
    """First tokens that come together, in whatever order, are one observation, whoever is over first."""
    sizes, order = case
    true = Rates(tokens_per_s=1_000, attention_tokens=1e9)
    place = Place(PlaceSpec("e0", "e0", "mixed", frozenset({"m"})), 60.0)
    now_s = 0.0
    for _ in range(12):
        for key, tokens in enumerate(sizes):
            place.load.begin_prefill(key, prefill_s(place.rates, tokens, 0), tokens, now_s)
        now_s += prefill_s(true, sum(sizes), 0)
        bursts = []
        for key in order:
            now_s += 0.0005
            burst = place.load.end_prefill(key, sizes[key], now_s, ran=True)
            assert burst is not None
            burst.parts[key] = (sizes[key], 0)
            bursts.append(burst)
        for burst in bursts:
            place.learn_prefill(burst, now_s)
    assert place.rates.tokens_per_s == pytest.approx(1_000, rel=0.1)


def test_steps_and_transfers_follow_slowly() -> None:
    rates = Rates()
    for _ in range(100):
        rates = learned_step(rates, 10, 100_000, 0.06)
        rates = learned_transfer(rates, 10_000, 0.1)
    assert decode_step_s(rates, 10, 100_000) == pytest.approx(0.06, rel=0.05)
    assert rates.transfer_tokens_per_s == pytest.approx(100_000, rel=0.05)
    assert learned_transfer(rates, 10, 5.0) == rates


def test_a_tier_costs_the_cheaper_of_loading_and_computing() -> None:
    fast = Rates(load_tokens_per_s=1e6)
    slow = Rates(load_tokens_per_s=10)
    assert tiered_prefill_s(fast, 10_000, 0, 8_000) < prefill_s(fast, 10_000, 0)
    assert tiered_prefill_s(slow, 10_000, 0, 8_000) == prefill_s(slow, 10_000, 0)


def test_confidence_falls_within_20_requests_and_returns() -> None:
    confidence = Confidence()
    for _ in range(10):
        confidence.observe("chat", 5_000, 0)
    assert confidence.of("chat") < Confidence.DEGRADED_BELOW
    for _ in range(20):
        confidence.observe("chat", 5_000, 5_000)
    assert confidence.of("chat") > 0.9
    assert confidence.of("messages") == 1.0


def test_a_wrong_template_is_shown_and_enters_the_cost() -> None:
    fleet = Fleet(spec("d0"), settings=RoutingSettings())
    for turn in range(20):
        fleet.ask(request("s", 50 + turn), cached=0)
    status = fleet.router.status(fleet.now_s)
    assert status.places["d0"].index == "degraded"
    assert any("d0" in line for line in status.degraded)
    ticket = fleet.start(request("s", 80))
    assert ticket.decision is not None
    assert (ticket.decision.expected_cached_tokens or 0) < 0.5 * 70 * 128


def test_a_restarted_engine_is_noticed_by_its_counters() -> None:
    fleet = Fleet(spec("d0"))
    fleet.router.observe_stats("d0", EngineStats(prefix_queries_tokens=90_000, prefix_hits_tokens=50_000), 0.0)
    fleet.ask(request("s", 50))
    fleet.router.observe_stats("d0", EngineStats(prefix_queries_tokens=10, prefix_hits_tokens=0), fleet.now_s)
    view = fleet.router.session("s")
    assert view is not None
    assert not view.warm
    ticket = fleet.start(request("s", 51))
    assert ticket.decision is not None
    assert ticket.decision.expected_cached_tokens == 0
    outcome = fleet.end(ticket, cached=0)
    assert set(outcome.causes) == {"cold_backend", "new"}


def test_a_restart_without_telemetry_heals_within_20_requests() -> None:
    fleet = Fleet(spec("d0"))
    held: dict[str, int] = {}

    def ask(name: str, blocks: int) -> tuple[int, int]:
        ticket = fleet.start(request(name, blocks))
        assert ticket.decision is not None
        true = held.get(name, 0) * 128
        fleet.end(ticket, cached=true)
        held[name] = blocks
        return ticket.decision.expected_cached_tokens or 0, true

    for turn in range(30):
        ask(f"s{turn % 30}", 40)
    held.clear()  # the engine restarted: nothing is cached any more
    for turn in range(30):
        ask(f"s{turn}", 41)
    for turn in range(20):
        ask(f"s{turn}", 42)
    errors = [ask(f"s{turn}", 43) for turn in range(20)]
    assert sum(abs(expected - true) for expected, true in errors) < 0.3 * sum(true for _, true in errors)


def test_speculation_and_capacity_come_from_telemetry() -> None:
    fleet = Fleet(spec("d0", kv_capacity_tokens=None))
    stats = EngineStats(kv_capacity_tokens=2_000, spec=SpecStats(drafts=100, draft_tokens=400, accepted_tokens=200))
    fleet.router.observe_stats("d0", stats, 0.0)
    fleet.router.observe_stats("gone", stats, 0.0)
    for number in range(20):
        fleet.ask(request(f"s{number}", 4))
    assert fleet.router.status(0.0).places["d0"].spec_acceptance == 0.5
    assert fleet.router.status(0.0).index_bytes <= 20 * 320
    ticket = fleet.start(request("s0", 5))
    assert ticket.decision is not None
    assert ticket.decision.expected_cached_tokens == 0
    fleet.router.set_places([spec("d0", kv_capacity_tokens=None)])  # a reload that does not say so either
    for number in range(20, 40):
        fleet.ask(request(f"s{number}", 4))
    assert fleet.router.status(0.0).index_bytes <= 20 * 320


def test_places_never_tried_take_the_fleets_learned_speed() -> None:
    fleet = Fleet(spec("d0"), spec("d1"))
    for number in range(5):
        ticket = fleet.start(request(f"s{number}", 100))
        fleet.now_s += 8.0  # an engine far slower than the defaults
        fleet.end(ticket, cached=0)
    rates = {place.rates.tokens_per_s for place in fleet.router.status(0.0).places.values()}
    assert max(rates) < 4_000
