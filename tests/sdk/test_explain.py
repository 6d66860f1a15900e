"""The explainer: every reason it knows, whose doing it is, where, how much was lost, and when it says nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeport.breaks import HINTS, Blame, CacheBreak, Detail, Reason
from homeport.explain import explain
from homeport.fingerprint import render
from homeport.prices import PriceBook
from homeport.redaction import expand, redact
from homeport.usage import Usage
from sdk.explaining import Body, chat, edited, grown, mark, messages, responses, tool, usage

HOME = {"X-Homeport-Backend": "d0", "X-Homeport-Decision": "home"}


@dataclass(frozen=True)
class Case:
    before: Body | None
    after: Body
    reason: Reason
    blame: Blame = Blame.CALLER
    pointer: str = ""
    more: dict[str, Any] = field(default_factory=dict)


def change(
    body: Body, reason: Reason, pointer: str, edit: Callable[[Body], object], blame: Blame = Blame.CALLER
) -> Case:
    return Case(body, edited(body, edit), reason, blame, pointer)


def unread(body: Body, reason: Reason, blame: Blame, pointer: str = "", **more: Any) -> Case:
    return Case(body, grown(body), reason, blame, pointer, {"usage": usage(0), **more})


def put(pointer: str, value: Any) -> Callable[[Body], None]:
    """An edit that sets one value."""

    def edit(body: Body) -> None:
        *path, last = [int(token) if token.isdigit() else token for token in pointer.split("/")[1:]]
        node: Any = body
        for token in path:
            node = node[token]
        node[last] = value

    return edit


def image(data: str) -> Body:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def with_image(data: str) -> Body:
    body = chat()
    body["messages"][1]["content"] = [{"type": "text", "text": "What is this?"}, image(data)]
    return body


def marked(*pointers: str, ttl: str | None = None, **more: Any) -> Body:
    body = messages(**more)
    for pointer in pointers:
        node: Any = body
        for token in pointer.split("/")[1:]:
            node = node[int(token)] if token.isdigit() else node[token]
        node.update(mark(node, ttl))
    return body


def long_turn(blocks: int) -> Body:
    """A request that ends with ``blocks`` more blocks than :func:`marked`'s, its mark on the last one."""
    body = marked("/messages/2/content/0")
    del body["messages"][2]["content"][0]["cache_control"]
    results = [{"type": "text", "text": f"reading {number}"} for number in range(blocks)]
    body["messages"].append({"role": "user", "content": [*results[:-1], mark(results[-1])]})
    return body


THINKS = chat(model="qwen3-8b")

