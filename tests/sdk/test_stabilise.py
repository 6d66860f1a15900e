"""The stabiliser: order, slots, canonical definitions, marks in place, declared volatile text; pure and idempotent."""

from __future__ import annotations

import copy
import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import homeport
from homeport import canonical
from homeport.fingerprint import segments
from homeport.profiles import PROFILES, recognise
from homeport.stabilise import ChangeKind, State, origin, stabilise
from homeport.volatile import Declared, declared
from sdk.bodies import TOOL_LISTS, histories, schemas


def chat(name: str, **extra: object) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}, **extra}


def flat(name: str) -> dict:
    return {"type": "function", "name": name, "parameters": {"type": "object"}}


def anthropic(name: str, **extra: object) -> dict:
    return {"name": name, "input_schema": {"type": "object"}, **extra}


SHAPES = {"chat": chat, "responses": flat, "messages": anthropic}


def names(body: dict) -> list[str]:
    return [tool.get("function", tool).get("name", tool.get("type")) for tool in body["tools"]]


def marks(tools: list[dict]) -> list[object]:
    return [tool.get("cache_control") or tool.get("function", {}).get("cache_control") for tool in tools]


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize(
    ("given_names", "stable"),
    [
        (["b", "a", "c"], ["a", "b", "c"]),
        (["b", "B", "a"], ["B", "a", "b"]),  # by code point, not by locale
        (["é", "z", "a"], ["a", "z", "é"]),
        (["tool10", "tool9"], ["tool10", "tool9"]),
        (["mcp__z__a", "own", "mcp__a__z"], ["own", "mcp__a__z", "mcp__z__a"]),
        (["mcp__git__b", "zz", "mcp__git__a"], ["zz", "mcp__git__a", "mcp__git__b"]),
        (["mcp_like", "mcp__a__b", "read_file"], ["mcp_like", "read_file", "mcp__a__b"]),
    ],
)
def test_first_sight(shape: str, given_names: list[str], stable: list[str]) -> None:
    plan = stabilise({"tools": [SHAPES[shape](name) for name in given_names]})
    assert names(plan.body) == stable


def test_callers_order_is_kept_on_demand() -> None:
    plan = stabilise({"tools": [chat("b"), chat("a")]}, tool_order="caller")
    assert names(plan.body) == ["b", "a"]
    assert names(stabilise({"tools": [chat("a"), chat("b")]}, plan.state, tool_order="caller").body) == ["b", "a"]


def test_later_tools_are_appended() -> None:
    state = stabilise({"tools": [chat("m"), chat("c")]}).state
    plan = stabilise({"tools": [chat("a"), chat("m"), chat("mcp__s__b"), chat("c"), chat("b")]}, state)
    assert names(plan.body) == ["c", "m", "a", "b", "mcp__s__b"]


def test_a_tool_that_returns_takes_its_old_slot() -> None:
    tools = [chat("a"), chat("b"), chat("c")]
    state = stabilise({"tools": tools}).state
    gone = stabilise({"tools": [chat("c"), chat("a")]}, state)
    assert names(gone.body) == ["a", "c"]
    back = stabilise({"tools": [chat("c"), chat("b"), chat("a")]}, gone.state)
    assert names(back.body) == ["a", "b", "c"]


def test_tools_absent_for_a_request_keep_their_slots() -> None:
    state = stabilise({"tools": [chat("b"), chat("a")]}).state
    state = stabilise({"messages": []}, state).state
    assert names(stabilise({"tools": [chat("b"), chat("a")]}, state).body) == ["a", "b"]


def test_tools_of_one_name_stay_apart() -> None:
    first, second = chat("a", n=1), chat("a", n=2)
    plan = stabilise({"tools": [chat("b"), first, second]})
    assert [tool.get("n") for tool in plan.body["tools"]] == [1, 2, None]


