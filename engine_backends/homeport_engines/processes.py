"""Child processes that never outlive their starter: each runs under a small guard (see guard.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")


class ManagedProcess:
    """One guarded command that writes its output, both streams, to ``log``.

    The starter's end closes the guard's pipe, whatever ended it; then the command is stopped too.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        grace_s: float = 10.0,
    ) -> None:
        """Start the command. ``env`` is added to this process's environment; ``grace_s``: from SIGTERM to SIGKILL."""
        self.name = name
        self.argv = tuple(argv)
        self.log = log
        self.grace_s = grace_s
        self._written_before = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), str(grace_s), *argv],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                cwd=cwd,
                start_new_session=True,  # Ctrl-C in the terminal is for the starter, who stops things in order
            )

    @property
    def pid(self) -> int:
        """The guard's process id; the command is its only child."""
        return self._guard.pid

    def poll(self) -> int | None:
        """The exit status (128 + signal number for a killed command), None while it runs."""
        status = self._guard.poll()
        if status is not None:
            self.ask_to_stop()  # closes the pipe
        return status

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end; raises subprocess.TimeoutExpired."""
        self._guard.wait(timeout_s)
        return self.poll() or 0

    def ask_to_stop(self) -> None:
        """Begin to stop (SIGTERM, after the grace SIGKILL) and return at once."""
        if self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()

    def kill(self) -> None:
        """End the command at once, with everything it started."""
        for pid in _children_of(self._guard.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.ask_to_stop()
        try:
            self.wait(5)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self.wait()

    def output(self) -> str:
        """What this run has written so far."""
        with self.log.open("rb") as file:
            file.seek(self._written_before)
            return file.read().decode("utf-8", "replace")

    def last_lines(self, count: int = 1) -> list[str]:
        """The last non-empty lines of this run's output."""
        with self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._written_before, end - 400 * max(count, 4)))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return [line.rstrip() for line in lines if line.strip()][-count:]


def stop_all(processes: Iterable[ManagedProcess]) -> None:
    """Stop all at the same time and wait until the last has ended."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.ask_to_stop()
    deadline_s = time.monotonic() + max((process.grace_s for process in running), default=0.0) + 3
    for process in running:
        try:
            process.wait(max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def _children_of(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]
    except OSError:
        return []
