"""`make bench-agents`: tau-bench sessions through SDK, proxy and real engines, each set beside the engines' counters.

The same sessions run on two mixed engines, on one prefill and two decode engines, on one engine alone, and under round
robin without affinity. For each session the SDK's report must say what the engines that prefilled it counted; for each
setup the cached share stands beside the one that a single engine with room for everything would reach.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from openai import OpenAI

import homeport
from bench.tau import Books, Engines, OneCache, Recorded, replay, sessions
from examples.demo import Fleet, fleet
from homeport.call import Mode


@dataclass(frozen=True, slots=True)
class Setup:
    """Engines to start and how clients are attached."""

    name: str
    options: tuple[str, ...]
    mode: Mode = "stabilise"


SETUPS = (
    Setup("mixed", ("--mixed", "2")),
    Setup("split", ("--prefill", "1", "--decode", "2")),
    Setup("one", ("--mixed", "1")),
    Setup("round-robin", ("--mixed", "2", "--policy", "round-robin"), "observe"),
)


def run(place: Fleet, setup: Setup, recorded: Sequence[Recorded]) -> list[Books]:
    """Replay the sessions one after another."""
    engines, alone = Engines(place.base_url.removesuffix("/v1")), OneCache()
    client = homeport.attach(OpenAI(base_url=place.base_url, api_key="-", timeout=600, max_retries=0), mode=setup.mode)
    found: list[Books] = []
    for session in recorded:
        books = replay(client, place.model, session, engines, alone, name=f"{setup.name}/{session.name}")
        found.append(books)
        say(
            f"{setup.name:<12}{books.session:<12}{books.requests:>4} requests{books.prompt_tokens or 0:>8} prompt"
            f"{books.cached_tokens or 0:>8} cached{books.engine_cached_tokens:>8} by the engines"
            f"{books.one_engine_cached_tokens:>8} by one engine{books.backends:>3} backends"
        )
    return found


def summary(setup: Setup, books: Sequence[Books], took_s: float) -> str:
    """One setup in one line: cached share, share of what one engine would reach, sessions whose books differ."""
    prompt = sum(one.engine_prompt_tokens for one in books)
    cached = sum(one.engine_cached_tokens for one in books)
    best = sum(one.one_engine_cached_tokens for one in books)
    wrong = [one.session for one in books if not one.agree]
    requests = sum(one.requests for one in books)
    return (
        f"{setup.name:<12} {len(books)} sessions, {requests} requests, {prompt:,} prompt tokens: {cached / prompt:.1%} "
        f"cached, {cached / best:.3f} of one engine with room for all ({best / prompt:.1%}); "
        f"books that differ: {', '.join(wrong) or 'none'}; {took_s:.0f} s"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=None, help="how many sessions (default: all that fit)")
    parser.add_argument(
        "--setups", nargs="+", choices=[setup.name for setup in SETUPS], default=[setup.name for setup in SETUPS]
    )
    parser.add_argument("--json", action="store_true", help="print every session's books as JSON")
    args, options = parser.parse_known_args()  # the rest is for `homeport up`
    recorded = sessions(args.sessions)
    rows: list[dict[str, object]] = []
    lines = [f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"]
    agree = True
    for setup in (setup for setup in SETUPS if setup.name in args.setups):
        with fleet(*setup.options, *options) as place:
            started = time.monotonic()
            books = run(place, setup, recorded)
            lines.append(summary(setup, books, time.monotonic() - started))
        rows += [{"setup": setup.name, **asdict(one)} for one in books]
        agree = agree and all(one.agree for one in books)
    if args.json:
        print(json.dumps(rows))
    for line in lines:
        say(line)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
