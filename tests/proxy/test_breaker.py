"""The breaker: what counts as failure, and that it always lets traffic back in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeport_proxy.breaker import Breaker, BreakerSettings, Result, classify


@pytest.mark.parametrize(
    ("status", "result"),
    [
        (200, Result.SUCCESS),
        (400, Result.SUCCESS),
        (404, Result.SUCCESS),
        (429, Result.NEUTRAL),
        (503, Result.NEUTRAL),
        (500, Result.FAILURE),
        (502, Result.FAILURE),
        (529, Result.FAILURE),
    ],
)
def test_back_pressure_is_not_failure(status: int, result: Result) -> None:
    assert classify(status) is result


def opened(now_s: float = 0.0) -> Breaker:
    breaker = Breaker(BreakerSettings(failures_to_open=3, rest_s=1.0, max_rest_s=4.0))
    for _ in range(3):
        breaker.ended(Result.FAILURE, now_s)
    return breaker


def test_failures_in_a_row_open_it_and_time_alone_half_opens_it() -> None:
    breaker = opened()
    assert not breaker.allows(0.99)
    assert breaker.allows(1.0)


def test_one_trial_at_a_time() -> None:
    breaker = opened()
    breaker.sent(1.0)
    assert not breaker.allows(1.1)
    breaker.ended(Result.NEUTRAL, 1.2)
    assert breaker.allows(1.2), "a trial that proved nothing frees the way for the next"
    breaker.sent(1.3)
    breaker.ended(Result.SUCCESS, 1.4)
    breaker.sent(1.5)
    assert breaker.allows(1.5), "closed again"


def test_the_rest_doubles_up_to_its_bound_and_starts_over_after_a_success() -> None:
    breaker, now_s, rests = opened(), 0.0, []
    for _ in range(4):
        assert breaker.open_until_s is not None
        rests.append(breaker.open_until_s - now_s)
        now_s = breaker.open_until_s
        breaker.sent(now_s)
        breaker.ended(Result.FAILURE, now_s)
    assert rests == [1.0, 2.0, 4.0, 4.0]
    breaker.ended(Result.SUCCESS, now_s)
    assert breaker.open_until_s is None


@given(st.lists(st.tuples(st.sampled_from(["sent", *Result]), st.floats(0, 3)), max_size=60))
def test_whatever_happens_it_lets_traffic_in_again(events: list[tuple[str, float]]) -> None:
    breaker, now_s, sent = Breaker(), 0.0, 0
    for what, wait_s in events:
        now_s += wait_s
        if what == "sent":
            if breaker.allows(now_s):
                breaker.sent(now_s)
                sent += 1
        elif sent:
            breaker.ended(Result(what), now_s)
            sent -= 1
    for _ in range(sent):
        breaker.ended(Result.NEUTRAL, now_s)
    assert breaker.allows(now_s + BreakerSettings().max_rest_s)
    if not any(what in (Result.FAILURE, Result.REFUSED) for what, _ in events):
        assert breaker.allows(now_s), "neutral outcomes and successes never close the way"
