"""Spending limits over the ledger's lines: what was spent in the current period, and a callback when it is too much."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Literal

from homeport.ledger_store import where

Period = Literal["day", "month", "total"]


@dataclass(frozen=True, slots=True)
class Budget:
    """A spending limit in US dollars over a UTC ``day``, a ``month`` or in ``total``, for all lines or for those of a
    tenant, a session, a model. ``callback(budget, spent_usd)`` is called once a period, when the limit is reached, from
    the ledger's writer thread: it must not block."""

    limit_usd: Decimal
    callback: Callable[[Budget, Decimal], None]
    period: Period = "day"
    tenant: str | None = None
    session: str | None = None
    model: str | None = None


class Spending:
    """What has been spent of one budget in its current period, kept up to date by reading only new lines."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._period: str | None = None
        self._seen = 0
        self._spent = Decimal(0)
        self._told = False

    def update(self, connection: sqlite3.Connection) -> bool:
        """Add what is new; whether the limit is now reached and nobody was told this period."""
        budget = self._budget
        since, period = period_of(budget.period, time.time())
        if period != self._period:
            self._period, self._seen, self._spent, self._told = period, 0, Decimal(0), False
        condition, values = where(tenant=budget.tenant, session=budget.session, model=budget.model, since=since)
        condition = f"{condition} AND" if condition else " WHERE"
        query = f"SELECT decimal_sum(cost_usd), max(rowid) FROM ledger{condition} rowid > ?"
        spent, seen = connection.execute(query, [*values, self._seen]).fetchone()
        self._seen = seen or self._seen
        self._spent += Decimal(spent or 0)
        return self._spent >= budget.limit_usd and not self._told

    def tell(self) -> None:
        """Call back, once a period, whatever comes of it."""
        self._told = True
        self._budget.callback(self._budget, self._spent)


def period_of(period: Period, now: float) -> tuple[float | None, str]:
    moment = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "total":
        return None, "total"
    start = moment.replace(day=1) if period == "month" else moment
    return start.timestamp(), start.isoformat()
