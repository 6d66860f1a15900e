"""`homeport wrap -- COMMAND`: run an agent harness pointed at the local proxy; afterwards say what the cache did."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from homeport.cli import CommandError
from homeport.fingerprint import JsonValue
from homeport.overlays import Model, Overlay, Target, overlay
from homeport.wrapped import WrapReport, report_of

HELP = "run a harness pointed at the local proxy, and print its cache report when it ends"

_PATIENCE_S = 5.0
_CLOCK_SLACK_S = 2.0
"""File systems round times."""
_DECISIONS = 1000
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--url", default=None, help="the proxy (default: $HOMEPORT_URL, else http://127.0.0.1:8080)")
    parser.add_argument("--model", default=None, help="the model to use (default: the first that the proxy serves)")
    parser.add_argument("--no-report", action="store_true", help="print no report at the end")
    parser.add_argument("--json", action="store_true", help="print the report as one line of JSON (to stderr)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the harness and its arguments")


def run(args: argparse.Namespace) -> int:
    """Run the harness; its exit status is ours (128 + n when signal n ended it)."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise CommandError("say what to run, as in: homeport wrap -- opencode run 'hello'")
    target = _target(args.url or os.environ.get("HOMEPORT_URL") or "http://127.0.0.1:8080", args.model)
    began_s = time.time()
    with tempfile.TemporaryDirectory(prefix="homeport-wrap-") as folder:
        plan = overlay(command, target, os.environ, Path(folder))
        _lay_out(plan, Path(folder))
        for note in plan.notes:
            print(f"homeport: {note}", file=sys.stderr)
        status = _child(plan)
    if not args.no_report and _report(target, began_s, as_json=args.json) and not _loaded(plan, began_s):
        print(f"homeport: the {plan.harness} plugin was not loaded; see why: opencode-homeport check", file=sys.stderr)
    return status


def _loaded(plan: Overlay, began_s: float) -> bool:
    """Whether the harness's plugin left its sign; True for a harness without one."""
    if plan.sign is None:
        return True
    try:
        return plan.sign.stat().st_mtime >= began_s - _CLOCK_SLACK_S
    except OSError:
        return False


def _target(url: str, model: str | None) -> Target:
    url = url.rstrip("/").removesuffix("/v1")
    key = os.environ.get("HOMEPORT_API_KEY") or None
    try:
        answer = _get(f"{url}/v1/models", key)
    except urllib.error.HTTPError as error:
        hint = "; set HOMEPORT_API_KEY" if error.code == 401 else ""
        raise CommandError(f"the proxy at {url} answered {error.code} to /v1/models{hint}") from None
    except (OSError, ValueError) as error:
        raise CommandError(
            f"no proxy answers at {url} ({error}); start one with `homeport up`, or give --url"
        ) from None
    models = tuple(_models(answer))
    if not models and not model:
        raise CommandError(f"the proxy at {url} serves no model at the moment; see `homeport status`")
    return Target(url, models or (Model(str(model)),), model or models[0].name, key)


def _models(answer: JsonValue) -> Iterator[Model]:
    listed = answer.get("data") if isinstance(answer, dict) else None
    for entry in listed if isinstance(listed, list) else []:
        name = entry.get("id") if isinstance(entry, dict) else None
        if isinstance(entry, dict) and isinstance(name, str) and "*" not in name:
            length = entry.get("max_model_len")
            yield Model(name, length if isinstance(length, int) else None)


def _get(url: str, key: str | None) -> JsonValue:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
        document: JsonValue = json.load(answer)
        return document


def _lay_out(plan: Overlay, folder: Path) -> None:
    for kept in plan.kept:
        kept.mkdir(parents=True, exist_ok=True)
    for name, text in plan.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for name, original in plan.links.items():
        (folder / name).symlink_to(original)


def _child(plan: Overlay) -> int:
    environment = {**os.environ, **plan.environment}
    children: list[subprocess.Popen[bytes]] = []
    with _signals_to(children):
        try:
            # the same process group and terminal: Ctrl-C reaches the harness by itself, a TUI works as without us
            children.append(subprocess.Popen(plan.command, env=environment))
        except FileNotFoundError:
            raise CommandError(f"there is no program {plan.command[0]!r}; is it installed and on the PATH?") from None
        except OSError as error:
            raise CommandError(f"cannot run {plan.command[0]!r}: {error.strerror}") from None
        status = children[0].wait()
    return status if status >= 0 else 128 - status


@contextmanager
def _signals_to(children: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Signals are the child's business: Ctrl-C it gets from the terminal, others are handed on."""

    def forward(number: int, _: FrameType | None) -> None:
        for child in children:
            child.send_signal(number)

    def ignore(_: int, __: FrameType | None) -> None:
        """Not SIG_IGN, which a child would inherit."""

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    before |= {number: signal.signal(number, ignore) for number in (signal.SIGINT, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _report(target: Target, began_s: float, *, as_json: bool) -> bool:
    """Print the report; whether any request came."""
    admin_key = os.environ.get("HOMEPORT_ADMIN_KEY") or target.key
    try:
        answer = _get(f"{target.url}/homeport/v1/decisions?limit={_DECISIONS}", admin_key)
    except (OSError, ValueError) as error:
        print(f"homeport: no report: {target.url} did not tell its decisions ({error})", file=sys.stderr)
        return False
    listed = answer.get("decisions") if isinstance(answer, dict) else None
    report: WrapReport = report_of(_records(listed), began_s)
    print(json.dumps(report.to_dict()) if as_json else str(report), file=sys.stderr)
    return bool(report.sessions)


def _records(listed: JsonValue) -> Sequence[Mapping[str, JsonValue]]:
    return [record for record in listed if isinstance(record, dict)] if isinstance(listed, list) else []