def test_mcp_names_that_do_not_say_it_are_told() -> None:
    origin = {"git_log": ("git", "log"), "fs_read": ("fs", "read")}
    plan = stabilise({"tools": [chat("git_log"), chat("zoom"), chat("fs_read")]}, mcp_tools=origin)
    assert names(plan.body) == ["zoom", "fs_read", "git_log"]


def test_built_in_tools_stay_verbatim_and_remote_servers_come_last() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5, "allowed_domains": ["b", "a"]}
    remote = {"type": "mcp", "server_label": "docs", "server_url": "https://x", "allowed_tools": ["b", "a"]}
    plan = stabilise({"tools": [remote, search, flat("a")]})
    assert plan.body["tools"][1] is search
    assert plan.body["tools"][2] is remote


def test_legacy_functions() -> None:
    plan = stabilise({"functions": [{"name": "b", "parameters": {"b": 1, "a": 2}}, {"name": "a", "parameters": {}}]})
    assert json.dumps(plan.body["functions"]) == (
        '[{"name": "a", "parameters": {}}, {"name": "b", "parameters": {"a": 2, "b": 1}}]'
    )


@pytest.mark.parametrize("bad", [{"tools": None}, {"tools": {}}, {"tools": []}, {"tools": [None, 3, "x"]}, {}])
def test_odd_shapes_pass(bad: dict) -> None:
    assert stabilise(bad).body is bad


def test_a_wrong_order_is_named() -> None:
    with pytest.raises(ValueError, match="sorted or caller"):
        stabilise({}, tool_order="random")  # type: ignore[arg-type]


# --- definitions -----------------------------------------------------------------------------------------------------


def test_what_is_sorted_and_what_never() -> None:
    schema = {
        "type": "object",
        "required": ["b", "a"],
        "properties": {
            "z": {"type": "string", "enum": ["b", "a"], "description": "one of: b, a"},
            "required": {"anyOf": [{"type": "string"}, {"type": "null", "title": "t"}]},
            "enum": {"prefixItems": [{"type": "string"}, {"type": "integer"}], "type": "array"},
            "a": {"type": "object", "examples": [{"z": 1, "a": 2}], "default": {"y": 1, "b": 2}},
        },
        "dependentRequired": {"z": ["q", "b"], "a": ["y", "x"]},
        "$defs": {"T": {"type": "string"}, "A": {"const": {"b": 1, "a": 2}}},
    }
    assert json.dumps(canonical.schema(schema)) == json.dumps(
        {
            "$defs": {"A": {"const": {"b": 1, "a": 2}}, "T": {"type": "string"}},
            "dependentRequired": {"a": ["x", "y"], "z": ["b", "q"]},
            "properties": {
                "a": {"default": {"y": 1, "b": 2}, "examples": [{"z": 1, "a": 2}], "type": "object"},
                "enum": {"prefixItems": [{"type": "string"}, {"type": "integer"}], "type": "array"},
                "required": {"anyOf": [{"type": "string"}, {"title": "t", "type": "null"}]},
                "z": {"description": "one of: b, a", "enum": ["b", "a"], "type": "string"},
            },
            "required": ["a", "b"],
            "type": "object",
        }
    )


@pytest.mark.parametrize("required", [True, "a", ["b", 1], None])
def test_a_required_that_is_no_list_of_names_stays(required: object) -> None:
    assert canonical.schema({"required": required}) == {"required": required}


@given(schemas())
@settings(max_examples=60)
def test_canonical_form_is_idempotent_and_means_the_same(schema: dict) -> None:
    once = canonical.schema(schema)
    assert json.dumps(canonical.schema(once)) == json.dumps(once)
    assert unordered(once) == unordered(schema)


def unordered(node: object, key: str = "") -> object:
    """The value with the sets a schema has as sets; dicts compare without order anyway."""
    if isinstance(node, dict):
        if key == "dependentRequired":
            return {name: sorted(value) for name, value in node.items()}
        return {name: unordered(value, name) for name, value in node.items()}
    if isinstance(node, list) and key == "required":
        return sorted(node, key=str)
    return [unordered(item) for item in node] if isinstance(node, list) else node


