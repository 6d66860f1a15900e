"""Sessions in Anthropic's shape with both cache lifetimes: ledger, report and explainer reconcile with the bill."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from homeport.analysis import Conversation, conversations
from homeport.breaks import Reason
from homeport.ledger import Ledger
from homeport.prices import PriceBook
from homeport.record import Record, RecordWriter, read
from homeport.report import SessionReport
from homeport.usage import Usage

MODEL = "claude-sonnet-4-5"
URL = "https://api.anthropic.com/v1/messages"
# dollars per million tokens as published for this model: input, output, read, write for 5 minutes, write for 1 hour
INPUT, OUTPUT, READ, WRITE_5M, WRITE_1H = 3, 15, Fraction("0.3"), Fraction("3.75"), 6
TTL_S = {"5m": 300, "1h": 3600}
START = 1_780_000_000.0
WORDS = "the water at the north gauge rises with wind from the west and falls again with the ebb "


@dataclass
class Vendor:
    """Bills like Anthropic's cache: what a request's marks cover is written once and read until its lifetime ends."""

    prefixes: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Prefix written -> (until when it can be read, its lifetime)."""
    bill: Fraction = Fraction(0)
    now: float = START

    def answer(self, body: dict[str, Any], output: int) -> dict[str, Any]:
        """The usage of a request whose system text is marked for 1 hour and whose last message for ``5m`` or ``1h``."""
        head = body["system"][0]["text"]
        blocks = [block for message in body["messages"] for block in message["content"]]
        last_ttl = blocks[-1]["cache_control"].get("ttl", "5m")
        texts = [head, *(block["text"] for block in blocks)]
        ends = ["".join(texts[: count + 1]) for count in range(len(texts))]
        read = max((len(end) // 4 for end in ends if self._alive(end)), default=0)
        whole, first = len(ends[-1]) // 4, len(head) // 4
        written_1h = max(0, first - read) if last_ttl == "5m" else whole - read
        written_5m = whole - read - written_1h
        self._keep(head, "1h")
        self._keep(ends[-1], last_ttl)
        self.bill += Fraction(read) * READ + written_5m * WRITE_5M + written_1h * WRITE_1H + 7 * INPUT + output * OUTPUT
        return {
            "input_tokens": 7,
            "cache_read_input_tokens": read,
            "cache_creation_input_tokens": written_5m + written_1h,
            "cache_creation": {"ephemeral_5m_input_tokens": written_5m, "ephemeral_1h_input_tokens": written_1h},
            "output_tokens": output,
            "service_tier": "standard",
        }

    def _alive(self, prefix: str) -> bool:
        return prefix in self.prefixes and self.prefixes[prefix][0] >= self.now

    def _keep(self, prefix: str, ttl: str) -> None:
        self.prefixes[prefix] = (self.now + TTL_S[ttl], ttl)


def request(turn: int, ttl: str, system: str) -> dict[str, Any]:
    """The request of a turn: an append-only conversation whose last block is marked."""
    blocks = [{"type": "text", "text": f"turn {number}: {WORDS * (3 + number)}"} for number in range(2 * turn + 1)]
    roles = ["user", "assistant"]
    messages = [{"role": roles[number % 2], "content": [block]} for number, block in enumerate(blocks)]
    marked = copy.deepcopy(messages)
    marked[-1]["content"][0]["cache_control"] = {"type": "ephemeral", **({"ttl": ttl} if ttl == "1h" else {})}  # type: ignore[index]
    head = {"type": "text", "text": system, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    return {"model": MODEL, "max_tokens": 500, "system": [head], "messages": marked}


SYSTEM = "You look after a harbour. " + WORDS * 60
# (seconds since the answer before, does the caller change the system text)
SESSIONS: dict[str, tuple[str, list[tuple[float, bool]]]] = {
    "steady, five minutes": ("5m", [(0, False), (20, False), (250, False), (5, False)]),
    "steady, one hour": ("1h", [(0, False), (1200, False), (3000, False)]),
    "a pause of ten minutes, five minutes": ("5m", [(0, False), (20, False), (600, False), (20, False)]),
    "a pause of ten minutes, one hour": ("1h", [(0, False), (20, False), (600, False), (20, False)]),
    "a pause of two hours, one hour": ("1h", [(0, False), (20, False), (7200, False), (20, False)]),
    "another system text in between": ("5m", [(0, False), (20, False), (20, True), (20, False)]),
}


def play(name: str, path: Path) -> Vendor:
    ttl, turns = SESSIONS[name]
    vendor, system = Vendor(), SYSTEM
    with RecordWriter(path, text=True) as writer:
        for turn, (pause_s, changes) in enumerate(turns):
            vendor.now += pause_s
            system = f"{system} Be quick." if changes else system
            body = request(turn, ttl, system)
            usage = vendor.answer(body, output=50 + turn)
            writer.write(Record(body=body, ts=vendor.now, session=name, url=URL, usage=usage, elapsed_s=2.0))
            vendor.now += 2.0
    return vendor


def explained(path: Path) -> Conversation:
    with path.open(encoding="utf-8") as lines:
        (conversation,) = conversations(read(lines))
    return conversation


@pytest.mark.parametrize("name", SESSIONS)
def test_the_books_are_the_bill(name: str, tmp_path: Path) -> None:
    path = tmp_path / "session.jsonl"
    bill = play(name, path).bill / 1_000_000
    spent = explained(path).report.cost_usd
    assert spent is not None
    assert Fraction(spent) == bill
    with Ledger(tmp_path / "ledger.sqlite", prices=PriceBook()) as ledger, path.open(encoding="utf-8") as lines:
        for record in read(lines):
            ledger.record(Usage.parse(record.usage), model=MODEL, session=name, url=URL, ts=record.ts)
        (total,) = ledger.totals(["session"])
        assert total.cost_usd == spent
        report = SessionReport.of(ledger, name)
    assert report.saved_usd is not None
    uncached = sum(
        (entry.parsed_usage() or Usage()).input_tokens or 0 for entry in _records(path)
    ) * INPUT + OUTPUT * sum((entry.parsed_usage() or Usage()).output_tokens or 0 for entry in _records(path))
    assert Fraction(report.saved_usd) == Fraction(uncached, 1_000_000) - bill


def _records(path: Path) -> list[Record]:
    with path.open(encoding="utf-8") as lines:
        return list(read(lines))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("steady, five minutes", []),
        ("steady, one hour", []),
        ("a pause of ten minutes, five minutes", [(3, Reason.EXPIRED)]),
        ("a pause of ten minutes, one hour", []),
        ("a pause of two hours, one hour", [(3, Reason.EXPIRED)]),
        ("another system text in between", [(3, Reason.SYSTEM_CHANGED)]),
    ],
)
def test_every_loss_is_named_and_nothing_else(name: str, expected: list[tuple[int, Reason]], tmp_path: Path) -> None:
    path = tmp_path / "session.jsonl"
    play(name, path)
    found = list(explained(path).breaks())
    assert [(turn.number, one.reason) for turn, one in found] == expected
    assert all(one.cost_usd is not None and one.cost_usd > Decimal("0.0005") for _, one in found)


def test_what_the_pause_cost(tmp_path: Path) -> None:
    """The lost tokens were written again: at the price of a write instead of a read."""
    path = tmp_path / "session.jsonl"
    play("a pause of two hours, one hour", path)
    ((turn, found),) = explained(path).breaks()
    before = explained(path).turns[turn.number - 2].record.parsed_usage()
    assert before is not None
    assert before.input_tokens is not None
    assert found.lost_tokens is not None
    assert abs(found.lost_tokens - before.input_tokens) < before.input_tokens * 0.02
    assert found.cost_usd == found.lost_tokens * (Decimal(6) - Decimal("0.3")) / 1_000_000
