"""`homeport explain FILE.jsonl`: recorded requests as a table of cache breaks that one would send to a colleague."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from homeport.analysis import Conversation, Turn, conversations
from homeport.breaks import CacheBreak, Reason
from homeport.cli import CommandError
from homeport.prices import PriceBook
from homeport.record import Record, RecordError, read
from homeport.report import Json, SessionReport, money
from homeport.words import plural

HELP = "say where a recorded agent's prompt cache broke, why, what it cost and what to do"

_HEADINGS = ("turn", "reason", "blame", "where", "byte", "tokens", "cost")
_NUMBERS = frozenset({"turn", "byte", "tokens", "cost"})
_Table: TypeAlias = list[tuple[str, ...]]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("file", metavar="FILE.jsonl", help="recorded requests, one JSON object per line; - reads stdin")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--prices",
        metavar="FILE.json",
        help="own prices: {MODEL: {input, output, cache_read, cache_write}} in dollars per million tokens",
    )


def run(args: argparse.Namespace) -> int:
    """Read, explain, print."""
    try:
        found = conversations(_records(args.file), _prices(args.prices))
    except RecordError as error:
        raise CommandError(str(error)) from None
    if not found:
        raise CommandError(
            f"{args.file} holds no recorded requests; the proxy writes them under `record: {{file: PATH}}`"
        )
    if args.json:
        print(json.dumps(_as_json(found), indent=2, ensure_ascii=False))
    else:
        _print(found)
    return 0


def _records(file: str) -> Iterator[Record]:
    try:
        if file == "-":
            yield from read(sys.stdin, name="stdin")
        else:
            with open(file, encoding="utf-8") as lines:
                yield from read(lines, name=file)
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CommandError(f"{file} is not UTF-8 text; expected recorded requests as JSON lines") from None


def _prices(file: str | None) -> PriceBook:
    if file is None:
        return PriceBook()
    try:
        prices = json.loads(Path(file).read_text(encoding="utf-8"))
        if not isinstance(prices, dict):
            raise ValueError("it must be a JSON object of prices by model")
        return PriceBook(prices)
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror or error}") from None
    except ValueError as error:
        raise CommandError(f"{file}: {error}") from None


# --- JSON ------------------------------------------------------------------------------------------------------------


def _as_json(found: Sequence[Conversation]) -> dict[str, Json]:
    """The sessions' books, and every break of them with its session and turn."""
    sessions: list[Json] = []
    breaks: list[Json] = []
    for conversation in found:
        books = conversation.report.to_dict()
        del books["breaks"]
        books["side_requests"] = conversation.side_requests
        books["refused_requests"] = books.pop("failed_requests")
        sessions.append(books)
        for turn, one in conversation.breaks():
            breaks.append({"session": conversation.session, "turn": turn.number, "ts": turn.record.ts, **one.to_dict()})
    return {"sessions": sessions, "breaks": breaks}


# --- tables ----------------------------------------------------------------------------------------------------------


def _print(found: Sequence[Conversation]) -> None:
    for number, conversation in enumerate(found):
        if number:
            print()
        print(_heading(conversation))
        breaks = [(turn, one) for turn, one in conversation.breaks() if one.reason is not Reason.NOT_REPORTED]
        if not breaks:
            print("  no breaks")
        else:
            _print_table(_table(breaks))
            _print_hints([one for _, one in breaks])
        if note := _note(conversation):
            print(f"  {note}")
    if any(_is_unpriced(conversation.report) for conversation in found):
        print("\nWhere no money is shown, no price is known: --prices FILE.json gives prices of your own.")


def _is_unpriced(books: SessionReport) -> bool:
    return books.cost_usd is None and books.input_tokens is not None


def _heading(conversation: Conversation) -> str:
    books = conversation.report
    parts = [f"{books.requests} {plural('request', books.requests)}"]
    parts.append("cache not reported" if books.cached_share is None else f"{books.cached_share:.1%} of input cached")
    if books.cost_usd is not None:
        parts.append(f"{money(books.cost_usd)} spent")
    if books.saved_usd is not None:
        parts.append(f"{money(books.saved_usd)} saved by the cache")
    if books.lost_tokens:
        cost = f" ({money(books.lost_usd)})" if books.lost_usd is not None else ""
        parts.append(f"{books.lost_tokens:,} tokens lost{cost}")
    return f"Session {conversation.session}: {', '.join(parts)}"


def _table(breaks: Sequence[tuple[Turn, CacheBreak]]) -> _Table:
    """Headings and a row per break; without the column for costs when none is known."""
    rows = [
        (
            str(turn.number),
            one.reason.value,
            one.blame.value,
            _where(one),
            f"{one.offset:,}",
            "?" if one.lost_tokens is None else f"{one.lost_tokens:,}",
            money(one.cost_usd, "-"),
        )
        for turn, one in breaks
    ]
    table: _Table = [_HEADINGS, *rows]
    return table if any(one.cost_usd is not None for _, one in breaks) else [row[:-1] for row in table]


def _where(one: CacheBreak) -> str:
    place = one.pointer or "-"
    return f"{place} ({one.detail.value})" if one.detail else place


def _note(conversation: Conversation) -> str:
    unreported = sum(one.reason is Reason.NOT_REPORTED for _, one in conversation.breaks())
    notes = [
        (unreported, "did not report cached tokens"),
        (conversation.side_requests, "beside the conversation (titles, summaries)"),
        (conversation.refused_requests, "refused"),
    ]
    return "; ".join(f"{count} {plural('request', count)} {what}" for count, what in notes if count)


def _print_table(table: _Table) -> None:
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _print_rich(table)
    else:
        _print_plain(table)


def _print_plain(table: _Table) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    for row in table:
        cells = [
            cell.rjust(width) if name in _NUMBERS else cell.ljust(width)
            for name, cell, width in zip(table[0], row, widths, strict=True)
        ]
        print(f"  {'  '.join(cells)}".rstrip())


def _print_rich(table: _Table) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in table[0]:
        shown.add_column(name, justify="right" if name in _NUMBERS else "left", overflow="fold")
    for row in table[1:]:
        shown.add_row(*(escape(cell) for cell in row))
    Console(highlight=False).print(Padding(shown, (0, 0, 0, 2), expand=False))


def _print_hints(breaks: Sequence[CacheBreak]) -> None:
    """What to do about each kind of break, once."""
    hints = dict.fromkeys((one.reason.value, one.hint) for one in breaks)
    width = max(len(reason) for reason, _ in hints)
    print("  What to do:")
    for reason, hint in hints:
        print(f"    {reason:<{width}}  {hint}")
