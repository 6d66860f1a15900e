"""The ledger: exact sums, several processes, a writer killed mid-write, bounds that say so, budgets that speak up."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeport.ledger import COLUMNS, Budget, Entry, Ledger
from homeport.prices import PriceBook
from homeport.report import SessionReport
from homeport.usage import Usage

PRICES = PriceBook({"m": {"input": 1, "output": 2, "cache_read": "0.1"}}, vendors=False)
USAGE = Usage(1000, 800, None, 10)


def test_a_line_has_the_columns_and_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "ledger.sqlite"
    with Ledger(path, prices=PRICES) as ledger:
        entry = ledger.record(
            USAGE, model="m", session="s", tenant="t", backend="d0", request_id="r", cause="evicted", lost_tokens=7
        )
        assert ledger.rows() == [entry]
    assert entry.cost_usd == Decimal("0.00030") == Decimal("0.0002") + Decimal("0.00008") + Decimal("0.00002")
    assert entry.saved_usd == Decimal("0.00072")
    connection = sqlite3.connect(path)
    try:
        assert tuple(row[1] for row in connection.execute("PRAGMA table_info(ledger)")) == COLUMNS
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    finally:
        connection.close()


def test_what_is_not_known_is_null_and_counted_apart() -> None:
    with Ledger(prices=PRICES) as ledger:
        ledger.record(Usage(100, None, None, 5), model="m", session="a")
        ledger.record(Usage(100, 50, None, 5), model="other", session="b")
        first, second = ledger.totals(["session"])
        assert (first.cached_tokens, first.cached_share, first.saved_usd, first.unreported_requests) == (
            None,
            None,
            None,
            1,
        )
        assert (second.cached_share, second.cost_usd, second.unpriced_requests) == (0.5, None, 1)
        (both,) = ledger.totals()
        assert (both.input_tokens, both.cached_tokens, both.measured_input_tokens) == (200, 50, 100)
        assert both.cached_share == 0.5
        assert ledger.rows()[0].cached_tokens is None


def test_a_request_counts_once_per_tenant(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    for _ in range(2):  # also over a restart
        with Ledger(path) as ledger:
            for tenant in ("a", "b", "a"):
                ledger.record(USAGE, model="m", tenant=tenant, request_id="same")
            assert [(total.group, total.requests) for total in ledger.totals(["tenant"])] == [
                ({"tenant": "a"}, 1),
                ({"tenant": "b"}, 1),
            ]


def test_groups_and_filters() -> None:
    day = 86_400.0
    with Ledger(prices=PRICES) as ledger:
        for number in range(6):
            ledger.record(
                USAGE,
                model="m" if number % 2 else "n",
                tenant="ab"[number // 3],
                session=f"s{number}",
                ts=day * number,
                cause="evicted" if number == 5 else None,
            )
        groups = [total.group for total in ledger.totals(["tenant", "model"])]
        assert groups == [{"tenant": t, "model": m} for t in "ab" for m in "mn"]
        assert ledger.totals(["day"])[1].group == {"day": "1970-01-02"}
        assert [total.requests for total in ledger.totals(["cause"])] == [5, 1]
        assert ledger.totals(tenant="a")[0].requests == 3
        assert [entry.session for entry in ledger.rows(since=day * 2, until=day * 4)] == ["s2", "s3"]
        assert [entry.session for entry in ledger.rows(limit=2)] == ["s4", "s5"]
        with pytest.raises(ValueError, match="cannot group by 'colour'"):
            ledger.totals(["colour"])  # type: ignore[list-item]


@settings(deadline=None)
@given(st.lists(st.decimals(0, 100, places=12), min_size=1, max_size=20))
def test_sums_are_exact(costs: list[Decimal]) -> None:
    with Ledger(flush_interval_s=0) as ledger:
        for number, cost in enumerate(costs):
            ledger.add(Entry(str(number), "m", 0.0, cost_usd=cost))
        assert ledger.totals()[0].cost_usd == sum(costs)


def test_export() -> None:
    with Ledger(prices=PRICES) as ledger:
        ledger.record(USAGE, model='m"x,', session="ü", request_id="1", ts=1.5)
        ledger.record(Usage(), model="m", request_id="2", ts=2.5)
        lines, table = io.StringIO(), io.StringIO()
        assert ledger.export(lines) == ledger.export(table, "csv") == 2
        with pytest.raises(ValueError, match="jsonl or csv"):
            ledger.export(lines, "parquet")  # type: ignore[arg-type]
    parsed = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [tuple(line) for line in parsed] == [COLUMNS, COLUMNS]
    assert (parsed[0]["session"], parsed[1]["input_tokens"], parsed[1]["cost_usd"]) == ("ü", None, None)
    rows = list(csv.DictReader(table.getvalue().splitlines()))
    assert rows[0]["model"] == 'm"x,'
    assert rows[1]["cached_tokens"] == ""


WRITER = """
import sys
from homeport.ledger import Ledger
from homeport.usage import Usage
path, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Ledger(path, flush_interval_s=0.01) as ledger:
    for number in range(count):
        ledger.record(Usage(10, 5, None, 1), model="m", session=name, request_id=f"{name}-{number % (count // 2)}")
    ledger.flush()
    print(ledger.dropped_rows, ledger.error, flush=True)
