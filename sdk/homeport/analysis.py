"""Recorded requests told apart into conversations, each request explained against the one before it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from homeport.breaks import CacheBreak, Reason
from homeport.explain import explain
from homeport.fingerprint import JsonValue
from homeport.ledger import Entry
from homeport.prices import PriceBook
from homeport.prompt import api_of, prompt_of
from homeport.providers import CALLER_HEADERS
from homeport.record import Record
from homeport.redaction import expand
from homeport.report import SessionReport, SessionTally

# ids of agents that share their parent's session id
_AGENT_HEADERS = ("x-claude-code-agent-id", "thread-id")


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation: its number (from 1), its record (without the body: a file may be larger than the
    memory), and the breaks found in it."""

    number: int
    record: Record
    breaks: tuple[CacheBreak, ...]


@dataclass(slots=True)
class Conversation:
    """One conversation's turns and its books. Side requests (titles, summaries) and refused ones are counted only."""

    session: str
    turns: list[Turn] = field(default_factory=list)
    side_requests: int = 0
    _tally: SessionTally = field(init=False)
    _last: Record | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._tally = SessionTally(self.session)

    @property
    def refused_requests(self) -> int:
        """How many were answered with an error."""
        return self._tally.failed_requests

    @property
    def report(self) -> SessionReport:
        """The books so far."""
        return self._tally.report()

    def breaks(self) -> Iterator[tuple[Turn, CacheBreak]]:
        """Every break with its turn; cold starts are none."""
        for turn in self.turns:
            for found in turn.breaks:
                if found.reason is not Reason.COLD_START:
                    yield turn, found

    def add(self, record: Record, prices: PriceBook) -> None:
        """Take the conversation's next request."""
        if record.status is not None and record.status >= 400:
            self._tally.failed_requests += 1
            return
        if self._last is not None and _is_side(record, self._last):
            self.side_requests += 1
            return
        breaks = tuple(_explained(self._last, record, prices))
        self.turns.append(Turn(len(self.turns) + 1, replace(record, body={}), breaks))
        self._tally.add(_entry(self.session, record, prices), breaks)
        self._last = record


def conversations(records: Iterable[Record], prices: PriceBook | None = None) -> list[Conversation]:
    """The conversations of recorded requests, in the order they began; ``prices``: own prices before public ones.

    A request without a session is told by the ids in its headers; those without any count as one conversation."""
    book = prices or PriceBook()
    found: dict[str, Conversation] = {}
    for record in records:
        name = _name(record)
        found.setdefault(name, Conversation(name)).add(record, book)
    return list(found.values())


def _name(record: Record) -> str:
    headers = record.headers
    session = record.session or next((headers[name] for name in sorted(CALLER_HEADERS) if headers.get(name)), "-")
    agent = next((headers[name] for name in _AGENT_HEADERS if headers.get(name) not in (None, "", session)), None)
    return f"{session}/{agent}" if agent and not record.session else session


def _is_side(record: Record, main: Record) -> bool:
    """A title or a summary under the session's id: it says so, or has no tools and another system prompt."""
    if record.headers.get("x-homeport-kind") == "side":
        return True
    body, before = record.request_body, main.request_body
    if body.get("tools") or not before.get("tools"):
        return False
    return _system_text(body) != _system_text(before)


def _system_text(body: Mapping[str, JsonValue]) -> str:
    expanded = expand(dict(body))
    if not isinstance(expanded, dict):
        return ""
    try:
        prompt = prompt_of(expanded, api_of(expanded))
    except (RecursionError, ValueError):
        return ""
    return "".join(part.text for part in prompt.region("system"))


def _explained(before: Record | None, record: Record, prices: PriceBook) -> list[CacheBreak]:
    return explain(
        None if before is None else before.request_body,
        record.request_body,
        record.parsed_usage(),
        record.diagnostics,
        response_headers=record.response_headers,
        elapsed_s=_pause_s(before, record),
        url=record.url,
        prices=prices,
        at=record.ts,
    )


def _pause_s(before: Record | None, record: Record) -> float | None:
    if before is None or before.ts is None or record.ts is None:
        return None
    return max(0.0, record.ts - before.ts - (before.elapsed_s or 0.0))


def _entry(session: str, record: Record, prices: PriceBook) -> Entry:
    usage = record.parsed_usage()
    model = record.request_body.get("model")
    name = model if isinstance(model, str) else ""
    cost = prices.cost(usage, name, url=record.url, at=record.ts) if usage else None
    return Entry(
        request_id=record.response_headers.get("x-homeport-request-id") or uuid.uuid4().hex,
        model=name,
        ts=record.ts or 0.0,
        session=session,
        backend=record.response_headers.get("x-homeport-backend", ""),
        input_tokens=usage.input_tokens if usage else None,
        cached_tokens=usage.cached_tokens if usage else None,
        cache_write_tokens=usage.cache_write_tokens if usage else None,
        output_tokens=usage.output_tokens if usage else None,
        cost_usd=cost.total_usd if cost else None,
        saved_usd=cost.saved_usd if cost else None,
    )
