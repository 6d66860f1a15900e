"""How the ledger lies in SQLite: schema, connections, lines to rows and back; only :mod:`homeport.ledger` uses it."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from operator import attrgetter
from pathlib import Path
from typing import Literal

from homeport.books import COLUMNS, Entry, Totals, Value, plain

_log = logging.getLogger("homeport.ledger")

GroupBy = Literal["tenant", "model", "day", "session", "backend", "cause"]
"""What totals can be grouped by; ``day`` is the UTC date."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS ledger (
    ts REAL NOT NULL,
    tenant TEXT NOT NULL,
    session TEXT NOT NULL,
    request_id TEXT NOT NULL,
    model TEXT NOT NULL,
    backend TEXT NOT NULL,
    input_tokens INTEGER,
    cached_tokens INTEGER,
    cache_write_tokens INTEGER,
    output_tokens INTEGER,
    cost_usd TEXT,
    saved_usd TEXT,
    cause TEXT,
    lost_tokens INTEGER
);
CREATE UNIQUE INDEX IF NOT EXISTS ledger_request ON ledger (request_id, tenant);
CREATE INDEX IF NOT EXISTS ledger_ts ON ledger (ts);
CREATE INDEX IF NOT EXISTS ledger_session ON ledger (session);
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""

_INSERT = f"INSERT INTO ledger ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))}) ON CONFLICT DO NOTHING"

_FIELDS = attrgetter(*COLUMNS)

GROUPS: dict[str, str] = {
    "tenant": "tenant",
    "model": "model",
    "day": "date(ts, 'unixepoch')",
    "session": "session",
    "backend": "backend",
    "cause": "cause",
}

_AGGREGATES = {
    "requests": "count(*)",
    "input_tokens": "sum(input_tokens)",
    "cached_tokens": "sum(cached_tokens)",
    "measured_input_tokens": "sum(CASE WHEN cached_tokens IS NOT NULL THEN input_tokens END)",
    "cache_write_tokens": "sum(cache_write_tokens)",
    "output_tokens": "sum(output_tokens)",
    "lost_tokens": "sum(lost_tokens)",
    "cost_usd": "decimal_sum(cost_usd)",
    "saved_usd": "decimal_sum(saved_usd)",
    "unreported_requests": "count(*) - count(cached_tokens)",
    "unpriced_requests": "count(*) - count(cost_usd)",
}
"""How each of the totals is asked for."""


class _DecimalSum:
    """SQLite aggregate: the exact sum of decimal texts; NULL when every one is NULL."""

    def __init__(self) -> None:
        self._sum: Decimal | None = None

    def step(self, value: object) -> None:
        if value is not None:
            with contextlib.suppress(InvalidOperation):  # a line another program wrote
                self._sum = (self._sum or Decimal(0)) + Decimal(str(value))

    def finalize(self) -> str | None:
        return None if self._sum is None else format(self._sum, "f")


def connect(path: Path | None) -> sqlite3.Connection:
    """A connection to the ledger at ``path`` (None: a new one in memory), its tables in place."""
    connection = sqlite3.connect(
        ":memory:" if path is None else path, timeout=30.0, check_same_thread=False, isolation_level=None
    )
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA journal_size_limit = 8388608")
        connection.create_aggregate("decimal_sum", 1, _DecimalSum)  # type: ignore[arg-type]  # typeshed wants int or float steps
        connection.executescript(_SCHEMA)
    except BaseException:
        connection.close()
        raise
    return connection


