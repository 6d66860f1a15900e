"""`homeport check`: can this configuration work, and are the engines what it says?"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence

import yaml
from rich.console import Console
from rich.table import Table

from homeport_proxy import config as configuration
from homeport_proxy import lint
from homeport_proxy.config import Backend, Config, ConfigError
from homeport_proxy.discovery import discover_once
from homeport_proxy.lint import Finding, Seen

HELP = "validate a configuration and ask every engine in it"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the configuration file")
    parser.add_argument("--offline", action="store_true", help="look at the file only, ask no engine")
    parser.add_argument("--dump", action="store_true", help="print the effective configuration, without secrets")
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    parser.add_argument("--insecure", action="store_true", help="as for serve: it may be open to other machines")


def run(args: argparse.Namespace) -> int:
    """Check; 1 when there is any error."""
    try:
        config = configuration.load(args.config)
    except ConfigError as error:
        found = [lint.finding("error", line) for line in error.errors]
        _tell(found, [], {}, as_json=args.json, offline=True)
        return 1
    findings = lint.offline(config, insecure=args.insecure)
    # offline may be elsewhere than where the keys are
    findings += lint.unreadable(config, "warning" if args.offline else "error")
    backends: list[tuple[str, Backend]] = []
    seen: Mapping[str, Seen] = {}
    if args.offline:
        findings += lint.guesses(config)
    else:
        found, backends, seen = asyncio.run(_ask(config))
        findings += found
    if args.dump:
        yaml.safe_dump(configuration.dump(config), sys.stdout, sort_keys=False)
    _tell(findings, backends, seen, as_json=args.json, offline=args.offline, to_stderr=args.dump)
    return 1 if any(finding.level == "error" for finding in findings) else 0


async def _ask(config: Config) -> tuple[list[Finding], list[tuple[str, Backend]], Mapping[str, Seen]]:
    discovered, faults = await discover_once(config)
    backends = config.backends + discovered
    findings, seen = await lint.online(config, backends)
    return [Finding("error", where, text) for where, text in faults] + findings, backends, seen


def _tell(
    findings: Sequence[Finding],
    backends: Sequence[tuple[str, Backend]],
    seen: Mapping[str, Seen],
    *,
    as_json: bool,
    offline: bool,
    to_stderr: bool = False,
) -> None:
    errors = sum(finding.level == "error" for finding in findings)
    out = sys.stderr if to_stderr else sys.stdout
    if as_json:
        lines = [{"level": f.level, "where": f.where, "text": f.text} for f in findings]
        print(json.dumps({"ok": errors == 0, "findings": lines}), file=out)
        return
    if backends:
        Console(file=out, highlight=False).print(_table(backends, seen))
    for finding in sorted(findings, key=lambda f: f.level):
        print(finding, file=out if finding.level == "warning" else sys.stderr)
    warnings = len(findings) - errors
    if errors:
        print(f"{errors} error(s), {warnings} warning(s)", file=sys.stderr)
    else:
        asked = "no engine was asked" if offline else _answered(seen)
        print(f"ok: {asked}, {warnings} warning(s)", file=out)


def _answered(seen: Mapping[str, Seen]) -> str:
    confirmed = sum(answer.confirmed for answer in seen.values())
    if confirmed == len(seen):
        return f"{confirmed} backend(s) answered"
    return f"{confirmed} of {len(seen)} backends answered as configured"


def _table(backends: Sequence[tuple[str, Backend]], seen: Mapping[str, Seen]) -> Table:
    table = Table("region", "backend", "role", "engine", "kv", "models", "context", "answer")
    for region, backend in backends:
        answer = seen.get(backend.name) or Seen("not asked")
        served = answer.served
        table.add_row(
            region,
            backend.name,
            backend.role,
            _engine(backend, answer),
            backend.kv_transfer if backend.kv_transfer != "none" else backend.kv_store,
            ", ".join(sorted(served.models)) if served else "?",
            f"{served.max_model_len:,}" if served and served.max_model_len else "?",
            "[red]no[/]" if answer.fault else "[yellow]not as this engine[/]" if answer.stranger else "[green]yes[/]",
        )
    return table


def _engine(backend: Backend, answer: Seen) -> str:
    """The engine as configured; with its version, or a question mark where nothing confirms it."""
    if answer.version is not None:
        return f"{backend.engine} {answer.version}"
    return f"{backend.engine}?" if answer.served is None else backend.engine
