"""The simulated engine that computes in steps: prefill in chunks beside the decode batch."""

import pytest

from homeport_proxy.routing.cost import decode_step_s, prefill_s
from homeport_proxy.routing.index.lru import PrefixLru
from homeport_proxy.routing.views import Rates, Ticket
from homeport_proxy.simulate.cluster import Cluster, Sessions
from homeport_proxy.simulate.engine import Job
from homeport_proxy.simulate.run import Failure, Simulation
from homeport_proxy.simulate.steps import SteppedEngine
from homeport_proxy.simulate.workload import Call
from routing.routing_kit import chain, request
from routing.test_simulate import agents

RATES = Rates(t0_s=0.02, tokens_per_s=1_000, step_s=0.1, per_sequence_s=0.0, per_context_token_s=0.0)
CLUSTER = Cluster(replicas=4, cache_tokens=700_000, steps=True, sessions=Sessions(spread_s_per_session=1.5))


class Bench:
    """One engine and its clock; ``first`` and ``last``: when each job's first and last token came."""

    def __init__(self, chunk_tokens: int = 1_000) -> None:
        self.engine = SteppedEngine("e0", RATES, PrefixLru(1_000), 100, chunk_tokens)
        self.now_s = 0.0
        self.due_s: float | None = None
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}

    def send(self, name: str, tokens: int, output: int) -> None:
        call = Call(tokens, output, chain(name, tokens // 100), 0.0)
        self.engine.waiting.append(Job(Ticket(request(name), self.now_s), call, 0, self.now_s, host=self.engine))
        self.begin()

    def begin(self) -> None:
        self.due_s = self.engine.begin(self.now_s) or self.due_s

    def until(self, time_s: float) -> None:
        while self.due_s is not None and self.due_s <= time_s:
            self.now_s, self.due_s = self.due_s, None
            prefilled, finished = self.engine.end(self.now_s)
            self.first.update({job.ticket.request.session: self.now_s for job in prefilled})
            self.last.update({job.ticket.request.session: self.now_s for job in finished})
            self.begin()
        self.now_s = time_s


def work_s(tokens: int, cached: int = 0) -> float:
    return prefill_s(RATES, tokens, cached)


def test_alone_one_prompt_after_the_other_in_chunks() -> None:
    bench = Bench()
    bench.send("a", 2_500, 1)
    bench.send("b", 500, 1)
    bench.until(100.0)
    assert bench.first["a"] == pytest.approx(work_s(2_500))
    assert bench.first["b"] == pytest.approx(work_s(2_500) + work_s(500))
    assert bench.last == bench.first
    assert bench.engine.busy_s == pytest.approx(work_s(2_500) + work_s(500))
    assert (bench.engine.sequences, bench.engine.context_tokens) == (2, 3_000)


def test_beside_a_decode_batch_prompts_share_a_step_and_slow_the_batch() -> None:
    bench = Bench()
    bench.send("old", 500, 11)
    bench.until(bench_start := work_s(500) + 0.25)
    bench.send("a", 400, 1)
    bench.send("b", 400, 1)
    bench.until(100.0)
    joined_s = work_s(500) + 0.3  # the decode step under way ends first
    both_s = joined_s + 0.1 + 2 * work_s(400) - 0.0
    assert bench_start < joined_s
    # the second came once the first's step had begun to be planned for the same end: both are in it
    assert bench.first["a"] == bench.first["b"] == pytest.approx(both_s)
    # three steps before, one with the prompts, six after it
    assert bench.last["old"] == pytest.approx(both_s + 6 * 0.1)


def test_what_was_prefilled_is_found_by_the_next_turn() -> None:
    bench = Bench()
    bench.send("a", 1_000, 1)
    bench.until(100.0)
    bench.send("a", 1_500, 1)
    bench.until(200.0)
    assert bench.first["a"] == pytest.approx(100.0 + work_s(500, 1_000))


def test_a_batch_alone_is_played_in_one_stretch() -> None:
    bench = Bench()
    bench.send("a", 500, 100)
    bench.until(100.0)
    assert bench.last["a"] == pytest.approx(work_s(500) + 99 * decode_step_s(RATES, 1, 500))
    assert bench.engine.serial == 2


@pytest.mark.parametrize("split", [False, True])
def test_every_request_is_served_by_engines_that_compute_in_steps(split: bool) -> None:
    cluster = CLUSTER.model_copy(update={"prefill_replicas": 3, "decode_replicas": 1} if split else {})
    workload = agents(24)
    simulation = Simulation(workload, cluster, "cost", seed=1, whole=True)
    assert len(simulation.run().all) == workload.calls
    for engine in simulation.engines.values():
        assert isinstance(engine, SteppedEngine)
        assert not any((engine.left, engine.prefilling, engine.joining, engine.waiting))


def test_steps_survive_an_engine_that_dies() -> None:
    workload = agents(24)
    failures = [Failure("e1", 20.0, 50.0)]
    samples = Simulation(workload, CLUSTER, "cost", seed=1, failures=failures, whole=True).run()
    assert len(samples.all) == workload.calls


def test_a_step_shared_with_decoding_makes_a_busy_fleet_slower() -> None:
    shared = Simulation(agents(), CLUSTER, "cost", seed=1).run().row("cost", 1)
    apart = Simulation(agents(), CLUSTER.model_copy(update={"steps": False}), "cost", seed=1).run().row("cost", 1)
    assert shared.ttft_p90_s is not None
    assert apart.ttft_p90_s is not None
    assert shared.ttft_p90_s > apart.ttft_p90_s
