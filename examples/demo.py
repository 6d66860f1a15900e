"""`make demo`: starts engines and proxy, runs the agent of agent.py against them, shows the report, stops everything.

With ``--compare`` the same agent runs twice more on two aggregated engines: first as most people run it (round robin,
no SDK), then through Homeport, so that one sees what Homeport is for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AGENT = Path(__file__).with_name("agent.py")
STOP_S = 60


class DemoError(Exception):
    """The demo cannot go on; says why in one line."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """A running `homeport up`: where clients connect, and the model it serves."""

    base_url: str
    model: str
    engines: tuple[str, ...] = ()


@contextlib.contextmanager
def fleet(*options: str) -> Iterator[Fleet]:
    """`homeport up` with these options, from ready to stopped."""
    command = [str(Path(sys.executable).with_name("homeport")), "up", "--json", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise DemoError(f"the engines did not come up (`homeport up` exited with {process.wait()})")
        ready = json.loads(line)
        yield Fleet(ready["base_url"], ready["model"], tuple(engine["url"] for engine in ready["engines"]))
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def show(place: Fleet) -> None:
    """Run the agent and let its table through."""
    done = subprocess.run(
        [sys.executable, str(AGENT), "--base-url", place.base_url, "--model", place.model], check=False
    )
    if done.returncode:
        raise DemoError(f"the agent failed (exit status {done.returncode})")


def measure(place: Fleet, *options: str) -> list[dict[str, Any]]:
    """Run the agent and return its turns."""
    done = subprocess.run(
        [sys.executable, str(AGENT), "--base-url", place.base_url, "--model", place.model, "--json", *options],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise DemoError(f"the agent failed (exit status {done.returncode})")
    turns: list[dict[str, Any]] = json.loads(done.stdout)
    return turns


def compare() -> None:
    """The same agent on two aggregated engines, without Homeport's help and with it."""
    print("\nOn two aggregated engines: round robin and no SDK, then through Homeport", flush=True)
    with fleet("--mixed", "2", "--policy", "round-robin") as place:
        without = measure(place, "--plain")
    with fleet("--mixed", "2") as place:
        with_homeport = measure(place)
    print(f"\n{'turn':>4}  {'step':<12}{'without: cached':>16}{'TTFT s':>8}{'with: cached':>16}{'TTFT s':>8}")
    for left, right in zip(without, with_homeport, strict=True):
        print(
            f"{left['turn']:>4}  {left['step']:<12}{_share(left):>16}{left['ttft_s']:>8.2f}"
            f"{_share(right):>16}{right['ttft_s']:>8.2f}"
        )
    print(f"\nwithout Homeport: {_sum(without)}\nwith Homeport:    {_sum(with_homeport)}")


def _share(turn: dict[str, Any]) -> str:
    cached = "?" if turn["cached_tokens"] is None else turn["cached_tokens"]
    return f"{cached} of {turn['prompt_tokens']}"


def _sum(turns: list[dict[str, Any]]) -> str:
    prompt = sum(turn["prompt_tokens"] or 0 for turn in turns)
    cached = sum(turn["cached_tokens"] or 0 for turn in turns)
    mean_s = sum(turn["ttft_s"] for turn in turns) / len(turns)
    return f"{cached} of {prompt} prompt tokens cached ({cached / prompt:.0%}), mean TTFT {mean_s:.2f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compare", action="store_true", help="also without Homeport, on two aggregated engines")
    args, options = parser.parse_known_args()
    try:
        with fleet(*options) as place:
            show(place)
        if args.compare:
            compare()
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
