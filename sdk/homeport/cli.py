"""The `homeport` command: finds its subcommands by entry point and runs one.

A subcommand is a module with ``HELP`` (one line), ``configure(parser)`` and ``run(args) -> int``, registered in the
entry-point group ``homeport.commands``. It raises :class:`CommandError` for a failure the user can mend.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, cast

from homeport._version import __version__


class CommandError(Exception):
    """A failure with one readable line that says what is wrong and what to do; exit status 1."""


class Command(Protocol):
    """The shape of a subcommand module."""

    HELP: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


_EXTRA = {"homeport_proxy": "proxy", "homeport_engines": "proxy"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0 success, 1 failed, 2 bad usage)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser(arguments).parse_args(arguments)
    try:
        return cast("int", args.run(args))
    except CommandError as error:
        print(f"homeport: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # the reader went away (`homeport ... | head`): nothing is wrong, but the interpreter must not flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="homeport", description="Keeps agent sessions at the replica where their KV cache lies."
    )
    parser.add_argument("--version", action="version", version=f"homeport {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    points = {point.name: point for point in entry_points(group="homeport.commands")}
    for name in sorted(points):
        # only the wanted command's module is imported in full: `homeport explain` starts without aiohttp
        if wanted in points and name != wanted:
            commands.add_parser(name)
        else:
            _add(commands, points[name])
    return parser


def _add(commands: argparse._SubParsersAction[argparse.ArgumentParser], point: EntryPoint) -> None:
    try:
        module = cast("Command", point.load())
    except ModuleNotFoundError as error:
        root = point.value.partition(".")[0]
        extra = _EXTRA.get(root)
        if error.name == point.module:
            return  # metadata newer or older than the code: leave the command out
        if extra is None or (error.name or "").startswith("homeport"):
            raise
        missing = commands.add_parser(point.name, help=f"needs pip install 'homeport[{extra}]'", add_help=False)
        missing.add_argument("rest", nargs=argparse.REMAINDER)
        missing.set_defaults(run=_needs_extra(point.name, extra, error.name or "a package"))
        return
    parser = commands.add_parser(point.name, help=module.HELP, description=module.HELP)
    module.configure(parser)
    parser.set_defaults(run=module.run)


def _needs_extra(command: str, extra: str, package: str) -> Callable[[argparse.Namespace], int]:
    def run(_: argparse.Namespace) -> int:
        raise CommandError(f"`{command}` needs {package}; install it with: pip install 'homeport[{extra}]'")

    return run


if __name__ == "__main__":
    sys.exit(main())
