"""Two legs: who prefills for a decode engine, and when nobody but itself."""

import pytest

from homeport_proxy.routing.disaggregate import threshold_tokens
from homeport_proxy.routing.views import Decision, PlaceView, RequestView, RoutingSettings
from routing.routing_kit import BLOCK_TOKENS, Fleet, request, spec

PAIR = [spec("p0", "prefill"), spec("d0", "decode")]


def decided(fleet: Fleet, one: RequestView) -> Decision:
    decision = fleet.ask(one).decision
    assert decision is not None
    return decision


def test_a_new_prompt_is_prefilled_apart_and_a_small_turn_where_it_decodes() -> None:
    fleet = Fleet(*PAIR)
    first = decided(fleet, request("s", 100))
    assert (first.place, first.prefill_place) == ("d0", "p0")
    assert first.expected_cached_tokens == first.prefill_cached_tokens == 0
    second = decided(fleet, request("s", 101))
    assert (second.place, second.prefill_place) == ("d0", None)
    assert "prefilled where they decode" in second.reason
    third = decided(fleet, request("s", 160))
    assert third.prefill_place == "p0"
    assert third.prefill_cached_tokens == pytest.approx(100 * BLOCK_TOKENS, rel=0.02)
    assert fleet.empty()


@pytest.mark.parametrize("left", ["d0", "d1"])
def test_a_request_that_waits_for_its_prefill_is_placed_anew_when_its_decode_place_leaves(left: str) -> None:
    fleet = Fleet(*PAIR, spec("d1", "decode"))
    busy = fleet.start(request("busy", 400))
    waiting = fleet.router.arrive(request("late", 400), 0.0)
    assert waiting not in fleet.router.due(0.0)
    fleet.router.set_places([PAIR[0], spec(left, "decode")])
    fleet.router.prefill_done(busy, 1.0, 0)
    assert waiting in fleet.router.due(1.0)
    assert waiting.decision is not None
    assert waiting.decision.place == left
    for ticket in (busy, waiting):
        fleet.router.cancel(ticket, 2.0)
    assert fleet.empty()


def test_an_answer_that_is_not_streamed_leaves_its_prompt_at_the_decode_engine_too() -> None:
    fleet = Fleet(*PAIR)
    ticket = fleet.start(request("s", 100))
    fleet.router.prefill_done(ticket, 1.0, 0)
    fleet.router.finished(ticket, 2.0, prompt_tokens=100 * BLOCK_TOKENS, cached_tokens=0, output_tokens=9, ok=True)
    fleet.now_s = 3.0
    assert decided(fleet, request("s", 101)).prefill_place is None


def test_one_means_always_when_anything_is_uncached() -> None:
    fleet = Fleet(*PAIR, settings=RoutingSettings(min_uncached_tokens=1))
    for turn in range(10, 14):
        assert decided(fleet, request("s", turn)).prefill_place == "p0"


@pytest.mark.parametrize(
    ("prefill_wait_s", "decode_wait_s", "tokens"), [(0, 0, 256), (1, 0, 1280), (0, 1, 51.2), (1, 1, 256)]
)
def test_the_threshold_follows_both_queues(prefill_wait_s: float, decode_wait_s: float, tokens: float) -> None:
    prefill = PlaceView("p0", "p0", "prefill", wait_s=prefill_wait_s)
    decode = PlaceView("d0", "d0", "decode", wait_s=decode_wait_s)
    assert threshold_tokens(decode, prefill, RoutingSettings()) == pytest.approx(tokens)


@pytest.mark.parametrize(
    ("specs", "more", "says"),
    [
        ([spec("p0", "prefill"), spec("d0", "decode", pool="other")], {}, "no prefill engine is available"),
        ([spec("d0", "decode")], {}, "no prefill engine is available"),
        (PAIR, {"split_refused": "n > 1 needs one engine"}, "n > 1"),
    ],
)
def test_why_not_split_stands_in_the_reason(specs: list[object], more: dict[str, object], says: str) -> None:
    fleet = Fleet(*specs)  # type: ignore[arg-type]
    decision = decided(fleet, request("s", 100, **more))
    assert decision.prefill_place is None
    assert says in decision.reason


def test_without_prefill_engines_decode_goes_on_and_status_says_so() -> None:
    fleet = Fleet(*PAIR)
    fleet.router.set_state("p0", "down", 0.0)
    assert decided(fleet, request("s", 100)).prefill_place is None
    assert any("no prefill engine is up" in line for line in fleet.router.status(0.0).degraded)


def test_a_failed_prefill_leg_leaves_the_word_and_says_why() -> None:
    fleet = Fleet(*PAIR)
    ticket = fleet.start(request("s", 100))
    assert fleet.router.status(0.0).places["p0"].prefill_tokens == 100 * BLOCK_TOKENS
    before = ticket.decision
    after = fleet.router.without_prefill(ticket, 0.5, "prefill engine p0 answered 500")
    assert before is not None
    assert (after.word, after.place, after.prefill_place) == (before.word, "d0", None)
    assert "500" in after.reason
    status = fleet.router.status(0.5).places
    assert (status["p0"].prefill_tokens, status["d0"].prefill_tokens) == (0, 100 * BLOCK_TOKENS)
    fleet.end(ticket)
    assert fleet.empty()


def test_the_prefill_engine_is_free_when_its_leg_answered() -> None:
    fleet = Fleet(*PAIR)
    ticket = fleet.start(request("s", 100))
    fleet.router.prefill_done(ticket, 0.4, 0)
    status = fleet.router.status(0.4).places
    assert status["p0"].prefill_tokens == 0
    assert status["d0"].decode_tokens > 0
    fleet.end(ticket)
    assert fleet.empty()


def test_prefill_goes_where_the_prefix_lies() -> None:
    fleet = Fleet(spec("p0", "prefill"), spec("p1", "prefill"), spec("d0", "decode"), spec("d1", "decode"))
    first = decided(fleet, request("s", 200))
    for turn in range(3):
        again = decided(fleet, request("s", 260 + 60 * turn))
        assert (again.prefill_place, again.place) == (first.prefill_place, first.place)


def test_a_wrong_ratio_is_reported() -> None:
    fleet = Fleet(spec("p0", "prefill"), spec("d0", "decode"), spec("d1", "decode"))
    for number in range(120):
        ticket = fleet.router.arrive(request(f"s{number}", 100), fleet.now_s)
        fleet.router.due(fleet.now_s)
        fleet.router.cancel(ticket, fleet.now_s)
        fleet.now_s += 0.5
    status = fleet.router.status(fleet.now_s)
    assert status.wanted == {"default": "prefill"}
    assert any("prefill engines are wanted" in line for line in status.degraded)