CASES: dict[str, Case] = {
    "model_changed": change(chat(), Reason.MODEL_CHANGED, "/model", put("/model", "other"), Blame.PARAMETER),
    "params_changed: effort": change(
        responses(reasoning={"effort": "low"}),
        Reason.PARAMS_CHANGED,
        "/reasoning/effort",
        put("/reasoning/effort", "high"),
        Blame.PARAMETER,
    ),
    "params_changed: template arguments": change(
        chat(chat_template_kwargs={"date_string": "1 May"}),
        Reason.PARAMS_CHANGED,
        "/chat_template_kwargs",
        put("/chat_template_kwargs/date_string", "2 May"),
        Blame.PARAMETER,
    ),
    "params_changed: thinking": change(
        messages(thinking={"type": "enabled", "budget_tokens": 2000}),
        Reason.PARAMS_CHANGED,
        "/thinking",
        put("/thinking/budget_tokens", 4000),
        Blame.PARAMETER,
    ),
    "cache_key_changed": change(
        chat(prompt_cache_key="a"),
        Reason.CACHE_KEY_CHANGED,
        "/prompt_cache_key",
        put("/prompt_cache_key", "b"),
        Blame.PARAMETER,
    ),
    "cache_key_changed: salt": change(
        chat(cache_salt="a"), Reason.CACHE_KEY_CHANGED, "/cache_salt", put("/cache_salt", "b"), Blame.PARAMETER
    ),
    "tools_reordered": change(chat(), Reason.TOOLS_REORDERED, "/tools/0", lambda b: b["tools"].reverse()),
    "tools_added": change(chat(), Reason.TOOLS_ADDED, "/tools/3", lambda b: b["tools"].append(tool("z"))),
    "tools_added: in between": change(
        chat(), Reason.TOOLS_ADDED, "/tools/1", lambda b: b["tools"].insert(1, tool("z"))
    ),
    "tools_removed": change(chat(), Reason.TOOLS_REMOVED, "/tools/1", lambda b: b["tools"].pop(1)),
    "tools_removed: the last": change(chat(), Reason.TOOLS_REMOVED, "/tools", lambda b: b["tools"].pop()),
    "tools_removed: all": change(chat(), Reason.TOOLS_REMOVED, "/tools", lambda b: b.pop("tools")),
    "tool_schema_changed": change(
        chat(),
        Reason.TOOL_SCHEMA_CHANGED,
        "/tools/1/function/description",
        put("/tools/1/function/description", "Search, now better."),
    ),
    "tool_schema_changed: key order": change(
        chat(),
        Reason.TOOL_SCHEMA_CHANGED,
        "/tools/0/function/parameters/properties",
        put("/tools/0/function/parameters/properties", {"day": {"type": "string"}, "gauge": {"type": "string"}}),
    ),
    "system_changed": change(chat(), Reason.SYSTEM_CHANGED, "/messages/0/content", put("/messages/0/content", "New.")),
    "system_changed: messages api": change(
        messages(), Reason.SYSTEM_CHANGED, "/system/0/text", put("/system/0/text", "New.")
    ),
    "system_changed: responses": change(
        responses(), Reason.SYSTEM_CHANGED, "/instructions", put("/instructions", "New.")
    ),
    "history_truncated": change(
        chat(), Reason.HISTORY_TRUNCATED, "/messages/1", lambda b: b["messages"].__delitem__(slice(1, 3))
    ),
    "history_truncated: compacted": change(
        chat(),
        Reason.HISTORY_TRUNCATED,
        "/messages/1",
        lambda b: b.update(messages=[b["messages"][0], {"role": "user", "content": "Summary: the water is high."}]),
    ),
    "history_edited": change(
        chat(), Reason.HISTORY_EDITED, "/messages/3/content", put("/messages/3/content", "[cleared]")
    ),
    "history_edited: inserted": change(
        chat(),
        Reason.HISTORY_EDITED,
        "/messages/2",
        lambda b: b["messages"].insert(2, {"role": "user", "content": "<context/>"}),
    ),
    "whitespace_changed": change(
        chat(),
        Reason.WHITESPACE_CHANGED,
        "/messages/3/content",
        put("/messages/3/content", "4.31 m above chart datum"),
    ),
    "whitespace_changed: system": change(
        chat(system="Be brief.\n\n"),
        Reason.WHITESPACE_CHANGED,
        "/messages/0/content",
        put("/messages/0/content", "Be brief."),
    ),
    "reasoning_dropped": change(
        chat(model="glm-5"),
        Reason.REASONING_DROPPED,
        "/messages/2",
        lambda b: b["messages"][2].pop("reasoning_content"),
    ),
    "reasoning_dropped: thinking block": change(
        messages(), Reason.REASONING_DROPPED, "/messages/1", lambda b: b["messages"][1]["content"].pop(0)
    ),
    "reasoning_dropped: responses item": change(
        responses(), Reason.REASONING_DROPPED, "/input/1", lambda b: b["input"].pop(1)
    ),
    "tool_call_ids_changed": change(
        chat(),
        Reason.TOOL_CALL_IDS_CHANGED,
        "/messages/2/tool_calls/0/id",
        lambda b: (put("/messages/2/tool_calls/0/id", "call_9")(b), put("/messages/3/tool_call_id", "call_9")(b)),
    ),
    "arguments_reencoded": change(
        chat(),
        Reason.ARGUMENTS_REENCODED,
        "/messages/2/tool_calls/0/function/arguments",
        put("/messages/2/tool_calls/0/function/arguments", '{"day":"today","gauge":"north"}'),
    ),
    "arguments_reencoded: responses": change(
        responses(), Reason.ARGUMENTS_REENCODED, "/input/2/arguments", put("/input/2/arguments", '{"gauge":"n"}')
    ),
    "images_changed": change(
        with_image("AAAA"),
        Reason.IMAGES_CHANGED,
        "/messages/1/content/1",
        put("/messages/1/content/1", image("BBBB")),
    ),
    "images_changed: replaced by a marker": change(
        with_image("AAAA"),
        Reason.IMAGES_CHANGED,
        "/messages/1/content/1/text",
        put("/messages/1/content/1", {"type": "text", "text": "[image removed]"}),
    ),
    "breakpoint_missing": unread(messages(), Reason.BREAKPOINT_MISSING, Blame.CALLER, "/messages"),
    "breakpoints_too_many": Case(
        marked("/system/0"),
        marked("/tools/0", "/tools/1", "/tools/2", "/system/0", "/messages/0/content/0"),
        Reason.BREAKPOINTS_TOO_MANY,
        Blame.CALLER,
        "/messages/0/content/0",
    ),
    "lookback_exceeded": Case(
        marked("/messages/2/content/0"),
        long_turn(21),
        Reason.LOOKBACK_EXCEEDED,
        Blame.CALLER,
        "/messages/3/content/20",
    ),
    "below_minimum": unread(
        marked("/messages/2/content/0", model="claude-opus-4-5"),
        Reason.BELOW_MINIMUM,
        Blame.ENGINE,
        usage=usage(0, total=3000),
    ),
    "expired: five minutes": unread(marked("/messages/2/content/0"), Reason.EXPIRED, Blame.ENGINE, elapsed_s=301.0),
    "expired: one hour": unread(
        marked("/messages/2/content/0", ttl="1h"), Reason.EXPIRED, Blame.ENGINE, elapsed_s=3601.0
    ),
    "expired: openai": unread(chat(model="gpt-5"), Reason.EXPIRED, Blame.ENGINE, elapsed_s=7200.0),
    **{
        f"routed_elsewhere: {word}": unread(
            chat(), Reason.ROUTED_ELSEWHERE, Blame.ROUTE, response_headers={**HOME, "X-Homeport-Decision": word}
        )
        for word in ("spill", "moved", "failover", "peer", "placed")
    },
    "evicted: at home": unread(chat(), Reason.EVICTED, Blame.ENGINE, response_headers=HOME),
    "evicted: nothing known of the route": unread(chat(), Reason.EVICTED, Blame.UNKNOWN),
    "evicted: within the lifetime": unread(
        marked("/messages/2/content/0", ttl="1h"), Reason.EVICTED, Blame.UNKNOWN, elapsed_s=3599.0
    ),
    "expired: at home": unread(chat(), Reason.EXPIRED, Blame.ENGINE, response_headers=HOME, elapsed_s=3601.0),
    "cold_start": Case(None, chat(), Reason.COLD_START, Blame.UNKNOWN),
    "template_inherent": Case(THINKS, grown(THINKS), Reason.TEMPLATE_INHERENT, Blame.TEMPLATE, "/messages/2"),
    "not_reported": unread(chat(), Reason.NOT_REPORTED, Blame.UNKNOWN, usage=usage(None)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_reason(name: str) -> None:
    case = CASES[name]
    (found,) = explain(case.before, case.after, **case.more)
    assert (found.reason, found.blame, found.pointer) == (case.reason, case.blame, case.pointer)
    assert found.hint.endswith((".", ")")) or ":" in found.hint
    json.dumps(found.to_dict())


def test_the_table_knows_every_reason() -> None:
    assert {case.reason for case in CASES.values()} == set(Reason)
    assert set(HINTS) == set(Reason)


@pytest.mark.parametrize(
    ("before", "after", "detail"),
    [
        ("Time: 2026-11-29 20:44:11.", "Time: 2026-11-29 20:44:12.", Detail.TIMESTAMP),
        ("It is 09:59 now.", "It is 10:00 now.", Detail.TIMESTAMP),
        ("Today is Sunday, November 29, 2026.", "Today is Monday, November 30, 2026.", Detail.DATE),
        ("Run 6f9619ff-8b86-d011-b42d-00cf4fc964ff.", "Run 7a0e29ff-8b86-d011-b42d-00cf4fc964ff.", Detail.UUID),
        ("Folder: /home/ann/harbour", "Folder: /home/bob/harbour", Detail.PATH),
        ("Current branch: main", "Current branch: fix", Detail.GIT),
        ("You are at step 3 of 9.", "You are at step 4 of 9.", Detail.COUNTER),
        ("There are 17 unread notes.", "There are 18 unread notes.", Detail.COUNTER),
        ("x-anthropic-billing-header: cch=ab1;", "x-anthropic-billing-header: cch=zz9;", Detail.BILLING),
        ("Be brief.", "Be thorough.", None),
        ("gitStatus: at the start\n\nStatus:\nM a.py", "gitStatus: at the start\n\nStatus:\nM b.py", "git"),
        ("Recent commits:\nabc1234 one\n", "Recent commits:\ndef5678 two\nabc1234 one\n", "git"),
        ("Status:\nall is well", "Status:\nnothing is", None),
    ],
)
def test_what_kind_of_volatile_text_changed(before: str, after: str, detail: Detail | None) -> None:
    first = chat(system=f"You look after a harbour.\n{before}\nAnswer briefly.")
    (found,) = explain(
        first, edited(first, put("/messages/0/content", first["messages"][0]["content"].replace(before, after)))
    )
    assert (found.reason, found.detail) == (Reason.SYSTEM_CHANGED, detail)


class TestNoBreak:
    @pytest.mark.parametrize("body", [chat(), messages(), responses(), with_image("AAAA"), {"prompt": "Once"}])
    def test_itself_and_its_continuation(self, body: Body) -> None:
        assert explain(body, copy.deepcopy(body)) == []
        if "prompt" not in body:
            assert explain(body, grown(body)) == []

    def test_marks_string_content_and_item_ids_are_no_difference(self) -> None:
        assert explain(marked("/system/0", "/messages/0/content/0"), grown(messages())) == []
        body = chat()
        body["messages"][1]["content"] = [{"type": "text", "text": body["messages"][1]["content"]}]
        assert explain(chat(), grown(body)) == []
        other = responses()
        other["input"][1]["id"], other["input"][2]["id"] = "rs_2", "fc_2"
        assert explain(responses(), grown(other)) == []

    def test_a_conversation_cut_short_loses_nothing(self) -> None:
        (found,) = explain(grown(chat()), chat())
        assert (found.reason, found.lost_tokens) == (Reason.HISTORY_TRUNCATED, 0)
        assert explain(grown(chat()), chat(), usage(3990)) == []

    def test_tool_call_ids_where_no_template_renders_them(self) -> None:
        gpt = chat(model="gpt-5")
        assert explain(gpt, edited(gpt, _new_ids)) == []

    def test_a_parameter_at_the_tail(self) -> None:
        body = chat(model="kimi-k3", tool_choice="auto")
        assert explain(body, edited(body, put("/tool_choice", "none"))) == []

    @pytest.mark.parametrize("parameter", ["temperature", "max_tokens", "stream", "metadata", "user"])
    def test_parameters_no_prompt_has(self, parameter: str) -> None:
        assert explain(chat(), edited(chat(), put(f"/{parameter}", 1))) == []

    def test_the_engine_read_on_all_the_same(self) -> None:
        after = edited(chat(), put("/tool_choice", "none"))
        assert explain(chat(), after, usage(3400)) == []
        assert explain(chat(), after, usage(0))[0].reason is Reason.PARAMS_CHANGED

    def test_read_as_expected(self) -> None:
        assert explain(chat(), grown(chat()), usage(3600)) == []
        assert explain(None, chat(), usage(3600)) == []

    def test_twenty_blocks_back_are_found(self) -> None:
        assert explain(marked("/messages/2/content/0"), long_turn(20)) == []

    def test_kept_thinking(self) -> None:
        kept = {**THINKS, "chat_template_kwargs": {"preserve_thinking": True}}
        assert explain(kept, grown(kept)) == []
        assert explain(THINKS, grown(THINKS), usage(3990)) == []

    def test_history_kept_by_the_provider(self) -> None:
        later = {**responses(), "previous_response_id": "resp_1", "input": [{"role": "user", "content": "And now?"}]}
        assert explain(responses(), later) == []


def _new_ids(body: Body) -> None:
    body["messages"][2]["tool_calls"][0]["id"] = body["messages"][3]["tool_call_id"] = "other"


class TestPlaceAndLoss:
    def test_offset_is_bytes_of_the_rendered_prompt(self) -> None:
        before = chat(system="Häfen und Hochwasser: 10:00")
        after = edited(before, put("/messages/0/content", "Häfen und Hochwasser: 11:00"))
        (found,) = explain(before, after)
        text = "".join(piece.text for piece in render("chat", before))
        assert text.encode()[: found.offset].decode().endswith("Häfen und Hochwasser: 1")

    def test_four_characters_a_token_without_usage(self) -> None:
        before = chat()
        (found,) = explain(before, edited(before, put("/model", "other")))
        text = "".join(piece.text for piece in render("chat", before))
        assert found.lost_tokens == -(-len(text) // 4)

    def test_a_tokenizer_on_this_machine_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = import_module("homeport.explain")
        monkeypatch.setattr(module, "tokenizer_for", lambda model: len if model == "smollm2" else None)
        before, after = chat(), edited(chat(), put("/messages/0/content", "New."))
        (counted,) = explain(before, after)
        (redacted,) = explain(redact(before, KEY), redact(after, KEY))  # type: ignore[arg-type]
        assert counted.lost_tokens is not None
        assert redacted.lost_tokens is not None
        assert counted.lost_tokens > 3 * redacted.lost_tokens

    def test_usage_says_what_was_lost(self) -> None:
        (found,) = explain(chat(), edited(chat(), lambda b: b["tools"].reverse()), usage(1000, total=4000))
        assert found.lost_tokens is not None
        assert 2300 < found.lost_tokens < 3000

    def test_the_first_difference_decides(self) -> None:
        def everything(body: Body) -> None:
            body["messages"][3]["content"] = "[cleared]"
            body["tools"].reverse()
            body["messages"][0]["content"] = "New."

        assert explain(chat(), edited(chat(), everything))[0].reason is Reason.SYSTEM_CHANGED
        tools_first = chat(model="kimi-k2")
        assert explain(tools_first, edited(tools_first, everything))[0].reason is Reason.TOOLS_REORDERED

    def test_what_a_changed_tool_costs_depends_on_the_template(self) -> None:
        lost = {
            model: explain(chat(model), edited(chat(model), lambda b: b["tools"].reverse()))[0].lost_tokens
            for model in ("qwen3-8b", "kimi-k2")
        }
        assert lost["qwen3-8b"] is not None
        assert lost["kimi-k2"] is not None
        assert lost["qwen3-8b"] < lost["kimi-k2"] - 100  # Qwen keeps the system text

    def test_priced(self) -> None:
        book = PriceBook({"smollm2": {"input": 1, "output": 1, "cache_read": "0.1"}})
        (found,) = explain(chat(), edited(chat(), lambda b: b["tools"].reverse()), usage(0), prices=book)
        assert found.lost_tokens is not None
        assert found.cost_usd == Decimal(found.lost_tokens) * Decimal("0.9") / 1_000_000
        assert explain(chat(), edited(chat(), lambda b: b["tools"].reverse()))[0].cost_usd is None

    def test_behind_a_proxy_no_vendor_is_paid(self) -> None:
        claude = chat(model="gpt-5")
        assert explain(claude, grown(claude), usage(0))[0].cost_usd is not None
        assert explain(claude, grown(claude), usage(0), response_headers=HOME)[0].cost_usd is None

    def test_half_of_it_evicted(self) -> None:
        (found,) = explain(chat(), grown(chat()), usage(8000, total=32000), response_headers=HOME)
        assert found.reason is Reason.EVICTED
        assert found.lost_tokens is not None
        assert 20_000 < found.lost_tokens < 24_000

    def test_marks_that_stay_behind(self) -> None:
        body = marked("/system/0")
        reported = {"input_tokens": 30_000, "cache_read_input_tokens": 20_000, "output_tokens": 5}
        body["messages"][0]["content"][0]["text"] *= 50
        found = explain(body, grown(body), reported)
        assert [one.reason for one in found] == [Reason.BREAKPOINT_MISSING]

    def test_a_short_prompt_at_a_vendor_that_names_a_minimum(self) -> None:
        gpt = chat(model="gpt-5")
        (found,) = explain(gpt, grown(gpt), usage(0, total=900), url="https://api.openai.com/v1/chat/completions")
        assert found.reason is Reason.BELOW_MINIMUM


class TestTemplates:
    def test_a_block_that_moves(self) -> None:
        body = chat(model="mistral-small-3.1")
        (found,) = explain(body, grown(body))
        assert (found.reason, found.blame) == (Reason.TEMPLATE_INHERENT, Blame.TEMPLATE)

    def test_a_late_system_message_that_is_gathered(self) -> None:
        body = chat(model="deepseek-v3.1")
        del body["messages"][2]["reasoning_content"]
        (found,) = explain(body, edited(body, lambda b: b["messages"].append({"role": "system", "content": "Hurry."})))
        assert (found.reason, found.pointer) == (Reason.TEMPLATE_INHERENT, "/messages/6")

    def test_only_what_follows_the_dropped_thought_is_lost(self) -> None:
        (found,) = explain(THINKS, grown(THINKS))
        whole = sum(len(piece.text) for piece in render("chat", THINKS)) // 4
        assert found.lost_tokens is not None
        assert 0 < found.lost_tokens < whole / 2

    def test_within_the_tool_loop_nothing_is_dropped(self) -> None:
        later = copy.deepcopy(THINKS)
        later["messages"].append({"role": "assistant", "content": "", "reasoning_content": "Now the south gauge."})
        later["messages"].append({"role": "tool", "tool_call_id": "call_2", "content": "4.02 m"})
        assert explain(THINKS, later) == []

    def test_a_caller_who_drops_what_the_template_drops(self) -> None:
        after = edited(THINKS, lambda b: b["messages"][2].pop("reasoning_content"))
        assert explain(THINKS, after)[0].blame is Blame.TEMPLATE


class TestVendorsDiagnostics:
    @pytest.mark.parametrize(
        ("diagnostics", "reason", "lost"),
        [
            ({"cache_miss_reason": {"type": "model_changed", "cache_missed_input_tokens": 9}}, Reason.MODEL_CHANGED, 9),
            ({"diagnostics": {"cache_miss_reason": {"type": "system_changed"}}}, Reason.SYSTEM_CHANGED, None),
            ({"cache_miss_reason": {"type": "messages_changed"}}, Reason.HISTORY_EDITED, None),
            (
                {"type": "cache_miss", "reason": "tools_changed", "cache_missed_tokens": 7},
                Reason.TOOL_SCHEMA_CHANGED,
                7,
            ),
            ({"type": "cache_miss", "reason": "text_format_changed"}, Reason.PARAMS_CHANGED, None),
            ({"type": "cache_miss", "reason": "context_compacted"}, Reason.HISTORY_TRUNCATED, None),
            ({"type": "cache_miss", "reason": "prompt_cache_key_changed"}, Reason.CACHE_KEY_CHANGED, None),
        ],
    )
    def test_theirs_holds_where_we_see_nothing(self, diagnostics: Any, reason: Reason, lost: int | None) -> None:
        (found,) = explain(chat(), grown(chat()), None, diagnostics)
        assert found.reason is reason
        assert lost is None or found.lost_tokens == lost

    def test_ours_is_the_more_precise_one_where_both_agree(self) -> None:
        theirs = {"cache_miss_reason": {"type": "tools_changed", "cache_missed_input_tokens": 812}}
        (found,) = explain(messages(), edited(messages(), lambda b: b["tools"].reverse()), None, theirs)
        assert (found.reason, found.pointer, found.lost_tokens) == (Reason.TOOLS_REORDERED, "/tools/0", 812)

    @pytest.mark.parametrize(
        "diagnostics",
        [
            {"cache_miss_reason": None},
            {"cache_miss_reason": {"type": "unavailable"}},
            {"type": "comparison_response_not_found"},
            "what",
            None,
        ],
    )
    def test_what_says_nothing_changes_nothing(self, diagnostics: Any) -> None:
        after = edited(chat(), lambda b: b["tools"].reverse())
        assert explain(chat(), after, None, diagnostics) == explain(chat(), after)

    def test_a_hit_is_a_hit(self) -> None:
        assert explain(chat(), edited(chat(), lambda b: b["tools"].reverse()), None, {"type": "cache_hit"}) == []

    def test_as_objects(self) -> None:
        from anthropic.types import CacheMissToolsChanged, Diagnostics

        miss = CacheMissToolsChanged(type="tools_changed", cache_missed_input_tokens=5)
        (found,) = explain(messages(), grown(messages()), None, Diagnostics(cache_miss_reason=miss))
        assert (found.reason, found.lost_tokens) == (Reason.TOOL_SCHEMA_CHANGED, 5)


# --- properties ------------------------------------------------------------------------------------------------------

_names = st.sampled_from(
    [
        "messages", "tools", "input", "system", "role", "content", "type", "text", "tool_calls", "function", "name",
        "arguments", "cache_control", "model", "thinking", "instructions", "prompt", "reasoning", "$blocks", "chars",
    ]
)  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | _names, inner, max_size=5),
    max_leaves=30,
)
bodies = st.dictionaries(_names, json_values, max_size=8)

texts = st.text(max_size=60)
plain_messages = st.builds(
    lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), texts
)
conversations = st.builds(
    lambda system, history, tools: {
        "model": "smollm2",
        "tools": [tool(name) for name in tools],
        "messages": [{"role": "system", "content": system}, *history],
    },
    texts,
    st.lists(plain_messages, max_size=8),
    st.lists(st.sampled_from("abcdef"), unique=True, max_size=4),
)


