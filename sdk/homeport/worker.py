"""Work that nobody waits for: one daemon thread takes it in order, so that books never delay an event loop."""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from homeport.failures import failed

MAX_PENDING = 256
"""Beyond so many pieces of work the caller does it itself: back-pressure, and nothing is lost."""


@dataclass(slots=True)
class _Job:
    work: Callable[[], None]
    done: threading.Event = field(default_factory=threading.Event)


class Worker:
    """Runs work in the order it was given. Starts with the first piece, again after a fork, and is drained at exit."""

    def __init__(self, name: str, max_pending: int = MAX_PENDING) -> None:
        self._name = name
        self._max_pending = max_pending
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._pid = 0
        atexit.register(self.drain, 2.0)

    def do(self, work: Callable[[], None]) -> None:
        """Have ``work`` done soon; what it raises is counted as a failure of ``books``."""
        if self._queue.qsize() >= self._max_pending:
            _attempt(work)
            return
        self._start()
        self._queue.put(_Job(work))

    def drain(self, timeout_s: float = 30.0) -> bool:
        """Wait until what was given so far is done; False when that took longer than ``timeout_s``. Blocks."""
        if self._pid != os.getpid() or threading.current_thread().name == self._name:
            return True
        last = _Job(lambda: None)
        self._queue.put(last)
        return last.done.wait(timeout_s)

    def _start(self) -> None:
        if self._pid == os.getpid():
            return
        with self._lock:
            if self._pid != os.getpid():
                if self._pid:
                    self._queue = queue.SimpleQueue()  # a forked child: the parent does what it had pending
                threading.Thread(target=self._work, args=(self._queue,), name=self._name, daemon=True).start()
                self._pid = os.getpid()

    def _work(self, jobs: queue.SimpleQueue[_Job]) -> None:
        while True:
            job = jobs.get()
            try:
                _attempt(job.work)
            except Exception as error:  # the thread outlives everything
                failed("books", error)
            job.done.set()


def _attempt(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:
        failed("books", error)
