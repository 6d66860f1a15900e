"""`make bench-routing`: our policy and peers' rules on traces, by the production router in virtual time.

Each trace is split in two. Peers' knobs are tuned on the first part (lowest TTFT p90), everything is reported on the
second, over several session orders (seeds), each figure beside the tuned llm-d latency rule's with the same seed and
beside one cache shared by all replicas (the bound). Ours runs with its defaults. `--queue` prints a second table with
our queue given to the peers; `--lag`, `--noise`, `--no-session-ids` repeat it with telemetry a second old, 30 % noise
in every prefill's rate, and requests that carry no session id; `--uneven` with engines of different speeds; `--steps`
lets engines compute in steps as vLLM does, `--no-slices` takes the parts of long prefills away.

Agentic sessions of a part are played three times (content apart, tools and system prompt shared): 570 of them, so that
half the file makes the whole cluster's load. Open-loop parts are compressed so that under least requests the engines
prefill for the share of time in the case's name, from the first arrival to the last answer of the first part;
`--calibrate` finds these factors (and, for comparison, those of the second part). What a seed changes in open-loop
traces is who comes first within a tick, which some do not have, and the compression by up to 4 %: the same for every
rule, and enough to show how far a figure depends on what happens to meet.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

from rich.console import Console

from homeport_proxy.routing.policies import Policy
from homeport_proxy.simulate.cluster import Cluster, Sessions
from homeport_proxy.simulate.peers import (
    ONE_CACHE,
    AIBrix,
    Chwbl,
    Dynamo,
    LlmD,
    LlmDLatency,
    PowerOfTwo,
    Preble,
    SessionRing,
    Sglang,
    Turns,
)
from homeport_proxy.simulate.report import by_policy, medians, paired, print_table
from homeport_proxy.simulate.result import Row
from homeport_proxy.simulate.run import Simulation
from homeport_proxy.simulate.suite import Run, simulate_all
from homeport_proxy.simulate.traces import load
from homeport_proxy.simulate.workload import Workload

TRACES = Path(__file__).parent / "traces"
REFERENCE = "llm-d-latency"
COPIES = 3
SPREAD = 0.04


@dataclass(frozen=True, slots=True)
class Case:
    """A trace under a load. ``goals``: TTFT p90 and p99 over the reference's, hit over one shared cache's."""

    trace: str
    cluster: Cluster
    goals: tuple[float, float, float]


def agentic(spread_s: float) -> Cluster:
    """The cluster for agentic traces, a session started every ``spread_s``."""
    return Cluster(cache_tokens=2_600_000, sessions=Sessions(spread_s_per_session=spread_s))


def opened(rate_scale: float) -> Cluster:
    """The cluster for open-loop traces, compressed by ``rate_scale``."""
    return Cluster(cache_tokens=1_300_000, rate_scale=rate_scale)


CASES = {
    "agentic-tight": Case("agentic_coding", agentic(10.6), (0.83, 0.90, 0.985)),
    "agentic-light": Case("agentic_coding", agentic(15.9), (0.94, 1.02, 0.985)),
    "toolagent-0.7": Case("toolagent_reconstructed", opened(1.83), (0.86, 0.90, 0.96)),
    "toolagent-0.85": Case("toolagent_reconstructed", opened(2.26), (0.62, 1.0, 0.97)),
    "conversation-0.7": Case("mooncake_conversation", opened(1.99), (0.88, 1.10, 0.92)),
    "synthetic-0.7": Case("mooncake_synthetic", opened(1.63), (0.76, 1.20, 0.98)),
}

GRIDS: dict[str, Sequence[Policy]] = {
    "sglang": [Sglang(absolute=a, match=m) for a in (8, 64) for m in (0.3, 0.6)],
    "llm-d": [LlmD(), LlmD(prefix=6.0)],
    REFERENCE: [LlmDLatency(penalty_s=penalty_s) for penalty_s in (5, 10, 18)],
    "dynamo": [Dynamo(), Dynamo(scale=4.0)],
    "preble": [Preble()],
    "chwbl": [Chwbl(), Chwbl(bound=1.5)],
    "aibrix": [AIBrix(), AIBrix(spread=2.0)],
    "power-of-two": [PowerOfTwo()],
    "session-ring": [SessionRing()],
    "turns": [Turns()],
}


def part(trace: str, half: int) -> Workload:
    """One half of a trace: every second agentic session, ``COPIES`` times, or the first or second half of requests."""
    path = TRACES / f"{trace}.jsonl.gz"
    whole = load(path)
    if whole.closed:
        whole = load(path, copies=COPIES)
        chosen = range(half, len(whole.conversations) // COPIES, 2)
        kept = [one for index in chosen for one in whole.conversations[COPIES * index : COPIES * (index + 1)]]
        return Workload(kept, True, whole.block_tokens)
    times = sorted(call.wait_s for one in whole.conversations for call in one.lanes[0].calls)
    middle_s = times[len(times) // 2]
    for conversation in whole.conversations:
        lane = conversation.lanes[0]
        lane.calls = [call for call in lane.calls if (call.wait_s > middle_s) == bool(half)]
        for call in lane.calls:
            call.wait_s -= middle_s * half
    kept = [conversation for conversation in whole.conversations if conversation.lanes[0].calls]
    return Workload(kept, False, whole.block_tokens)


def rate_scale(workload: Workload, busy_share: float) -> float:
    """The compression at which engines under least requests prefill for ``busy_share`` of the time."""
    low, high = 0.5, 4.0
    while high - low > 0.01:
        middle = (low + high) / 2
        played = Simulation(workload, opened(middle), "least-requests", whole=True)
        played.run()
        busy_s = sum(engine.busy_s for engine in played.engines.values())
        low, high = (middle, high) if busy_s < busy_share * len(played.engines) * played.now_s else (low, middle)
    return round((low + high) / 2, 2)


def compression(case: Case, seed: int) -> float:
    """The case's, by up to ``SPREAD`` more or less."""
    return case.cluster.rate_scale * (1.0 + SPREAD * Random(seed).uniform(-1.0, 1.0))


