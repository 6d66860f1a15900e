"""`homeport replay`: a workload trace against a simulated cluster or a live proxy; or a decision log proved."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from homeport.cli import CommandError
from homeport_proxy.routing.decisions import DecisionLogError, parse, replay, same
from homeport_proxy.routing.policies import POLICIES
from homeport_proxy.simulate.cluster import Cluster, ClusterError, load_cluster
from homeport_proxy.simulate.live import LiveError, LiveOptions, replay_live
from homeport_proxy.simulate.peers import PEERS
from homeport_proxy.simulate.report import PlotError, plot_ttft, print_table
from homeport_proxy.simulate.result import Row
from homeport_proxy.simulate.run import ONE_CACHE
from homeport_proxy.simulate.suite import Done, Run, sample, simulate_all
from homeport_proxy.simulate.traces import TraceError, load
from homeport_proxy.simulate.workload import Workload

HELP = "replay a workload trace against a simulated cluster or a live proxy, or prove a decision log"

NAMES = (*POLICIES, *PEERS, ONE_CACHE)


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("trace", nargs="?", type=Path, help="agentic block trace, Mooncake trace, recorded requests")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="a live proxy's base URL, such as http://127.0.0.1:8080/v1")
    where.add_argument("--cluster", type=Path, metavar="FILE", help="cluster file (YAML); default: 8 replicas")
    where.add_argument("--decisions", type=Path, metavar="FILE", help="prove that a decision log replays")
    parser.add_argument(
        "--policy", action="append", choices=NAMES, metavar="NAME", help=f"one of {', '.join(NAMES)}; repeatable"
    )
    parser.add_argument("--seeds", type=_positive, default=1, metavar="N", help="seeds 0..N-1 (default 1)")
    parser.add_argument("--sessions", type=_positive, metavar="N", help="a seeded subset of the trace's sessions")
    parser.add_argument("--no-session-ids", action="store_true", help="requests carry no session id")
    parser.add_argument("--queue", action="store_true", help="give peers' rules our late-binding queue as well")
    parser.add_argument("--jobs", type=_positive, metavar="N", help="processes (default: one per core)")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the TTFT distributions")
    live = parser.add_argument_group("against a live proxy")
    live.add_argument("--model", default=None, help="model name (default: the proxy's first)")
    live.add_argument("--key-env", default="HOMEPORT_KEY", help="environment variable with the API key")
    live.add_argument("--speed", type=_factor, default=1.0, help="divide think times by this")
    live.add_argument("--shrink", type=_factor, default=1.0, help="divide prompt sizes by this (small engines)")
    live.add_argument("--max-output-tokens", type=_positive, default=64, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.decisions is not None:
        return _prove(args.decisions)
    if args.trace is None:
        raise CommandError("name a TRACE file, or give --decisions FILE")
    try:
        cluster = load_cluster(args.cluster) if args.cluster is not None else Cluster()
        if args.no_session_ids:
            cluster = cluster.model_copy(update={"session_ids": False})
        workload = _workload(args, cluster)
        if args.url is not None:
            rows, ttft_s = _live(args, workload, cluster)
        else:
            rows, ttft_s = _simulated(args, workload, cluster)
        if args.plot is not None:
            plot_ttft(ttft_s, args.plot, args.trace.name)
    except (ClusterError, TraceError, LiveError, PlotError) as error:
        raise CommandError(str(error)) from error
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        console = Console()
        print_table(rows, console if console.is_terminal else Console(width=120), args.trace.name)
    return 0


def _workload(args: argparse.Namespace, cluster: Cluster) -> Workload:
    cuts = cluster.sessions
    workload = load(
        args.trace,
        block_tokens=cluster.block_tokens,
        think_cap_s=cuts.think_cap_s,
        max_start_tokens=cuts.max_start_tokens,
        max_context_tokens=cuts.max_context_tokens,
    )
    if not workload.calls:
        raise TraceError(f"{args.trace}: no session starts within max_start_tokens ({cuts.max_start_tokens})")
    return sample(workload, args.sessions, 0) if args.sessions else workload


def _simulated(
    args: argparse.Namespace, workload: Workload, cluster: Cluster
) -> tuple[list[Row], dict[str, Sequence[float]]]:
    policies = list(dict.fromkeys(args.policy or ["cost"]))
    runs = [Run(name, seed, queue_for_peers=args.queue) for name in policies for seed in range(args.seeds)]
    count = 0

    def progress(done: Done) -> None:
        nonlocal count
        count += 1
        print(f"{count}/{len(runs)} {done.row.policy}, seed {done.row.seed}", file=sys.stderr, flush=True)

    done = simulate_all(workload, cluster, runs, jobs=args.jobs, progress=progress)
    ttft_s: dict[str, Sequence[float]] = {}
    for item in done:
        ttft_s.setdefault(item.row.policy, item.ttft_s)
    return [item.row for item in done], ttft_s


def _live(
    args: argparse.Namespace, workload: Workload, cluster: Cluster
) -> tuple[list[Row], dict[str, Sequence[float]]]:
    url = args.url.rstrip("/")
    options = LiveOptions(
        url=url if url.endswith("/v1") else f"{url}/v1",
        model=args.model,
        key=os.environ.get(args.key_env),
        speed=args.speed,
        shrink=args.shrink,
        spread_s=cluster.sessions.spread_s_per_session,
        max_output_tokens=args.max_output_tokens,
        session_ids=not args.no_session_ids,
    )
    rows: list[Row] = []
    ttft_s: dict[str, Sequence[float]] = {}
    for seed in range(args.seeds):
        samples = asyncio.run(replay_live(workload, options, seed))
        rows.append(samples.row("live", seed))
        ttft_s.setdefault("live", [item.ttft_s for item in samples.measured])
    return rows, ttft_s


def _prove(path: Path) -> int:
    """Replay every record of a decision log; 0 when each gives its own decision again."""
    count = different = 0
    try:
        with path.open("rb") as file:
            for record in parse(file):
                count += 1
                again = replay(record)
                if not same(record, again):
                    different += 1
                    place = again.place if again is not None else "no place"
                    request = record.request.request_id
                    print(f"{request}: recorded {record.decision.place}, replayed {place}", file=sys.stderr)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from error
    except DecisionLogError as error:
        raise CommandError(f"{path}, {error}") from error
    if not count:
        raise CommandError(f"{path}: holds no decision")
    print(f"{count} decisions, {count - different} replay to the same")
    return 1 if different else 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _factor(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value
