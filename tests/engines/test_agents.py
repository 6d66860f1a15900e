"""Recorded agents on real engines: the SDK's books are the engines' own, and affinity keeps what one engine would."""

from __future__ import annotations

import pytest
from openai import OpenAI

import homeport
from bench.tau import Engines, OneCache, replay, sessions
from engines.engine_kit import BLOCK_TOKENS, Pair

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

SESSIONS, REQUESTS = 12, 3


def test_tau_sessions_are_booked_as_the_engines_count_them(pair: Pair, client: OpenAI) -> None:
    engines, alone = Engines(pair.proxy_url), OneCache(BLOCK_TOKENS)
    attached = homeport.attach(client)
    books = [
        replay(attached, pair.model, recorded, engines, alone, name=recorded.name, max_requests=REQUESTS)
        for recorded in sessions(SESSIONS)
    ]
    assert len(books) == SESSIONS
    assert [one for one in books if not one.agree] == []
    assert all(one.requests == REQUESTS for one in books)
    # with tools, too, the index named the prompts' blocks as the engines do
    shown = [(backend["index"], backend["index_confidence"] >= 0.9) for backend in pair.status().values()]
    assert shown == [("exact", True)] * 2, pair.status()
    cached = sum(one.engine_cached_tokens for one in books)
    assert cached >= 0.95 * sum(one.one_engine_cached_tokens for one in books)
