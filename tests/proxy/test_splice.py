"""Edits by span: what is not named stays byte for byte, whatever the spelling of the object."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeport_proxy.splice import NotAnObjectError, document_of, edit, edit_at, members, raw_members

KEYS = st.sampled_from(["a", "b", "model", "kv_transfer_params", "é", "x y", '"', "\\", "stream"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
SPACE = st.sampled_from(["", " ", "\n  ", "\t"])


@st.composite
def objects(draw: st.DrawFn) -> tuple[list[tuple[str, object]], bytes]:
    """Members in order, duplicates allowed, and one spelling of them."""
    pairs = draw(st.lists(st.tuples(KEYS, VALUES), max_size=6))
    ascii_only = draw(st.booleans())
    parts = [
        f"{draw(SPACE)}{json.dumps(key, ensure_ascii=ascii_only)}{draw(SPACE)}:{draw(SPACE)}"
        f"{json.dumps(value, ensure_ascii=ascii_only)}{draw(SPACE)}"
        for key, value in pairs
    ]
    return pairs, (draw(SPACE) + "{" + (",".join(parts) or draw(SPACE)) + "}" + draw(SPACE)).encode()


@settings(max_examples=80, deadline=None)
@given(objects())
def test_members_are_found_where_they_stand(case: tuple[list[tuple[str, object]], bytes]) -> None:
    pairs, body = case
    found = members(body)
    assert [member.key for member in found] == [key for key, _ in pairs]
    assert [json.loads(body[member.value_start : member.value_end]) for member in found] == [v for _, v in pairs]


@settings(max_examples=80, deadline=None)
@given(objects(), st.dictionaries(KEYS, VALUES, max_size=3), st.sets(KEYS, max_size=3))
def test_edit_means_what_it_says(
    case: tuple[list[tuple[str, object]], bytes], put: dict[str, object], drop: set[str]
) -> None:
    pairs, body = case
    drop -= put.keys()
    edited = edit(body, put, drop)
    expected = {key: value for key, value in pairs if key not in drop} | put
    result = json.loads(edited)
    assert result == expected
    assert [member.key for member in members(edited)].count("a") <= 1 or "a" not in put
    for member in members(body):
        if member.key not in drop and member.key not in put:
            assert body[member.key_start : member.value_end] in edited


@settings(max_examples=40, deadline=None)
@given(objects())
def test_nothing_to_change_gives_the_same_bytes(case: tuple[list[tuple[str, object]], bytes]) -> None:
    _, body = case
    assert edit(body, {}, {"absent"}) is body


def test_a_duplicate_cannot_hide_a_member() -> None:
    body = b'{"a":"1","kv_transfer_params":{"x":1},"a":"22","kv_transfer_params":{"x":2}}'
    assert json.loads(edit(body, {}, {"kv_transfer_params"})) == {"a": "22"}
    assert b"kv_transfer_params" not in edit(body, {}, {"kv_transfer_params"})


def test_numbers_and_escapes_survive() -> None:
    body = b'{"temperature":1.0000,"seed":1e3,"text":"\\u00e9\\/","stop":null,"stream":true}'
    assert edit(body, {"stream": False}) == body.replace(b'"stream":true', b'"stream":false')


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"1", b"{", b'{"a":}', b'{"a":1}x', b"\xff", b"{" * 5000, b'{"a":[' * 9000]
)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(NotAnObjectError):
        raw_members(body)
    with pytest.raises(NotAnObjectError):
        document_of(body)


def test_half_a_surrogate_pair_and_nan_pass_as_pythons_parser_takes_them() -> None:
    body = b'{"text":"\\ud83d","n":NaN,"kv_transfer_params":{}}'
    assert edit(body, {}, {"kv_transfer_params"}) == b'{"text":"\\ud83d","n":NaN}'
    assert document_of(body)["text"] == "\ud83d"


def test_edit_at_reaches_inside() -> None:
    body = b'{"x": 1, "usage": {"a": 1, "details": null}, "y":2}'
    assert edit_at(body, ("usage",), {"details": {"c": 3}}) == b'{"x": 1, "usage": {"a": 1, "details": {"c":3}}, "y":2}'
    assert edit_at(body, ("absent", "path"), {"c": 3}) is body
