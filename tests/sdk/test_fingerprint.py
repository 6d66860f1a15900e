"""Fingerprints: the order of each template family, what does not count, chains, and the incremental form."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeport.fingerprint import Incremental, identity, render, segments, text_blocks
from homeport.templates import FAMILIES, family_of
from sdk.bodies import chat_bodies

TOOL = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": {"type": "object"}}}
CHAT = {
    "model": "m",
    "tools": [TOOL],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "more"},
    ],
}


def kinds(api: str, body: dict, family: str = "default") -> list[str]:
    return [segment.kind for segment in segments(api, body, family)]  # type: ignore[arg-type]


def last(api: str, body: dict, ids: bool = True) -> bytes:
    return segments(api, body, ids=ids)[-1].digest  # type: ignore[arg-type]


# --- order -----------------------------------------------------------------------------------------------------------

MESSAGES = ["message:user", "message:assistant", "message:user"]


@pytest.mark.parametrize(
    ("model", "order"),
    [
        ("moonshotai/Kimi-K2-Instruct", ["tool", "system", *MESSAGES]),
        ("zai-org/GLM-4.6", ["tool", "system", *MESSAGES]),
        ("claude-sonnet-4-5", ["tool", "system", *MESSAGES]),
        ("gpt-5.1", ["tool", "system", *MESSAGES]),
        ("Qwen/Qwen3-32B", ["system", "tool", *MESSAGES]),
        ("deepseek-ai/DeepSeek-V3.2", ["system", "tool", *MESSAGES]),
        ("MiniMaxAI/MiniMax-M2", ["system", "tool", *MESSAGES]),
        ("openai/gpt-oss-120b", ["system", "tool", *MESSAGES]),
        ("meta-llama/Llama-3.1-8B-Instruct", ["system", "tool", *MESSAGES]),
        ("mistralai/Mistral-Small-3.1-24B", ["system", *MESSAGES[:2], "tool", MESSAGES[2]]),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", ["system", "tool", *MESSAGES]),
    ],
)
def test_order_by_model(model: str, order: list[str]) -> None:
    assert kinds("chat", {**CHAT, "model": model}) == order


def test_messages_api_of_an_unknown_model_renders_tools_first() -> None:
    body = {"model": "m", "system": "s", "tools": [{"name": "a", "input_schema": {}}], "messages": []}
    assert kinds("messages", body) == ["tool", "system"]


def test_a_late_system_message_is_gathered_by_the_families_that_do() -> None:
    body = {"messages": [*CHAT["messages"], {"role": "system", "content": "late"}]}
    assert kinds("chat", {**body, "model": "deepseek-chat"}) == ["system", "system", *MESSAGES]
    assert kinds("chat", {**body, "model": "qwen3"}) == ["system", *MESSAGES, "message:system"]


def test_responses_items() -> None:
    body = {
        "model": "gpt-5.1",
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "user", "content": "hi", "id": "msg_1", "status": "completed"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
            {"type": "function_call", "name": "read", "arguments": '{"a":1}', "call_id": "c1", "id": "fc_1"},
            {"type": "function_call_output", "call_id": "c1", "output": "text"},
        ],
    }
    expected = ["system", "system", "message:user", "message:assistant", "message:assistant", "message:tool"]
    assert kinds("responses", body) == expected
    text = "".join(piece.text for piece in render("responses", body))  # type: ignore[arg-type]
    assert '<call c1>read {"a":1}' in text
    assert "rs_1" not in text
    assert "fc_1" not in text


@pytest.mark.parametrize(
    ("prompt", "pointers"),
    [
        ("once", ["/prompt"]),
        (["a", "b"], ["/prompt/0", "/prompt/1"]),
        ([1, 2, 3], ["/prompt"]),
        ([[1], [2]], ["/prompt/0", "/prompt/1"]),
    ],
)
def test_completions(prompt: object, pointers: list[str]) -> None:
    assert [segment.pointer for segment in segments("completions", {"prompt": prompt})] == pointers  # type: ignore[dict-item]


def test_pointers_lead_to_the_text() -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    assert [piece.pointer for piece in render("chat", body)][-1] == "/messages/0/content/0/text"  # type: ignore[arg-type]


# --- what does not count ---------------------------------------------------------------------------------------------


def edited(change: dict) -> dict:
    return {**CHAT, "messages": [*CHAT["messages"][:-1], {**CHAT["messages"][-1], **change}]}


@pytest.mark.parametrize(
    "same",
    [
        edited({"content": [{"type": "text", "text": "more"}]}),
        edited({"content": [{"type": "text", "text": "mo"}, {"type": "text", "text": "re"}]}),
        edited({"content": [{"type": "text", "text": "more", "cache_control": {"type": "ephemeral"}}]}),
        edited({"cache_control": {"type": "ephemeral"}}),
        edited({"id": "msg_77", "status": "completed"}),
        {**CHAT, "tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}]},
        {**CHAT, "tools": [{"function": dict(reversed(TOOL["function"].items())), "type": "function"}]},  # type: ignore[attr-defined]
        {**CHAT, "temperature": 0.3, "stream": True, "metadata": {"a": "b"}, "prompt_cache_key": "k"},
    ],
)
def test_no_difference(same: dict) -> None:
    assert last("chat", same) == last("chat", CHAT)


@pytest.mark.parametrize(
    "other",
    [
        edited({"content": "more "}),
        edited({"role": "assistant"}),
        edited({"content": [{"type": "text", "text": "more"}, {"type": "image_url", "image_url": {"url": "data:x"}}]}),
        {**CHAT, "tools": [{"type": "function", "function": {**TOOL["function"], "description": "reads."}}]},
        {
            **CHAT,
            "tools": [{"type": "function", "function": {**TOOL["function"], "parameters": {"type": "object", "a": 1}}}],
        },
        {**CHAT, "messages": CHAT["messages"][:-1]},
        {**CHAT, "chat_template_kwargs": {"date_string": "today"}},
    ],
)
def test_a_difference(other: dict) -> None:
    assert last("chat", other) != last("chat", CHAT)


def test_schema_key_order_counts_as_it_does_for_the_model() -> None:
    def body(*names: str) -> dict:
        schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
        return {
            "model": "m",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
            "messages": [],
        }

    assert last("chat", body("a", "b")) != last("chat", body("b", "a"))
    kimi = [last("chat", {**body(*names), "model": "kimi-k3"}) for names in (("a", "b"), ("b", "a"))]
    assert kimi[0] == kimi[1]  # its template sorts the keys itself


def test_tool_call_ids_count_only_when_asked() -> None:
    def body(number: str) -> dict:
        call = {"id": number, "type": "function", "function": {"name": "read", "arguments": "{}"}}
        return {
            "messages": [
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": number, "content": "x"},
            ]
        }

    assert last("chat", body("a")) != last("chat", body("b"))
    assert last("chat", body("a"), ids=False) == last("chat", body("b"), ids=False)


def test_model_output_stands_verbatim() -> None:
    arguments = '{"b": 1,\n  "a": "\\u00e9" }'
    body = {
        "messages": [
            {
                "role": "assistant",
                "content": "  x \n",
                "reasoning_content": " why ",
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}],
            }
        ]
    }
    text = "".join(piece.text for piece in render("chat", body))  # type: ignore[arg-type]
    assert arguments in text
    assert "  x \n" in text
    assert " why " in text


def test_pictures_count_as_a_few_bytes() -> None:
    url = "data:image/png;base64," + "A" * 100_000
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    assert segments("chat", body)[0].size < 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": None},
        {"messages": {"a": 1}},
        {"messages": [1, None, [], {"role": 3, "content": {"x": 1}}]},
        {"tools": "no"},
        {"messages": [{"role": "user", "content": "\ud800"}], "tools": [3, None, {"function": 7}]},
        {"system": 4, "input": [[]]},
    ],
)
@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages"])
def test_any_shape_is_taken(api: str, body: dict) -> None:
    assert segments(api, body) == segments(api, body)  # type: ignore[arg-type]
    identity(api, body)  # type: ignore[arg-type]


# --- chains ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(chat_bodies(), st.data())
def test_a_continuation_has_the_prompt_before_as_prefix(body: dict, data: st.DataObject) -> None:
    if family_of(body["model"]).order == "tools_at_last_user":
        return  # that template moves the tools with every turn
    cut = data.draw(st.integers(1, len(body["messages"])))
    before = segments("chat", {**body, "messages": body["messages"][:cut]})
    after = segments("chat", body)
    if body["messages"][0]["role"] != "system" or cut > 1:
        assert after[: len(before)] == before


@settings(max_examples=60)
@given(chat_bodies(), st.sampled_from(sorted(FAMILIES)))
def test_sizes_and_pieces_agree(body: dict, family: str) -> None:
    text = "".join(piece.text for piece in render("chat", body, family))
    assert sum(segment.size for segment in segments("chat", body, family)) == len(text.encode("utf-8", "surrogatepass"))


@settings(max_examples=60)
@given(chat_bodies(), st.integers(1, 40))
def test_blocks_are_chained_and_leave_the_last_part_out(body: dict, block: int) -> None:
    blocks = text_blocks("chat", body, block)
    layout = family_of(body["model"])
    text = "".join(p.text for p in render("chat", body, ids=layout.renders_call_ids is True))
    assert len(blocks) == len(text) // block
    assert all(0 <= one < 2**64 for one in blocks)
    longer = {**body, "messages": [*body["messages"], {"role": "user", "content": "tail"}]}
    if layout.order != "tools_at_last_user":
        assert text_blocks("chat", longer, block)[: len(blocks)] == blocks


@settings(max_examples=30)
@given(st.lists(chat_bodies(), min_size=1, max_size=3), st.integers(1, 64))
def test_incremental_gives_the_same(bodies: list[dict], block: int) -> None:
    follow = Incremental(ids=False, block_chars=block)
    for body in bodies:
        for cut in range(1, len(body["messages"]) + 1):
            part = {**body, "messages": body["messages"][:cut]}
            assert follow.segments("chat", part) == segments("chat", part, ids=False)
            if family_of(body["model"]).renders_call_ids is not True:
                assert follow.text_blocks("chat", part) == text_blocks("chat", part, block)


def test_incremental_renders_only_what_is_new() -> None:
    follow = Incremental()
    body = {"model": "m", "tools": [TOOL] * 9, "messages": [{"role": "user", "content": "x" * 100_000}]}
    follow.segments("chat", body)
    assert follow.rendered_bytes > 100_000
    longer = json.loads(json.dumps({**body, "messages": [*body["messages"], {"role": "assistant", "content": "y"}]}))
    follow.segments("chat", longer)
    assert follow.rendered_bytes < 20
    assert follow.size_bytes < 5_000  # digests, no text


def test_incremental_does_not_even_read_frozen_objects_again() -> None:
    history: list = [{"role": "user", "content": "x" * 1_000} for _ in range(50)]
    follow = Incremental(frozen=True)
    follow.segments("chat", {"messages": history})
    assert follow.read_bytes > 50_000
    longer = [*history, {"role": "assistant", "content": "y"}]
    assert follow.segments("chat", {"messages": longer}) == segments("chat", {"messages": longer})
    assert follow.read_bytes == follow.rendered_bytes < 20
    follow.let_go()
    assert follow.segments("chat", {"messages": longer}) == segments("chat", {"messages": longer})
    assert follow.rendered_bytes == 0 < follow.read_bytes


def test_an_object_that_stands_elsewhere_now_is_another_part() -> None:
    one, two = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    follow = Incremental(frozen=True)
    for messages in ([one, two], [two, one], [two], [one, one, two]):
        assert follow.segments("chat", {"messages": messages}) == segments("chat", {"messages": messages})


def test_incremental_after_a_fault_on_the_way() -> None:
    deep: object = "x"
    for _ in range(100_000):
        deep = [deep]
    messages: list = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    follow = Incremental(frozen=True)
    follow.segments("chat", {"messages": messages})
    with pytest.raises((RecursionError, ValueError)):
        follow.segments("chat", {"messages": [messages[0], {"role": "user", "content": "c"}, {"content": deep}]})
    assert follow.segments("chat", {"messages": messages}) == segments("chat", {"messages": messages})
    while isinstance(deep, list):  # a deep list is taken apart by hand: its own end would be a recursion
        deep = deep.pop()


def test_incremental_sees_key_order_and_types() -> None:
    follow = Incremental()
    for schema in ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"b": 2, "a": True}, {"b": 2, "a": 1.0}):
        body = {"tools": [{"name": "f", "input_schema": schema}], "messages": []}
        assert follow.segments("messages", body) == segments("messages", body)


# --- identity --------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(chat_bodies(), chat_bodies(), st.data())
def test_identity_after_an_earlier_one_is_the_same(body: dict, other: dict, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(body["messages"])))
    before = {**body, "messages": body["messages"][:cut] + data.draw(st.sampled_from([[], other["messages"]]))}
    after = identity("chat", before, tools=False)
    assert identity("chat", body, tools=False, after=after) == identity("chat", body, tools=False)


def test_identity_reads_only_what_is_new() -> None:
    class Message(dict):
        """Counts how often it is read."""

        reads = 0

        def __iter__(self):
            type(self).reads += 1
            return super().__iter__()

    history = [Message(role="user", content="x") for _ in range(9)]
    first = identity("chat", {"messages": history})
    seen = Message.reads
    assert seen >= 9
    second = identity("chat", {"messages": [*history, {"role": "user", "content": "y"}]}, after=first)
    assert Message.reads == seen
    assert second.chain[:9] == first.chain


def test_identity_of_head_and_chain() -> None:
    one = identity("chat", CHAT)
    longer = identity("chat", {**CHAT, "messages": [*CHAT["messages"], {"role": "assistant", "content": "z"}]})
    assert longer.head == one.head
    assert longer.chain[: len(one.chain)] == one.chain
    other_system = identity(
        "chat", {**CHAT, "messages": [{"role": "system", "content": "Be long."}, *CHAT["messages"][1:]]}
    )
    assert other_system.head != one.head
    assert other_system.chain == one.chain


# --- the same everywhere ---------------------------------------------------------------------------------------------

PROGRAM = """
import json, sys
from homeport.fingerprint import identity, segments, text_blocks
from homeport.session import affinity_id, affinity_uuid
from homeport.stabilise import stabilise
from homeport.volatile import mask
body = json.loads(sys.argv[1])
plan = stabilise(body)
print(json.dumps([
    [s.digest.hex() for s in segments("chat", body)], text_blocks("chat", body, 16), identity("chat", body).head.hex(),
    affinity_id("n", "\\u00e9"), affinity_uuid("n", "x"), plan.body, [str(k) for k in plan.state.slots],
    mask("29. November 2026, 12:00:01 \\u0130"),
]))
"""


def test_digests_do_not_depend_on_hash_seed_or_locale() -> None:
    tools = [
        {"type": "function", "function": {"name": n, "parameters": {"properties": {"b": {}, "a": {}}}}} for n in "zéa"
    ]
    argument = json.dumps(
        {**CHAT, "tools": tools, "messages": [*CHAT["messages"], {"role": "user", "content": "İé海🚢"}]}
    )
    outputs = set()
    for seed, locale in (("0", "C"), ("1", "C.UTF-8"), ("12345", "POSIX")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": locale, "PYTHONUTF8": "0"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, argument], env=environment, capture_output=True, text=True, check=True
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_digests_are_the_documented_ones() -> None:
    """A digest that is stored or sent must not change with a release: these are fixed."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert segments("chat", body)[0].digest.hex() == "7bff827bd637bc847d0699e234fff356"