"""


def test_several_processes_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, f"w{n}", "2000"], stdout=subprocess.PIPE, text=True) for n in range(3)]
    assert [writer.communicate(timeout=60)[0].strip() for writer in writers] == ["0 None"] * 3
    with Ledger(path) as ledger:
        assert [total.requests for total in ledger.totals(["session"])] == [1000] * 3


ENDLESS = """
import itertools, sys
from homeport.ledger import Ledger
from homeport.usage import Usage
ledger = Ledger(sys.argv[1], flush_interval_s=0.001)
for number in itertools.count():
    ledger.record(Usage(10, 5, None, 1), model="m", request_id=str(number))
    if number % 100 == 0:
        ledger.flush()
        print(number, flush=True)
"""


def test_what_was_flushed_survives_a_kill_in_mid_write(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    writer = subprocess.Popen([sys.executable, "-c", ENDLESS, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    flushed = 0
    for _ in range(5):
        flushed = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    with Ledger(path) as ledger:  # opens, reads and goes on
        before = len(ledger.rows())
        assert before > flushed
        ledger.record(USAGE, model="m", request_id="after")
        assert len(ledger.rows()) == before + 1
    connection = sqlite3.connect(path)
    try:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    finally:
        connection.close()


def test_lines_are_bounded_and_it_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Ledger(tmp_path / "l.sqlite", max_rows=100, flush_interval_s=0) as ledger:
        for number in range(350):
            ledger.record(USAGE, model="m", request_id=str(number), ts=float(number))
            if number % 50 == 0:
                ledger.flush()
        rows = ledger.rows()
        assert len(rows) <= 100
        assert rows[-1].request_id == "349"
        assert ledger.pruned_rows == 350 - len(rows)
        assert ledger.pruned_until == rows[0].ts - 1
    assert "made room" in caplog.text


def test_bytes_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    with Ledger(path, max_bytes=256 * 1024) as ledger:
        for number in range(4000):
            ledger.record(USAGE, model="m" * 200, request_id=str(number))
            if number % 200 == 0:
                ledger.flush()
        assert 0 < len(ledger.rows()) < 2000
        assert ledger.pruned_rows > 2000
    assert path.stat().st_size < 1024 * 1024


@pytest.mark.parametrize("bounds", [{"max_rows": 0}, {"max_bytes": 1000}])
def test_bounds_that_hold_nothing_are_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="max_rows must be at least 1"):
        Ledger(**bounds)  # type: ignore[arg-type]


def test_a_path_that_cannot_be_used_fails_at_once(tmp_path: Path) -> None:
    not_a_database = tmp_path / "x"
    not_a_database.write_text("these are not the books " * 100)
    with pytest.raises(sqlite3.DatabaseError):
        Ledger(not_a_database)


def test_a_disk_at_fault_is_counted_and_never_raised(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    with Ledger(path) as ledger:
        ledger.record(USAGE, model="m")
        ledger.flush()
        connection = sqlite3.connect(path)
        connection.execute("DROP TABLE ledger")
        connection.close()
        ledger.record(USAGE, model="m")
        assert ledger.flush()
        assert ledger.dropped_rows == 1
        assert ledger.error is not None


def test_too_many_waiting_lines_are_dropped_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    with Ledger(path, max_pending=10) as ledger:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")  # the disk is busy
        for number in range(5000):
            ledger.record(USAGE, model="m", request_id=str(number))
        dropped = ledger.dropped_rows
        other.execute("ROLLBACK")
        other.close()
        assert dropped > 0
        assert len(ledger.rows()) == 5000 - ledger.dropped_rows


async def test_adding_does_not_hold_up_an_event_loop(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    with Ledger(path) as ledger:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")  # whoever waited for the disk would wait until the end of this block
        try:
            for number in range(200):
                ledger.record(USAGE, model="m", request_id=str(number))
                await asyncio.sleep(0)
        finally:
            other.execute("ROLLBACK")
            other.close()
        assert len(await asyncio.to_thread(ledger.rows)) == 200


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_writes_its_own_lines(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    forking = f"""
import os
from homeport.ledger import Ledger
from homeport.usage import Usage
ledger = Ledger({str(path)!r})
ledger.record(Usage(1, 0, None, 1), model="m", request_id="parent-1")
child = os.fork()
ledger.record(Usage(1, 0, None, 1), model="m", request_id="parent-2" if child else "child")
ledger.close()
if child:
    os.waitpid(child, 0)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", forking], check=True, timeout=60)
    with Ledger(path) as ledger:
        assert {entry.request_id for entry in ledger.rows()} == {"parent-1", "parent-2", "child"}


