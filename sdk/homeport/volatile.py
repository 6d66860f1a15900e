"""Text in a system prompt that changes from request to request: found by kind, and frozen or moved where declared.

Finding is for telling people. Text is changed only where the caller declared it (:func:`volatile`) or a harness profile
knows it for certain.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Literal, NamedTuple, TypeVar

Policy = Literal["freeze", "move", "drop"]
"""``freeze``: the session's first text stays. ``move``: to the end of the system text. ``drop``: left out."""

MIN_CHARS = 6
"""Declared text shorter than this is not looked for: it could stand anywhere in a prompt."""


class VolatileKind(StrEnum):
    """What makes a text change."""

    BILLING = "billing"
    GIT = "git"
    TIMESTAMP = "timestamp"
    DATE = "date"
    UUID = "uuid"
    PATH = "path"
    COUNTER = "counter"


class Volatile(NamedTuple):
    """Volatile text that was found: its kind and its place in the text, in characters."""

    kind: VolatileKind
    start: int
    end: int


_MONTHS = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAYS = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\.?"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp][Mm])?(?:\s?(?:Z\b|UTC|GMT))?(?:\s?[+-]\d{2}:?\d{2}\b)?"
_DATE = (
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}"
    r"|\d{1,2}[-/.]\d{1,2}[-/.]\d{4}"
    rf"|(?:{_DAYS},?\s+)?{_MONTHS}\s+\d{{1,2}}(?:st|nd|rd|th)?,?\s+\d{{4}}"
    rf"|(?:{_DAYS},?\s+)?\d{{1,2}}(?:st|nd|rd|th)?\s+{_MONTHS},?\s+\d{{4}}"
    rf"|{_DAYS}\s+{_MONTHS}\s+\d{{1,2}}(?:\s+\d{{4}})?"
)
# the order decides where two kinds begin at the same place
_PATTERNS = {
    VolatileKind.BILLING: r"x-anthropic-billing-header:[^\n]*",
    VolatileKind.GIT: r"(?i:^[ \t]*(?:git status|current branch|main branch|on branch|recent commits|"
    r"your branch is|is (?:directory )?a git repo(?:sitory)?)\b[^\n]*"
    r"|\bgit[ _-]?(?:status|branch|commit|head)[ \t]*[:=][^\n]*"
    r"|\b(?:commit|HEAD|revision)[ \t]*(?:hash|id|sha)?[ \t]*[:=]?[ \t]*(?=[0-9a-f]*\d)[0-9a-f]{7,40}\b)",
    VolatileKind.TIMESTAMP: rf"\b(?:{_DATE})(?:T|,?\s+(?:at\s+)?){_CLOCK}(?!\d)"
    rf"|\b{_DAYS}\s+{_MONTHS}\s+\d{{1,2}}\s+{_CLOCK}(?:\s+[A-Z]{{2,4}})?(?:\s+\d{{4}})?"
    r"|\b\d{1,2}:\d{2}:\d{2}(?:[.,]\d+)?(?:\s?[AaPp][Mm])?(?:Z|\sUTC)?\b"
    r"|(?<=[ =:])1[5-9]\d{8}(?:\d{3})?(?:\.\d+)?\b",
    VolatileKind.UUID: r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"
    r"|\b[0-9A-HJKMNP-TV-Z]{26}\b|\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{32,64}\b",
    VolatileKind.DATE: rf"\b(?:{_DATE})(?!\d)",
    VolatileKind.PATH: r"(?<![\w/.:<])(?:~|/(?:home|Users|root|tmp|var|work(?:space)?|mnt|opt|private|srv))/[\w.+@~-]+"
    r"(?:/[\w.+@~-]+)*|\b[A-Z]:\\(?:[\w.+@~ -]+\\)*[\w.+@~-]+",
    VolatileKind.COUNTER: r"(?i:\b(?:turn|step|iteration|attempt|request|message|call|round"
    r"|tokens? (?:left|used|remaining)|remaining (?:tokens?|budget|steps?|turns?))"
    r"\s*(?:number|no\.?|count|#)?\s*[:=#]?\s*\d[\d,]*(?:\s*(?:/|of)\s*\d+)?)",
}
# searched one by one and line by line: one pattern of all kinds costs three times as much, and most lines have none
_SEARCHES = tuple((rank, kind, re.compile(pattern)) for rank, (kind, pattern) in enumerate(_PATTERNS.items()))
_TELLTALE = re.compile(r"[0-9~/\\]")
_GIT_WORDS = ("git", "branch", "commits")
_KEPT_LINE_CHARS = 1_024


def scan(text: str) -> list[Volatile]:
    """The volatile texts in ``text``, in order. A likely list: a fixed date in an example is found as well."""
    found: list[Volatile] = []
    at = 0
    for line in text.split("\n"):
        if _may_change(line):
            found += [Volatile(one.kind, at + one.start, at + one.end) for one in _in_line(line)]
        at += len(line) + 1
    return found


def mask(text: str) -> str:
    """``text`` with every volatile text replaced by its kind: the same for two renderings of one prompt."""
    return "\n".join([_masked_line(line) for line in text.split("\n")])


def _may_change(line: str) -> bool:
    if _TELLTALE.search(line) is not None:
        return True
    low = line.lower()
    return any(word in low for word in _GIT_WORDS)


