"""`homeport why REQUEST_ID`: where one request's time went, and why its tokens were not cached."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from homeport_proxy.commands.ask import add_url, ask, quoted
from homeport_proxy.routing.causes import CAUSES

HELP = "where one request's time went, and why its tokens were not cached"
_LITTLE_SHARE = 0.2
"""Of the prompt: less than this computed is no reason for a late first token."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a request's way to its first token; all of them together are the time to first token."""

    name: str
    ms: float
    text: str


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("request_id", help="the x-homeport-request-id of an answer")
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_url(parser)


def run(args: argparse.Namespace) -> int:
    """Ask and show."""
    summary = ask(args, f"requests/{quoted(args.request_id)}")
    if args.json:
        found = parts(summary)
        print(
            json.dumps({**summary, "why": verdict(summary, found), "parts": [asdict(part) for part in found]}, indent=2)
        )
    else:
        Console(highlight=False).print(render(summary))
    return 0


def parts(summary: Mapping[str, Any]) -> list[Part]:
    """Where the time to the first token went (to the end, when the answer was not streamed), in order, ms."""
    ms = summary["ms"]
    until = ms["first_token"] if ms["first_token"] is not None else ms["total"]
    if until is None:
        return []
    found = [
        Part("queue", ms["queue"], "held in the proxy until a place had room"),
        Part("decide", ms["decide"], "deciding where it goes"),
    ]
    legs = summary["legs"]
    at = sum(part.ms for part in found) - sum(leg.get("held_ms", 0.0) for leg in legs)
    sliced: list[float] = []
    for leg, following in zip_longest(legs, legs[1:]):
        start = max(at, leg["start_ms"] or 0.0)  # one that could not even connect was never sent
        if leg["part"] == "serve" and not leg["error"]:
            found.append(_served(summary, leg["place"], until - start))
            break
        ends = (leg["end_ms"], following and following["start_ms"], until)
        at = max(start, min(next(end for end in ends if end is not None), until))
        if leg["part"] == "slice" and not leg["error"]:
            sliced.append(at - start)
        else:
            name, what = ("attempt", "tried in vain") if leg["error"] else ("prefill_leg", "prefilled")
            found.append(Part(name, at - start, f"{what} on {leg['place']}" + _error(leg)))
        at += leg.get("held_ms", 0.0)
    found.append(Part("slices", sum(sliced), f"{len(sliced)} of its parts, each prefilled by itself"))
    rest = until - sum(part.ms for part in found)
    found.append(Part("proxy", max(rest, 0.0), "reading the request, and the proxy's own work"))
    return [part for part in found if part.ms > 0]


def _served(summary: Mapping[str, Any], place: str, ms: float) -> Part:
    if summary["decision"] == "peer":
        return Part("peer", ms, f"until another region answered ({place})")
    if summary["prefill_backend"]:
        what = "whole answer, not streamed" if _whole(summary) else "first step"
        return Part("transfer", ms, f"moving the KV to {place}, and its {what}")
    what = "the whole answer, not streamed," if _whole(summary) else "the first token"
    return Part("engine", ms, f"until {what} of {place}")


def _streamed(summary: Mapping[str, Any]) -> bool:
    """Whether its first token came by itself, so that its time is known."""
    return summary["ms"]["first_token"] is not None and summary["stream"]


def _whole(summary: Mapping[str, Any]) -> bool:
    """Whether the answer came in one piece: when its first token was there is not known, and its time is all of it."""
    return summary["ms"]["first_token"] is not None and not summary["stream"]


def verdict(summary: Mapping[str, Any], found: Sequence[Part]) -> str:
    """The longest part in words; for an engine's, why it had so much to compute."""
    if not summary["legs"] and summary["error"]:
        ended = "the client left" if summary["error"] == "client_closed" else "refused by the proxy"
        return f"{ended} before it was sent to an engine"
    if not found:
        return "no answer came"
    longest = max(found, key=lambda part: part.ms)
    until = "time to first token" if _streamed(summary) else "time"
    said = f"{longest.ms / sum(part.ms for part in found):.0%} of the {until}: {longest.text}"
    if longest.name in ("engine", "transfer") and _whole(summary):
        output = summary["tokens"]["output"]
        return f"{said}; {'its' if output is None else f'{output:,}'} output tokens were generated in that time as well"
    if longest.name not in ("engine", "prefill_leg", "slices"):
        return said
    prompt, cached = summary["tokens"]["prompt"], summary["tokens"]["cached"]
    if prompt and cached is not None and prompt - cached < _LITTLE_SHARE * prompt:
        return (
            f"{said}; little was to be computed ({prompt - cached:,} of {prompt:,} tokens): the engine is busy or slow"
        )
    causes = summary["miss_causes"]
    if not causes:
        return said
    cause, tokens = max(causes.items(), key=lambda item: item[1])
    return f"{said}; {tokens:,} tokens computed: {cause} ({CAUSES.get(cause, cause)})"


def render(summary: dict[str, Any]) -> Group:
    """One request in words and two tables."""
    model = summary["model"] or "(no model named)"
    head = f"{summary['request_id']}: {summary['api']} {model}, status {summary['status'] or 'none'}"
    if summary["error"]:
        head += f" ({summary['error']})"
    place = summary["backend"] or "no backend"
    if summary["prefill_backend"]:
        place += f", prefilled by {summary['prefill_backend']}"
    went = f"{summary['decision'] or 'not placed'}: {place}{_because(summary)}"
    found = parts(summary)
    streamed = _streamed(summary)
    times = Table("ms", "what", title="time to first token" if streamed else "time")
    for part in found:
        times.add_row(f"{part.ms:,.1f}", part.text)
    times.add_section()
    for name, text in (("first_token", "until the first token"), ("total", "until the end")):
        if summary["ms"][name] is not None and (streamed or name == "total"):
            times.add_row(f"{summary['ms'][name]:,.1f}", text)
    said: list[Text | Table] = [Text(head), Text(went), Text(verdict(summary, found)), times]
    if summary["legs"]:
        said += [_tokens(summary), *_legs(summary)]
    return Group(*said)


def _because(summary: Mapping[str, Any]) -> str:
    """The reason without the decision's own word, which stands before it."""
    reason = (summary["reason"] or "").removeprefix(summary["decision"] or "").removeprefix(", ")
    return f" because {reason}" if reason else ""


def _tokens(summary: Mapping[str, Any]) -> Table:
    tokens = summary["tokens"]
    table = Table("tokens", "what", title="prompt")
    for name, text in (
        ("prompt", "in the prompt"),
        ("expected_cached", "expected in the cache"),
        ("cached", "found in the cache"),
    ):
        table.add_row("not reported" if tokens[name] is None else f"{tokens[name]:,}", text)
    for cause, count in sorted(summary["miss_causes"].items(), key=lambda item: -item[1]):
        table.add_row(f"{count:,}", f"computed: {cause}, {CAUSES.get(cause, '')}".rstrip(", "))
    return table


def _legs(summary: Mapping[str, Any]) -> list[Text]:
    return [
        Text(f"{leg['part']} on {leg['place']}: {leg['state']}, status {leg['status'] or 'none'}{_error(leg)}")
        for leg in summary["legs"]
    ]


def _error(leg: Mapping[str, Any]) -> str:
    return f", {leg['error']}" if leg["error"] else ""