def test_a_program_that_just_ends_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    program = "import sys; from homeport.ledger import *; Ledger(sys.argv[1]).add(Entry('1', 'm', 0.0))"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=60)
    with Ledger(path) as ledger:
        assert len(ledger.rows()) == 1


def test_closed_is_closed() -> None:
    ledger = Ledger()
    ledger.close()
    ledger.close()
    with pytest.raises(ValueError, match="closed"):
        ledger.record(USAGE, model="m")


class TestBudgets:
    def test_it_speaks_once_a_period_and_counts_a_request_once(self) -> None:
        told: list[Decimal] = []
        budget = Budget(Decimal("0.0005"), lambda _, spent: told.append(spent), tenant="a")
        with Ledger(prices=PRICES, budgets=[budget]) as ledger:
            for number in ("1", "1", "1", "2", "3"):
                ledger.record(USAGE, model="m", tenant="a", request_id=number)
                ledger.record(USAGE, model="m", tenant="b", request_id=number)
                ledger.flush()
                if number == "1":
                    assert told == []
        assert told == [Decimal("0.00060")]

    def test_what_other_processes_spent_counts_and_yesterday_does_not(self, tmp_path: Path) -> None:
        path = tmp_path / "l.sqlite"
        now = time.time()
        with Ledger(path, prices=PRICES) as other:
            other.record(USAGE, model="m", request_id="today", ts=now)
            other.record(USAGE, model="m", request_id="yesterday", ts=now - 86_400 * 1.01)
        told: list[str] = []
        with Ledger(path, prices=PRICES) as ledger:
            for period in ("day", "total"):
                note = Budget(Decimal("0.00075"), lambda budget, _: told.append(budget.period), period)
                ledger.add_budget(note)
            ledger.record(USAGE, model="m", ts=now)
        assert told == ["total"]

    def test_a_callback_that_fails_stops_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        def fail(_: Budget, __: Decimal) -> None:
            raise RuntimeError("no pager")

        with Ledger(prices=PRICES, budgets=[Budget(Decimal(0), fail)]) as ledger:
            ledger.record(USAGE, model="m")
            assert len(ledger.rows()) == 1
            assert ledger.error is None
        assert "no pager" in caplog.text

    def test_a_callback_may_use_the_ledger_it_watches(self, tmp_path: Path) -> None:
        seen: list[int] = []
        path = tmp_path / "l.sqlite"
        with Ledger(path, prices=PRICES) as ledger:
            ledger.add_budget(Budget(Decimal(0), lambda *_: seen.append(len(Ledger(path).rows()))))
            ledger.record(USAGE, model="m")
            assert ledger.flush()
        assert seen == [1]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.parametrize("place", ["l.sqlite", None])
    def test_a_callback_may_fork(self, tmp_path: Path, place: str | None) -> None:
        """A fork closes the writer's connection: the batch is stored all the same, and counted so, twice over."""
        forking = f"""
import os
from decimal import Decimal
from homeport.ledger import Budget, Ledger
from homeport.usage import Usage
def fork(*_):
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
budgets = [Budget(Decimal(0), fork), Budget(Decimal(0), fork)]
ledger = Ledger({place!r}, budgets=budgets)
for name in ("1", "2"):
    ledger.record(Usage(1, 0, None, 1), model="m", request_id=name)
    ledger.flush()
print(len(ledger.rows()), ledger.dropped_rows, ledger.error)
ledger.close()
"""
        command = [sys.executable, "-W", "ignore", "-c", forking]
        done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True, cwd=tmp_path)
        assert done.stdout == "2 0 None\n", done.stderr


