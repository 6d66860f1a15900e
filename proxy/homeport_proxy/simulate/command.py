"""What `homeport replay TRACE` does: the trace read, played on a simulated cluster or a live proxy, and shown."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from homeport.cli import CommandError
from homeport.words import plural
from homeport_proxy.simulate.cluster import Cluster, ClusterError, load_cluster
from homeport_proxy.simulate.live import LiveError, LiveOptions, replay_live
from homeport_proxy.simulate.report import PlotError, plot_ttft, print_table
from homeport_proxy.simulate.result import Row
from homeport_proxy.simulate.suite import Done, Run, sample, simulate_all
from homeport_proxy.simulate.traces import TraceError, load
from homeport_proxy.simulate.workload import Workload


def replay(args: argparse.Namespace) -> int:
    """Replay and print. Raises CommandError with what the user can mend."""
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
    if workload.left_out:
        what = f"{workload.left_out} recorded {plural('request', workload.left_out)}"
        print(f"homeport: left out {what} answered with an error", file=sys.stderr)
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
