"""Runs one command and never leaves anything of it behind: `python -I -S guard.py GRACE_S COMMAND...`.

The guard's standard input is a pipe whose other end the starter holds. When the pipe closes (the starter ended, even
by SIGKILL) or on SIGTERM, the command gets SIGTERM, and GRACE_S seconds later SIGKILL. Whenever the command has ended,
what it left in its process group or, on Linux, anywhere below the guard is killed too. The exit status is the
command's (128 + signal number when a signal ended it). Standard library only, so that it starts in some 20 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from types import FrameType

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(argv: list[str]) -> int:
    """Guard ``argv[1:]`` with a grace of ``argv[0]`` seconds; returns the exit status to use."""
    grace_s, command = float(argv[0]), argv[1:]
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    stopping: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            stopping.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, note)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    child = _start(command)
    try:
        return _watch(child, woken, stopping, grace_s)
    finally:
        _kill_rest(child)


def _start(command: list[str]) -> int:
    guard = os.getpid()
    child = os.fork()
    if child:
        with contextlib.suppress(OSError):
            os.setpgid(child, child)  # here too: nobody may signal the group before it exists
        return child
    os.setpgid(0, 0)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _watch(child: int, woken: int, stopping: list[int], grace_s: float) -> int:
    watched = [0, woken]
    kill_at: float | None = None
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        if stopping and kill_at is None:
            kill_at = time.monotonic() + grace_s
            _signal(child, signal.SIGTERM)
        if kill_at is not None and time.monotonic() >= kill_at:
            _signal(-child, signal.SIGKILL)
        ready, _, _ = select.select(watched, [], [], None if kill_at is None else 0.2)
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
        if 0 in ready and not os.read(0, 4096):
            watched = [woken]
            stopping.append(signal.SIGHUP)
        _reap_others(child)


def _reap_others(child: int) -> None:
    """Collect orphans that were handed to the guard; the command itself is left for the next look."""
    for orphan in _children():
        if orphan != child:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan, os.WNOHANG)


def _kill_rest(child: int) -> None:
    _signal(-child, signal.SIGKILL)
    for _ in range(50):
        rest = _children()
        if not rest:
            return
        for orphan in rest:
            _signal(orphan, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan, os.WNOHANG)
        time.sleep(0.02)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def _signal(target: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(target, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