@settings(deadline=None, max_examples=40)
@given(bodies | st.none(), bodies, json_values, json_values)
def test_never_raises_for_any_json(before: Any, after: Any, reported: Any, diagnostics: Any) -> None:
    for found in explain(before, after, reported, diagnostics):
        assert isinstance(found, CacheBreak)
        json.dumps(found.to_dict())


@settings(deadline=None, max_examples=40)
@given(bodies)
def test_a_body_does_not_part_from_itself(body: Any) -> None:
    marks = json.dumps(body).count("cache_control")
    assert explain(body, copy.deepcopy(body)) == [] or marks > 4


@settings(deadline=None, max_examples=40)
@given(conversations, st.lists(plain_messages, max_size=4))
def test_a_continuation_is_no_break(body: Any, more: list[Any]) -> None:
    assert explain(body, {**body, "messages": [*body["messages"], *more]}) == []


@settings(deadline=None, max_examples=40)
@given(conversations, conversations)
def test_the_offset_is_where_the_prompts_part(before: Any, after: Any) -> None:
    for found in explain(before, after):
        one, other = ("".join(piece.text for piece in render("chat", body)).encode() for body in (before, after))
        assert one[: found.offset] == other[: found.offset]
        assert found.lost_tokens is not None
        assert 0 <= found.lost_tokens <= len(one)


