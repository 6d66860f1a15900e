"""What a session's cache did: the share that was read, the money spent, saved and lost, and the cause of each loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TypeAlias

from homeport.books import SUMS, Entry, Sums, plain, total, total_usd
from homeport.breaks import HINTS, CacheBreak, Reason
from homeport.ledger import Ledger
from homeport.prices import PriceBook, loss_of
from homeport.usage import Usage
from homeport.words import plural

Json: TypeAlias = "str | int | float | list[Json] | dict[str, Json] | None"

_KEPT_BREAKS = 256


@dataclass(frozen=True, slots=True)
class Loss:
    """All breaks of one cause: how many, tokens computed again, and what they cost; None: not known of any."""

    cause: str
    count: int = 0
    lost_tokens: int | None = None
    cost_usd: Decimal | None = None


@dataclass(frozen=True, slots=True)
class BreakLine:
    """One break: the turn it happened in (1 is the session's first request), its cause, tokens computed again and what
    they cost (None: not known), where in the request body (JSON pointer, empty: nowhere or not kept), what to do."""

    turn: int
    cause: str
    lost_tokens: int | None = None
    cost_usd: Decimal | None = None
    pointer: str = ""
    hint: str = ""

    def to_dict(self) -> dict[str, Json]:
        """The fields as JSON values; dollars as decimal text."""
        return {
            "turn": self.turn,
            "cause": self.cause,
            "lost_tokens": self.lost_tokens,
            "cost_usd": plain(self.cost_usd),
            "pointer": self.pointer,
            "hint": self.hint,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReport(Sums):
    """One session's books, of its answered requests. ``failed_requests``: those that got no answer or were refused
    (HTTP 400 and above), each retry counted; they are in no sum and in no ledger, so only the process that sent them
    knows them. ``losses``: by cause, the dearest first; ``breaks``: the newest 256, oldest first. ``str()`` is a table
    to read.
    """

    session: str
    failed_requests: int = 0
    losses: tuple[Loss, ...] = ()
    breaks: tuple[BreakLine, ...] = ()

    @classmethod
    def of(cls, ledger: Ledger, session: str, *, tenant: str | None = None) -> SessionReport:
        """A session's report from the ledger's lines; losses are priced with the ledger's own price book."""
        tally = SessionTally(session)
        for entry in ledger.rows(session=session, tenant=tenant):
            tally.add(entry, lost_usd=_lost_usd(entry, ledger.prices))
        return tally.report()

    @property
    def lost_tokens(self) -> int | None:
        """Tokens computed again through breaks; None when not known of any, 0 when the cache was measured and nothing
        was lost."""
        return 0 if self._nothing_lost else total(loss.lost_tokens for loss in self.losses)

    @property
    def lost_usd(self) -> Decimal | None:
        """What the breaks cost, in US dollars; None when not known of any, 0 when the cache was measured and nothing
        was lost."""
        return Decimal(0) if self._nothing_lost else total_usd(loss.cost_usd for loss in self.losses)

    @property
    def _nothing_lost(self) -> bool:
        return not self.losses and self.requests > self.unreported_requests

    def to_dict(self) -> dict[str, Json]:
        """Everything as JSON values; dollars as decimal text."""
        losses: list[Json] = [
            {
                "cause": loss.cause,
                "count": loss.count,
                "lost_tokens": loss.lost_tokens,
                "cost_usd": plain(loss.cost_usd),
            }
            for loss in self.losses
        ]
        breaks: list[Json] = [line.to_dict() for line in self.breaks]
        return {
            "session": self.session,
            **self.sums(),
            "failed_requests": self.failed_requests,
            "lost_tokens": self.lost_tokens,
            "lost_usd": plain(self.lost_usd),
            "losses": losses,
            "breaks": breaks,
        }

    def __str__(self) -> str:
        rows = [("requests", f"{self.requests:,}" if self.requests else "none answered")]
        if self.failed_requests:
            rows.append(("failed requests", f"{self.failed_requests:,}  (no answer, or refused)"))
        if self.requests:
            rows += self._token_rows() + self._money_rows()
        if self.unreported_requests:
            rows.append(("cache not reported by", _requests(self.unreported_requests)))
        if self.unpriced_requests and self._is_priced:
            rows.append(("price not known of", _requests(self.unpriced_requests)))
        lines = [f"Session {self.session}", *(f"  {name:<22} {value}" for name, value in rows)]
        for loss in self.losses:
            cost = "" if loss.cost_usd is None else f"  {money(loss.cost_usd)}"
            lines.append(f"    {loss.count:>4} x {loss.cause:<22} {_tokens(loss.lost_tokens):>16}{cost}")
        return "\n".join(lines)

    @property
    def _is_priced(self) -> bool:
        return self.cost_usd is not None or any(loss.cost_usd is not None for loss in self.losses)

    def _token_rows(self) -> list[tuple[str, str]]:
        share = "" if self.cached_share is None else f"  ({self.cached_share:.1%})"
        return [
            ("input tokens", _number(self.input_tokens)),
            ("  cached", f"{_number(self.cached_tokens)}{share}"),
            ("output tokens", _number(self.output_tokens)),
        ]

    def _money_rows(self) -> list[tuple[str, str]]:
        lost = _tokens(self.lost_tokens)
        if not self._is_priced:
            return [("lost to breaks", lost), ("money", "unpriced (no price is known for the model)")]
        return [
            ("spent", money(self.cost_usd, "not known")),
            ("saved by the cache", money(self.saved_usd, "not known")),
            ("lost to breaks", lost if self.lost_usd is None else f"{money(self.lost_usd)}  ({lost})"),
        ]


@dataclass(slots=True)
class SessionTally:
    """Adds up a session as it goes, in bounded memory: sums, losses by cause, and the newest 256 breaks."""

    session: str
    failed_requests: int = 0
    _sums: Sums = field(init=False, default_factory=Sums)
    _losses: dict[str, Loss] = field(init=False, default_factory=dict)
    _breaks: deque[BreakLine] = field(init=False, default_factory=lambda: deque(maxlen=_KEPT_BREAKS))

    def add(self, entry: Entry, breaks: Sequence[CacheBreak] = (), *, lost_usd: Decimal | None = None) -> None:
        """Count one request and the breaks found in it; without ``breaks``, the line's own cause counts, at
        ``lost_usd``."""
        self._sums = self._sums.plus(entry)
        turn = self._sums.requests
        for one in breaks:
            if one.reason is Reason.COLD_START:
                continue  # a first request has nothing to lose
            self._lose(BreakLine(turn, one.reason.value, one.lost_tokens, one.cost_usd, one.pointer, one.hint))
        if not breaks and entry.cause and entry.cause != Reason.COLD_START:
            self._lose(BreakLine(turn, entry.cause, entry.lost_tokens, lost_usd, hint=_hint(entry.cause)))

    def report(self) -> SessionReport:
        """The report so far."""
        by_cost = sorted(
            self._losses.values(), key=lambda loss: (-(loss.cost_usd or 0), -(loss.lost_tokens or 0), loss.cause)
        )
        sums = {name: getattr(self._sums, name) for name in SUMS}
        return SessionReport(
            session=self.session,
            failed_requests=self.failed_requests,
            **sums,
            losses=tuple(by_cost),
            breaks=tuple(self._breaks),
        )

    def _lose(self, line: BreakLine) -> None:
        self._breaks.append(line)
        before = self._losses.get(line.cause, Loss(line.cause))
        self._losses[line.cause] = Loss(
            line.cause,
            before.count + 1,
            total((before.lost_tokens, line.lost_tokens)),
            total_usd((before.cost_usd, line.cost_usd)),
        )


def _lost_usd(entry: Entry, prices: PriceBook | None) -> Decimal | None:
    # a line without a cost was served by somebody whose price nobody knows, whatever the model is called
    if prices is None or entry.cost_usd is None or entry.lost_tokens is None:
        return None
    price = prices.price(entry.model, at=entry.ts)
    usage = Usage(entry.input_tokens, entry.cached_tokens, entry.cache_write_tokens, entry.output_tokens)
    return None if price is None else loss_of(entry.lost_tokens, price, usage)


def _hint(cause: str) -> str:
    return HINTS[Reason(cause)] if cause in Reason._value2member_map_ else ""


def _number(count: int | None) -> str:
    return "not reported" if count is None else f"{count:,}"


def _tokens(count: int | None) -> str:
    return "tokens not known" if count is None else f"{count:,} {plural('token', count)}"


def _requests(count: int) -> str:
    return f"{count:,} {plural('request', count)}"


def money(amount: Decimal | None, unknown: str = "no price") -> str:
    """Dollars to read: four decimals, for small amounts as many as it takes to show two digits."""
    if amount is None:
        return unknown
    if amount == 0 or abs(amount) >= Decimal("0.01"):
        return f"${amount:,.4f}"
    return f"${amount:.{max(4, 1 - amount.adjusted())}f}"
