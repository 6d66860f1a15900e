"""Work for the disk, done by a thread of its own: the event loop hands items over and never waits."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class BackgroundWriter(Generic[T]):
    """Gives items to ``write`` one after another. At most ``max_pending`` wait; further ones are dropped and counted.

    ``finish`` is called when the last is written (to close the file). ``fault`` says the last failure of ``write`` in
    words, None while all is well.
    """

    def __init__(
        self, name: str, write: Callable[[T], None], finish: Callable[[], None], *, max_pending: int = 1024
    ) -> None:
        self.dropped = 0
        self.fault: str | None = None
        self._write = write
        self._finish = finish
        self._queue: queue.Queue[T | None] = queue.Queue(max_pending)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Hand one over; returns at once."""
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits, finish, and end the thread. Blocks."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def degraded(self, what: str) -> list[str]:
        """What went wrong, one sentence each."""
        said = [f"{what}: {self.fault}"] if self.fault else []
        return said + ([f"{what}: {self.dropped} dropped, the disk is too slow"] if self.dropped else [])

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._write(item)
                self.fault = None
            except Exception as error:  # a full disk must not end the thread: it may be emptied
                if self.fault is None:
                    log.error("%s: %s", self._thread.name, error)
                self.fault = f"{type(error).__name__}: {error}"
        self._finish()
