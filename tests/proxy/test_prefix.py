"""Prefix keys that grow with a conversation are those of the whole conversation, however it grew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from homeport.fingerprint import Api, text_blocks
from homeport_proxy.document import Document
from homeport_proxy.prefix import Prefixes
from homeport_proxy.splice import raw_members

TEXT = st.text(alphabet="ab é\n<>", max_size=40)
CHAT = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"])},
    optional={
        "content": TEXT | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=2),
        "cache_control": st.just({"type": "ephemeral"}),
        "tool_calls": st.just([{"id": "x", "function": {"name": "f", "arguments": "{}"}}]),
    },
)
STEP = st.tuples(st.sampled_from(["append", "append", "append", "cut", "edit", "tools", "system"]), CHAT)
API = st.sampled_from(["chat", "messages", "responses"])
MODEL = st.sampled_from(["m", "gpt-4o", "qwen3", "llama-3", "deepseek-v3", "mistral-large", "claude-x"])


def grown(api: str, model: str, steps: list[Any]) -> Iterator[dict[str, Any]]:
    """A conversation's body after each step."""
    name = "input" if api == "responses" else "messages"
    body: dict[str, Any] = {"model": model, name: []}
    for kind, message in steps:
        if kind == "append":
            body[name] = [*body[name], message]
        elif kind == "cut":
            body[name] = body[name][:-1]
        elif kind == "edit" and body[name]:
            body[name] = [*body[name][:-1], message]
        elif kind == "tools":
            body["tools"] = [{"type": "function", "function": {"name": "f"}}]
        elif kind == "system":
            billing = f"x-anthropic-billing-header: cch={len(body[name])};"
            body["system"] = [{"type": "text", "text": billing}, {"type": "text", "text": "You help."}]
        yield body


@settings(max_examples=150, deadline=None)
@given(API, MODEL, st.lists(STEP, min_size=1, max_size=12), st.integers(1, 30))
def test_grown_keys_are_the_keys_of_the_whole(api: str, model: str, steps: list[Any], block_chars: int) -> None:
    prefixes = Prefixes(block_chars)
    told = []
    for body in grown(api, model, steps):
        raws = raw_members(json.dumps(body).encode())
        found = prefixes.blocks(cast("Api", api), "s", Document(raws))
        assert list(found) == text_blocks(cast("Api", api), body, block_chars)
        told.append((found, list(found)))
    assert all(list(found) == first for found, first in told), "a later request changed the keys of an earlier one"


def test_memory_is_bounded() -> None:
    prefixes = Prefixes(64, kept_bytes=100_000)
    for number in range(300):
        body = {"model": "m", "messages": [{"role": "user", "content": f"{number} " * 500}]}
        prefixes.blocks("chat", f"s{number}", Document(raw_members(json.dumps(body).encode())))
    assert prefixes.size_bytes <= 100_000
