"""A conversation's digests, found step by step, are those of the whole conversation, however it grew."""

from __future__ import annotations

import json
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from homeport.fingerprint import Api, identity
from homeport_proxy.document import Document
from homeport_proxy.marks import Marks
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
