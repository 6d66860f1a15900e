"""Long prompts in parts: how long a part is, who comes in between, and that nothing of it is counted twice or kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeport_engines.vllm.kv import BlockStored, KvBatch
from homeport_proxy.routing.cost import prefill_s
from homeport_proxy.routing.slices import part_tokens, tokens_in
from homeport_proxy.routing.views import PrefixKeys, Rates, RoutingSettings, Ticket
from homeport_proxy.simulate.cluster import Cluster
from homeport_proxy.simulate.peers import ONE_CACHE
from homeport_proxy.simulate.run import Failure, Simulation
from homeport_proxy.simulate.workload import Call, Conversation, Lane, Workload
from routing.routing_kit import Fleet, chain, request, spec

SLICED = RoutingSettings(slice_s=1.0)
LONG = 800  # blocks: 102,400 tokens, 12.6 s of prefill at the default speeds


@pytest.mark.parametrize(
    ("slice_s", "prompt_tokens", "cached_tokens", "sliced"),
    [
        (0.0, 100_000, 0, False),
        (1.0, 100_000, 0, True),
        (1.0, 100_000, 99_000, False),
        (1.0, 10_000, 0, False),
        (1.0, 100_000, 60_000, True),
    ],
)
def test_only_long_prefills_are_sliced(slice_s: float, prompt_tokens: int, cached_tokens: int, sliced: bool) -> None:
    part = part_tokens(Rates(), RoutingSettings(slice_s=slice_s), prompt_tokens, cached_tokens)
    assert (part is not None) == sliced
    if part is not None:
        assert part % 512 == 0
        assert prefill_s(Rates(), part - cached_tokens, cached_tokens) == pytest.approx(1.0, abs=0.1)


def test_where_much_is_held_parts_are_longer() -> None:
    parts = [part_tokens(Rates(), SLICED, 100_000, 0, held_s) or 100_000 for held_s in (0.0, 4.0, 10.0, 20.0, 100.0)]
    assert parts[0] == parts[1]
    assert parts == sorted(parts)
    assert prefill_s(Rates(), parts[2], 0) == pytest.approx(2.0, abs=0.1)
    assert parts[-1] == 100_000


def test_where_a_part_has_a_price_parts_are_longer() -> None:
    for t0_s, slice_s in ((0.02, 1.0), (0.05, 2.0), (0.09, 3.6), (1.0, 4.0)):
        rates = Rates(t0_s=t0_s)
        part = part_tokens(rates, SLICED, 100_000, 0)
        assert part is not None
        assert prefill_s(rates, part, 0) == pytest.approx(slice_s, abs=0.1)
        half = part_tokens(rates, RoutingSettings(slice_s=0.5), 100_000, 0)
        assert half is not None
        assert prefill_s(rates, half, 0) == pytest.approx(slice_s / 2, abs=0.1)


def test_a_slow_engine_gets_whole_steps() -> None:
    slow = Rates(tokens_per_s=100.0)
    part = part_tokens(slow, SLICED, 20_000, 0)
    assert part == 2 * SLICED.step_tokens
    assert part_tokens(slow, SLICED, 5_000, 0) is None


@given(
    seconds=st.floats(0.05, 20),
    cached=st.integers(0, 500_000),
    speed=st.floats(50, 100_000),
    attention=st.floats(1_000, 1_000_000),
)
def test_tokens_in_is_prefill_s_turned_round(seconds: float, cached: int, speed: float, attention: float) -> None:
    rates = Rates(tokens_per_s=speed, attention_tokens=attention)
    tokens = tokens_in(rates, seconds, cached)
    assert prefill_s(rates, tokens, cached) <= seconds + 1e-6
    assert prefill_s(rates, tokens + 2, cached) >= seconds - 1e-6


def play(fleet: Fleet, ticket: Ticket) -> list[str]:
    """An engine that computes one thing at a time as predicted, until ``ticket`` is sent whole; sessions in order."""
    served: list[str] = []
    while True:
        for decided in fleet.router.due(fleet.now_s):
            served.append(decided.request.session)
            if decided.part_tokens is not None:
                fleet.now_s += 1.0
                fleet.router.sliced(decided, fleet.now_s, cached_tokens=None, ok=True)
            elif decided is ticket:
                return served
            else:
                fleet.now_s += 0.1
                fleet.router.first_token(decided, fleet.now_s)
                fleet.router.cancel(decided, fleet.now_s)


def test_short_prompts_come_in_between() -> None:
    fleet = Fleet(spec("d0"), settings=SLICED)
    long = fleet.router.arrive(request("long", LONG, sliceable=True), 0.0)
    assert fleet.router.due(0.0) == [long]
    assert long.part_tokens is not None
    fleet.router.arrive(request("short", 20), 0.0)
    assert fleet.router.due(0.0) == []
    fleet.router.sliced(long, 1.0, cached_tokens=0, ok=True)
    fleet.now_s = 1.0
    served = play(fleet, long)
    assert served[0] == "short"
    assert set(served[1:]) == {"long"}
    fleet.router.cancel(long, fleet.now_s)
    assert fleet.empty()


def test_parts_grow_until_the_rest_goes_whole_and_only_what_was_found_counts_as_cached() -> None:
    fleet = Fleet(spec("d0"), settings=SLICED)
    ticket = fleet.router.arrive(request("s", LONG, sliceable=True), 0.0)
    parts = []
    for second in range(40):
        assert fleet.router.due(second) == [ticket]
        if ticket.part_tokens is None:
            break
        parts.append(ticket.part_tokens)
        fleet.router.sliced(ticket, second + 1.0, cached_tokens=parts[-2] if len(parts) > 1 else 0, ok=True)
    assert parts == sorted(set(parts))
    assert 8 <= len(parts) <= 14
    assert ticket.decision is not None
    assert ticket.decision.expected_cached_tokens == 0
    fleet.now_s = 50.0
    outcome = fleet.end(ticket, cached=0)
    assert outcome.expected_cached_tokens == 0
    assert sum(outcome.causes.values()) == ticket.request.prompt_tokens
    again = fleet.ask(request("s", LONG + 2, sliceable=True))
    assert again.decision is not None
    assert (again.decision.expected_cached_tokens or 0) > 0.98 * LONG * 128
    assert fleet.empty()


def test_parts_go_on_before_the_engines_events_tell_of_them() -> None:
    fleet = Fleet(spec("d0"), settings=SLICED)
    keys = chain("s", LONG)
    fleet.router.kv_follow("d0")
    fleet.router.kv_events("d0", KvBatch(0, 0.0, (BlockStored((1,), None, 128),)))
    ticket = fleet.router.arrive(request("s", LONG, prefix=PrefixKeys(keys, 128, {128: keys}), sliceable=True), 0.0)
    parts = []
    for second in range(40):
        assert fleet.router.due(second) == [ticket]
        if ticket.part_tokens is None:
            break
        parts.append(ticket.part_tokens)
        fleet.router.sliced(ticket, second + 1.0, cached_tokens=None, ok=True)
    assert parts == sorted(set(parts))
    assert len(parts) >= 8
    fleet.router.cancel(ticket, 50.0)
    after = fleet.start(request("s", LONG, prefix=ticket.request.prefix, sliceable=True))
    assert after.decision is not None
    assert after.decision.expected_cached_tokens == 0, "what was claimed for it alone is claimed no more"


def test_the_place_goes_while_a_part_is_computed() -> None:
    fleet = Fleet(spec("d0"), spec("d1"), settings=SLICED)
    fleet.router.set_state("d0", "down", 0.0)
    fleet.ask(request("s", 80))
    fleet.router.set_state("d0", "up", 0.0)
    fleet.router.cool("d1", fleet.now_s + 1.0)
    gone, left, known = "d0", "d1", 80 * 128
    ticket = fleet.start(request("t", LONG, prefix=PrefixKeys(chain("s", LONG), 128), sliceable=True))
    assert ticket.decision is not None
    assert ticket.decision.place == gone
    assert ticket.decision.expected_cached_tokens == 0
    fleet.router.set_places([spec(left)])
    fleet.router.sliced(ticket, 1.0, cached_tokens=0, ok=True)
    assert fleet.router.due(1.0) == [ticket]
    assert ticket.decision.place == left
    while ticket.part_tokens is not None:
        fleet.now_s += 1.0
        fleet.router.sliced(ticket, fleet.now_s, cached_tokens=None, ok=True)
        assert fleet.router.due(fleet.now_s) == [ticket]
    assert ticket.decision.expected_cached_tokens == pytest.approx(known, rel=0.01), "what it found there, not before"
    assert fleet.end(ticket, cached=known).expected_cached_tokens == ticket.decision.expected_cached_tokens
    assert fleet.router.status(fleet.now_s).places[left].confidence > 0.99
    assert fleet.empty()


@pytest.mark.parametrize("more", [{}, {"kind": "side"}])
def test_what_the_caller_cannot_slice_goes_whole(more: dict[str, object]) -> None:
    fleet = Fleet(spec("d0"), settings=SLICED)
    assert fleet.start(request("s", LONG, **more)).part_tokens is None


def test_with_a_separate_prefill_nothing_is_sliced() -> None:
    fleet = Fleet(spec("p0", "prefill"), spec("d0", "decode"), settings=SLICED)
    ticket = fleet.start(request("s", LONG, sliceable=True))
    assert ticket.decision is not None
    assert ticket.decision.prefill_place == "p0"
    assert ticket.part_tokens is None


def test_a_part_that_fails_sends_the_request_as_it_is() -> None:
    fleet = Fleet(spec("d0"), settings=SLICED)
    ticket = fleet.start(request("s", LONG, sliceable=True))
    assert ticket.part_tokens is not None
    fleet.router.sliced(ticket, 0.1, cached_tokens=None, ok=False)
    assert fleet.router.due(0.1) == [ticket]
    assert ticket.part_tokens is None
    fleet.router.cancel(ticket, 0.2)
    assert fleet.empty()


@pytest.mark.parametrize("held", [False, True])
def test_a_client_that_leaves_lets_go_of_everything(held: bool) -> None:
    fleet = Fleet(spec("d0"), settings=SLICED)
    ticket = fleet.start(request("s", LONG, sliceable=True))
    if held:
        fleet.router.sliced(ticket, 1.0, cached_tokens=0, ok=True)
    fleet.router.cancel(ticket, 1.0)
    fleet.router.sliced(ticket, 2.0, cached_tokens=0, ok=True)
    assert fleet.router.due(2.0) == []
    assert fleet.empty()


def begun_on_one_of_two() -> tuple[Fleet, Ticket, str]:
    """Two places, and a long prompt whose first part is computed at the one that is named."""
    fleet = Fleet(spec("d0"), spec("d1"), settings=SLICED)
    ticket = fleet.start(request("s", LONG, sliceable=True))
    assert ticket.decision is not None
    return fleet, ticket, ticket.decision.place


def test_a_place_that_goes_down_between_parts_is_left() -> None:
    fleet, ticket, first = begun_on_one_of_two()
    assert ticket.decision is not None
    fleet.router.sliced(ticket, 1.0, cached_tokens=0, ok=True)
    fleet.router.set_state(first, "down", 1.0)
    assert fleet.router.due(1.0) == [ticket]
    assert ticket.decision.place != first
    fleet.router.cancel(ticket, 1.0)
    assert fleet.empty()


def mixed(requests: int = 240) -> Workload:
    """Many short prompts, and now and then one that takes seconds."""
    lanes = []
    for number in range(requests):
        tokens = 80_000 if number % 20 == 0 else 2_048
        keys = [number * 1_000 + index + 1 for index in range(tokens // 512)]
        lanes.append(Conversation(f"c{number}", [Lane(f"c{number}", [Call(tokens, 20, keys, number * 0.4)])]))
    return Workload(lanes, False, 512)


@pytest.mark.parametrize("steps", [False, True])
def test_the_simulated_short_ones_wait_less_and_every_token_is_computed_once(steps: bool) -> None:
    cluster = Cluster(replicas=1, cache_tokens=1_000_000, rate_scale=0.5, steps=steps)
    figures = []
    for slice_s in (0.0, 1.0):
        simulation = Simulation(mixed(), cluster, "cost", settings=RoutingSettings(slice_s=slice_s), whole=True)
        samples = simulation.run()
        assert len(samples.all) == 240
        assert sum(sample.cached_tokens for sample in samples.all) == 0
        assert simulation.router.status(simulation.now_s).queued == 0
        figures.append(samples.row("cost", 0))
    whole, sliced = figures
    assert sliced.ttft_p50_s is not None
    assert whole.ttft_p90_s is not None
    assert sliced.ttft_p90_s is not None
    assert sliced.ttft_p90_s < 0.7 * whole.ttft_p90_s


def test_an_engine_that_dies_amid_parts_loses_no_request() -> None:
    cluster = Cluster(replicas=2, cache_tokens=1_000_000)
    failures = [Failure("e0", 10.3, 40.0), Failure("e1", 61.0, 70.0)]
    simulation = Simulation(mixed(), cluster, "cost", settings=SLICED, failures=failures, whole=True)
    samples = simulation.run()
    assert len(samples.all) >= 240
    status = simulation.router.status(simulation.now_s)
    assert status.queued == 0
    assert all(place.prefill_tokens == 0 and place.requests == 0 for place in status.places.values())


def test_the_rest_of_what_is_being_prefilled_in_part_is_not_forgotten() -> None:
    fleet = Fleet(spec("d0"), spec("d1"), settings=SLICED)
    first = fleet.start(request("first", LONG, sliceable=True))
    second = fleet.start(request("second", LONG, sliceable=True))
    assert first.decision is not None
    assert second.decision is not None
    assert {first.decision.place, second.decision.place} == {"d0", "d1"}
    third = fleet.router.arrive(request("third", LONG, sliceable=True), 0.0)
    assert fleet.router.due(0.0) == []
    for ticket in (first, second, third):
        fleet.router.cancel(ticket, 0.0)
    assert fleet.empty()


def test_a_retry_elsewhere_leaves_nothing_of_the_parts_behind() -> None:
    fleet, ticket, place = begun_on_one_of_two()
    again = fleet.router.again(ticket, frozenset({place}), 0.5)
    assert again is not None
    assert again.place != place
    assert ticket.part_tokens is None
    fleet.router.sliced(ticket, 0.6, cached_tokens=0, ok=True)
    assert fleet.router.due(0.6) == []
    fleet.router.cancel(ticket, 1.0)
    assert fleet.empty()


def test_one_shared_cache_is_one() -> None:
    simulation = Simulation(mixed(), Cluster(replicas=3), ONE_CACHE)
    assert len({id(engine.cache) for engine in simulation.engines.values()}) == 1
