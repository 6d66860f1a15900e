"""What a person sees while engines start: a table that lives on a terminal, plain lines in a log."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from homeport_proxy.local.supervisor import Part

LINE_EVERY_S = 15.0
LOOK_AT_LINES = 20
_PROCESS = r"(\(\w+ pid=\d+\) )?"
_LOG_PREFIX = re.compile(rf"^{_PROCESS}(INFO|WARNING|ERROR) \S+ \S+ (\[[\w.]+:\d+\] )?")
_MESSAGE = re.compile(rf"^{_PROCESS}((DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|[^\s/].*\b\d+%)")
"""A line of a log, or of a progress bar; what Python prints of a warning (a path, a line of code) is neither."""


class PlainDisplay:
    """A line when a part starts, when it is ready, and every 15 s in between."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._said: dict[str, str] = {}
        self._said_s = time.monotonic()

    def show(self, parts: list[Part]) -> None:
        due = time.monotonic() - self._said_s >= LINE_EVERY_S
        for part in parts:
            new = self._said.get(part.name) != part.state
            if new or (due and part.state == "starting"):
                self._said[part.name] = part.state
                self._said_s = time.monotonic()
                print(_line(part, with_log=not new), file=self._stream, flush=True)


class LiveDisplay:
    """One row a part."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, parts: list[Part]) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, justify="right")
        table.add_column(no_wrap=True, overflow="ellipsis")
        for part in parts:
            mark = {"starting": "[yellow]starting[/]", "ready": "[green]ready[/]", "ended": "[red]ended[/]"}[part.state]
            log = Text(
                last_message(part.process.last_lines(LOOK_AT_LINES)) if part.state == "starting" else "", style="dim"
            )
            table.add_row(_title(part), mark, f"{_seconds(part):.0f} s", log)
        self._live.update(table)


@contextmanager
def start_display(stream: TextIO) -> Iterator[PlainDisplay | LiveDisplay]:
    """The fitting kind for ``stream``."""
    console = Console(file=stream)
    if not console.is_terminal:
        yield PlainDisplay(stream)
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield LiveDisplay(live)


def _line(part: Part, *, with_log: bool) -> str:
    text = f"{_title(part)}: {part.state}, {_seconds(part):.0f} s"
    said = last_message(part.process.last_lines(LOOK_AT_LINES))[:160] if with_log else ""
    return f"{text}: {said}" if said else text


def _title(part: Part) -> str:
    return part.name if part.name == part.role else f"{part.name} ({part.role})"


def _seconds(part: Part) -> float:
    return time.monotonic() - part.started_s if part.ready_after_s is None else part.ready_after_s


def last_message(lines: Sequence[str]) -> str:
    """The newest of a log's lines that is a message, without its prefix; empty when there is none."""
    found = next((line for line in reversed(lines) if _MESSAGE.match(line)), "")
    return _LOG_PREFIX.sub("", found).strip()
