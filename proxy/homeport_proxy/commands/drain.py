"""`homeport drain NAME`: take a backend or region out without breaking its sessions."""

from __future__ import annotations

import argparse

from homeport_proxy.commands.ask import add_url, ask, quoted

HELP = "take a backend out without breaking its sessions"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("name", help="the backend's (or region's) name")
    parser.add_argument("--carry", action="store_true", help="hand its sessions' KV over where the engines can")
    parser.add_argument("--deadline", type=float, metavar="S", help="seconds its sessions may stay")
    add_url(parser)


def run(args: argparse.Namespace) -> int:
    """Ask the proxy to drain."""
    options: dict[str, object] = {"carry": args.carry}
    if args.deadline is not None:
        options["deadline_s"] = args.deadline
    answer = ask(args, f"backends/{quoted(args.name)}/drain", post=options)
    print(f"{answer['name']}: {answer['state']}{_note(answer)}")
    return 0


def _note(answer: dict[str, object]) -> str:
    return f" ({answer['note']})" if answer.get("note") else ""
