"""The ledger: one line per request in SQLite, written by a thread of its own so that no caller waits for the disk.

Several processes may write one file (WAL); what was flushed survives a kill; a request id counts once; the oldest lines
make room when the ledger is full, and how many went is remembered and said. Table ``ledger`` has one column per name in
:data:`COLUMNS`: ``ts`` in Unix seconds, tokens as integers, dollars as exact decimal text, NULL for what is not known.
Table ``about`` holds what was pruned.
"""

from __future__ import annotations

import atexit
import contextlib
import csv
import json
import logging
import os
import queue
import sqlite3
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from homeport import ledger_store as store
from homeport.books import COLUMNS, Entry, Totals
from homeport.budgets import Budget, Spending
from homeport.ledger_store import GROUPS, GroupBy
from homeport.prices import PriceBook
from homeport.usage import Usage

__all__ = ["COLUMNS", "Budget", "Entry", "GroupBy", "Ledger", "Totals"]

_log = logging.getLogger("homeport.ledger")

_BATCH_ROWS = 2_000

# A child must not inherit an open database: it would take SQLite's record of its parent's locks for its own, and its
# lines would be lost (https://www.sqlite.org/howtocorrupt.html). So every connection is closed before a fork.
_between_forks = threading.RLock()
_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _before_fork() -> None:
    _between_forks.acquire()
    for ledger in list(_ledgers):
        ledger._put_down()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_between_forks.release, after_in_child=_between_forks.release
    )


@dataclass(frozen=True, slots=True)
class _Mark:
    """Stands in the queue behind what was added before it: set once that is on disk; ``last`` ends the writer."""

    done: threading.Event
    last: bool = False


