"""Which place, in which word: the life of a session's home."""

import re

import pytest

from homeport_proxy.routing.views import (
    Kind,
    NoPlaceError,
    PrefixKeys,
    RequestView,
    RoutingSettings,
    State,
    Ticket,
    Word,
)
from routing.routing_kit import BLOCK_TOKENS, Fleet, chain, request, spec

FOUR = [spec(f"d{n}") for n in range(4)]


def word(fleet: Fleet, one: RequestView) -> tuple[Word, str]:
    decision = fleet.ask(one).decision
    assert decision is not None
    return decision.word, decision.place


def test_a_session_is_placed_then_at_home() -> None:
    fleet = Fleet(*FOUR)
    first, place = word(fleet, request("s", 10))
    assert first is Word.PLACED
    for turn in range(11, 20):
        assert word(fleet, request("s", turn)) == (Word.HOME, place)
    assert fleet.empty()


def test_seconds_are_promised_only_once_the_speed_was_learned() -> None:
    fleet = Fleet(*FOUR)

    def reason(session: str, blocks: int) -> str:
        decision = fleet.ask(request(session, blocks)).decision
        assert decision is not None
        return decision.reason

    assert "is not known yet" in reason("a", 40)
    assert "predicted to start in" in reason("b", 40), "one place's speed is lent to the others of its role"
    fleet = Fleet(*FOUR)
    assert "is not known yet" in reason("a", 1)
    assert "is not known yet" in reason("b", 40), "a short prompt tells nothing of the speed"


def test_expected_cached_tokens_are_those_of_the_repeated_prompt() -> None:
    fleet = Fleet(*FOUR)
    ticket = fleet.ask(request("s", 40))
    assert ticket.decision is not None
    assert ticket.decision.expected_cached_tokens == 0
    ticket = fleet.ask(request("s", 50))
    assert ticket.decision is not None
    assert ticket.decision.expected_cached_tokens == pytest.approx(40 * BLOCK_TOKENS, rel=0.02)


@pytest.mark.parametrize("kv_capacity_tokens", [None, 10_000, 10**12])
def test_a_warm_session_is_kept_for_a_time_that_can_be_told(kv_capacity_tokens: int | None) -> None:
    fleet = Fleet(spec("d0", kv_capacity_tokens=kv_capacity_tokens), settings=RoutingSettings(idle_ttl_s=600))
    for turn in range(1, 4):
        fleet.ask(request("s", 10 * turn))
    seen = fleet.router.session("s")
    assert seen is not None
    assert seen.warm
    assert seen.keep_s is not None
    assert 0 < seen.keep_s <= 600
    for later_s, warm in ((seen.keep_s, True), (seen.keep_s + 0.1, False)):
        later = fleet.router.session("s", seen.last_used_s + later_s)
        assert later is not None
        assert (later.warm, later.keep_s) == (warm, seen.keep_s if warm else None)
    fleet.start(request("s", 31))
    running = fleet.router.session("s", fleet.now_s + 10_000)
    assert running is not None
    assert running.warm, "a request under way keeps it"


@pytest.mark.parametrize("learned", [True, False])
def test_an_overloaded_home_spills_once_and_stays_home(learned: bool) -> None:
    fleet = Fleet(*FOUR, settings=RoutingSettings(late_binding=False))
    blocks = 40 if learned else 1
    _, home = word(fleet, request("s", blocks))
    others = [spec_ for spec_ in FOUR if spec_.name != home]
    for other in others:
        fleet.router.set_state(other.name, "down", fleet.now_s)
    blockers = [fleet.start(request(f"big{n}", 1500)) for n in range(4)]
    for other in others:
        fleet.router.set_state(other.name, "up", fleet.now_s)
    decision = fleet.ask(request("s", blocks)).decision
    assert decision is not None
    assert decision.word is Word.SPILL
    assert decision.place != home
    assert bool(re.search(r"\d s longer", decision.reason)) is learned, "seconds come from a learned speed only"
    seen = fleet.router.session("s")
    assert seen is not None
    assert seen.home == home
    assert seen.moves == 0
    for blocker in blockers:
        fleet.router.cancel(blocker, fleet.now_s)
    assert fleet.empty()


def test_a_home_that_stays_dearer_moves_after_several_times() -> None:
    fleet = Fleet(spec("d0"), spec("d1"), settings=RoutingSettings(late_binding=False, move_after=3))
    _, home = word(fleet, request("s", 400))
    other = "d1" if home == "d0" else "d0"
    fleet.router.set_state(other, "down", fleet.now_s)
    for n in range(30):
        fleet.start(request(f"big{n}", 3000))
    fleet.router.set_state(other, "up", fleet.now_s)
    words = [word(fleet, request("s", 401 + n))[0] for n in range(4)]
    assert words == [Word.SPILL, Word.SPILL, Word.MOVED, Word.HOME]
    seen = fleet.router.session("s")
    assert seen is not None
    assert (seen.home, seen.moves) == (other, 1)


