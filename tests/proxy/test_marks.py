"""A conversation's digests, found step by step, are those of the whole conversation, however it grew."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeport.fingerprint import Api, identity
from homeport_proxy.document import Document
from homeport_proxy.marks import Marks
from homeport_proxy.prefix import Prefixes
from homeport_proxy.splice import raw_members
from proxy.test_prefix import API, MODEL, STEP, grown


@settings(max_examples=150, deadline=None)
@given(API, MODEL, st.lists(STEP, min_size=1, max_size=12), st.sampled_from([2, 1000]))
def test_marks_are_the_identity_of_the_whole(api: str, model: str, steps: list[Any], kept: int) -> None:
    marks = Marks(kept)
    for body in grown(api, model, steps):
        document = Document(raw_members(json.dumps(body).encode()))
        assert marks.of(cast("Api", api), document) == identity(cast("Api", api), body)


def test_memory_is_bounded() -> None:
    marks = Marks(kept=50)
    for number in range(200):
        body = {"model": "m", "messages": [{"role": "user", "content": f"{number}"}]}
        marks.of("chat", Document(raw_members(json.dumps(body).encode())))
    assert len(marks) == 50


def test_of_a_conversation_without_end_the_head_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's body keeps a proxy busy for long: what no model's context holds is told apart by its first messages."""
    for module in ("marks", "prefix"):
        monkeypatch.setattr(f"homeport_proxy.{module}.MOST_MESSAGES", 10)
    marks, chains = Marks(), []
    for length in (30, 40):
        messages = [{"role": "user", "content": str(number)} for number in range(length)]
        document = Document(raw_members(json.dumps({"model": "m", "messages": messages}).encode()))
        chains.append(marks.of("chat", document).chain)
        with pytest.raises(ValueError, match="messages"):
            Prefixes(64).blocks("chat", "s", document)
    assert len(chains[0]) == 10
    assert chains[0] == chains[1]