def _masked_line(line: str) -> str:
    if not _may_change(line):
        return line
    return _remembered_masked_line(line) if len(line) <= _KEPT_LINE_CHARS else _mask_line(line)


def _mask_line(line: str) -> str:
    pieces: list[str] = []
    at = 0
    for found in _in_line(line):
        pieces += (line[at : found.start], f"<{found.kind.value}>")
        at = found.end
    return "".join([*pieces, line[at:]])


# the lines of a system prompt come again with every request; at most 4 MB of them
_remembered_masked_line = lru_cache(maxsize=4_096)(_mask_line)


def _in_line(line: str) -> list[Volatile]:
    hits = sorted(
        (match.start(), rank, match.end(), kind)
        for rank, kind, pattern in _SEARCHES
        for match in pattern.finditer(line)
    )
    found: list[Volatile] = []
    for start, _, end, kind in hits:
        if not found or start >= found[-1].end:
            found.append(Volatile(kind, start, end))
    return found


# --- declared text ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Declared:
    """Volatile text that may be changed: where a text matches ``pattern``, ``policy`` applies; ``name`` tells one
    declaration from another within a session."""

    name: str
    pattern: re.Pattern[str]
    policy: Policy = "freeze"
    kind: str | None = None
    whole_block: bool = False
    """Only a system block that begins with the pattern, as a whole (profiles)."""
    instead: str = ""
    """What stands where text was dropped; must not match ``pattern`` itself."""


@dataclass
class _Recent:
    """The texts last declared under one name; a prompt may carry any of them."""

    policy: Policy
    kind: str | None
    texts: deque[str] = field(default_factory=lambda: deque(maxlen=64))


_T = TypeVar("_T", str, re.Pattern[str])
_lock = threading.Lock()
_patterns: OrderedDict[str, Declared] = OrderedDict()
_recent: OrderedDict[str, _Recent] = OrderedDict()
_MAX_NAMES = 256


def volatile(what: _T, *, kind: str | None = None, policy: Policy = "freeze", name: str | None = None) -> _T:
    """Declare text of a system prompt that may be frozen or moved, and return it as it is.

    A text is declared where it is made, ``f"{homeport.volatile(clock())}\\n\\n{guide}"``; a compiled pattern once, for
    every system prompt of this process. ``policy``: ``freeze`` (default) keeps the session's first text, ``move`` puts
    the text behind the stable part of the system prompt, ``drop`` leaves it out. ``name`` says which texts are
    renderings of the same thing; default: the calling line (for a text) or the pattern. Text shorter than 6 characters
    is not looked for: declare the whole line.
    """
    if policy not in ("freeze", "move", "drop"):
        raise ValueError(f"policy must be freeze, move or drop, not {policy!r}")
    with _lock:
        if isinstance(what, re.Pattern):
            key = name or what.pattern
            _patterns[key] = Declared(key, what, policy, kind)
            _trim(_patterns)
        elif len(what) >= MIN_CHARS:
            caller = sys._getframe(1)
            key = name or f"{caller.f_code.co_filename}:{caller.f_lineno}"
            recent = _recent.setdefault(key, _Recent(policy, kind))
            recent.policy, recent.kind = policy, kind
            if what not in recent.texts:
                recent.texts.append(what)
            _recent.move_to_end(key)
            _trim(_recent)
    return what


def _trim(names: OrderedDict[str, Declared] | OrderedDict[str, _Recent]) -> None:
    while len(names) > _MAX_NAMES:
        names.popitem(last=False)


def declared() -> tuple[Declared, ...]:
    """What this process has declared so far."""
    with _lock:
        texts = tuple(
            Declared(name, _one_of(recent.texts), recent.policy, recent.kind) for name, recent in _recent.items()
        )
        return (*_patterns.values(), *texts)


def forget_declared() -> None:
    """Take every declaration back."""
    with _lock:
        _patterns.clear()
        _recent.clear()


def _one_of(texts: Iterable[str]) -> re.Pattern[str]:
    # the longest first: one rendering may begin another
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))


def apply(text: str, rules: Iterable[Declared], frozen: dict[str, str]) -> tuple[str, list[Declared]]:
    """Apply declared rules to a system text: the text after them, and the rules that changed it.

    ``frozen`` holds the session's first texts by rule and place, and is added to. Applying twice changes nothing more.
    """
    before = text
    moved: list[str] = []
    acted: list[Declared] = []
    for rule in rules:
        after = _apply(text, rule, frozen, moved)
        if after != text:
            text = after
            acted.append(rule)
    if moved:
        text = "".join([text, "" if not text or text.endswith("\n") else "\n", *moved])
    return (text, acted) if text != before else (before, [])


def _apply(text: str, rule: Declared, frozen: dict[str, str], moved: list[str]) -> str:
    if rule.whole_block:
        return "" if rule.policy == "drop" and rule.pattern.match(text) else text
    count = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        found = match.group()
        if not found or rule.policy == "freeze":
            return frozen.setdefault(f"{rule.name}#{count}", found) if found else found
        if rule.policy == "move":
            moved.append(found)
            return ""
        return rule.instead

    return rule.pattern.sub(replace, text)
