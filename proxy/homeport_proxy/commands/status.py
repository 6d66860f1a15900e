"""`homeport status`: a running proxy at a glance."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from homeport_proxy.commands.ask import add_url, ask

HELP = "a running proxy at a glance"
_COLOURS = {"up": "green", "draining": "yellow", "unknown": "cyan", "down": "red"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--json", action="store_true", help="the whole status as JSON")
    add_url(parser)


def run(args: argparse.Namespace) -> int:
    """Ask and show."""
    status = ask(args, "status")
    if args.json:
        print(json.dumps(status, indent=2))
    else:
        Console(highlight=False).print(render(status))
    return 0


def render(status: dict[str, Any]) -> Group:
    """The status as a table of backends, savings and what is degraded."""
    table = Table("region", "backend", "role", "state", "requests", "prefill", "decode", "sessions", "hits", "index")
    for name, region in status["regions"].items():
        if not region["backends"]:
            state = "up" if region["up"] else "unknown" if region["up"] is None else "down"
            table.add_row(name, region.get("url") or "-", region["kind"], _state(state), *["?"] * 6)
        for backend in region["backends"]:
            table.add_row(*_row(name, backend))
    where = f"region {status['region']}, {status['sessions']} sessions, homeport {status['version']}"
    parts: list[Table | Text] = [Text(where), table, Text(_savings(status["savings"]))]
    parts += [Text(f"degraded: {line}", style="yellow") for line in status["degraded"]]
    return Group(*parts)


def _row(region: str, backend: dict[str, Any]) -> list[str]:
    inflight = backend["inflight"]
    ratio = backend["hit_ratio"]
    return [
        region,
        backend["name"],
        backend["role"],
        _state(backend["state"]),
        *(_count(inflight[name]) for name in ("requests", "prefill_tokens", "decode_tokens")),
        _count(backend["sessions"]),
        "?" if ratio is None else f"{ratio:.0%}",
        backend["index"],
    ]


def _state(state: str) -> str:
    return f"[{_COLOURS.get(state, 'white')}]{state}[/]"


def _count(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _savings(savings: dict[str, Any]) -> str:
    share = savings["cached_share"]
    said = f"{_count(savings['requests'])} requests, {_count(savings['input_tokens'])} prompt tokens"
    said += ", cached share " + ("unknown" if share is None else f"{share:.1%}")
    if savings["saved_usd"] is not None:
        said += f", saved ${float(savings['saved_usd']):.4f} of ${float(savings['saved_usd']) + _spent(savings):.4f}"
    return said


def _spent(savings: dict[str, Any]) -> float:
    return float(savings["cost_usd"] or 0)
