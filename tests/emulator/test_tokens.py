"""The tokenizer and the block hashes: exact, reversible, the same for ever."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeport_engines.emulator.hashing import ROOT, block_hash, event_hash, extra_keys
from homeport_engines.emulator.tokenizer import END, IMAGE, START, detokenize, tokenize

text = st.text(max_size=60)


@given(text)
def test_tokens_give_the_text_back(content: str) -> None:
    assert detokenize(tokenize(content)) == content


@given(text, text)
def test_a_longer_text_changes_at_most_the_last_token(head: str, tail: str) -> None:
    short, long = tokenize(head), tokenize(head + tail)
    kept = len(short) if len(head.encode()) % 4 == 0 else len(short) - 1
    assert long[:kept] == short[:kept]


@given(text, text)
def test_different_texts_have_different_tokens(one: str, other: str) -> None:
    assert (tokenize(one) == tokenize(other)) == (one == other)


@given(text)
def test_no_text_makes_a_special_token(content: str) -> None:
    assert not {START, END, IMAGE} & set(tokenize(content))


def test_lone_surrogates_do_not_break() -> None:
    assert len(tokenize("\ud800")) == 1
    assert isinstance(detokenize(tokenize("\ud800")), str)


def _cbor_head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes([major << 5 | value])
    for code, form, bound in ((24, ">B", 1 << 8), (25, ">H", 1 << 16), (26, ">I", 1 << 32)):
        if value < bound:
            return bytes([major << 5 | code]) + struct.pack(form, value)
    raise AssertionError(value)


def _by_hand(parent: bytes, tokens: list[int], keys: list[str] | None) -> bytes:
    body = _cbor_head(4, 3) + _cbor_head(2, len(parent)) + parent
    body += _cbor_head(4, len(tokens)) + b"".join(_cbor_head(0, token) for token in tokens)
    if keys is None:
        body += b"\xf6"
    else:
        body += _cbor_head(4, len(keys)) + b"".join(_cbor_head(3, len(k.encode())) + k.encode() for k in keys)
    return hashlib.sha256(body).digest()


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=32),
    st.one_of(st.none(), st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=2)),
)
def test_hashes_are_sha256_of_canonical_cbor(tokens: list[int], keys: list[str] | None) -> None:
    assert block_hash(ROOT, tokens, keys) == _by_hand(ROOT, tokens, keys)


def test_the_first_parent_is_the_hash_of_a_constant() -> None:
    constant = b"vllm-none-hash"
    assert hashlib.sha256(_cbor_head(3, len(constant)) + constant).digest() == ROOT


def test_events_carry_the_low_64_bits() -> None:
    digest = bytes(range(32))
    assert event_hash(digest) == int.from_bytes(digest[-8:], "big")


@pytest.mark.parametrize(
    ("adapter", "salt", "block", "keys"),
    [
        (None, None, 0, None),
        (None, "s", 0, ("s",)),
        (None, "s", 1, None),
        ("lora", None, 3, ("lora",)),
        ("lora", "s", 0, ("lora", "s")),
    ],
)
def test_what_tells_blocks_apart(
    adapter: str | None, salt: str | None, block: int, keys: tuple[str, ...] | None
) -> None:
    assert extra_keys(adapter, salt, block) == keys
