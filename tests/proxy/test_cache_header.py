"""`x-homeport-cache` says what a request found: the session's prefix, kept since its last answer, or nothing."""

from __future__ import annotations

import math

import pytest

from homeport_proxy.pipeline import cache_word
from homeport_proxy.routing.views import SessionView


def view(*, warm: bool = True, keep_s: float | None = 240.0, open_requests: int = 0) -> SessionView:
    return SessionView(
        session="s",
        home="d0",
        requests=3,
        open_requests=open_requests,
        context_tokens=9000,
        last_used_s=1000.0,
        moves=0,
        warm=warm,
        keep_s=keep_s,
    )


@pytest.mark.parametrize(
    ("before", "now_s", "said"),
    [
        (None, 1000.0, "cold"),
        (view(warm=False), 1000.0, "cold"),
        (view(), 1240.0, "warm; keep=240"),
        (view(), 1240.1, "cold"),
        (view(open_requests=1), 9000.0, "warm; keep=240"),
        (view(keep_s=0.2), 1000.1, "warm; keep=0"),
        (view(keep_s=None), 9000.0, "warm"),
        (view(keep_s=math.inf), 9000.0, "warm"),
    ],
)
def test_it_says_what_was_found(before: SessionView | None, now_s: float, said: str) -> None:
    assert cache_word(before, now_s) == said
