"""Load is taken before dispatch and let go once, whatever happens in between."""

from hypothesis import given, settings
from hypothesis import strategies as st

from homeport_proxy.routing.load import PlaceLoad
from homeport_proxy.routing.views import RoutingSettings, Ticket
from routing.routing_kit import Fleet, request, spec

_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "due", "first", "end", "cancel", "again", "prefill", "without", "down", "up"]),
        st.integers(0, 7),
        st.integers(1, 400),
    ),
    max_size=60,
)


@given(_STEPS, st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_order_of_events_ends_with_empty_books(steps: list[tuple[str, int, int]], split: bool, late: bool) -> None:
    specs = [spec("p0", "prefill"), spec("p1", "prefill"), spec("d0", "decode"), spec("d1", "decode")]
    if not split:
        specs = [spec(f"d{n}") for n in range(3)]
    fleet = Fleet(*specs, settings=RoutingSettings(late_binding=late))
    router = fleet.router
    tickets: list[Ticket] = []
    decided: list[Ticket] = []
    for action, index, size in steps:
        fleet.now_s += 0.05 * index
        ticket = tickets[index % len(tickets)] if tickets else None
        if action == "arrive":
            tickets.append(router.arrive(request(f"s{index}", size), fleet.now_s))
        elif action == "due":
            decided += router.due(fleet.now_s)
        elif action in ("down", "up"):
            router.set_state(specs[index % len(specs)].name, action, fleet.now_s)  # type: ignore[arg-type]
        elif ticket is None:
            continue
        elif action == "first":
            router.first_token(ticket, fleet.now_s)
        elif action == "end":
            router.finished(ticket, fleet.now_s, prompt_tokens=10, cached_tokens=1, output_tokens=1, ok=bool(size % 2))
        elif action == "cancel":
            router.cancel(ticket, fleet.now_s)
        elif ticket.decision is None:
            continue
        elif action == "again":
            router.again(ticket, frozenset({ticket.decision.place}), fleet.now_s)
        elif action == "prefill":
            router.prefill_done(ticket, fleet.now_s, 0)
        elif action == "without":
            router.without_prefill(ticket, fleet.now_s, "prefill engine is gone")
    assert len(decided) == len(set(decided)), "nobody is sent twice"
    for ticket in tickets:
        router.cancel(ticket, fleet.now_s)
        router.cancel(ticket, fleet.now_s)
    assert fleet.empty()
    assert router.due(fleet.now_s + 1000) == []


def test_prefill_load_goes_with_the_first_token_decode_load_at_the_end() -> None:
    fleet = Fleet(spec("d0"))
    ticket = fleet.start(request("s", 100))
    place = fleet.router.status(0.0).places["d0"]
    assert place.prefill_tokens == 12_800
    assert place.decode_tokens >= 12_800
    fleet.router.first_token(ticket, 0.5)
    place = fleet.router.status(0.5).places["d0"]
    assert place.prefill_tokens == 0
    assert place.decode_tokens >= 12_800
    fleet.end(ticket)
    assert fleet.empty()


def test_only_uncached_tokens_are_prefill_load() -> None:
    fleet = Fleet(spec("d0"))
    fleet.ask(request("s", 100))
    fleet.start(request("s", 104))
    assert fleet.router.status(0.0).places["d0"].prefill_tokens < 1000


def test_the_prefill_left_follows_the_engine() -> None:
    load = PlaceLoad(60.0)
    load.begin_prefill(1, 2.0, 100, 0.0)
    load.begin_prefill(2, 3.0, 100, 0.0)
    assert load.prefill_left_s(1.0) == 4.0
    first = load.end_prefill(1, 100, 1.5, ran=True)
    assert load.prefill_left_s(1.5) == 3.0
    second = load.end_prefill(2, 100, 4.0, ran=True)
    assert load.prefill_left_s(4.0) == 0.0
    assert first is not None
    assert second is not None
    assert (first.began_s, first.ended_s, second.began_s, second.ended_s) == (0.0, 1.5, 1.5, 4.0)


def test_a_late_head_is_not_taken_for_done_and_a_silent_engine_not_for_busy_forever() -> None:
    load = PlaceLoad(60.0)
    load.begin_prefill(1, 2.0, 100, 0.0)
    assert load.prefill_left_s(3.0) > 0.1
    assert load.prefill_left_s(60.0) == 0.0
    due_s = load.next_change_s(0.1, 3.0)
    assert load.backlog_s(due_s) <= 0.1


@given(st.lists(st.floats(0.02, 5), min_size=1, max_size=6), st.floats(0, 40))
def test_next_change_is_never_before_there_is_room(works: list[float], now_s: float) -> None:
    load = PlaceLoad(60.0)
    for key, work_s in enumerate(works):
        load.begin_prefill(key, work_s, 1, 0.0)
    due_s = load.next_change_s(0.1, now_s)
    assert due_s >= now_s
    if load.backlog_s(now_s) <= 0.1:
        assert due_s == now_s
    else:
        for _ in range(100):  # a caller that comes when told gets there in a bounded number of wake-ups
            if load.backlog_s(due_s) <= 0.1:
                break
            due_s = load.next_change_s(0.1, due_s)
        assert load.backlog_s(due_s) <= 0.1
