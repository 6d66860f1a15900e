"""Held requests: short ones first, nothing starves, tenants and users get their shares, idle places help."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeport_proxy.routing.queue import Held, VirtualQueues
from homeport_proxy.routing.views import Decision, PrefixKeys, RoutingSettings, Ticket, Word
from routing.routing_kit import Fleet, request, spec


def drain(fleet: Fleet, tickets: list[Ticket]) -> list[str]:
    """Play an engine that takes one prefill at a time, exactly as predicted; sessions in the order served."""
    served: list[str] = []
    waiting = set(tickets)
    while waiting:
        decided = fleet.router.due(fleet.now_s)
        for ticket in decided:
            served.append(ticket.request.session)
            fleet.now_s += 0.02 + ticket.request.prompt_tokens / 16_000
            fleet.router.first_token(ticket, fleet.now_s)
            fleet.router.cancel(ticket, fleet.now_s)
            waiting.discard(ticket)
        if not decided:
            due_s = fleet.router.next_due_s(fleet.now_s)
            assert due_s is not None
            fleet.now_s = max(due_s, fleet.now_s + 1e-3)
    return served


def held(fleet: Fleet, *requests_: tuple[str, int], **more: object) -> list[Ticket]:
    return [fleet.router.arrive(request(name, blocks, **more), fleet.now_s) for name, blocks in requests_]


def busy(fleet: Fleet) -> Ticket:
    return fleet.start(request("busy", 2000))


def test_the_shortest_prefill_goes_first() -> None:
    fleet = Fleet(spec("d0"))
    blocker = busy(fleet)
    tickets = held(fleet, ("long", 900), ("short", 2), ("middle", 200))
    assert fleet.router.due(fleet.now_s) == []
    fleet.router.cancel(blocker, fleet.now_s)
    assert drain(fleet, tickets) == ["short", "middle", "long"]
    assert fleet.empty()


def test_many_short_prompts_in_flight_are_no_queue() -> None:
    fleet = Fleet(spec("d0"))
    tickets = [fleet.router.arrive(request(f"s{n}", 1, prompt_tokens=24), 0.0) for n in range(50)]
    assert len(fleet.router.due(0.0)) == 50
    for ticket in tickets:
        fleet.router.cancel(ticket, 0.0)
    assert fleet.empty()


@pytest.mark.parametrize("prompt_tokens", [24, 300])
def test_an_engine_whose_steps_are_slow_gets_a_step_full_of_prompts(prompt_tokens: int) -> None:
    """Steps of a second that take every prompt waiting: learning that each took a second must not send one a step."""
    fleet = Fleet(spec("d0"))
    waiting = [
        fleet.router.arrive(request(f"s{n}", 1, prompt_tokens=prompt_tokens, prefix=PrefixKeys()), 0.0)
        for n in range(100)
    ]
    steps, started = 0, 0
    while started < len(waiting):
        batch = fleet.router.due(fleet.now_s)
        started += len(batch)
        steps += 1
        fleet.now_s += 1.0
        for ticket in batch:
            fleet.router.first_token(ticket, fleet.now_s)
            fleet.router.finished(
                ticket, fleet.now_s, prompt_tokens=prompt_tokens, cached_tokens=0, output_tokens=1, ok=True
            )
    assert steps <= 100 / (2048 // prompt_tokens) + 2
    assert fleet.empty()


def test_a_silent_engine_holds_nobody_for_long() -> None:
    fleet = Fleet(spec("d0"))
    fleet.start(request("stuck", 10))
    held(fleet, *[(f"s{n}", 10) for n in range(5)])
    served = len(fleet.router.due(0.0))
    for _ in range(50):
        due_s = fleet.router.next_due_s(fleet.now_s)
        if due_s is None:
            break
        fleet.now_s = max(due_s, fleet.now_s + 1e-3)
        served += len(fleet.router.due(fleet.now_s))
    assert served == 5
    assert fleet.now_s < 5


def test_age_outweighs_length() -> None:
    fleet = Fleet(spec("d0"))
    blocker = busy(fleet)
    old = held(fleet, ("old", 400))
    fleet.now_s += 30
    new = held(fleet, ("new", 2))
    fleet.router.cancel(blocker, fleet.now_s)
    assert drain(fleet, old + new) == ["old", "new"]


def test_the_starved_go_first_whatever_their_length() -> None:
    settings = RoutingSettings(age_weight=0.0, starve_after_s=20)
    fleet = Fleet(spec("d0"), settings=settings)
    blocker = busy(fleet)
    old = held(fleet, ("old", 4000))
    fleet.now_s += 21
    new = held(fleet, ("new", 2))
    fleet.router.cancel(blocker, fleet.now_s)
    assert drain(fleet, old + new) == ["old", "new"]


def test_a_flooding_tenant_waits_for_the_others() -> None:
    fleet = Fleet(spec("d0"))
    blocker = busy(fleet)
    flood = [fleet.router.arrive(request(f"f{n}", 60, tenant="flood"), 0.0) for n in range(60)]
    quiet = [fleet.router.arrive(request(f"q{n}", 100, tenant="quiet"), 0.0) for n in range(5)]
    fleet.router.cancel(blocker, 0.0)
    served = drain(fleet, flood + quiet)
    last_quiet = max(index for index, name in enumerate(served) if name.startswith("q"))
    assert last_quiet < 30


def test_weights_share_the_time() -> None:
    fleet = Fleet(spec("d0"))
    blocker = busy(fleet)
    heavy = [fleet.router.arrive(request(f"h{n}", 80, tenant="heavy", tenant_weight=3.0), 0.0) for n in range(60)]
    light = [fleet.router.arrive(request(f"l{n}", 80, tenant="light"), 0.0) for n in range(60)]
    fleet.router.cancel(blocker, 0.0)
    first = drain(fleet, heavy + light)[:40]
    assert 26 <= sum(name.startswith("h") for name in first) <= 34


def test_users_of_one_tenant_share_as_well() -> None:
    fleet = Fleet(spec("d0"))
    blocker = busy(fleet)
    loud = [fleet.router.arrive(request(f"l{n}", 80, tenant="t", user="loud"), 0.0) for n in range(60)]
    calm = [fleet.router.arrive(request(f"c{n}", 90, tenant="t", user="calm"), 0.0) for n in range(4)]
    fleet.router.cancel(blocker, 0.0)
    served = drain(fleet, loud + calm)
    assert max(index for index, name in enumerate(served) if name.startswith("c")) < 16


def test_an_idle_place_takes_a_waiting_request_of_another() -> None:
    fleet = Fleet(spec("d0"), spec("d1"))
    first = fleet.ask(request("s", 40))
    assert first.decision is not None
    home = first.decision.place
    other = "d1" if home == "d0" else "d0"
    at_other = fleet.router
    at_other.set_state(home, "down", fleet.now_s)
    blocker = fleet.start(request("b0", 600))
    at_other.set_state(home, "up", fleet.now_s)
    at_other.set_state(other, "down", fleet.now_s)
    long = fleet.start(request("b1", 1500))
    at_other.set_state(other, "up", fleet.now_s)
    ticket = fleet.router.arrive(request("s", 300), fleet.now_s)
    assert fleet.router.due(fleet.now_s) == []
    fleet.now_s += 0.5
    fleet.router.first_token(blocker, fleet.now_s)
    assert fleet.router.due(fleet.now_s) == [ticket]
    assert ticket.decision is not None
    assert (ticket.decision.place, ticket.decision.word) == (other, Word.SPILL)
    for one in (ticket, blocker, long):
        fleet.router.cancel(one, fleet.now_s)
    assert fleet.empty()


def test_held_requests_of_a_lost_place_are_placed_anew_or_refused() -> None:
    fleet = Fleet(spec("d0"), spec("d1"))
    fleet.router.set_state("d1", "draining", 0.0)
    busy(fleet)
    ticket = fleet.router.arrive(request("s", 10), 0.0)
    assert fleet.router.due(0.0) == []
    fleet.router.set_state("d0", "draining", 0.0)
    assert fleet.router.due(0.0) == [ticket]
    assert ticket.decision is None
    assert ticket.refused is not None
    assert "draining" in ticket.refused
    other = Fleet(spec("d0"))
    busy(other)
    moved = other.router.arrive(request("s", 10), 0.0)
    other.router.set_places([spec("d9")])
    assert other.router.due(0.0) == [moved]
    assert moved.decision is not None
    assert moved.decision.place == "d9"


def test_the_overload_guard_holds_new_sessions_and_lets_running_ones_on() -> None:
    settings = RoutingSettings(overload_context=1.0)
    fleet = Fleet(spec("d0", kv_capacity_tokens=20_000), settings=settings)
    fleet.ask(request("running", 170))
    new = fleet.router.arrive(request("new", 10), fleet.now_s)
    assert fleet.router.due(fleet.now_s) == []
    assert "overload" in new.held_reason
    assert any("overload" in line for line in fleet.router.status(fleet.now_s).degraded)
    fleet.ask(request("running", 171))
    fleet.router.finish_session("running", fleet.now_s)
    assert fleet.router.due(fleet.now_s) == [new]


def test_who_was_served_while_others_were_placed_anew_is_not_sent_twice() -> None:
    fleet = Fleet(spec("d0"))
    blocker = busy(fleet)
    waiting = held(fleet, ("a", 4), ("b", 5), ("c", 6))
    assert fleet.router.due(fleet.now_s) == []
    fleet.router.set_state("d0", "down", fleet.now_s)  # everything is down: it is tried all the same
    fleet.now_s += 10.0
    fleet.router.first_token(blocker, fleet.now_s)
    assert fleet.router.due(fleet.now_s) == waiting
    assert [ticket.attempts for ticket in waiting] == [("d0",)] * 3
    for ticket in (blocker, *waiting):
        fleet.router.cancel(ticket, fleet.now_s)
    assert fleet.empty()


def large_fleet_but_one_is_busy() -> Fleet:
    """Each place prefills for half a second; d0 for less."""
    fleet = Fleet(*LARGE)
    for number in range(18):
        fleet.router.adopt(f"busy{number}", f"d{number}", 0.0)
        fleet.start(request(f"busy{number}", 60 if number else 40))
    return fleet


def hold_at_d0(fleet: Fleet, *blocks: int) -> None:
    for number in range(len(blocks)):
        fleet.router.adopt(f"s{number}", "d0", 0.0)
    held(fleet, *[(f"s{number}", size) for number, size in enumerate(blocks)])


def d0_is_priced(fleet: Fleet) -> bool:
    """Whether d0 is thought to be one of the freest by somebody new."""
    ticket = fleet.router.arrive(request("new", 2), 0.0)
    priced = [place.name for place in fleet.records[-1].places]
    assert 0 < len(priced) < len(LARGE)
    fleet.router.cancel(ticket, 0.0)
    return "d0" in priced


LARGE = [spec(f"d{number}") for number in range(18)]


@pytest.mark.parametrize("blocks", [[400], [40, 40, 40]], ids=["one alone", "three"])
@pytest.mark.parametrize("after", ["nothing", "a look", "leaving and coming back"])
def test_in_a_large_fleet_what_is_held_for_a_place_makes_it_no_free_one(blocks: list[int], after: str) -> None:
    """Its engine has least to do; others wait for it."""
    fleet = large_fleet_but_one_is_busy()
    assert d0_is_priced(fleet)
    hold_at_d0(fleet, *blocks)
    assert fleet.router.due(0.0) == []
    if after == "a look":
        assert fleet.router.status(0.0).places["d0"].queued == len(blocks)
    elif after != "nothing":
        fleet.router.set_places(LARGE[1:])
        fleet.router.set_places(LARGE)
        fleet.router.set_state("d0", "up", 0.0)
    assert not d0_is_priced(fleet)


STEP = st.tuples(
    st.sampled_from(["push", "park", "take", "remove", "first"]),
    st.integers(0, 1),
    st.integers(1, 9),
    st.integers(0, 2),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEP, max_size=30))
def test_whether_anybody_looks_changes_nothing_in_the_queues(steps: list[tuple[str, int, int, int]]) -> None:
    """One who is held alone stands beside the queues until somebody looks; what the queues say is the same."""
    seen: list[list[object]] = []
    for looks in (False, True):
        says: list[object] = []
        told: set[str] = set()
        known_s = {"d0": 0.0, "d1": 0.0}
        queues, entered = VirtualQueues(RoutingSettings(), told.add), list[Held]()
        for number, (step, place, work_s, who) in enumerate(steps):
            standing = [one for one in entered if not one.out]
            if step in ("push", "park"):
                asked = request(f"s{number}", 1, tenant=f"t{who}", request_id=f"r{number}")
                entered.append(
                    Held(
                        Ticket(asked, 0.0), Decision("d0", Word.HOME, ""), f"d{place}", float(work_s), 1, float(number)
                    )
                )
                queues.push(entered[-1], parked=step == "park")
            elif step == "first":
                first = queues.first(f"d{place}", float(len(steps)))
                says.append(None if first is None else first.ticket.request.request_id)
            elif standing:
                one = standing[who % len(standing)]
                queues.take(one, one.work_s) if step == "take" else queues.remove(one)
            if looks:
                assert queues.count("d0") + queues.count("d1") == len(queues)
                held_s = {name: queues.held_s(name) for name in known_s}
                assert {name for name in held_s if held_s[name] != known_s[name]} <= told
                known_s = held_s
                told.clear()
            says += [len(queues), sorted(queues.waiting())]
        says += [[name, queues.count(name), queue.ranks, queue.works] for name, queue in queues.joined().items()]
        seen.append(says)
    assert seen[0] == seen[1]