def loaded_home(fleet: Fleet, session: str) -> tuple[str, list[Ticket]]:
    """A session of 60 blocks whose home is then given prefill of others to do; the tickets of that."""
    place = word(fleet, request(session, 60))[1]
    others = [one.name for one in FOUR if one.name != place]
    for other in others:
        fleet.router.set_state(other, "down", fleet.now_s)
    tickets = [fleet.start(request("busy", 30))]
    for other in others:
        fleet.router.set_state(other, "up", fleet.now_s)
    return place, tickets


@pytest.mark.parametrize("kind", ["main", "side"])
def test_a_session_moves_for_free_when_nothing_of_it_is_cached_at_home(kind: Kind) -> None:
    fleet = Fleet(*FOUR)
    place, busy = loaded_home(fleet, "s")
    compacted = request("s", 60, prefix=PrefixKeys(chain("another head", 60)), kind=kind)
    ticket = fleet.start(compacted)
    assert ticket.decision is not None
    if kind == "side":
        assert ticket.decision.home == place
    else:
        assert ticket.decision.word is Word.MOVED
        assert ticket.decision.home == ticket.decision.place != place
        assert "nothing of it is cached at home" in ticket.decision.reason
    for one in (ticket, *busy):
        fleet.router.cancel(one, fleet.now_s)


def test_a_home_that_holds_the_prefix_is_left_for_nothing_small() -> None:
    fleet = Fleet(*FOUR)
    place, busy = loaded_home(fleet, "s")
    ticket = fleet.start(request("s", 61))
    assert ticket.decision is not None
    assert ticket.decision.place == place
    for one in (ticket, *busy):
        fleet.router.cancel(one, fleet.now_s)
    nameless = fleet.ask(request("t", 1, prefix=PrefixKeys(), prompt_tokens=90)).decision
    assert nameless is not None
    assert nameless.expected_cached_tokens in (None, 0)
    assert word(fleet, request("t", 1, prefix=PrefixKeys(), prompt_tokens=190))[0] is Word.HOME


def test_a_session_leaves_a_draining_home_when_it_begins_anew() -> None:
    fleet = Fleet(*FOUR)
    place = word(fleet, request("s", 60))[1]
    fleet.router.set_state(place, "draining", fleet.now_s)
    assert word(fleet, request("s", 62)) == (Word.HOME, place)
    left, other = word(fleet, request("s", 20, prefix=PrefixKeys(chain("compacted", 20))))
    assert left is Word.MOVED
    assert other != place


def test_the_prompt_length_that_was_reported_corrects_the_next_estimate() -> None:
    fleet = Fleet(*FOUR)
    ticket = fleet.start(request("s", 40, prompt_tokens=5600, prompt_estimated=True))
    fleet.now_s += 1
    fleet.router.finished(ticket, fleet.now_s, prompt_tokens=5120, cached_tokens=0, output_tokens=5, ok=True)
    guessed = fleet.ask(request("s", 50, prompt_tokens=7000, prompt_estimated=True))
    assert guessed.request.prompt_tokens == pytest.approx(6400, rel=0.01)
    counted = fleet.ask(request("s", 60, prompt_tokens=7700))
    assert counted.request.prompt_tokens == 7700
    short = Fleet(spec("d0", max_model_len=6000))
    short.end(short.start(request("s", 40, prompt_tokens=5120, prompt_estimated=True)))
    held = short.ask(request("s", 50, prompt_tokens=5999, prompt_estimated=True))
    assert held.request.prompt_tokens == 5999


def test_a_down_home_fails_over_and_takes_its_session_back() -> None:
    fleet = Fleet(*FOUR)
    _, home = word(fleet, request("s", 100))
    fleet.router.set_state(home, "down", fleet.now_s)
    decided, place = word(fleet, request("s", 101))
    assert decided is Word.FAILOVER
    assert place != home
    fleet.router.set_state(home, "up", fleet.now_s)
    seen = fleet.router.session("s")
    assert seen is not None
    assert seen.home == home


def test_a_home_that_stays_down_is_given_up() -> None:
    fleet = Fleet(*FOUR)
    _, home = word(fleet, request("s", 100))
    fleet.router.set_state(home, "down", fleet.now_s)
    fleet.now_s += RoutingSettings().gone_after_s + 1
    decided, place = word(fleet, request("s", 101))
    assert decided is Word.FAILOVER
    assert word(fleet, request("s", 102)) == (Word.HOME, place)


