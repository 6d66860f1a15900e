"""Bodies that grew are read like any other, whatever stands in them and however they changed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeport_proxy.grown import GrownBodies
from homeport_proxy.splice import NotAnObjectError, raw_members

MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"])}, optional={"content": st.text()})
STEP = st.sampled_from(["append", "append", "edit last", "edit first", "cut", "member ahead", "member behind", "twice"])
SPACE = st.sampled_from(["", " ", "\n\t "])


def read(bodies: GrownBodies, body: bytes, end: int | None = None) -> dict[str, bytes] | None:
    """The members; None when the body is refused. ``end``: remember it up to the item that ends last before there."""
    try:
        document = bodies.document("s", body)
    except NotAnObjectError:
        return None
    if end is not None and document.is_list("messages"):
        messages = document.list_of("messages")
        ends = [one for one in messages.next_ends(messages.items(), 1) if one <= end]
        bodies.remember("s", body, document, "messages", max(ends, default=1))
    return {name: bytes(raw) for name, raw in document.raws.items()}


def expected(body: bytes) -> dict[str, bytes] | None:
    try:
        return {name: bytes(raw) for name, raw in raw_members(body).items()}
    except NotAnObjectError:
        return None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(STEP, MESSAGE, SPACE, st.integers(0, 400)), min_size=2, max_size=10))
def test_the_members_are_those_of_the_whole(steps: list[tuple[str, dict[str, Any], str, int]]) -> None:
    bodies = GrownBodies(long_bytes=0)
    ahead, behind, messages = ['"model":"m"'], ['"stream":true'], ['{"role":"system"}']
    for kind, message, space, end in steps:
        text = json.dumps(message)
        if kind == "append":
            messages.append(text)
        elif kind == "edit last":
            messages[-1] = text
        elif kind == "edit first":
            messages[0] = text
        elif kind == "cut":
            del messages[1:]
        elif kind == "member ahead":
            ahead.append(f'"a{len(ahead)}":{text}')
        elif kind == "member behind":
            behind.append(f'"b{len(behind)}":{text}')
        else:
            behind.append('"model":"n"' if len(behind) % 2 else '"messages":[1]')
        listed = f"{space},{space}".join(messages)
        members = ",".join([*ahead, f'{space}"messages":{space}[{listed}{space}]', *behind])
        body = f"{{{members}}}{space}".encode()
        assert read(bodies, body, end) == expected(body)
        assert read(bodies, body) == expected(body)


@pytest.mark.parametrize(
    "body",
    [
        '{"messages":[{"a":1},{"b":2},]}',
        '{"messages":[{"a":1},{"b":2}]',
        '{"messages":[{"a":1},{"b":2} {"c":3}]}',
        '{"messages":[{"a":1},{"b":2}}',
        '{"messages":[{"a":1},{"b":2}]} x',
        '{"messages":[{"a":1},{"b":2}',
        '{"messages":[{"a":1},{"b":2}],"stream":}',
    ],
)
def test_what_is_not_json_is_refused_behind_a_known_front_too(body: str) -> None:
    bodies = GrownBodies(long_bytes=0)
    assert read(bodies, b'{"messages":[{"a":1},{"b":2}],"stream":true}', end=100) is not None
    assert bodies.document("s", b'{"messages":[{"a":1},{"b":2},3]}').known_bytes > 0
    assert read(bodies, body.encode()) is None


def test_fronts_are_kept_apart_and_only_of_long_bodies() -> None:
    bodies = GrownBodies(long_bytes=100)
    short, long = (json.dumps({"messages": [{"content": "x" * size}, 1]}).encode() for size in (10, 200))
    for body in (short, long):
        read(bodies, body, end=1000)
    assert bodies.document("s", short).known_bytes == 0
    assert bodies.document("t", long).known_bytes == 0
    assert bodies.document(None, long).known_bytes == 0
    assert bodies.document("s", long).known_bytes > 200
