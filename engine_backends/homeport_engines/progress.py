"""Shows how an installation gets on: a bar where a person looks on, one plain line a step and every 15 s elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 15.0


class PlainProgress:
    """Lines for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._title = ""
        self._said_s = time.monotonic()

    def step(self, title: str) -> None:
        self._title = title
        self.say(f"{title} ...")

    def update(self, share: float, note: str) -> None:
        if time.monotonic() - self._said_s >= LINE_EVERY_S:
            self.say(f"{self._title}: {share:.0%} ({note})")

    def say(self, line: str) -> None:
        self._said_s = time.monotonic()
        print(line, file=self._stream, flush=True)


class BarProgress:
    """One bar a step, on a terminal."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def step(self, title: str) -> None:
        self.finish()
        self._task = self._bars.add_task(title, total=1.0, note="")

    def update(self, share: float, note: str) -> None:
        if self._task is not None:
            self._bars.update(self._task, completed=share, note=note)

    def say(self, line: str) -> None:
        self._bars.console.print(line, markup=False, highlight=False)

    def finish(self) -> None:
        """Fill the running step's bar."""
        self.update(1.0, "done")


@contextmanager
def install_progress(stream: TextIO) -> Iterator[PlainProgress | BarProgress]:
    """The fitting kind for ``stream``."""
    console = Console(file=stream)
    if not console.is_terminal:
        yield PlainProgress(stream)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:12}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        progress = BarProgress(bars)
        yield progress
        progress.finish()
