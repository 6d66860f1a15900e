"""`homeport undrain NAME`: take a drained backend or region back into service."""

from __future__ import annotations

import argparse

from homeport_proxy.commands.ask import add_url, ask, quoted

HELP = "take a drained backend back into service"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("name", help="the backend's (or region's) name")
    add_url(parser)


def run(args: argparse.Namespace) -> int:
    """Ask the proxy to undrain."""
    answer = ask(args, f"backends/{quoted(args.name)}/undrain", post={})
    print(f"{answer['name']}: {answer['state']}")
    return 0