def test_threads_share_a_ledger() -> None:
    with Ledger() as ledger:
        threads = [
            threading.Thread(target=lambda n=n: [ledger.record(USAGE, model=f"m{n}") for _ in range(200)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        assert all(total.requests <= 200 for total in ledger.totals(["model"]))  # readable meanwhile
        for thread in threads:
            thread.join()
        assert ledger.totals()[0].requests == 800


class TestReport:
    def test_from_the_ledger(self) -> None:
        with Ledger(prices=PRICES) as ledger:
            ledger.record(USAGE, model="m", session="s", request_id="1", cause="cold_start", lost_tokens=0)
            ledger.record(Usage(1000, 0, None, 10), model="m", session="s", cause="system_changed", lost_tokens=1000)
            ledger.record(Usage(1000, None, None, 10), model="?", session="s", cause="not_reported")
            ledger.record(USAGE, model="m", session="another")
            report = SessionReport.of(ledger, "s")
        assert report.requests == 3
        assert report.cached_share == 0.4
        assert report.cost_usd == Decimal("0.0003") + Decimal("0.00102")
        assert report.lost_usd == Decimal("0.0009")
        assert [(loss.cause, loss.lost_tokens) for loss in report.losses] == [
            ("system_changed", 1000),
            ("not_reported", None),
        ]
        assert (report.unreported_requests, report.unpriced_requests) == (1, 1)
        assert report.to_dict()["lost_usd"] == "0.0009"
        json.dumps(report.to_dict())

    def test_nothing_lost_is_not_the_same_as_not_measured(self) -> None:
        with Ledger() as ledger:
            ledger.record(USAGE, model="m", session="measured")
            ledger.record(Usage(1000, None, None, 10), model="m", session="silent")
            measured, silent = (SessionReport.of(ledger, name) for name in ("measured", "silent"))
        assert (measured.lost_tokens, measured.lost_usd) == (0, 0)
        assert "lost to breaks         0 tokens" in str(measured)
        assert (silent.lost_tokens, silent.lost_usd) == (None, None)

    def test_it_reads_like_a_table(self) -> None:
        with Ledger(prices=PRICES) as ledger:
            ledger.record(Usage(1000, 250, None, 10), model="m", session="s", cause="evicted", lost_tokens=750)
            text = str(SessionReport.of(ledger, "s"))
        for words in ("Session s", "25.0%", "1,000", "evicted", "750 tokens", "$0.00068"):
            assert words in text

    def test_nothing_known(self) -> None:
        with Ledger() as ledger:
            text = str(SessionReport.of(ledger, "unheard-of"))
        assert text.splitlines() == ["Session unheard-of", "  requests               none answered"]

    def test_without_prices_no_dollar_is_shown(self) -> None:
        with Ledger() as ledger:
            ledger.record(USAGE, model="m", session="s")
            ledger.record(Usage(1000, 250, None, 10), model="m", session="s", cause="evicted", lost_tokens=750)
            text = str(SessionReport.of(ledger, "s"))
        assert "$" not in text
        assert "unpriced" in text
        assert "750 tokens" in text

    def test_what_is_not_reported_is_said_once(self) -> None:
        with Ledger(prices=PRICES) as ledger:
            ledger.record(Usage(), model="m", session="s", cause="not_reported")
            text = str(SessionReport.of(ledger, "s"))
        assert "  cached               not reported\n" in text
        assert "lost to breaks         tokens not known" in text
        assert "not reported tokens" not in text
        assert "cache not reported by  1 request\n" in text