def test_only_the_failed_backends_sessions_move() -> None:
    fleet = Fleet(*[spec(f"d{n}") for n in range(8)])
    homes = {f"s{n}": word(fleet, request(f"s{n}", 60))[1] for n in range(64)}
    lost = homes["s0"]
    fleet.router.set_state(lost, "down", fleet.now_s)
    for name, home in homes.items():
        decided, place = word(fleet, request(name, 62))
        if home == lost:
            assert decided is Word.FAILOVER
        else:
            assert (decided, place) == (Word.HOME, home)


def test_a_draining_home_keeps_its_active_sessions_takes_no_new_ones_and_is_left_when_idle() -> None:
    fleet = Fleet(*FOUR)
    _, home = word(fleet, request("s", 30))
    fleet.router.set_state(home, "draining", fleet.now_s)
    for turn in range(31, 34):
        assert word(fleet, request("s", turn)) == (Word.HOME, home)
        fleet.now_s += 20
    assert home not in {word(fleet, request(f"new{n}", 30))[1] for n in range(12)}
    fleet.now_s += 61
    decided, place = word(fleet, request("s", 34))
    assert decided is Word.MOVED
    assert place != home
    fleet.router.set_state(home, "up", fleet.now_s)
    assert word(fleet, request("s", 32)) == (Word.HOME, place)
    fleet.router.set_state(place, "drained", fleet.now_s)
    assert word(fleet, request("s", 33))[0] is Word.MOVED, "past its deadline not even an active session stays"


def test_a_home_that_left_the_fleet_moves() -> None:
    fleet = Fleet(*FOUR)
    _, home = word(fleet, request("s", 30))
    fleet.router.set_places([one for one in FOUR if one.name != home])
    assert word(fleet, request("s", 31))[0] is Word.MOVED


def test_refused_attempts_leave_the_home() -> None:
    fleet = Fleet(*FOUR)
    _, home = word(fleet, request("s", 30))
    for turn in range(31, 40):
        ticket = fleet.start(request("s", turn))
        again = fleet.router.again(ticket, frozenset({home}), fleet.now_s)
        assert again is not None
        assert again.word is Word.FAILOVER
        assert again.home == home
        fleet.end(ticket)
    seen = fleet.router.session("s")
    assert seen is not None
    assert seen.home == home
    assert fleet.empty()


def test_a_cooling_backend_gets_no_new_sessions_but_its_own() -> None:
    fleet = Fleet(*FOUR)
    _, home = word(fleet, request("s", 30))
    fleet.router.cool(home, fleet.now_s + 1000)
    assert word(fleet, request("s", 31)) == (Word.HOME, home)
    assert all(word(fleet, request(f"new{n}", 5))[1] != home for n in range(20))


def test_cooling_ends_on_time() -> None:
    fleet = Fleet(spec("d0"), spec("d1"))
    fleet.router.cool("d0", 5.0)
    assert {word(fleet, request(f"a{n}", 5))[1] for n in range(1)} == {"d1"}
    fleet.now_s = 100.0
    assert {word(fleet, request(f"b{n}", 5))[1] for n in range(20)} == {"d0", "d1"}


def test_side_requests_move_and_renew_nothing() -> None:
    fleet = Fleet(*FOUR)
    _, home = word(fleet, request("s", 30))
    before = fleet.router.session("s")
    assert word(fleet, request("s", 4, kind="side")) == (Word.HOME, home)
    assert fleet.router.session("s") == before
    decided, _ = word(fleet, request("unknown", 4, kind="side"))
    assert decided is Word.PLACED
    assert fleet.router.session("unknown") is None


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"model": "other"}, "'other'"),
        ({"adapter": "sql"}, "'sql'"),
        ({"prompt_tokens": 9000}, "9000"),
    ],
)
def test_what_no_place_can_serve_is_refused_in_words(more: dict[str, object], says: str) -> None:
    fleet = Fleet(spec("d0", max_model_len=8192, adapters=frozenset({"law"})))
    with pytest.raises(NoPlaceError, match=says):
        fleet.router.arrive(request("s", 5, **more), 0.0)
    assert fleet.empty()


def test_an_adapter_goes_where_it_is_loaded_and_shares_no_cache() -> None:
    fleet = Fleet(spec("d0", adapters=frozenset({"law"})), spec("d1", adapters=frozenset()))
    assert word(fleet, request("s", 30, adapter="law"))[1] == "d0"
    fleet.router.set_state("d1", "down", fleet.now_s)
    plain = fleet.ask(request("s", 30))
    assert plain.decision is not None
    assert plain.decision.expected_cached_tokens == 0


def test_when_everything_is_down_everything_is_tried() -> None:
    fleet = Fleet(*FOUR)
    for one in FOUR:
        fleet.router.set_state(one.name, "down", 0.0)
    assert fleet.ask(request("s", 5)).decision is not None


