"""Cache breaks as agents, frameworks and gateways cause them, each before (named) and after (no break)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from homeport.breaks import Blame, Detail, Reason
from homeport.explain import explain
from homeport.usage import UsageMeter
from sdk.explaining import Body, chat, edited, flat, grown, mark, messages, responses, tool, usage

HOME = {"x-homeport-backend": "d0", "x-homeport-decision": "home"}


@dataclass(frozen=True)
class Kind:
    """One kind of fault: a request, the next one as the fault makes it, what it is called, and the next one done right
    (None: simply continued), after ``before_right`` where the first request has to be another one too. ``more`` and
    ``more_right``: what the two answers told."""

    before: Body
    broken: Body
    reason: Reason
    pointer: str
    detail: Detail | None = None
    blame: Blame | None = None
    right: Body | None = None
    before_right: Body | None = None
    more: dict[str, Any] = field(default_factory=dict)
    more_right: dict[str, Any] = field(default_factory=dict)


def systems(
    before: str, broken: str, detail: Detail | None, *, pointer: str = "/messages/0/content", right: str | None = None
) -> Kind:
    """A fault in the system text of a chat; right: the text stays as it was at the session's start."""
    first = chat(system=before)
    later = grown(chat(system=broken))
    return Kind(first, later, Reason.SYSTEM_CHANGED, pointer, detail, Blame.CALLER, grown(first))


def tools(body: Body, reason: Reason, pointer: str, edit: Callable[[list[Any]], object]) -> Kind:
    """A fault in the list of tools; right: the list of the first request."""
    return Kind(body, edited(body, lambda later: edit(later["tools"])), reason, pointer, blame=Blame.CALLER)


def history(body: Body, reason: Reason, pointer: str, edit: Callable[[list[Any]], object], **more: Any) -> Kind:
    """A fault in the history; right: it is sent as it was."""
    name = "input" if "input" in body else "messages"
    return Kind(body, edited(body, lambda later: edit(later[name])), reason, pointer, **more)


def described(*lines: str) -> Body:
    """A chat whose first tool lists something in its description."""
    body = chat()
    body["tools"][0] = tool("agent", "Start one of these agents:\n" + "\n".join(f"- {line}" for line in lines))
    return body


def with_enum(*values: str) -> Body:
    body = chat()
    body["tools"][1]["function"]["parameters"]["properties"]["word"]["enum"] = list(values)
    return body


def arguments(text: str) -> Body:
    body = chat()
    body["messages"][2]["tool_calls"][0]["function"]["arguments"] = text
    return body


def tool_input(value: Body) -> Body:
    body = messages()
    body["messages"][1]["content"][1]["input"] = value
    return body


def seen_image(number: int) -> Body:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBOR" * number}}
    body = messages()
    body["messages"][2]["content"][0]["content"] = [picture]
    return body


def marked(*blocks: Callable[[Body], Body]) -> Body:
    """A Messages request with marks on the given blocks."""
    body = messages()
    for block in blocks:
        found = block(body)
        found.update(mark(found))
    return body


def system_block(body: Body) -> Body:
    return body["system"][0]  # type: ignore[no-any-return]


def last_block(body: Body) -> Body:
    return body["messages"][-1]["content"][-1]  # type: ignore[no-any-return]


