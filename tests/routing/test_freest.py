"""A large fleet's places in the order of their load, whatever happened to it; and who lacks a run of blocks."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from homeport_proxy.routing.freest import Freest
from homeport_proxy.routing.index.lru import PrefixLru
from homeport_proxy.routing.index.tree import PrefixTree
from homeport_proxy.routing.place import Place
from routing.routing_kit import spec

PLACES = 7
CHANGE = st.tuples(st.integers(0, PLACES - 1), st.sampled_from(["prefill", "end", "decode", "offer", "held", "look"]))


@settings(max_examples=100, deadline=None)
@given(st.lists(CHANGE, max_size=40), st.integers(0, PLACES - 1))
def test_the_least_burdened_come_first_and_equals_in_turn(changes: list[tuple[int, str]], start: int) -> None:
    places = [Place(spec(f"d{number}"), 60.0) for number in range(PLACES)]
    held_s: dict[str, float] = {}
    freest = Freest(places, lambda name: held_s.get(name, 0.0))
    for serial, (number, change) in enumerate(changes):
        load = places[number].load
        if change == "prefill":
            load.begin_prefill(serial, 1.0, 100, 0.0)
        elif change == "end":
            for key in range(serial):
                load.end_prefill(key, 100, 0.0, ran=True)
        elif change == "decode":
            load.begin_decode(100)
        elif change == "offer":
            load.offer(0.5, 0.0)
        elif change == "held":
            held_s[places[number].spec.name] = 0.3 * serial
            load.weighed.add(load)
        else:
            list(freest.since(start))
    turned = places[start:] + places[:start]
    assert list(freest.since(start)) == sorted(
        turned, key=lambda place: place.load.burden_s + held_s.get(place.spec.name, 0.0)
    )


KEYS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), KEYS, st.sampled_from(["use", "forget"])), min_size=1, max_size=12))
def test_who_lacks_a_run_is_told_anew_after_every_change(steps: list[tuple[int, list[int], str]]) -> None:
    tree = PrefixTree()
    names = [f"d{number}" for number in range(4)]
    indexes = {name: PrefixLru(8, tree, name) for name in names}
    for number, branch, kind in steps:
        keys = [hash(tuple(branch[: depth + 1])) & (1 << 62) - 1 for depth in range(len(branch))]
        index = indexes[names[number]]
        if kind == "use":
            index.use(keys)
        else:
            index.clear()
        for run, _ in tree.path(array("Q", keys)):
            held = {name: run.holds[name].length if name in run.holds else 0 for name in names}
            assert run.short(names) == {name: length for name, length in held.items() if length < len(run.keys)}