def insert(connection: sqlite3.Connection, entries: Sequence[Entry], max_rows: int, max_bytes: int) -> None:
    """Add lines in one transaction, leaving out request ids that are there already, and prune what is too much."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(_INSERT, [_row(entry) for entry in entries])
        _prune(connection, max_rows, max_bytes)


def _row(entry: Entry) -> tuple[Value, ...]:
    row: tuple[Value, ...] = _FIELDS(entry)
    # only dollars are no value of SQLite's
    return row if entry.cost_usd is None and entry.saved_usd is None else tuple([plain(value) for value in row])


def _prune(connection: sqlite3.Connection, max_rows: int, max_bytes: int) -> None:
    # lines go from the old end only, so first and last rowid give the count without a scan
    first, last = connection.execute("SELECT min(rowid), max(rowid) FROM ledger").fetchone()
    rows = 0 if last is None else last - first + 1
    surplus = max(rows - max_rows, 1 if _used_bytes(connection) > max_bytes else 0)
    if surplus <= 0 or rows <= 1:
        return
    # a tenth more than needed: not again with each of the next lines
    upto = min(last, first + surplus + min(rows, max_rows) // 10)
    (until,) = connection.execute("SELECT max(ts) FROM ledger WHERE rowid < ?", (upto,)).fetchone()
    gone = connection.execute("DELETE FROM ledger WHERE rowid < ?", (upto,)).rowcount
    until = max(until or 0.0, float(about(connection, "pruned_until") or 0.0))
    pairs = [("pruned_rows", str(int(about(connection, "pruned_rows") or 0) + gone)), ("pruned_until", repr(until))]
    connection.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", pairs)
    moment = datetime.fromtimestamp(until, UTC).isoformat(timespec="seconds")
    _log.warning("ledger: full, the oldest %d lines (until %s) made room", gone, moment)


def select(
    connection: sqlite3.Connection, condition: str, values: Sequence[Value], limit: int | None
) -> Iterator[Entry]:
    """The lines that match, oldest first; with ``limit`` the newest that many."""
    names = ", ".join(COLUMNS)
    query = f"SELECT {names} FROM ledger{condition} ORDER BY ts, rowid"
    if limit is not None:
        newest = f"SELECT {names}, rowid AS id FROM ledger{condition} ORDER BY ts DESC, rowid DESC LIMIT {limit:d}"
        query = f"SELECT {names} FROM ({newest}) ORDER BY ts, id"
    for row in connection.execute(query, values):
        yield _entry_of(row)


def totals(
    connection: sqlite3.Connection, by: Sequence[GroupBy], condition: str, values: Sequence[Value]
) -> list[Totals]:
    """Sums by group, in the order of the groups' values."""
    groups = ", ".join(GROUPS[name] for name in by)
    query = f"SELECT {groups + ', ' if by else ''}{', '.join(_AGGREGATES.values())} FROM ledger{condition}"
    query += f" GROUP BY {groups} ORDER BY {groups}" if by else ""
    return [_totals_of(by, row) for row in connection.execute(query, values)]


def _used_bytes(connection: sqlite3.Connection) -> int:
    pages, free, size = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def about(connection: sqlite3.Connection, name: str) -> str | None:
    """What the ledger says of itself under a name, or None."""
    found = connection.execute("SELECT value FROM about WHERE name = ?", (name,)).fetchone()
    return None if found is None else str(found[0])


def where(
    *,
    tenant: str | None = None,
    session: str | None = None,
    model: str | None = None,
    since: float | None = None,
    until: float | None = None,
) -> tuple[str, list[Value]]:
    """The WHERE clause (empty when nothing is asked for) and its values."""
    terms: list[tuple[str, Value]] = [
        ("tenant = ?", tenant),
        ("session = ?", session),
        ("model = ?", model),
        ("ts >= ?", since),
        ("ts < ?", until),
    ]
    given = [(term, value) for term, value in terms if value is not None]
    return (" WHERE " + " AND ".join(term for term, _ in given) if given else ""), [value for _, value in given]


def _entry_of(row: Sequence[Value]) -> Entry:
    """A row of all columns as the line it came from."""
    fields = dict(zip(COLUMNS, row, strict=True))
    text = {name: str(fields[name]) for name in ("request_id", "model", "tenant", "session", "backend")}
    tokens = {name: _whole(fields[name]) for name in COLUMNS if name.endswith("_tokens")}
    return Entry(
        **text,  # type: ignore[arg-type]  # the names are the fields' own
        **tokens,  # type: ignore[arg-type]
        ts=float(fields["ts"] or 0),
        cost_usd=_dollars(fields["cost_usd"]),
        saved_usd=_dollars(fields["saved_usd"]),
        cause=None if fields["cause"] is None else str(fields["cause"]),
    )


def _totals_of(by: Sequence[GroupBy], row: Sequence[Value]) -> Totals:
    """A row of the groups and the aggregates as sums."""
    group: dict[str, str | None] = {
        name: None if value is None else str(value) for name, value in zip(by, row, strict=False)
    }
    sums = dict(zip(_AGGREGATES, row[len(by) :], strict=True))
    dollars = {name: _dollars(sums.pop(name)) for name in ("cost_usd", "saved_usd")}
    counts = {name: _whole(value) for name, value in sums.items()}
    return Totals(group=group, **counts, **dollars)  # type: ignore[arg-type]  # the names are the fields' own


def _whole(value: Value) -> int | None:
    return value if isinstance(value, int) else None


def _dollars(value: Value) -> Decimal | None:
    return None if value is None else Decimal(str(value))