@settings(deadline=None, max_examples=40)
@given(conversations, conversations)
def test_pure(before: Any, after: Any) -> None:
    kept = copy.deepcopy((before, after))
    assert explain(before, after) == explain(before, after)
    assert (before, after) == kept


KEY = b"k" * 32


@settings(deadline=None, max_examples=40)
@given(conversations, conversations)
def test_without_the_text_the_place_is_still_found(before: Any, after: Any) -> None:
    plain = explain(before, after)
    bare = explain(redact(before, KEY), redact(after, KEY))  # type: ignore[arg-type]
    assert [one.offset // 256 for one in bare] == [one.offset // 256 for one in plain] or _not_ascii(before, after)
    assert bool(bare) == bool(plain)


def _not_ascii(*bodies: Any) -> bool:
    return any("\\u" in json.dumps(body) for body in bodies)


def test_redaction_keeps_lengths() -> None:
    text = "a" * 700
    redacted = redact(text, KEY)
    assert isinstance(redacted, dict)
    assert (len(redacted["$blocks"]), redacted["chars"]) == (3, 700)  # type: ignore[arg-type]
    assert len(str(expand(redacted))) == 700
    assert redact("short text stays plain.", KEY) == "short text stays plain."


def test_usage_may_be_parsed_already() -> None:
    assert explain(chat(), grown(chat()), Usage(4000, 0, None, 1))[0].reason is Reason.EVICTED
    assert (
        explain(chat(), grown(chat()), {"prompt_tokens": 4000, "completion_tokens": 1})[0].reason is Reason.NOT_REPORTED
    )
    assert explain(chat(), grown(chat()), {}) == []
