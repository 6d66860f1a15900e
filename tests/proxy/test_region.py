"""Home regions: minimal movement, bounded load, one answer from every region's proxy, and the way back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeport_proxy.region import SLACK_TOKENS, RegionView, choose, ranking

names = st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=6, unique=True)
weights = st.sampled_from([0.5, 1.0, 2.0, 5.0])


@st.composite
def fleets(draw: st.DrawFn) -> list[RegionView]:
    return [RegionView(name, weight=draw(weights)) for name in draw(names)]


@settings(max_examples=60)
@given(fleets(), st.text(min_size=1, max_size=20), st.randoms())
def test_every_proxy_gives_the_same_answer(regions: list[RegionView], session: str, random: object) -> None:
    home = choose(session, regions)
    shuffled = [replace(region, local=i == 0, rtt_s=0.1 * i) for i, region in enumerate(reversed(regions))]
    assert choose(session, shuffled) == home


@settings(max_examples=40)
@given(fleets(), st.lists(st.text(max_size=8), max_size=30, unique=True), st.data())
def test_a_lost_region_moves_only_its_own_sessions(
    regions: list[RegionView], sessions: list[str], data: st.DataObject
) -> None:
    lost = data.draw(st.sampled_from([region.name for region in regions]))
    how = data.draw(st.sampled_from(["usable", "draining"]))
    after = [replace(r, usable=how != "usable", draining=True) if r.name == lost else r for r in regions]
    for session in sessions:
        before = choose(session, regions)
        now = choose(session, after)
        assert before is not None
        assert now is not None
        assert now.home == before.home, "home itself never changes by trouble"
        assert now.region == (before.region if before.region != lost else ranking(session, regions)[1].name)
        assert bool(now.reason) == (before.region == lost)


@settings(max_examples=40)
@given(fleets(), weights, st.lists(st.text(max_size=8), max_size=30, unique=True))
def test_a_joining_region_takes_only_what_it_wins(
    regions: list[RegionView], weight: float, sessions: list[str]
) -> None:
    joined = [*regions, RegionView("new", weight=weight)]
    for session in sessions:
        before, now = choose(session, regions), choose(session, joined)
        assert before is not None
        assert now is not None
        assert now.region in (before.region, "new")


def test_weights_are_shares() -> None:
    regions = [RegionView("a", weight=3.0), RegionView("b", weight=1.0)]
    homes = [ranking(f"s{i}", regions)[0].name for i in range(4000)]
    assert homes.count("a") / len(homes) == pytest.approx(0.75, abs=0.03)


@settings(max_examples=40)
@given(
    fleets(),
    st.lists(st.tuples(st.text(max_size=8), st.integers(1, 100_000)), max_size=60),
    st.sampled_from([1.0, 1.25, 2.0]),
)
def test_in_flight_tokens_stay_below_the_bound(
    regions: list[RegionView], arrivals: list[tuple[str, int]], bound: float
) -> None:
    load = {region.name: 0 for region in regions}
    share = {region.name: region.weight / sum(r.weight for r in regions) for region in regions}
    for session, tokens in arrivals:
        total = sum(load.values())
        choice = choose(session, [replace(r, inflight_tokens=load[r.name]) for r in regions], load_bound=bound)
        assert choice is not None
        assert load[choice.region] <= bound * share[choice.region] * total + SLACK_TOKENS
        load[choice.region] += tokens


def test_small_loads_never_part_two_proxies() -> None:
    """What one proxy knows of another's load is a little old; an idle fleet has one answer all the same."""
    for load_a, load_b in ((0, 0), (SLACK_TOKENS, 0), (0, 900)):
        regions = [RegionView("a", inflight_tokens=load_a), RegionView("b", inflight_tokens=load_b)]
        for i in range(50):
            choice = choose(f"s{i}", regions)
            assert choice is not None
            assert choice.region == choice.home


def test_the_bound_never_moves_a_session_that_is_warm() -> None:
    regions = [RegionView("a", inflight_tokens=10**6), RegionView("b")]
    session = next(f"s{i}" for i in range(99) if ranking(f"s{i}", regions)[0].name == "a")
    new, known = choose(session, regions, new=True), choose(session, regions, new=False)
    assert new is not None
    assert known is not None
    assert (new.region, known.region) == ("b", "a")


def here_and_there(**there: object) -> tuple[str, list[RegionView]]:
    regions = [
        RegionView("here", local=True, wait_s=0.2),
        replace(RegionView("there", rtt_s=0.1), **there),  # type: ignore[arg-type]
    ]
    session = next(f"s{i}" for i in range(99) if ranking(f"s{i}", regions)[0].name == "there")
    return session, regions


@pytest.mark.parametrize(("wait_s", "region"), [(1.29, "there"), (1.31, "here"), (None, "there")])
def test_home_is_left_when_its_wait_costs_a_second_more_than_the_way(wait_s: float | None, region: str) -> None:
    session, regions = here_and_there(wait_s=wait_s)
    choice = choose(session, regions)
    assert choice is not None
    assert choice.region == region
    assert choice.once == (region == "here"), "a spill is for this once"


def test_allowed_regions_are_a_hard_limit() -> None:
    session, regions = here_and_there()
    only_here = choose(session, regions, allowed={"here"})
    assert only_here is not None
    assert only_here.region == "here"
    assert choose(session, [replace(regions[0], usable=False), regions[1]], allowed={"here"}) is None


def test_a_displaced_session_stays_until_it_is_sent_home() -> None:
    session, regions = here_and_there()
    stays, returns = choose(session, regions, staying_at="here"), choose(session, regions)
    assert stays is not None
    assert returns is not None
    assert (stays.region, returns.region) == ("here", "there")


def test_when_all_drain_somebody_still_serves() -> None:
    assert choose("s", [RegionView("a", draining=True)]) is not None
