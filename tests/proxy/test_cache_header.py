"""`x-homeport-cache` says what a request found: the session's prefix, kept since its last answer, or nothing."""

from __future__ import annotations

import pytest

from homeport_proxy.pipeline import cache_word
from homeport_proxy.routing.views import SessionView


def view(keep_s: float | None) -> SessionView:
    return SessionView("s", "d0", 3, 0, 9000, 1000.0, 0, warm=keep_s is not None, keep_s=keep_s)


@pytest.mark.parametrize(
    ("before", "said"),
    [(None, "cold"), (view(None), "cold"), (view(240.0), "warm; keep=240"), (view(0.2), "warm; keep=0")],
)
def test_it_says_what_was_found(before: SessionView | None, said: str) -> None:
    assert cache_word(before) == said