# --- marks -----------------------------------------------------------------------------------------------------------

SHORT, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


def test_marks_stay_at_their_places() -> None:
    tools = [anthropic("c"), anthropic("b", cache_control=LONG), anthropic("a", cache_control=SHORT)]
    plan = stabilise({"tools": tools})
    assert names(plan.body) == ["a", "b", "c"]
    assert marks(plan.body["tools"]) == [None, LONG, SHORT]
    assert [change.pointer for change in plan.changes if change.kind is ChangeKind.MARK_KEPT_IN_PLACE] == [
        "/tools/1/cache_control",
        "/tools/2/cache_control",
    ]


def test_a_mark_inside_function_stays_inside() -> None:
    tool = chat("b")
    tool["function"]["cache_control"] = SHORT
    plan = stabilise({"tools": [tool, chat("a")]})
    assert plan.body["tools"][0]["function"]["cache_control"] == SHORT
    assert "cache_control" not in plan.body["tools"][1]["function"]


def test_a_mark_on_the_last_tool_stays_on_the_last_when_one_is_added() -> None:
    state = stabilise({"tools": [anthropic("b"), anthropic("a", cache_control=SHORT)]}).state
    plan = stabilise({"tools": [anthropic("b"), anthropic("aa"), anthropic("a", cache_control=SHORT)]}, state)
    assert names(plan.body) == ["a", "b", "aa"]
    assert marks(plan.body["tools"]) == [None, None, SHORT]


# --- properties ------------------------------------------------------------------------------------------------------


def exact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


@settings(max_examples=50)
@given(TOOL_LISTS, TOOL_LISTS, histories(), st.sampled_from(["sorted", "caller"]))
def test_pure_idempotent_and_lossless(before: list, after: list, messages: list, order: str) -> None:
    first = stabilise({"tools": before, "messages": messages}, tool_order=order)  # type: ignore[arg-type]
    body = {"x": 1, "tools": after, "messages": messages}
    kept_body, kept_state = copy.deepcopy(body), copy.deepcopy(first.state)
    plan = stabilise(body, first.state, tool_order=order)  # type: ignore[arg-type]
    # pure
    assert exact(body) == exact(kept_body)
    assert first.state == kept_state
    assert plan == stabilise(copy.deepcopy(body), kept_state, tool_order=order)  # type: ignore[arg-type]
    # idempotent
    again = stabilise(plan.body, plan.state, tool_order=order)  # type: ignore[arg-type]
    assert again.body is plan.body
    assert again.state == plan.state
    assert again.changes == []
    # lossless: the same tools with the same fields, the same marks in the same places, messages untouched
    assert sorted(exact(meaning(tool)) for tool in plan.body["tools"]) == sorted(exact(meaning(tool)) for tool in after)
    assert marks(plan.body["tools"]) == marks(after)
    assert plan.body["messages"] is messages
    assert list(plan.body) == list(body)


def meaning(tool: dict) -> object:
    bare = {key: value for key, value in tool.items() if key != "cache_control"}
    if isinstance(bare.get("function"), dict):
        bare["function"] = {key: value for key, value in bare["function"].items() if key != "cache_control"}
    return deep_sorted(unordered(bare))


def deep_sorted(node: object) -> object:
    if isinstance(node, dict):
        return {key: deep_sorted(node[key]) for key in sorted(node)}
    return [deep_sorted(item) for item in node] if isinstance(node, list) else node