class Ledger:
    """The books. ``Ledger()`` keeps them in memory, ``Ledger(path)`` in a file that other processes may share.

    ``prices``: what :meth:`record` prices requests with. ``max_rows`` and ``max_bytes`` bound the ledger: the oldest
    lines go first. ``max_pending`` bounds the lines that wait for the disk; beyond it they are dropped and counted in
    :attr:`dropped_rows`. Adding never blocks, and never raises for a disk at fault: :attr:`error` says the last one.
    Raises sqlite3.Error or OSError at once for a path that cannot be used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        prices: PriceBook | None = None,
        budgets: Iterable[Budget] = (),
        max_rows: int = 1_000_000,
        max_bytes: int = 256 * 1024 * 1024,
        max_pending: int = 100_000,
        flush_interval_s: float = 0.2,
    ) -> None:
        if max_rows < 1 or max_bytes < 65_536:
            raise ValueError("max_rows must be at least 1 and max_bytes at least 65536")
        self.path = None if path is None else Path(path)
        self.dropped_rows = 0
        self.error: str | None = None
        self.prices = prices
        self._max_rows, self._max_bytes, self._max_pending = max_rows, max_bytes, max_pending
        self._interval_s = flush_interval_s
        self._budgets = [Spending(budget) for budget in budgets]
        self._queue: queue.SimpleQueue[Entry | _Mark] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None
        self._writer_pid = 0
        self._closed = False
        # a database in memory is one connection, shared under a lock; a file gets one per use, and SQLite's own locks
        self._memory: sqlite3.Connection | None = None
        self._writing: sqlite3.Connection | None = None
        self._gate: contextlib.AbstractContextManager[object] = (
            threading.RLock() if path is None else contextlib.nullcontext()
        )
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path is None:
            self._memory = store.connect(None)
        else:
            with self._connection():
                pass  # made, or found to be unusable, now
        with _between_forks:
            _ledgers.add(self)

    def record(
        self,
        usage: Usage,
        *,
        model: str,
        session: str = "",
        tenant: str = "",
        backend: str = "",
        request_id: str | None = None,
        ts: float | None = None,
        cause: str | None = None,
        lost_tokens: int | None = None,
        provider: str | None = None,
        url: str | None = None,
    ) -> Entry:
        """Price one request and add it; returns the line. ``provider`` or ``url`` says who served the model, see
        :meth:`PriceBook.price`; ``request_id`` None mints one; ``ts`` is in Unix seconds, None: now."""
        when = time.time() if ts is None else ts
        cost = self.prices.cost(usage, model, provider=provider, url=url, at=when) if self.prices else None
        entry = Entry(
            request_id=request_id or uuid.uuid4().hex,
            model=model,
            ts=when,
            tenant=tenant,
            session=session,
            backend=backend,
            input_tokens=usage.input_tokens,
            cached_tokens=usage.cached_tokens,
            cache_write_tokens=usage.cache_write_tokens,
            output_tokens=usage.output_tokens,
            cost_usd=cost.total_usd if cost else None,
            saved_usd=cost.saved_usd if cost else None,
            cause=cause,
            lost_tokens=lost_tokens,
        )
        self.add(entry)
        return entry

    def add(self, entry: Entry) -> None:
        """Take one line; returns at once. A tenant's request id that is already there is not counted again.

        Raises ValueError when the ledger is closed."""
        if self._closed:
            raise ValueError("the ledger is closed")
        self._start()
        if self._queue.qsize() >= self._max_pending:
            if self.dropped_rows == 0:
                _log.warning("ledger: %d lines wait for the disk; further ones are dropped", self._max_pending)
            self.dropped_rows += 1
            return
        self._queue.put(entry)

    def add_budget(self, budget: Budget) -> None:
        """Watch one more budget from the next line on; what was spent before in its period counts."""
        with self._lock:
            self._budgets.append(Spending(budget))

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until what was added is on disk; False when that took longer than ``timeout_s``. Blocks."""
        return self._mark(last=False, timeout_s=timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what is pending and stop the writer; harmless when closed already. Blocks."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._mark(last=True, timeout_s=timeout_s)
        if self._writer is not None and self._writer_pid == os.getpid():
            self._writer.join(timeout_s)
        if self._memory is not None:
            with self._gate:
                self._memory.close()
        atexit.unregister(self.close)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rows(
        self,
        *,
        tenant: str | None = None,
        session: str | None = None,
        model: str | None = None,
        since: float | None = None,
        until: float | None = None,
        limit: int | None = None,
    ) -> list[Entry]:
        """The lines that match, oldest first; with ``limit`` the newest that many. Times in Unix seconds. Blocks."""
        condition, values = store.where(tenant=tenant, session=session, model=model, since=since, until=until)
        with self._reading() as connection:
            return list(store.select(connection, condition, values, limit))

    def totals(
        self,
        by: Sequence[GroupBy] = (),
        *,
        tenant: str | None = None,
        session: str | None = None,
        model: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> list[Totals]:
        """Sums by group, in the order of the groups' values; without ``by`` one sum over all. Blocks.

        Raises ValueError that names a group which does not exist."""
        unknown = [name for name in by if name not in GROUPS]
        if unknown:
            raise ValueError(f"cannot group by {unknown[0]!r}; groups are {', '.join(GROUPS)}")
        condition, values = store.where(tenant=tenant, session=session, model=model, since=since, until=until)
        with self._reading() as connection:
            return store.totals(connection, by, condition, values)

    def export(self, to: TextIO, form: Literal["jsonl", "csv"] = "jsonl") -> int:
        """Write every line to ``to``, oldest first; returns how many. Blocks.

        CSV: a header, one type per column, nothing for what is not known: pandas, DuckDB and pyarrow turn it into
        Parquet as it is."""
        if form not in ("jsonl", "csv"):
            raise ValueError(f"form must be jsonl or csv, not {form!r}")
        table = csv.DictWriter(to, COLUMNS, lineterminator="\n")
        if form == "csv":
            table.writeheader()
        written = 0
        with self._reading() as connection:
            for entry in store.select(connection, "", (), None):
                written += 1
                if form == "csv":
                    table.writerow(entry.to_dict())
                else:
                    to.write(json.dumps(entry.to_dict(), ensure_ascii=False) + "\n")
        return written

    @property
    def pruned_rows(self) -> int:
        """How many lines have made room for newer ones since the ledger began. Blocks."""
        with self._reading() as connection:
            return int(store.about(connection, "pruned_rows") or 0)

    @property
    def pruned_until(self) -> float | None:
        """Up to when lines were pruned, in Unix seconds: sums that reach further back are not complete. Blocks."""
        with self._reading() as connection:
            until = store.about(connection, "pruned_until")
        return None if until is None else float(until)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        self.flush()
        with self._connection() as connection:
            yield connection

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        if self._memory is not None:
            with self._gate:
                yield self._memory
        else:
            with _between_forks, contextlib.closing(store.connect(self.path)) as connection:
                yield connection

    def _put_down(self) -> None:
        """Close the writer's connection; its next batch opens another."""
        if self._writing is not None:
            self._writing.close()
            self._writing = None

    def _start(self) -> None:
        """See that this process has a writer: none yet, or we are a fork and the parent's stayed behind."""
        if self._writer_pid == os.getpid():
            return
        with self._lock:
            if self._writer_pid == os.getpid():
                return
            if self._writer is None:
                atexit.register(self.close)  # a daemon thread would lose its last batch
            else:
                self._queue = queue.SimpleQueue()  # what was pending is the parent's to write
            self._writer = threading.Thread(target=self._write, name="homeport-ledger", daemon=True)
            self._writer.start()
            self._writer_pid = os.getpid()

    def _mark(self, *, last: bool, timeout_s: float) -> bool:
        if self._writer_pid != os.getpid() or self._writer is None or not self._writer.is_alive():
            return True
        mark = _Mark(threading.Event(), last)
        self._queue.put(mark)
        return mark.done.wait(timeout_s)

    def _write(self) -> None:
        mark: _Mark | None = None
        while mark is None or not mark.last:
            batch, mark = self._gather()
            try:
                self._store(batch)
            except Exception as error:  # the books must not take the program down with them
                self.error = f"{type(error).__name__}: {error}"
                self.dropped_rows += len(batch)
                _log.warning("ledger: %d lines could not be written: %s", len(batch), self.error)
            else:
                self._watch(batch)
            if mark is not None and mark.last:
                with _between_forks:
                    self._put_down()
            if mark is not None:
                mark.done.set()

    def _gather(self) -> tuple[list[Entry], _Mark | None]:
        """One batch: waits for the first line, then as long as the flush interval for more, or up to a mark."""
        batch: list[Entry] = []
        deadline_s: float | None = None
        while len(batch) < _BATCH_ROWS:
            try:
                item = self._queue.get(timeout=None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(item, _Mark):
                return batch, item
            batch.append(item)
            deadline_s = deadline_s or time.monotonic() + self._interval_s
        return batch, None

    def _store(self, batch: Sequence[Entry]) -> None:
        if batch:
            with self._writable() as connection:
                store.insert(connection, batch, self._max_rows, self._max_bytes)

    def _watch(self, batch: Sequence[Entry]) -> None:
        """See whether the batch reached a budget. A callback is called with nothing held: it may fork, or use this
        ledger."""
        with self._lock:
            budgets = list(self._budgets) if batch else []
        for spending in budgets:
            try:
                with self._writable() as connection:
                    reached = spending.update(connection)
                if reached:
                    spending.tell()
            except Exception:  # the lines are stored all the same
                _log.exception("ledger: a budget failed")

    @contextlib.contextmanager
    def _writable(self) -> Iterator[sqlite3.Connection]:
        """The writer's connection, which no fork closes meanwhile."""
        with self._gate, _between_forks:
            connection = self._memory or self._writing
            if connection is None:
                connection = self._writing = store.connect(self.path)
            yield connection
