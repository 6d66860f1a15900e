"""Health: probes, what requests meet, panic, slow start, drains; on real sockets and on a clock of our own."""

from __future__ import annotations

import socket

import pytest

from homeport_proxy import config as cfg
from homeport_proxy.breaker import Result
from homeport_proxy.fleet import Fleet, Member
from homeport_proxy.health import Health
from homeport_proxy.probe import Alive, Prober
from homeport_proxy.routing.views import State
from proxy.control_kit import Clock, engine, serving, until


def fleet_of(*backends: str, extra: str = "") -> Fleet:
    listed = ", ".join(backends)
    return Fleet(cfg.parse(f"regions: {{local: {{backends: [{listed}]}}}}\n{extra}"))


class Watched:
    """A fleet of named backends under a clock, with every state change heard."""

    def __init__(self, *roles: str) -> None:
        names = [f"{{name: b{i}, url: 'http://127.0.0.1:1', role: {role}}}" for i, role in enumerate(roles)]
        self.clock = Clock()
        self.fleet = fleet_of(*names)
        self.changes: list[tuple[str, State]] = []
        self.cooled: list[tuple[str, float]] = []
        self.health = Health(
            self.fleet,
            self.fleet.config.health,
            on_state=lambda m, state: self.changes.append((m.name, state)),
            on_cool=lambda m, until_s: self.cooled.append((m.name, until_s)),
            clock=self.clock,
            wake_in=self.clock.wake_in,
        )
        for member in self.fleet.members.values():
            member.probed = True
        self.health.refresh()
        self.changes.clear()

    def member(self, name: str) -> Member:
        return self.fleet.members[name]

    def state(self, name: str) -> State:
        return self.health.state(self.member(name))

    def fail(self, name: str, times: int, result: Result = Result.FAILURE) -> None:
        for _ in range(times):
            self.health.sent(name, "serve")
            self.health.ended(name, "serve", result)


def test_a_refused_connection_marks_down_at_once() -> None:
    watched = Watched("mixed", "mixed")
    watched.fail("b0", 1, Result.REFUSED)
    assert watched.changes == [("b0", "down")]
    watched.fail("b0", 1, Result.SUCCESS)
    assert watched.changes[-1] == ("b0", "up")


@pytest.mark.parametrize("result", [Result.NEUTRAL, Result.SUCCESS])
def test_back_pressure_and_client_errors_never_count(result: Result) -> None:
    watched = Watched("mixed", "mixed")
    watched.fail("b0", 50, result)
    assert watched.changes == []


def test_failures_open_the_breaker_and_time_alone_lets_one_trial_in() -> None:
    watched = Watched("mixed", "mixed")
    watched.fail("b0", 5)
    assert watched.changes == [("b0", "down")]
    watched.clock.advance(1.5)
    assert watched.changes[-1] == ("b0", "up"), "the rest ends on time without traffic"
    watched.health.sent("b0", "serve")
    assert watched.state("b0") == "down", "one trial at a time"
    watched.health.ended("b0", "serve", Result.SUCCESS)
    assert watched.state("b0") == "up"


def test_legs_have_breakers_of_their_own() -> None:
    watched = Watched("mixed", "mixed")
    for _ in range(9):
        watched.health.ended("b0", "prefill", Result.FAILURE)
    assert watched.state("b0") == "up", "a mixed backend whose remote prefills fail still serves"


def test_a_fleet_in_trouble_locks_nobody_out() -> None:
    watched = Watched("mixed", "mixed", "mixed")
    for name in ("b0", "b1", "b2"):
        watched.fail(name, 5)
    assert [watched.state(name) for name in ("b0", "b1", "b2")] == ["unknown"] * 3
    assert any("nobody else is left" in said for said in watched.health.degraded())


def test_panic_never_revives_what_refuses_connections() -> None:
    watched = Watched("mixed", "mixed")
    watched.fail("b0", 1, Result.REFUSED)
    watched.fail("b1", 5)
    assert (watched.state("b0"), watched.state("b1")) == ("down", "unknown")


def test_an_answer_overrules_failed_probes() -> None:
    watched = Watched("mixed")
    watched.health.ended("b0", "serve", Result.SUCCESS)
    watched.member("b0").failed_probes = 5
    assert watched.state("b0") == "up"
    watched.clock.advance(30)
    assert watched.state("b0") == "down"