@settings(max_examples=40)
@given(TOOL_LISTS, st.integers(0, 999), histories())
def test_append_only_input_stays_append_only(tools: list, seed: int, messages: list) -> None:
    """Whatever order the tools come in: each turn's prompt continues the one before."""
    state = State()
    shuffle = random.Random(seed)
    previous: list = []
    for cut in range(1, len(messages) + 1):
        shuffled = list(tools)
        # tools of one name are told apart by their order only
        if len({origin(one, {}) for one in tools}) == len(tools):
            shuffle.shuffle(shuffled)
        plan = stabilise({"tools": strip(shuffled), "messages": messages[:cut]}, state)
        state = plan.state
        current = [s.digest for s in segments("chat", plan.body, "tools_first")]
        if messages[0]["role"] != "system" or cut > 1:
            assert current[: len(previous)] == previous
            previous = current


def strip(tools: list) -> list:
    return [{key: value for key, value in tool.items() if key != "cache_control"} for tool in tools]


def test_nothing_to_do_gives_the_very_body() -> None:
    body = stabilise({"tools": [chat("b"), chat("a")], "messages": []}).body
    assert stabilise(body).body is body


def test_slots_are_bounded() -> None:
    state = State()
    for start in range(0, 6000, 1000):
        state = stabilise({"tools": [chat(f"t{index}") for index in range(start, start + 1000)]}, state).state
    assert len(state.slots) <= 5000


# --- lists in descriptions -------------------------------------------------------------------------------------------


def test_a_list_in_a_description_is_left_and_seen() -> None:
    def body(agents: str) -> dict:
        tool = chat("task")
        tool["function"]["description"] = f"Starts one of: {agents}."
        return {"tools": [tool]}

    first = stabilise(body("build, plan, test"))
    same = stabilise(body("build, plan, test"), first.state)
    other = stabilise(body("test, build, plan"), same.state)
    new = stabilise(body("test, build, review"), other.state)
    assert "test, build, plan" in exact(other.body)
    seen = [[one.kind for one in plan.changes if one.kind == "description_reordered"] for plan in (same, other, new)]
    assert seen == [[], [ChangeKind.DESCRIPTION_REORDERED], []]


# --- volatile text ---------------------------------------------------------------------------------------------------

CLOCK = Declared("clock", re.compile(r"The time is [^\n]*\n"), "freeze", "timestamp")


def system(api: str, text: str) -> dict:
    return {
        "chat": {
            "messages": [{"role": "system", "content": text}, {"role": "user", "content": "The time is not now\n"}]
        },
        "chat-parts": {"messages": [{"role": "developer", "content": [{"type": "text", "text": text}]}]},
        "messages": {"system": text, "messages": []},
        "messages-blocks": {"system": [{"type": "text", "text": text, "cache_control": SHORT}], "messages": []},
        "responses": {"instructions": text, "input": "x"},
        "responses-items": {"input": [{"role": "system", "content": [{"type": "input_text", "text": text}]}]},
    }[api]


@pytest.mark.parametrize("api", ["chat", "chat-parts", "messages", "messages-blocks", "responses", "responses-items"])
def test_a_declared_clock_is_frozen_at_session_start(api: str) -> None:
    first = stabilise(system(api, "The time is 12:00\nBe brief."), rules=[CLOCK])
    later = stabilise(system(api, "The time is 12:05\nBe brief."), first.state, rules=[CLOCK])
    assert exact(later.body) == exact(first.body) == exact(system(api, "The time is 12:00\nBe brief."))
    assert [change.kind for change in later.changes] == [ChangeKind.VOLATILE_FROZEN]
    assert first.changes == []


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_a_declared_clock_is_moved_behind_the_stable_part(api: str) -> None:
    rule = (
        CLOCK._replace(policy="move")
        if hasattr(CLOCK, "_replace")
        else Declared("c", CLOCK.pattern, "move", "timestamp")
    )
    plan = stabilise(system(api, "The time is 12:00\nBe brief."), rules=[rule])
    moved = system(api, "Be brief.\nThe time is 12:00\n")
    assert exact(plan.body) == exact(moved)
    assert stabilise(plan.body, plan.state, rules=[rule]).body is plan.body


def test_user_messages_are_never_touched() -> None:
    body = system("chat", "Be brief.")
    assert stabilise(body, rules=[Declared("c", CLOCK.pattern, "drop")]).body is body