@pytest.mark.parametrize("state", ["draining", "drained"])
def test_nothing_is_sent_to_a_fleet_that_drains(state: State) -> None:
    fleet = Fleet(*FOUR)
    for one in FOUR:
        fleet.router.set_state(one.name, state, 0.0)
    with pytest.raises(NoPlaceError, match="draining"):
        fleet.router.arrive(request("s", 5), 0.0)


def test_ranks_are_places_of_their_own() -> None:
    ranks = [spec(f"d0/dp{n}", backend="d0", rank=n) for n in range(4)]
    fleet = Fleet(*ranks)
    homes = {word(fleet, request(f"s{n}", 30))[1] for n in range(40)}
    assert homes == {one.name for one in ranks}
    fleet.router.set_state("d0", "draining", fleet.now_s)
    assert {place.state for place in fleet.router.status(fleet.now_s).places.values()} == {"draining"}


def test_two_routers_with_the_same_view_agree() -> None:
    left, right = Fleet(*FOUR), Fleet(*reversed(FOUR), seed=99)
    for n in range(50):
        assert word(left, request(f"s{n}", 3))[1] == word(right, request(f"s{n}", 3))[1]


def test_equal_places_share_new_sessions() -> None:
    counts: dict[str, int] = {}
    for n in range(400):
        _, place = word(Fleet(*FOUR), request(f"s{n}", 3))
        counts[place] = counts.get(place, 0) + 1
    assert len(counts) == 4
    assert min(counts.values()) > 60


def test_a_sub_agent_starts_where_its_head_is_warm_else_beside_its_parent() -> None:
    fleet = Fleet(*FOUR)
    _, parent_home = word(fleet, request("parent", 200))
    assert word(fleet, request("child", 10, parent="parent", kind="subagent"))[1] == parent_home
    other = fleet.ask(request("library", 300))
    shared = request("kid", 250, parent="parent", kind="subagent", prefix=request("library", 250).prefix)
    assert other.decision is not None
    assert word(fleet, shared)[1] == other.decision.place


def test_final_and_finish_forget_the_session() -> None:
    fleet = Fleet(*FOUR)
    _, home = word(fleet, request("s", 10))
    assert fleet.router.status(0.0).places[home].sessions == 1
    assert fleet.router.finish_session("s", fleet.now_s)
    assert not fleet.router.finish_session("s", fleet.now_s)
    assert fleet.router.status(0.0).places[home].sessions == 0
    fleet.ask(request("t", 10, final=True))
    assert fleet.router.session("t") is None


def test_sessions_are_bounded_in_number() -> None:
    fleet = Fleet(*FOUR, settings=RoutingSettings(max_sessions=50))
    for n in range(300):
        fleet.ask(request(f"s{n}", 2))
    assert fleet.router.status(0.0).sessions <= 50


@pytest.mark.parametrize("policy", ["session", "prefix", "least-tokens", "round-robin"])
def test_every_policy_serves_and_lets_go(policy: str) -> None:
    fleet = Fleet(*FOUR, settings=RoutingSettings(policy=policy))  # type: ignore[arg-type]
    for n in range(40):
        assert fleet.ask(request(f"s{n % 8}", 5 + n // 8)).decision is not None
    assert fleet.empty()


def test_the_session_ring_keeps_sessions() -> None:
    fleet = Fleet(*FOUR, settings=RoutingSettings(policy="session"))
    places = {name: {word(fleet, request(name, 5 + n))[1] for n in range(5)} for name in map(str, range(20))}
    assert all(len(used) == 1 for used in places.values())


def test_the_session_ring_bounds_load() -> None:
    fleet = Fleet(*FOUR, settings=RoutingSettings(policy="session", late_binding=False, load_bound=1.25))
    held = [fleet.start(request("hot", 100, prefix=PrefixKeys(chain(n, 100)))) for n in range(60)]
    used = [place.requests for place in fleet.router.status(fleet.now_s).places.values()]
    assert max(used) <= 1.25 * sum(used) / 4 + 2
    for ticket in held:
        fleet.router.cancel(ticket, fleet.now_s)
    assert fleet.empty()


def test_a_home_that_prefills_only_from_now_on_is_left() -> None:
    fleet = Fleet(spec("a"), spec("b"))
    _, home = word(fleet, request("s", 40))
    other = {"a": "b", "b": "a"}[home]
    fleet.router.set_places([spec(home, role="prefill"), spec(other)])
    assert word(fleet, request("s", 41)) == (Word.MOVED, other)
    assert word(fleet, request("s", 42)) == (Word.HOME, other)
    assert not fleet.router.adopt("t", home, fleet.now_s)
    assert fleet.router.adopt("t", other, fleet.now_s)
