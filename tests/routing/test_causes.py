"""Every uncached token booked once: causes and cached tokens sum to the prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeport_proxy.routing.causes import CAUSES, PromptTrace, Sight, book
from routing.routing_kit import BLOCK_TOKENS, Fleet, chain, request, spec

_TOKENS = st.integers(0, 200_000)


@given(
    _TOKENS,
    _TOKENS,
    st.builds(Sight, _TOKENS, _TOKENS, _TOKENS, _TOKENS, st.booleans(), st.booleans(), st.booleans(), st.just(16)),
)
def test_causes_sum_to_the_prompt(prompt: int, cached: int, sight: Sight) -> None:
    causes = book(prompt, cached, sight)
    assert sum(causes.values()) + min(cached, prompt) == prompt
    assert all(tokens > 0 for tokens in causes.values())
    assert set(causes) <= set(CAUSES)


BASE = {"previous": 0, "shared": 0, "expected": 0, "elsewhere": 0, "same_place": True, "cold": False, "idle": False}


@pytest.mark.parametrize(
    ("changes", "prompt", "cached", "causes"),
    [
        ({}, 1000, 0, {"new": 1000}),
        ({"previous": 900, "shared": 900, "expected": 900}, 1000, 896, {"new": 100, "template": 4}),
        ({"previous": 900, "shared": 900, "expected": 900}, 1000, 0, {"new": 100, "evicted": 900}),
        ({"previous": 900, "shared": 300, "expected": 300}, 1000, 300, {"new": 100, "caller": 600}),
        (
            {"previous": 900, "shared": 900, "elsewhere": 900, "same_place": False},
            1000,
            0,
            {"new": 100, "routed_elsewhere": 900},
        ),
        ({"previous": 900, "shared": 900, "expected": 900, "cold": True}, 1000, 0, {"new": 100, "cold_backend": 900}),
        ({"previous": 900, "shared": 900, "idle": True}, 1000, 0, {"new": 100, "expired": 900}),
        ({"previous": 900, "shared": 900, "same_place": False}, 1000, 0, {"new": 100, "unknown": 900}),
    ],
)
def test_planted_causes_are_named(changes: dict[str, int], prompt: int, cached: int, causes: dict[str, int]) -> None:
    sight = Sight(block=16, **{**BASE, **changes})  # type: ignore[arg-type]
    assert book(prompt, cached, sight) == causes


def test_what_is_not_reported_is_unknown() -> None:
    assert book(None, None, None) == {}
    assert book(100, None, None) == {"unknown": 100}
    assert book(100, 40, None) == {"unknown": 60}


def test_a_prompt_is_recognised_up_to_where_it_parts() -> None:
    keys = chain("s", 320)
    trace = PromptTrace(keys, 320 * BLOCK_TOKENS)
    assert trace.shared_tokens(keys + chain("more", 5), 400 * BLOCK_TOKENS) == 320 * BLOCK_TOKENS
    parted = keys[:160] + chain("other", 200)
    assert trace.shared_tokens(parted, 360 * BLOCK_TOKENS) == pytest.approx(160 * BLOCK_TOKENS, rel=0.07)
    assert trace.shared_tokens(chain("other", 10), 1000) == 0
    assert PromptTrace([], 50).shared_tokens(keys, 100) == 0


def test_the_router_books_a_failover_as_routed_elsewhere_and_an_edit_as_the_callers() -> None:
    fleet = Fleet(spec("d0"), spec("d1"))
    home = fleet.ask(request("s", 100)).decision
    assert home is not None
    fleet.router.set_state(home.backend if hasattr(home, "backend") else home.place, "down", fleet.now_s)
    ticket = fleet.start(request("s", 104))
    outcome = fleet.end(ticket, cached=0)
    assert outcome.causes["routed_elsewhere"] == pytest.approx(100 * BLOCK_TOKENS, rel=0.02)
    edited = request("s", 104, prefix=type(request("s").prefix)(chain("s", 52) + chain("edit", 52)))
    outcome = fleet.end(fleet.start(edited), cached=52 * BLOCK_TOKENS)
    assert outcome.causes["caller"] == pytest.approx(52 * BLOCK_TOKENS, rel=0.1)
    assert sum(outcome.causes.values()) + 52 * BLOCK_TOKENS == 104 * BLOCK_TOKENS


def test_what_a_turn_appends_is_new_also_when_the_prompt_was_estimated_too_long() -> None:
    fleet = Fleet(spec("d0"))

    def turn(blocks: int, reported: int, cached: int) -> dict[str, int]:
        ticket = fleet.start(request("s", blocks, prompt_tokens=int(reported * 1.1)))
        outcome = fleet.router.finished(
            ticket, fleet.now_s, prompt_tokens=reported, cached_tokens=cached, output_tokens=20, ok=True
        )
        fleet.now_s += 1.0
        return dict(outcome.causes)

    assert turn(12, 1536, 0) == {"new": 1536}
    assert turn(12, 1590, 1536) == {"new": 54}
