"""Many runs: policies times seeds over one workload, in processes of their own where the machine has cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from random import Random

from homeport_proxy.routing.policies import Policy
from homeport_proxy.routing.views import RoutingSettings
from homeport_proxy.simulate.cluster import Cluster
from homeport_proxy.simulate.result import Row
from homeport_proxy.simulate.run import Simulation
from homeport_proxy.simulate.workload import Workload


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation to do. ``rule``: a tuned peer's rule in place of the policy's default one; ``label`` names it;
    ``rate_scale`` in place of the cluster's."""

    policy: str
    seed: int
    settings: RoutingSettings = field(default_factory=RoutingSettings)
    rule: Policy | None = None
    queue_for_peers: bool = False
    label: str = ""
    rate_scale: float | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """A run's line and its sorted TTFTs (s), for plots."""

    run: Run
    row: Row
    ttft_s: tuple[float, ...]


def sample(workload: Workload, sessions: int, seed: int) -> Workload:
    """A seeded subset of the conversations, in file order."""
    if sessions >= len(workload.conversations):
        return workload
    chosen = sorted(Random(seed).sample(range(len(workload.conversations)), sessions))
    return Workload([workload.conversations[index] for index in chosen], workload.closed, workload.block_tokens)


def simulate(workload: Workload, cluster: Cluster, run: Run) -> Done:
    """One run, here."""
    if run.rate_scale is not None:
        cluster = cluster.model_copy(update={"rate_scale": run.rate_scale})
    simulation = Simulation(
        workload,
        cluster,
        run.policy,
        seed=run.seed,
        settings=run.settings,
        rule=run.rule,
        queue_for_peers=run.queue_for_peers,
    )
    samples = simulation.run()
    ttft_s = tuple(sorted(item.ttft_s for item in samples.measured))
    return Done(run, samples.row(run.label or run.policy, run.seed), ttft_s)


_shared: tuple[Workload, Cluster] | None = None


def _in_child(run: Run) -> Done:
    if _shared is None:
        raise RuntimeError("no workload in this process")
    return simulate(_shared[0], _shared[1], run)


def simulate_all(
    workload: Workload,
    cluster: Cluster,
    runs: Sequence[Run],
    *,
    jobs: int | None = None,
    progress: Callable[[Done], None] | None = None,
) -> list[Done]:
    """All runs, in the order given; ``jobs`` processes (default: one per core, where processes can fork)."""
    global _shared
    jobs = min(jobs or os.cpu_count() or 1, len(runs))
    done: list[Done] = []
    if jobs <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        source: Iterator[Done] = (simulate(workload, cluster, run) for run in runs)
        for item in source:
            done.append(item)
            if progress is not None:
                progress(item)
        return done
    _shared = (workload, cluster)  # children inherit it by fork: a trace is never copied through a pipe
    try:
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
            for item in pool.map(_in_child, runs):
                done.append(item)
                if progress is not None:
                    progress(item)
    finally:
        _shared = None
    return done
