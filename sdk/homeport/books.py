"""A line of the books, and sums over lines: what the ledger stores and what reports add up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Self, TypeAlias

Value: TypeAlias = float | str | int | None

COLUMNS = (
    "ts",
    "tenant",
    "session",
    "request_id",
    "model",
    "backend",
    "input_tokens",
    "cached_tokens",
    "cache_write_tokens",
    "output_tokens",
    "cost_usd",
    "saved_usd",
    "cause",
    "lost_tokens",
)
"""The columns of a line, in order; CSV and JSON lines carry the same names."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One request. ``input_tokens`` is the whole prompt; ``saved_usd`` compares with no cache at all; ``cause`` says in
    one word why ``lost_tokens`` of it were computed again. None: not known, never 0."""

    request_id: str
    model: str
    ts: float
    tenant: str = ""
    session: str = ""
    backend: str = ""
    input_tokens: int | None = None
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd: Decimal | None = None
    saved_usd: Decimal | None = None
    cause: str | None = None
    lost_tokens: int | None = None

    def to_dict(self) -> dict[str, Value]:
        """The line by column name; dollars as decimal text."""
        return {name: plain(getattr(self, name)) for name in COLUMNS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums over lines. Each is over the lines that know it, and None when none does; the ``*_requests`` counts say how
    many lines do not know their cached tokens (``unreported``) or their cost (``unpriced``).
    ``measured_input_tokens`` is the input of the lines whose cached count is known; ``saved_usd`` compares with no
    cache at all."""

    requests: int = 0
    input_tokens: int | None = None
    cached_tokens: int | None = None
    measured_input_tokens: int | None = None
    cache_write_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd: Decimal | None = None
    saved_usd: Decimal | None = None
    unreported_requests: int = 0
    unpriced_requests: int = 0

    @property
    def cached_share(self) -> float | None:
        """Cached / input tokens over the lines that report both, 0 to 1; None when none does."""
        if not self.measured_input_tokens or self.cached_tokens is None:
            return None
        return self.cached_tokens / self.measured_input_tokens

    def plus(self, entry: Entry) -> Self:
        """The sums with one more line."""
        measured = entry.input_tokens if entry.cached_tokens is not None else None
        return dataclasses.replace(
            self,
            requests=self.requests + 1,
            input_tokens=total((self.input_tokens, entry.input_tokens)),
            cached_tokens=total((self.cached_tokens, entry.cached_tokens)),
            measured_input_tokens=total((self.measured_input_tokens, measured)),
            cache_write_tokens=total((self.cache_write_tokens, entry.cache_write_tokens)),
            output_tokens=total((self.output_tokens, entry.output_tokens)),
            cost_usd=total_usd((self.cost_usd, entry.cost_usd)),
            saved_usd=total_usd((self.saved_usd, entry.saved_usd)),
            unreported_requests=self.unreported_requests + (entry.cached_tokens is None),
            unpriced_requests=self.unpriced_requests + (entry.cost_usd is None),
        )

    def sums(self) -> dict[str, Value]:
        """The sums by name, for programs: dollars as decimal text, the cached share beside them."""
        return {**{name: plain(getattr(self, name)) for name in SUMS}, "cached_share": self.cached_share}


SUMS = tuple(each.name for each in dataclasses.fields(Sums))
"""The names of the sums, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals(Sums):
    """Sums over a group of the ledger's lines; ``group``: its names and values."""

    group: dict[str, str | None] = field(default_factory=dict)
    lost_tokens: int | None = None

    def to_dict(self) -> dict[str, Value]:
        """The group's names and values, then the sums; dollars as decimal text."""
        return {**self.group, **self.sums(), "lost_tokens": self.lost_tokens}


def total(counts: Iterable[int | None]) -> int | None:
    """The sum of those that are known; None when none is."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def total_usd(amounts: Iterable[Decimal | None]) -> Decimal | None:
    """The sum of those that are known; None when none is."""
    known = [amount for amount in amounts if amount is not None]
    return sum(known, Decimal(0)) if known else None


def plain(value: object) -> Value:
    """A field as a JSON value: dollars as decimal text."""
    if isinstance(value, Decimal):
        return format(value, "f")
    return value if isinstance(value, (str, int, float)) else None