def many_results(count: int, lagging: bool) -> Body:
    """The next request after a turn of many parallel calls: marked at its end, and in the middle when ``lagging``."""
    body = messages()
    results = [{"type": "text", "text": f"gauge {number}: 4.{number} m"} for number in range(count)]
    results[-1] = mark(results[-1])
    if lagging:
        results[count // 2] = mark(results[count // 2])
    body["messages"].append({"role": "user", "content": results})
    return body


def bedrock(points: int) -> Body:
    """A Converse request with so many cache points."""
    content: list[Any] = []
    for number in range(points):
        content += [{"text": f"part {number}"}, {"cachePoint": {"type": "default"}}]
    return {"model": "anthropic.claude-sonnet-4-5", "messages": [{"role": "user", "content": content}]}


def passing_and_marked() -> Body:
    """A Messages request whose mark stands behind context that is gone the next time."""
    body = messages()
    body["messages"].append({"role": "user", "content": [mark({"type": "text", "text": "<now/>"})]})
    return body


def with_tail(passing: str) -> Body:
    """A chat with passing context behind the last message."""
    body = chat()
    body["messages"].append({"role": "user", "content": passing})
    return body


def tail_moved(passing: str) -> Body:
    body = grown(chat())
    body["messages"].append({"role": "user", "content": passing})
    return body


def tail_kept(passing: str) -> Body:
    return grown(with_tail(passing))


def merged(context: str) -> Body:
    """Context merged into the last message's own text."""
    body = chat()
    body["messages"][3]["content"] += context
    return body


def many_tools(count: int) -> Body:
    return chat(tools=[tool(f"tool_{number:02}") for number in range(count)])


def without_marks(body: Body) -> Body:
    return json.loads(json.dumps(body), object_hook=lambda one: {k: v for k, v in one.items() if k != "cache_control"})  # type: ignore[no-any-return]


def re_dumped(body: Body) -> Body:
    """The body as a gateway dumps it that sorts every object's keys."""
    return json.loads(json.dumps(body, sort_keys=True))  # type: ignore[no-any-return]


SCRUBBED: Body = {"content": "", "tool_calls": []}
BILLING = "x-anthropic-billing-header: cc_version=2.1.0.{}; cch={};\nYou look after a harbour."
THINKER = chat(model="qwen3-32b")
CLAUDE_USAGE = {
    "input_tokens": 3000,
    "cache_read_input_tokens": 0,
    "cache_creation_input_tokens": 0,
    "output_tokens": 9,
}
CLAUDE_READ = {
    "input_tokens": 30,
    "cache_read_input_tokens": 2970,
    "cache_creation_input_tokens": 0,
    "output_tokens": 9,
}

KINDS: dict[str, Kind] = {
    # --- order of tools
    "a tool's description lists sub-agents in another order": Kind(
        described("pilot", "surveyor", "clerk"),
        grown(described("clerk", "pilot", "surveyor")),
        Reason.TOOL_SCHEMA_CHANGED,
        "/tools/0/function/description",
    ),
    "a tool's description lists skills from an unsorted map": Kind(
        {**messages(), "tools": [flat("skill", "Skills:\nsound\nmoor\ntow")]},
        grown({**messages(), "tools": [flat("skill", "Skills:\nmoor\ntow\nsound")]}),
        Reason.TOOL_SCHEMA_CHANGED,
        "/tools/0/description",
    ),
    "a registry that is a hash map": tools(chat(), Reason.TOOLS_REORDERED, "/tools/0", lambda t: t.reverse()),
    "tools in whatever order the database has": tools(
        messages(), Reason.TOOLS_REORDERED, "/tools/0", lambda t: t.insert(0, t.pop())
    ),
    "permissions kept in a set": tools(many_tools(9), Reason.TOOLS_REORDERED, "/tools/2", lambda t: t.append(t.pop(2))),
    "tools bound in order of relevance": tools(
        many_tools(5), Reason.TOOLS_REORDERED, "/tools/0", lambda t: t.insert(0, t.pop(3))
    ),
    "memories retrieved anew within a turn": systems("Known: tide tables.", "Known: a storm in May.", None),
    "a remote server whose list flips now and then": tools(
        many_tools(4), Reason.TOOLS_REORDERED, "/tools/1", lambda t: t.insert(1, t.pop(2))
    ),
    # --- MCP servers
    "servers in the order they connected": tools(
        many_tools(6), Reason.TOOLS_REORDERED, "/tools/0", lambda t: t.__setitem__(slice(None), t[3:] + t[:3])
    ),
    "a server's tools join in mid-session": tools(
        chat(), Reason.TOOLS_ADDED, "/tools/3", lambda t: t.extend([tool("mcp__tide__now"), tool("mcp__tide__next")])
    ),
    "a server's tools stand before the built-in ones": tools(
        chat(), Reason.TOOLS_ADDED, "/tools/0", lambda t: t.insert(0, tool("a_mcp"))
    ),
    "a server that is still pending on a fresh process": tools(
        many_tools(5), Reason.TOOLS_REMOVED, "/tools/1", lambda t: t.__delitem__(slice(1, 3))
    ),
    "a server that missed its time and was left out": tools(
        many_tools(50), Reason.TOOLS_REMOVED, "/tools", lambda t: t.__delitem__(slice(36, None))
    ),
    "references to an absent tool scrubbed from the history": history(
        chat(), Reason.HISTORY_EDITED, "/messages/2/content", lambda h: h.__setitem__(2, {**h[2], **SCRUBBED})
    ),
    "servers created anew for each request": tools(
        many_tools(7), Reason.TOOLS_ADDED, "/tools/7", lambda t: t.extend(tool(f"late_{n}") for n in range(3))
    ),
    "a server's instructions that depend on its connection": systems(
        "Servers: tide (connected).", "Servers: tide (connected), chart (connected).", None
    ),
    "a gateway that reorders the tools": tools(
        messages(), Reason.TOOLS_REORDERED, "/tools/1", lambda t: t.insert(1, t.pop())
    ),
    # --- JSON
    "a proxy that dumps the schema's keys in another order": Kind(
        chat(),
        re_dumped(grown(chat())),
        Reason.TOOL_SCHEMA_CHANGED,
        "/tools/0/function/parameters",
    ),
    "`required` in the order of a set": tools(
        chat(),
        Reason.TOOL_SCHEMA_CHANGED,
        "/tools/0/function/parameters/required",
        lambda t: t[0]["function"]["parameters"]["required"].reverse(),
    ),
    "an enumeration in the order of a set": Kind(
        with_enum("north", "south"),
        grown(with_enum("south", "north")),
        Reason.TOOL_SCHEMA_CHANGED,
        "/tools/1/function/parameters/properties/word/enum",
    ),
    "arguments dumped with sorted keys": Kind(
        arguments('{"gauge": "north", "day": "today"}'),
        grown(arguments('{"day": "today", "gauge": "north"}')),
        Reason.ARGUMENTS_REENCODED,
        "/messages/2/tool_calls/0/function/arguments",
    ),
    "arguments dumped without spaces": Kind(
        arguments('{"gauge": "north"}'),
        grown(arguments('{"gauge":"north"}')),
        Reason.ARGUMENTS_REENCODED,
        "/messages/2/tool_calls/0/function/arguments",
    ),
    "arguments escaped to ASCII": Kind(
        arguments('{"gauge": "Süd"}'),
        grown(arguments('{"gauge": "S\\u00fcd"}')),
        Reason.ARGUMENTS_REENCODED,
        "/messages/2/tool_calls/0/function/arguments",
    ),
    "a tool call's input object with its keys in another order": Kind(
        tool_input({"gauge": "north", "day": "today"}),
        grown(tool_input({"day": "today", "gauge": "north"})),
        Reason.ARGUMENTS_REENCODED,
        "/messages/1/content/1/input",
    ),
    "a tool result parsed and dumped again": Kind(
        edited(chat(), lambda b: b["messages"][3].update(content='{"level":4.31}')),
        grown(edited(chat(), lambda b: b["messages"][3].update(content='{"level": 4.31}'))),
        Reason.HISTORY_EDITED,
        "/messages/3/content",
    ),
    "trailing space of the assistant's text trimmed": Kind(
        edited(chat(), lambda b: b["messages"][4].update(content="It stands at 4.31 m. \n")),
        grown(edited(chat(), lambda b: b["messages"][4].update(content="It stands at 4.31 m."))),
        Reason.WHITESPACE_CHANGED,
        "/messages/4/content",
    ),
    # --- clocks, folders, git
    "a clock with seconds in the system prompt": systems(
        "It is 2026-11-29 20:44:11.", "It is 2026-11-29 20:44:38.", Detail.TIMESTAMP
    ),
    "a clock cut to the hour": systems("It is 20:00.", "It is 21:00.", Detail.TIMESTAMP),
    "a wall clock as the very first words": systems("20:44:11 Harbour log.", "20:45:02 Harbour log.", Detail.TIMESTAMP),
    "today's date, after midnight": systems(
        "Today's date: 2026-11-29", "Today's date: 2026-11-30", Detail.DATE
    ),
    "date and folder rebuilt when a session is resumed": systems(
        "<env>\nToday is November 29, 2026\nFolder: /home/ann/harbour\n</env>",
        "<env>\nToday is December 1, 2026\nFolder: /home/ann/harbour\n</env>",
        Detail.DATE,
    ),
    "the working folder in the system prompt": systems("cwd: /srv/harbour", "cwd: /srv/pier", Detail.PATH),
    "a git flag that changes after git init": systems(
        "Is directory a git repo: no\n", "Is directory a git repo: yes\n", Detail.GIT
    ),
    "the git branch in the system prompt": systems("Current branch: main", "Current branch: tides", Detail.GIT),
    "a list of skills read at each request": systems("Skills: tow, moor", "Skills: tow, moor, sound", None),
    "a session's random id in the system prompt": systems(
        "Session 6f9619ff-8b86-d011-b42d-00cf4fc964ff", "Session 9a0e29ff-8b86-d011-b42d-00cf4fc964aa", Detail.UUID
    ),
    "a budget that counts down": systems("Tokens left: 90,000", "Tokens left: 88,400", Detail.COUNTER),
    "a clock in each user message, rendered anew": Kind(
        edited(chat(), lambda b: b["messages"][1].update(content="Message time: 20:44:11Z\nHow high?")),
        grown(edited(chat(), lambda b: b["messages"][1].update(content="Message time: 20:46:30Z\nHow high?"))),
        Reason.HISTORY_EDITED,
        "/messages/1/content",
        Detail.TIMESTAMP,
    ),
    # --- the tail
    "context merged into the last message and gone the next time": Kind(
        merged("\n<context>wind 6</context>"), grown(chat()), Reason.HISTORY_EDITED, "/messages/3/content",
        right=grown(merged("\n<context>wind 6</context>")),
    ),
    "context inserted before the last answer": history(
        grown(chat()),
        Reason.HISTORY_EDITED,
        "/messages/4",
        lambda h: h.insert(4, {"role": "user", "content": "<context>wind 6</context>"}),
    ),
    "a synthetic message that moves with the end": Kind(
        with_tail("\n"), tail_moved("\n"), Reason.HISTORY_EDITED, "/messages/4", right=tail_kept("\n")
    ),
    "a reminder that is appended anew after the last message": Kind(
        with_tail("Reply with one sentence."),
        tail_moved("Reply with one sentence."),
        Reason.HISTORY_EDITED,
        "/messages/4",
        right=tail_kept("Reply with one sentence."),
    ),
    "a cache mark behind passing content": Kind(
        passing_and_marked(),
        grown(messages()),
        Reason.HISTORY_EDITED,
        "/messages/3",
        more={"usage": CLAUDE_USAGE},
        before_right=marked(last_block),
    ),
    # --- billing lines
    "a billing line with a nonce": systems(BILLING.format("abc", "1f"), BILLING.format("abc", "9c"), Detail.BILLING),
    "a billing line that differs for a sub-agent": systems(
        BILLING.format("abc", "1f"), BILLING.format("xyz", "1f"), Detail.BILLING
    ),
    # --- random ids
    "an id made up for a call that had none": history(
        chat(),
        Reason.TOOL_CALL_IDS_CHANGED,
        "/messages/2/tool_calls/0/id",
        lambda h: (h[2]["tool_calls"][0].update(id="5be1"), h[3].update(tool_call_id="5be1")),
    ),
    "ids of tool uses minted anew": history(
        messages(),
        Reason.TOOL_CALL_IDS_CHANGED,
        "/messages/1/content/1/id",
        lambda h: (h[1]["content"][1].update(id="toolu_x"), h[2]["content"][0].update(tool_use_id="toolu_x")),
    ),
    # --- reasoning
    "a gateway that drops reasoning_content": history(
        chat(), Reason.REASONING_DROPPED, "/messages/2", lambda h: h[2].pop("reasoning_content")
    ),
    "a thinking block left out": history(
        messages(), Reason.REASONING_DROPPED, "/messages/1", lambda h: h[1]["content"].pop(0)
    ),
    "an encrypted reasoning item left out": history(
        responses(), Reason.REASONING_DROPPED, "/input/1", lambda h: h.pop(1)
    ),
    "reasoning that the template drops at a new user turn": Kind(
        THINKER,
        grown(THINKER),
        Reason.TEMPLATE_INHERENT,
        "/messages/2",
        blame=Blame.TEMPLATE,
        before_right={**THINKER, "chat_template_kwargs": {"preserve_thinking": True}},
    ),
    # --- pruning
    "old tool results cleared in place": history(
        grown(chat()), Reason.HISTORY_EDITED, "/messages/3/content", lambda h: h[3].update(content="[cleared]")
    ),
    "a window that slides": history(
        grown(chat()), Reason.HISTORY_TRUNCATED, "/messages/1", lambda h: h.__delitem__(slice(1, 4))
    ),
    "history replaced by a summary": history(
        grown(chat()),
        Reason.HISTORY_TRUNCATED,
        "/messages/1",
        lambda h: h.__setitem__(slice(1, None), [{"role": "user", "content": "So far: 4.31 m at north. And south?"}]),
    ),
    "a window that slides in Responses": history(
        responses(), Reason.HISTORY_TRUNCATED, "/input/0", lambda h: h.__delitem__(slice(0, 2))
    ),
    "an image replaced by a marker": history(
        seen_image(3),
        Reason.IMAGES_CHANGED,
        "/messages/2/content/0/content/0/text",
        lambda h: h[2]["content"][0]["content"].__setitem__(0, {"type": "text", "text": "[image]"}),
    ),
    "an image encoded anew": Kind(
        seen_image(3), grown(seen_image(4)), Reason.IMAGES_CHANGED, "/messages/2/content/0/content/0"
    ),
    # --- marks
    "a caller's mark beside a framework's four": Kind(
        marked(last_block),
        grown({**marked(system_block, last_block), "tools": [mark(flat(name)) for name in "abc"]}),
        Reason.BREAKPOINTS_TOO_MANY,
        "/messages/2/content/0",
        right=grown(marked(last_block)),
    ),
    "five cache points in one request": Kind(
        bedrock(4), bedrock(5), Reason.BREAKPOINTS_TOO_MANY, "/messages/0/content/8", right=bedrock(4)
    ),
    "more than twenty blocks in one turn": Kind(
        marked(last_block),
        many_results(24, lagging=False),
        Reason.LOOKBACK_EXCEEDED,
        "/messages/3/content/23",
        right=many_results(24, lagging=True),
    ),
    "marks that stay where they were while the tail grows": Kind(
        marked(system_block),
        grown(marked(system_block)),
        Reason.BREAKPOINT_MISSING,
        "/messages",
        more={"usage": {**CLAUDE_USAGE, "input_tokens": 4500, "cache_read_input_tokens": 8000}},
        right=grown(marked(system_block, last_block)),
        more_right={"usage": CLAUDE_READ},
    ),
    "a serialiser that strips the marks": Kind(
        marked(system_block, last_block),
        without_marks(grown(marked(system_block, last_block))),
        Reason.BREAKPOINT_MISSING,
        "/messages",
        more={"usage": CLAUDE_USAGE},
        more_right={"usage": CLAUDE_READ},
    ),
    # --- parameters
    "another reasoning effort": Kind(
        responses(reasoning={"effort": "low"}),
        grown(responses(reasoning={"effort": "high"})),
        Reason.PARAMS_CHANGED,
        "/reasoning/effort",
        blame=Blame.PARAMETER,
    ),
    "an effort that the template writes at the head": Kind(
        chat(model="glm-5", reasoning_effort="low"),
        grown(chat(model="glm-5", reasoning_effort="high")),
        Reason.PARAMS_CHANGED,
        "/reasoning_effort",
        blame=Blame.PARAMETER,
    ),
    "another thinking budget": Kind(
        messages(thinking={"type": "enabled", "budget_tokens": 1024}),
        grown(messages(thinking={"type": "disabled"})),
        Reason.PARAMS_CHANGED,
        "/thinking",
        blame=Blame.PARAMETER,
    ),
    "another answer format": Kind(
        responses(text={"format": {"type": "text"}}),
        grown(responses(text={"format": {"type": "json_object"}})),
        Reason.PARAMS_CHANGED,
        "/text/format",
        blame=Blame.PARAMETER,
    ),
    "a cheaper model for one step": Kind(
        chat(model="gpt-5"), grown(chat(model="gpt-5-mini")), Reason.MODEL_CHANGED, "/model", blame=Blame.PARAMETER,
        right=grown(chat(model="gpt-5")),
    ),
    # --- affinity
    "a random cache key for each client": Kind(
        chat(prompt_cache_key="0f1e"), grown(chat(prompt_cache_key="77aa")),
        Reason.CACHE_KEY_CHANGED, "/prompt_cache_key",
        blame=Blame.PARAMETER,
    ),
    "a sub-agent with a cache key of its own": Kind(
        chat(promptCacheKey="ses_1"), grown(chat(promptCacheKey="ses_2")), Reason.CACHE_KEY_CHANGED, "/promptCacheKey",
    ),
    "an affinity header that was not forwarded": Kind(
        chat(), grown(chat()), Reason.ROUTED_ELSEWHERE, "", blame=Blame.ROUTE,
        more={"usage": usage(0), "response_headers": {**HOME, "x-homeport-decision": "placed"}},
        more_right={"usage": usage(3600), "response_headers": HOME},
    ),
    "a home that was overloaded": Kind(
        chat(), grown(chat()), Reason.ROUTED_ELSEWHERE, "", blame=Blame.ROUTE,
        more={"usage": usage(0), "response_headers": {**HOME, "x-homeport-decision": "spill"}},
        more_right={"usage": usage(3600), "response_headers": HOME},
    ),
    "replicas behind a balancer that knows no sessions": Kind(
        chat(), grown(chat()), Reason.EVICTED, "", blame=Blame.UNKNOWN,
        more={"usage": usage(0)}, more_right={"usage": usage(3600)},
    ),
    # --- usage
    "a server that does not report cached tokens": Kind(
        chat(), grown(chat()), Reason.NOT_REPORTED, "", blame=Blame.UNKNOWN,
        more={"usage": usage(None)}, more_right={"usage": usage(3600)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_before_it_is_named_and_after_there_is_no_break(kind: str) -> None:
    case = KINDS[kind]
    (found,) = explain(case.before, case.broken, **case.more)
    assert (found.reason, found.pointer, found.detail) == (case.reason, case.pointer, case.detail)
    assert case.blame in (None, found.blame)
    assert found.hint
    before = case.before_right or case.before
    assert explain(before, case.right or grown(before), **case.more_right) == []


def test_there_are_enough_of_them() -> None:
    assert len(KINDS) >= 60


def test_prune_then_compact_are_two_resets_and_one_pass_is_one() -> None:
    def prune(body: Body) -> Body:
        return edited(body, lambda b: b["messages"][3].update(content="[cleared]"))

    def compact(body: Body) -> Body:
        return {**body, "messages": [body["messages"][0], {"role": "user", "content": "So far: 4.31 m at north."}]}

    start = grown(chat())
    twice = [start, prune(start), compact(prune(start))]
    once = [start, compact(prune(start)), grown(compact(prune(start)))]
    reasons = [[one.reason for pair in pairwise(run) for one in explain(*pair)] for run in (twice, once)]
    assert reasons == [[Reason.HISTORY_EDITED, Reason.HISTORY_TRUNCATED], [Reason.HISTORY_TRUNCATED]]


def test_results_pruned_step_by_step_break_at_every_step() -> None:
    body = grown(chat())
    for step in range(3):
        body["messages"].append({"role": "tool", "tool_call_id": "c", "content": f"reading {step}"})
    before = copy.deepcopy(body)
    for step in range(3):
        after = copy.deepcopy(before)
        after["messages"][6 + step]["content"] = "[cleared]"
        after["messages"].append({"role": "user", "content": "go on"})
        assert [one.pointer for one in explain(before, after)] == [f"/messages/{6 + step}/content"]
        before = after


def test_an_effort_change_keeps_tools_and_system_text_where_the_vendor_does() -> None:
    before = messages(thinking={"type": "enabled", "budget_tokens": 1024})
    (at_claude,) = explain(before, grown(messages(thinking={"type": "disabled"})))
    (at_openai,) = explain(responses(reasoning={"effort": "low"}), grown(responses(reasoning={"effort": "high"})))
    assert at_claude.offset > 500
    assert at_openai.offset == 0


def test_usage_read_from_the_first_of_two_reports_would_have_seen_nothing() -> None:
    first = {"choices": [{"finish_reason": "stop"}], "usage": {"prompt_tokens": 4000, "completion_tokens": 9}}
    last = {"choices": [], "usage": usage(3600)}
    early, late = UsageMeter(), UsageMeter()
    early.feed(first)
    late.feed(first)
    late.feed(last)
    assert explain(chat(), grown(chat()), early.usage)[0].reason is Reason.NOT_REPORTED
    assert explain(chat(), grown(chat()), late.usage) == []


def test_what_was_read_beside_the_input_is_not_taken_for_a_part_of_it() -> None:
    before = marked(system_block, last_block)
    assert explain(before, grown(before), CLAUDE_READ) == []


def test_the_order_of_the_request_around_the_prompt_is_no_break() -> None:
    shuffled = dict(reversed(list(grown(chat()).items())))
    assert explain(chat(), shuffled) == []


def test_siblings_share_the_head_up_to_their_own_task() -> None:
    one, other = chat(), chat()
    other["messages"][1:] = [{"role": "user", "content": "Which ships lie at the pier?"}]
    (found,) = explain(one, other)
    assert found.pointer.startswith("/messages/1")
    assert found.offset > 400
