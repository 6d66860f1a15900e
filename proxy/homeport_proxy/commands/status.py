"""`homeport status`: a running proxy at a glance."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from homeport.words import plural
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
        console = Console(highlight=False)
        # into a pipe nothing is cut: whoever reads it looks for whole names
        console.print(render(status), width=None if console.is_terminal else 200)
    return 0


def render(status: dict[str, Any]) -> Group:
    """Backends by region, savings and what is degraded; fits 80 columns."""
    where = f"homeport {status['version']}, region {status['region']}: {_number(status['sessions'], 'session')}"
    parts: list[Table | Text] = [Text(where)]
    for name, region in status["regions"].items():
        if len(status["regions"]) > 1 or not region["backends"]:
            parts.append(Text(_region(name, region)))
        if region["backends"]:
            parts.append(_table(region["backends"]))
    parts.append(Text(_savings(status["savings"])))
    parts += [Text(f"degraded: {line}", style="yellow") for line in status["degraded"]]
    return Group(*parts)


def _region(name: str, region: dict[str, Any]) -> str:
    state = "unknown" if region["up"] is None else "up" if region["up"] else "down"
    rtt = "" if not region["rtt_ms"] else f", {region['rtt_ms']:.0f} ms away"
    return f"region {name} ({region['kind']}): {'draining' if region['draining'] else state}{rtt}"


def _table(backends: list[dict[str, Any]]) -> Table:
    table = Table(
        *("backend", "role", "state", "req", "prefill", "decode", "sess", "hits", "index"),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in table.columns:
        column.no_wrap = True
        column.justify = "right" if column.header in ("req", "prefill", "decode", "sess", "hits") else "left"
    for backend in backends:
        table.add_row(*_row(backend))
    return table


def _row(backend: dict[str, Any]) -> list[str]:
    inflight = backend["inflight"]
    ratio = backend["hit_ratio"]
    return [
        backend["name"],
        backend["role"],
        _state(backend["state"]),
        *(_count(inflight[name]) for name in ("requests", "prefill_tokens", "decode_tokens")),
        _count(backend["sessions"]),
        "?" if ratio is None else f"{ratio:.0%}",
        backend["index"].replace("approximate", "approx"),
    ]


def _state(state: str) -> str:
    return f"[{_COLOURS.get(state, 'white')}]{state}[/]"


def _count(value: int | None) -> str:
    if value is None:
        return "?"
    if value < 10_000:
        return f"{value:,}"
    return f"{value / 1e3:.0f}k" if value < 1_000_000 else f"{value / 1e6:.1f}M"


def _number(value: int | None, thing: str) -> str:
    return f"{_count(value)} {plural(thing, value)}"


def _savings(savings: dict[str, Any]) -> str:
    share = savings["cached_share"]
    # the ledger has no line of a request that was refused or failed: no tokens of it were reported
    said = f"{_number(savings['requests'], 'answered request')}, {_number(savings['input_tokens'], 'prompt token')}"
    said += ", cached share " + ("unknown" if share is None else f"{share:.1%}")
    if savings["saved_usd"] is not None:
        said += f", saved ${float(savings['saved_usd']):.4f} of ${float(savings['saved_usd']) + _spent(savings):.4f}"
    return said


def _spent(savings: dict[str, Any]) -> float:
    return float(savings["cost_usd"] or 0)
