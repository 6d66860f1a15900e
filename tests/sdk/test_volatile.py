"""Volatile text in system prompts is found by kind; stable text is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeport.volatile import MIN_CHARS, Declared, VolatileKind, apply, declared, mask, scan, volatile


@pytest.mark.parametrize(
    ("text", "kind", "found"),
    [
        ("Now: 2026-11-29T20:42:01Z.", "timestamp", "2026-11-29T20:42:01Z"),
        ("Now: 2026-11-29 20:42", "timestamp", "2026-11-29 20:42"),
        ("It is Sun Nov 29 2026 20:42:01 GMT+0000", "timestamp", "Sun Nov 29 2026 20:42:01 GMT+0000"),
        ("The clock says 20:42:01.", "timestamp", "20:42:01"),
        ("epoch=1764448921", "timestamp", "1764448921"),
        ("Today's date: 2026-11-29", "date", "2026-11-29"),
        ("Today is November 29, 2026.", "date", "November 29, 2026"),
        ("Today is Sunday, 29 November 2026.", "date", "Sunday, 29 November 2026"),
        ("Today's date: Sun Nov 29 2026", "date", "Sun Nov 29 2026"),
        ("Date: 29/11/2026", "date", "29/11/2026"),
        ("run 123e4567-e89b-12d3-a456-426614174000 begins", "uuid", "123e4567-e89b-12d3-a456-426614174000"),
        ("trace 4bf92f3577b34da6a3ce929d0e0e4736", "uuid", "4bf92f3577b34da6a3ce929d0e0e4736"),
        ("id 01ARZ3NDEKTSV4RRFFQ69G5FAV", "uuid", "01ARZ3NDEKTSV4RRFFQ69G5FAV"),
        ("Working directory: /home/ada/src/app", "path", "/home/ada/src/app"),
        ("cwd ~/src/app ok", "path", "~/src/app"),
        (r"cwd C:\Users\ada\app", "path", r"C:\Users\ada\app"),
        ("Is directory a git repo: yes", "git", "Is directory a git repo: yes"),
        ("a\nCurrent branch: main\nb", "git", "Current branch: main"),
        ("On branch feature/x", "git", "On branch feature/x"),
        ("Work well. Git branch: main", "git", "Git branch: main"),
        ("gitStatus: clean", "git", "gitStatus: clean"),
        ("at commit 3f2a9bc1 now", "git", "commit 3f2a9bc1"),
        ("This is turn 7 of 20.", "counter", "turn 7 of 20"),
        ("Remaining tokens: 91,002", "counter", "Remaining tokens: 91,002"),
        ("Step #3", "counter", "Step #3"),
        (
            "x-anthropic-billing-header: cc_version=2; cch=9",
            "billing",
            "x-anthropic-billing-header: cc_version=2; cch=9",
        ),
    ],
)
def test_found(text: str, kind: str, found: str) -> None:
    assert [(one.kind.value, text[one.start : one.end]) for one in scan(text)] == [(kind, found)]


@pytest.mark.parametrize(
    "text",
    [
        "You are a careful maintainer. Keep answers under two sentences.",
        "Use Python 3.11 and PEP 8; run tests/test_x.py with -q.",
        "Costs are 12.50 USD; ratio 3:1; version 1.2.3; section 4.2.",
        "See https://example.org/home/page for rules.",
        "Take the next turn when asked. One step at a time.",
        "Commit often, defaced or not; ask the head of the branch.",
        "GET /v1/models returns a list.",
        "May the tide be with you; march on.",
        "",
    ],
)
def test_not_found(text: str) -> None:
    assert scan(text) == []
    assert mask(text) == text


def test_masked_renderings_are_the_same() -> None:
    text = "It is {clock} on {day}. Turn {turn}. Run {run}.\nBe brief."
    one = text.format(clock="20:42:01", day="2026-11-29", turn=3, run="123e4567-e89b-12d3-a456-426614174000")
    two = text.format(clock="09:00:59", day="2026-12-01", turn=41, run="00000000-e89b-12d3-a456-426614174fff")
    assert mask(one) == mask(two)
    assert "Be brief." in mask(one)


@given(st.text(max_size=300))
def test_any_text_is_taken(text: str) -> None:
    for one in scan(text):
        assert 0 <= one.start < one.end <= len(text)
        assert one.kind in VolatileKind


@pytest.mark.parametrize("text", ["1" * 50_000, "/a" * 20_000, "turn " * 10_000, "Sun " * 10_000, "a0" * 30_000])
def test_a_long_text_takes_no_long_time(text: str) -> None:
    """No pattern backtracks its way through a hostile prompt (the test's own time limit is the measure)."""
    scan(text)


@given(
    st.lists(st.text(alphabet="ab 12:\n", min_size=MIN_CHARS, max_size=9), min_size=1, max_size=4),
    st.sampled_from(["freeze", "move", "drop"]),
)
def test_applying_twice_changes_nothing_more(texts: list[str], policy: str) -> None:
    for text in texts:
        volatile(text, name="n", policy=policy)  # type: ignore[arg-type]
    frozen: dict[str, str] = {}
    once, _ = apply("start " + " mid ".join(texts) + " end", declared(), frozen)
    again, acted = apply(once, declared(), frozen)
    if policy != "drop":  # what is dropped may bring its neighbours together into another match
        assert (again, acted) == (once, [])


def test_names_are_bounded() -> None:
    for index in range(2_000):
        volatile(f"text number {index}", name=f"n{index}")
    assert len(declared()) <= 256


def test_a_whole_block_rule_needs_the_block() -> None:
    import re

    rule = Declared("b", re.compile(r"head:[^\n]*\Z"), "drop", whole_block=True)
    assert apply("head: x", [rule], {}) == ("", [rule])
    assert apply("x head: x", [rule], {}) == ("x head: x", [])
