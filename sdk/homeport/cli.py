"""The `homeport` command: finds its subcommands by entry point and runs one.

A subcommand is a module with ``HELP`` (one line), ``configure(parser)`` and ``run(args) -> int``, registered in the
entry-point group ``homeport.commands``. It raises :class:`CommandError` for a failure the user can mend.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import InspectLoader
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
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
_SIGN = {"proxy": "aiohttp"}
"""A package by which an extra is seen to be installed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0 success, 1 failed, 2 bad usage)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = _parser(arguments)
        if not arguments:
            parser.print_help(sys.stderr)
            print("homeport: error: name a COMMAND", file=sys.stderr)
            return 2
        args = parser.parse_args(arguments)
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
        # only the wanted command's module is imported: `homeport explain` starts without aiohttp, the list with nothing
        if name == wanted:
            _add(commands, points[name])
        elif wanted in points:
            commands.add_parser(name)
        elif (summary := _summary(points[name])) is not None:
            commands.add_parser(name, help=summary)
    return parser


def _summary(point: EntryPoint) -> str | None:
    """The command's line in the list; None when metadata newer or older than the code names it."""
    extra = _EXTRA.get(point.module.partition(".")[0])
    if extra is not None and find_spec(_SIGN[extra]) is None:
        return f"needs pip install 'homeport[{extra}]'"
    try:
        found = find_spec(point.module)
    except ModuleNotFoundError:
        return None
    if found is None:
        return None
    source = found.loader.get_source(point.module) if isinstance(found.loader, InspectLoader) else None
    return _help_of(source or "") or cast("Command", point.load()).HELP


def _help_of(source: str) -> str | None:
    """The text of ``HELP`` as the source says it."""
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="HELP")], value=ast.Constant(value=str(text))):
                return text
    return None


def _add(commands: argparse._SubParsersAction[argparse.ArgumentParser], point: EntryPoint) -> None:
    try:
        module = cast("Command", point.load())
    except ModuleNotFoundError as error:
        if error.name == point.module:
            return  # metadata newer or older than the code: leave the command out
        raise _explained(error, point) from None
    parser = commands.add_parser(point.name, help=module.HELP, description=module.HELP)
    module.configure(parser)
    parser.set_defaults(run=partial(_run, module, point))


def _run(module: Command, point: EntryPoint, args: argparse.Namespace) -> int:
    try:
        return module.run(args)
    except ModuleNotFoundError as error:  # commands import what only running needs when they run
        raise _explained(error, point) from None


def _explained(error: ModuleNotFoundError, point: EntryPoint) -> Exception:
    """What to install for the package that is missing; the error itself when no extra brings it."""
    extra = _EXTRA.get(point.module.partition(".")[0])
    package = error.name or "a package"
    if extra is None or package.startswith("homeport"):
        return error
    return CommandError(f"`{point.name}` needs {package}; install it with: pip install 'homeport[{extra}]'")


if __name__ == "__main__":
    sys.exit(main())