def calibrate(console: Console) -> None:
    """Print each open-loop case's compression: as set, and as either part asks for."""
    for name, case in CASES.items():
        if not case.trace.startswith("agentic"):
            first, second = (rate_scale(part(case.trace, half), float(name.rpartition("-")[2])) for half in (0, 1))
            console.print(f"{name}: {case.cluster.rate_scale} (first part {first}, second part {second})")


def tuned(case: Case, names: Sequence[str], jobs: int | None) -> dict[str, Policy]:
    """Each peer's best rule on the first part, by TTFT p90 of one seed."""
    workload = part(case.trace, 0)
    runs = [Run(name, 0, rule=rule) for name in names for rule in GRIDS[name] if len(GRIDS[name]) > 1]
    best: dict[str, tuple[float, Policy]] = {name: (0.0, GRIDS[name][0]) for name in names if len(GRIDS[name]) == 1}
    for done in simulate_all(workload, case.cluster, runs, jobs=jobs):
        p90_s = done.row.ttft_p90_s or 0.0
        rule = done.run.rule
        if rule is not None and (done.run.policy not in best or p90_s < best[done.run.policy][0]):
            best[done.run.policy] = (p90_s, rule)
    return {name: rule for name, (_, rule) in best.items()}


def measure(case: Case, args: argparse.Namespace) -> list[Row]:
    """Every rule on the second part."""
    rules = tuned(case, args.peers, args.jobs)
    workload = part(case.trace, 1)
    changes: dict[str, object] = {
        "noise": args.noise,
        "uneven": args.uneven,
        "session_ids": not args.no_session_ids,
        "steps": args.steps,
        "slices": not args.no_slices,
    }
    if args.lag:
        changes |= {"index": "exact", "telemetry_lag_s": args.lag}
    cluster = case.cluster.model_copy(update=changes)
    runs = [Run(name, seed) for name in ("cost", ONE_CACHE) for seed in range(args.seeds)]
    runs += [Run(name, seed, rule=rule) for name, rule in rules.items() for seed in range(args.seeds)]
    if args.queue:
        runs += [
            Run(name, seed, rule=rule, queue_for_peers=True, label=f"{name} + our queue")
            for name, rule in rules.items()
            for seed in range(args.seeds)
        ]
    runs = [replace(run, rate_scale=compression(case, run.seed)) for run in runs]
    count = 0

    def progress(_: object) -> None:
        nonlocal count
        count += 1
        print(f"\r{count}/{len(runs)} runs", end="", file=sys.stderr, flush=True)

    rows = [done.row for done in simulate_all(workload, cluster, runs, jobs=args.jobs, progress=progress)]
    print(file=sys.stderr)
    return rows


def verdict(case: Case, rows: Sequence[Row]) -> str:
    """Ours against the goals, in a line."""
    grouped = by_policy(rows)
    ours, reference, bound = grouped["cost"], grouped.get(REFERENCE, []), grouped[ONE_CACHE]
    best = [paired(bound, reference, figure) for figure in ("ttft_p90_s", "ttft_p99_s")]
    found = [
        paired(ours, reference, "ttft_p90_s"),
        paired(ours, reference, "ttft_p99_s"),
        (medians(ours, "hit_ratio") or 0.0) / (medians(bound, "hit_ratio") or 1.0),
    ]
    words = []
    for name, value, goal, below in zip(("p90", "p99", "hit"), found, case.goals, (True, True, False), strict=True):
        if value is None:
            words.append(f"{name}: not measured")
            continue
        met = value <= goal if below else value >= goal
        words.append(f"{name} {value:.3f} ({'meets' if met else 'misses'} {'<=' if below else '>='} {goal})")
    if None not in best:
        words.append("one shared cache itself: p90 {:.3f}, p99 {:.3f}".format(*best))
    return ", ".join(words)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    parser.add_argument("--peers", nargs="*", choices=list(GRIDS), default=list(GRIDS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--queue", action="store_true", help="also the peers with our queue")
    parser.add_argument("--lag", type=float, default=0.0, metavar="S", help="KV events this late")
    parser.add_argument("--noise", type=float, default=0.0, help="by how much prefills differ from rates, such as 0.3")
    parser.add_argument("--uneven", type=float, default=0.0, help="by how much engines differ in speed, such as 0.3")
    parser.add_argument("--no-session-ids", action="store_true")
    parser.add_argument("--steps", action="store_true", help="engines compute in steps, prefill beside decoding")
    parser.add_argument("--no-slices", action="store_true", help="engines take no prompts in tokens: no parts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row")
    parser.add_argument("--calibrate", action="store_true", help="find the open-loop cases' loads instead")
    args = parser.parse_args(argv)
    console = Console(width=130)
    if args.calibrate:
        calibrate(console)
        return 0
    written: dict[str, list[dict[str, object]]] = {}
    for name in args.case or list(CASES):
        rows = measure(CASES[name], args)
        written[name] = [asdict(row) for row in rows]
        print_table(rows, console, name)
        console.print(f"{name}: ours over tuned {REFERENCE} and one shared cache: {verdict(CASES[name], rows)}\n")
        if args.json is not None:
            args.json.write_text(json.dumps(written, indent=1))  # after each case: all of them take half an hour
    return 0


if __name__ == "__main__":
    sys.exit(main())
