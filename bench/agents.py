"""`make bench-agents`: every tau-bench session through SDK, proxy and real engines; report against engine counters.

Starts two aggregated CPU engines with `homeport up`, replays the recorded sessions through ``homeport.attach``, and
prints for each session what the SDK's report says was cached beside what the engines' own counters say. Then the same
sessions under round robin without the SDK, so that both hit ratios stand in one run.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from openai import OpenAI

import homeport
from bench.tau import Recorded, replay, sessions
from examples.demo import Fleet, fleet


@dataclass(frozen=True, slots=True)
class Row:
    """One session under one policy; sizes in tokens."""

    policy: str
    session: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    engine_cached_tokens: int
    backends: int


def engine_cached_tokens(urls: Sequence[str]) -> int:
    """Prompt tokens that the engines took from their own prefix cache since they started."""
    total = 0
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("vllm:prompt_tokens_by_source_total{") and 'source="local_cache_hit"' in line:
                    total += int(float(line.rpartition(" ")[2]))
    return total


def run(place: Fleet, policy: str, recorded: Sequence[Recorded], *, attach: bool) -> list[Row]:
    """Replay the sessions in turn and compare each with the engines' counters."""
    client = OpenAI(base_url=place.base_url, api_key="-", timeout=600, max_retries=0)
    if attach:
        client = homeport.attach(client)
    rows: list[Row] = []
    for session in recorded:
        before = engine_cached_tokens(place.engines)
        with homeport.session(f"{policy}/{session.name}"):
            served = replay(client, place.model, session)
        row = Row(
            policy,
            session.name,
            len(served),
            sum(one.prompt_tokens for one in served),
            sum(one.cached_tokens or 0 for one in served),
            engine_cached_tokens(place.engines) - before,
            len({one.backend for one in served}),
        )
        rows.append(row)
        print(
            f"{row.policy:<12}{row.session:<12}{row.requests:>4} requests{row.prompt_tokens:>8} prompt"
            f"{row.cached_tokens:>8} cached{row.engine_cached_tokens:>8} by the engines{row.backends:>3} backends",
            file=sys.stderr,
            flush=True,
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=None, help="how many sessions (default: all that fit)")
    parser.add_argument("--json", action="store_true", help="print every row as JSON")
    args = parser.parse_args()
    recorded = sessions(args.sessions)
    rows: list[Row] = []
    for policy, attach in (("cost", True), ("round-robin", False)):
        with fleet("--mixed", "2", "--policy", policy) as place:
            rows += run(place, policy, recorded, attach=attach)
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    for policy in ("cost", "round-robin"):
        own = [row for row in rows if row.policy == policy]
        prompt, cached = sum(row.prompt_tokens for row in own), sum(row.cached_tokens for row in own)
        wrong = [row.session for row in own if row.cached_tokens != row.engine_cached_tokens]
        print(
            f"{policy:<12} {len(own)} sessions, {prompt} prompt tokens, {cached / prompt:.1%} cached", file=sys.stderr
        )
        print(f"{'':<12} books that differ from the engines: {', '.join(wrong) or 'none'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
