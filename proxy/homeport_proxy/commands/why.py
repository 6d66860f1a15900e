"""`homeport why REQUEST_ID`: where one request's time went, and why its tokens were not cached."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from homeport_proxy.commands.ask import add_url, ask, quoted

HELP = "where one request's time went, and why its tokens were not cached"
_STEPS = (
    ("queue", "held in the proxy for an engine to be free"),
    ("decide", "deciding where it goes"),
    ("prefill_leg", "prefill on an engine of its own"),
    ("headers", "until the answer's headers went out"),
    ("first_token", "until the first token"),
    ("total", "until the end"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("request_id", help="the x-homeport-request-id of an answer")
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_url(parser)


def run(args: argparse.Namespace) -> int:
    """Ask and show."""
    summary = ask(args, f"requests/{quoted(args.request_id)}")
    if args.json:
        print(json.dumps(summary, indent=2))
    else:
        Console(highlight=False).print(render(summary))
    return 0


def render(summary: dict[str, Any]) -> Group:
    """One request in words and two tables."""
    head = f"{summary['request_id']}: {summary['api']} {summary['model']}, status {summary['status'] or 'none'}"
    if summary["error"]:
        head += f" ({summary['error']})"
    place = summary["backend"] or "no backend"
    if summary["prefill_backend"]:
        place += f", prefilled by {summary['prefill_backend']}"
    went = f"{summary['decision'] or 'not placed'}: {place}" + (
        f" because {summary['reason']}" if summary["reason"] else ""
    )
    times = Table("ms", "what", title="time")
    for name, text in _STEPS:
        if summary["ms"][name] is not None:
            times.add_row(f"{summary['ms'][name]:,.1f}", text)
    return Group(Text(head), Text(went), times, _tokens(summary), *_legs(summary))


def _tokens(summary: dict[str, Any]) -> Table:
    tokens = summary["tokens"]
    table = Table("tokens", "what", title="prompt")
    for name, text in (
        ("prompt", "in the prompt"),
        ("expected_cached", "expected in the cache"),
        ("cached", "found in the cache"),
    ):
        table.add_row("not reported" if tokens[name] is None else f"{tokens[name]:,}", text)
    for cause, count in sorted(summary["miss_causes"].items(), key=lambda item: -item[1]):
        table.add_row(f"{count:,}", f"computed: {cause}")
    return table


def _legs(summary: dict[str, Any]) -> list[Text]:
    return [
        Text(f"{leg['part']} on {leg['place']}: {leg['state']}, status {leg['status'] or 'none'}{_error(leg)}")
        for leg in summary["legs"]
    ]


def _error(leg: dict[str, Any]) -> str:
    return f", {leg['error']}" if leg["error"] else ""
