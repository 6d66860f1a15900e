"""Load is taken before dispatch and let go once, whatever happens in between."""

import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from homeport_engines.base import EngineStats
from homeport_proxy.routing.load import PlaceLoad
from homeport_proxy.routing.views import NoPlaceError, RoutingSettings, Ticket
from routing.routing_kit import Fleet, request, spec

_ACTIONS = [
    *("arrive", "arrive", "due", "due", "first", "end", "cancel", "again", "prefill", "without", "sliced"),
    *("down", "up", "draining", "leave", "join", "restart", "cool", "finish"),
]
_STEPS = st.lists(st.tuples(st.sampled_from(_ACTIONS), st.integers(0, 7), st.integers(1, 400)), max_size=80)


class Traffic:
    """A fleet to which anything happens; ``tickets`` are all that ever arrived, ``decided`` what ``due`` gave back."""

    def __init__(self, split: bool, settings: RoutingSettings) -> None:
        self.specs = [spec(f"d{n}") for n in range(3)]
        if split:
            self.specs = [spec("p0", "prefill"), spec("p1", "prefill"), spec("d0", "decode"), spec("d1", "decode")]
        self.fleet = Fleet(*self.specs, settings=settings)
        self.here = list(self.specs)
        self.tickets: list[Ticket] = []
        self.decided: list[tuple[Ticket, int | None]] = []

    def do(self, action: str, index: int, size: int) -> None:
        """One step, somewhat later than the last."""
        fleet, router = self.fleet, self.fleet.router
        fleet.now_s += 0.05 * index
        place = self.specs[index % len(self.specs)]
        if action == "arrive":
            one = request(f"s{index}", size, sliceable=size % 2 == 0, kind="side" if size % 7 == 0 else "main")
            with contextlib.suppress(NoPlaceError):
                self.tickets.append(router.arrive(one, fleet.now_s))
        elif action == "due":
            self.decided += [(ticket, ticket.part_tokens) for ticket in router.due(fleet.now_s)]
        elif action in ("down", "up", "draining"):
            router.set_state(place.name, action, fleet.now_s)  # type: ignore[arg-type]
        elif action in ("leave", "join"):
            self.here = [one for one in self.specs if (one in self.here or action == "join") and one is not place]
            self.here += [place] if action == "join" else []
            router.set_places(self.here)
        elif action == "restart":
            for total in (size, 0):
                router.observe_stats(place.name, EngineStats(prefix_queries_tokens=total), fleet.now_s)
        elif action == "cool":
            router.cool(place.name, fleet.now_s + 0.2)
        elif action == "finish":
            router.finish_session(f"s{index}", fleet.now_s)
        elif self.tickets:
            self.go_on(action, self.tickets[index % len(self.tickets)], size)

    def go_on(self, action: str, ticket: Ticket, size: int) -> None:
        """Something happens to a request, in its time or out of it."""
        router, now_s = self.fleet.router, self.fleet.now_s
        ok = bool(size % 2)
        if action == "first":
            router.first_token(ticket, now_s)
        elif action == "end":
            router.finished(ticket, now_s, prompt_tokens=10, cached_tokens=1, output_tokens=1, ok=ok)
        elif action == "cancel":
            router.cancel(ticket, now_s)
        elif action == "sliced":
            router.sliced(ticket, now_s, cached_tokens=size, ok=ok)
        elif ticket.decision is None or ticket.part_tokens is not None:
            return
        elif action == "again":
            router.again(ticket, frozenset({ticket.decision.place}), now_s)
        elif action == "prefill":
            router.prefill_done(ticket, now_s, 0)
        elif action == "without":
            router.without_prefill(ticket, now_s, "prefill engine is gone")


@given(_STEPS, st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_order_of_events_ends_with_empty_books(steps: list[tuple[str, int, int]], split: bool, late: bool) -> None:
    traffic = Traffic(split, RoutingSettings(late_binding=late, slice_s=0.2))
    for action, index, size in steps:
        traffic.do(action, index, size)
    fleet, router, tickets = traffic.fleet, traffic.fleet.router, traffic.tickets
    sent = [ticket for ticket, part_tokens in traffic.decided if part_tokens is None]
    assert len(sent) == len(set(sent)), "nobody is sent twice"
    for ticket in tickets:
        router.cancel(ticket, fleet.now_s)
        router.cancel(ticket, fleet.now_s)
    assert fleet.empty()
    assert router.due(fleet.now_s + 1000) == []
    assert router.next_due_s(fleet.now_s + 1000) is None


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