def test_retry_after_cools_and_marks_nothing_down() -> None:
    watched = Watched("mixed")
    watched.health.ended("b0", "serve", Result.NEUTRAL, retry_after_s=7)
    watched.health.ended("b0", "serve", Result.NEUTRAL, retry_after_s=10**9)
    assert watched.cooled == [("b0", 1007.0), ("b0", 1300.0)]
    assert watched.changes == []


def test_a_recovered_backend_starts_slowly() -> None:
    watched = Watched("mixed")
    watched.fail("b0", 1, Result.REFUSED)
    assert watched.health.share(watched.member("b0")) == 1.0
    watched.fail("b0", 1, Result.SUCCESS)
    shares = []
    for _ in range(3):
        shares.append(watched.health.share(watched.member("b0")))
        watched.clock.advance(5)
    assert shares == [0.1, 0.5, 1.0]


def test_a_drain_ends_at_its_deadline_for_routing_only() -> None:
    watched = Watched("mixed")
    watched.health.drain(watched.member("b0"), 60)
    assert watched.changes == [("b0", "draining")]
    watched.clock.advance(61)
    assert watched.changes[-1] == ("b0", "drained"), "bound sessions leave"
    assert watched.state("b0") == "draining", "people still see why"
    watched.health.undrain(watched.member("b0"))
    assert watched.state("b0") == "up"


def test_places_unknown_to_the_fleet_are_ignored() -> None:
    Watched("mixed").health.ended("gone/dp1", "serve", Result.REFUSED)


# on real sockets


async def test_probes_find_models_and_follow_the_engine() -> None:
    async with engine(models=["a", "b"]) as stub:
        fleet = fleet_of(f"{{name: d0, url: '{stub.url}'}}")
        health = Health(fleet, cfg.Health(interval_s=0.02, timeout_s=1, fail_after=2))
        await health.start()
        try:
            member = fleet.members["d0"]
            assert health.ready()
            assert (member.models, member.max_model_len) == (frozenset({"a", "b"}), 8192)
            stub.health = 503
            await until(lambda: health.state(member) == "down")
            assert not health.ready()
            assert any("answers 503" in said for said in health.degraded())
            stub.health = 200
            await until(lambda: health.state(member) == "up")
        finally:
            await health.stop()


async def test_a_hanging_engine_is_found_down_and_stops_nobody_else() -> None:
    async with engine(health=None) as hung, engine() as well:
        fleet = fleet_of(f"{{name: hung, url: '{hung.url}'}}", f"{{name: well, url: '{well.url}'}}")
        health = Health(fleet, cfg.Health(interval_s=0.02, timeout_s=0.1, fail_after=2))
        await health.start()
        try:
            await until(lambda: health.state(fleet.members["hung"]) == "down")
            assert health.state(fleet.members["well"]) == "up"
        finally:
            await health.stop()


async def test_an_engine_that_comes_later_joins() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    fleet = fleet_of(f"{{name: d0, url: 'http://127.0.0.1:{port}'}}")
    health = Health(fleet, cfg.Health(interval_s=0.02, timeout_s=1))
    await health.start()
    try:
        assert health.state(fleet.members["d0"]) == "down"
        async with engine() as stub, serving(stub.app(), port):
            await until(lambda: health.state(fleet.members["d0"]) == "up")
    finally:
        await health.stop()


async def test_missing_telemetry_is_visible_and_nothing_else() -> None:
    async with engine(metrics=None) as stub:
        fleet = fleet_of(f"{{name: d0, url: '{stub.url}'}}")
        health = Health(fleet, cfg.Health(), telemetry=lambda *_: {})
        await health.start()
        try:
            assert health.state(fleet.members["d0"]) == "up"
            assert health.degraded() == [
                "d0: /metrics answers 404; load is known from this proxy's own requests only",
            ]
        finally:
            await health.stop()


async def test_questions_carry_the_backends_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "k1")
    async with engine() as stub, Prober(1.0) as prober:
        backend = fleet_of(f"{{name: d0, url: '{stub.url}', key_env: ENGINE_KEY}}").members["d0"].backend
        assert await prober.alive(backend) == (Alive.YES, None)
        assert stub.keys == ["Bearer k1"]