def test_a_text_declared_where_it_is_made() -> None:
    def turn(clock: str) -> dict:
        return {"messages": [{"role": "system", "content": f"Now: {homeport.volatile(clock, name='now')}. Be brief."}]}

    first = stabilise(turn("12:00:01 UTC"), rules=declared())
    later = stabilise(turn("12:00:09 UTC"), first.state, rules=declared())
    assert later.body == first.body


def test_declaring_returns_what_was_given() -> None:
    pattern = re.compile("x+y+z+")
    assert homeport.volatile(pattern, kind="counter") is pattern
    assert homeport.volatile("some text") == "some text"
    with pytest.raises(ValueError, match="freeze, move or drop"):
        homeport.volatile("some text", policy="hide")  # type: ignore[arg-type]


def test_short_text_is_not_looked_for() -> None:
    homeport.volatile("12")
    assert declared() == ()


# --- harness profiles ------------------------------------------------------------------------------------------------

BILLING = "x-anthropic-billing-header: cc_version=2.1.332.a1b; cc_entrypoint=cli; cch=0a1b2;"


def test_claude_codes_billing_line_goes_for_foreign_upstreams_only() -> None:
    body = {"system": [{"type": "text", "text": BILLING}, {"type": "text", "text": "You are Claude Code."}]}
    profile = PROFILES["claude-code"]
    assert stabilise(body, rules=profile.rules_for("api.anthropic.com")).body is body
    plan = stabilise(body, rules=profile.rules_for("127.0.0.1"))
    assert plan.body["system"] == [{"type": "text", "text": "You are Claude Code."}]


def test_a_text_that_only_begins_like_the_billing_line_stays() -> None:
    body = {"system": [{"type": "text", "text": f"{BILLING}\nYou are Claude Code."}]}
    assert stabilise(body, rules=PROFILES["claude-code"].rules_for("127.0.0.1")).body is body


def test_opencodes_environment_block_is_frozen() -> None:
    def body(date: str) -> dict:
        env = f"<env>\n  Working directory: /w\n  Is directory a git repo: no\n  Today's date: {date}\n</env>"
        return {"messages": [{"role": "system", "content": f"You are OpenCode.\n{env}\nBe brief."}]}

    rules = PROFILES["opencode"].rules_for("127.0.0.1")
    first = stabilise(body("Sun Nov 29 2026"), rules=rules)
    assert stabilise(body("Mon Nov 30 2026"), first.state, rules=rules).body == first.body


def test_qwen_codes_git_status_is_frozen() -> None:
    def body(status: str) -> dict:
        snapshot = f"git: Current branch: main\ngit: Status:\n{status}\ngit: Recent commits:\ngit: 26ff2aa first"
        text = f"# Core\nBe safe.\n\nGit snapshot at conversation start.\n```text\n{snapshot}\n```\n\n---\n\n# Final"
        return {"messages": [{"role": "system", "content": text}]}

    rules = PROFILES["qwen-code"].rules_for("127.0.0.1")
    first = stabilise(body("git: (clean)"), rules=rules)
    assert stabilise(body("git: M src/a.py\ngit: ?? src/b.py"), first.state, rules=rules).body == first.body


@pytest.mark.parametrize(
    ("agent", "profile"),
    [
        ("claude-cli/2.1.332 (external, cli)", "claude-code"),
        ("opencode/1.18.33 ai-sdk/provider-utils/3 runtime/bun/1.3", "opencode"),
        ("Kilo-Code/7.7.7", "opencode"),
        ("QwenCode/0.24.4 (linux; x64)", "qwen-code"),
        ("OpenAI/Python 3.57.0", None),
        ("my-claude-cli/1", None),
        ("", None),
    ],
)
def test_only_a_harness_that_says_so_is_recognised(agent: str, profile: str | None) -> None:
    found = recognise({"user-agent": agent})
    assert (found.name if found else None) == profile
