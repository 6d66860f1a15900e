"""`homeport replay`: a workload trace against a simulated cluster or a live proxy; or a decision log proved."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from homeport.cli import CommandError
from homeport_proxy.routing.policies import POLICIES
from homeport_proxy.simulate.peers import ONE_CACHE, PEERS

HELP = "replay a workload trace against a simulated cluster or a live proxy, or prove a decision log"

NAMES = (*POLICIES, *PEERS, ONE_CACHE)
_WRITTEN = "the proxy writes one under `decisions: {file: PATH}`"
_COLUMNS = """\
columns of the table (medians over the seeds):
  hit            share of the prompt tokens that were found in a cache
  TTFT, ITL      time to the first token; gap between two tokens of an answer
  moved          share of requests placed neither at their session's home nor as
                 its first: spilled, moved, failed over, or sent to a peer
  x-region       share of requests served outside their session's region
  p90, p99 / X   this policy's TTFT over that of X, the first policy, seed by
                 seed; below 1 is faster (only with several policies)
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _COLUMNS
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
    live.add_argument("--max-output-tokens", type=_positive, default=64, metavar="N", help="of each answer")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.decisions is not None:
        return _prove(args.decisions)
    if args.trace is None:
        raise CommandError("name a TRACE file, or give --decisions FILE")
    # here, so that --help waits for neither the simulator nor an HTTP client
    from homeport_proxy.simulate.command import replay

    return replay(args)


def _prove(path: Path) -> int:
    """Replay every record of a decision log; 0 when each gives its own decision again."""
    from homeport_proxy.routing.decisions import DecisionLogError, parse, replay, same

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
        raise CommandError(
            f"{path}, {error}" if count else f"{path} is no decision log ({error}); {_WRITTEN}"
        ) from error
    if not count:
        raise CommandError(f"{path}: holds no decision; {_WRITTEN}")
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
