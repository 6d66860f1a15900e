"""Whose request is this: every key in its order, conversations found again, side requests told apart."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from homeport_proxy.bounded import Bounded
from homeport_proxy.config import SESSION_HEADERS
from homeport_proxy.document import Document
from homeport_proxy.exchange import ApiName, Caller, Exchange, Identity
from homeport_proxy.identity import Identities, look
from homeport_proxy.marks import Marks
from homeport_proxy.splice import raw_members

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
UUID = "6a1f9c1e-0f7e-4f2a-9d58-9c7e4f0a1b2c"


def messages(*texts: str, system: str | None = "You help.") -> list[dict[str, Any]]:
    """A conversation: system, then user and assistant in turn."""
    head = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return head + [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


class Asking:
    """One proxy's memory, asked request by request."""

    def __init__(self, max_sessions: int = 1000) -> None:
        self.identities = Identities(max_sessions)
        self.marks = Marks()

    def __call__(
        self,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        *,
        api: ApiName = "chat",
        model: str = "m",
        tenant: str = "",
    ) -> Identity:
        exchange = Exchange(
            request_id="r",
            api=api,
            method="POST",
            path="/",
            query="",
            headers=CIMultiDictProxy(CIMultiDict(headers or {})),
            peer=None,
            arrived_s=0.0,
            arrived_unix_s=0.0,
        )
        exchange.model = model
        exchange.caller = Caller(tenant)
        document = Document(raw_members(json.dumps(body or {"messages": messages("hi")}).encode()))
        return self.identities.resolve(look(exchange, document, SESSION_HEADERS, self.marks))


@pytest.mark.parametrize("position", range(len(SESSION_HEADERS)))
def test_headers_in_their_order(position: int) -> None:
    ask = Asking()
    present = SESSION_HEADERS[position:]
    found = ask(headers={name: f"id-of-{name}" for name in present})
    assert found.source == present[0]
    assert found.session == ask(headers={present[0]: f"id-of-{present[0]}"}).session
    assert "id-of" not in found.session


def test_the_same_id_in_another_header_is_the_same_session() -> None:
    ask = Asking()
    assert ask(headers={"x-session-id": "s"}).session == ask(headers={"x-session-affinity": "s"}).session


@pytest.mark.parametrize(
    ("metadata", "source"),
    [
        ({"session_id": UUID}, "metadata.session_id"),
        ({"user_id": f"user_{'a' * 64}_account_{UUID}_session_{UUID}"}, "metadata.user_id"),
        ({"user_id": f"user_{'a' * 64}_account__session_{UUID}"}, "metadata.user_id"),
        ({"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": UUID})}, "metadata.user_id"),
    ],
)
def test_claude_codes_metadata(metadata: dict[str, str], source: str) -> None:
    ask = Asking()
    body = {"metadata": metadata, "messages": messages("hi"), "system": "x"}
    found = ask(body, api="messages")
    assert found.source == source
    assert found.session == ask(headers={"x-claude-code-session-id": UUID}, api="messages").session


@pytest.mark.parametrize("user_id", ["plain-user", "{broken", "[1]", '{"session_id": 5}', "user_x_session_", ""])
def test_other_user_ids_name_no_session(user_id: str) -> None:
    assert Asking()({"metadata": {"user_id": user_id}, "messages": messages("hi")}).source == "conversation"


def test_sub_agents_extend_the_key() -> None:
    ask = Asking()
    main = ask(headers={"x-claude-code-session-id": "s"})
    agent = ask(headers={"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"})
    assert agent.parent == main.session != agent.session
    assert agent.kind == "subagent"
    codex = {"session-id": "s1", "thread-id": "s1"}
    thread = {"session-id": "s1", "thread-id": "t2", "x-codex-parent-thread-id": "s1"}
    assert ask(headers=codex).session == ask(headers={"session-id": "s1"}).session
    assert ask(headers=thread).parent == ask(headers=codex).session
    assert ask(headers=thread).session != ask(headers=codex).session


def test_parent_hints() -> None:
    ask = Asking()
    child = ask(headers={"x-session-affinity": "child", "x-parent-session-affinity": "top"})
    assert child.parent == ask(headers={"x-session-affinity": "top"}).session
    assert child.kind == "subagent"


def test_keys_are_apart_by_tenant_and_model() -> None:
    ask = Asking()
    headers = {"x-session-id": "s"}
    found = {ask(headers=headers, tenant=t, model=m).session for t in ("a", "b") for m in ("x", "y")}
    assert len(found) == 4


@pytest.mark.parametrize("name", ["prompt_cache_key", "promptCacheKey", "user", "conversation"])
def test_a_shared_key_is_split_by_the_second_conversation(name: str) -> None:
    ask = Asking()
    one = ask({name: "k", "messages": messages("fix the bug")})
    assert one.source == name
    two = ask({name: "k", "messages": messages("write a poem")})
    assert two.session != one.session
    assert ask({name: "k", "messages": messages("fix the bug", "done", "go on")}).session == one.session
    assert ask({name: "k", "messages": messages("write a poem", "roses", "more")}).session == two.session


def test_a_shared_key_survives_tools_that_join_late() -> None:
    ask = Asking()
    first = ask({"prompt_cache_key": "k", "messages": messages("a"), "tools": TOOLS})
    more = [*TOOLS, {"type": "function", "function": {"name": "late", "parameters": {}}}]
    assert ask({"prompt_cache_key": "k", "messages": messages("a", "b", "c"), "tools": more}).session == first.session


turns = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(turns, st.integers(0, 3))
def test_an_append_only_conversation_keeps_its_session(texts: list[str], other: int) -> None:
    ask = Asking()
    noise = [ask({"messages": messages(f"noise {i}", system=None)}).session for i in range(other)]
    sessions = [ask({"messages": messages(*texts[: n + 1])}).session for n in range(0, len(texts), 2)]
    assert len(set(sessions)) == 1
    assert sessions[0] not in noise


def test_parallel_runs_from_one_prompt_part_when_they_differ() -> None:
    ask = Asking()
    start = ask({"messages": messages("go")})
    one = ask({"messages": messages("go", "left", "on")})
    two = ask({"messages": messages("go", "right", "on")})
    assert one.session == start.session
    assert two.session != one.session
    assert two.parent == one.session
    assert ask({"messages": messages("go", "right", "on", "x", "y")}).session == two.session
    assert ask({"messages": messages("go", "left", "on", "x", "y")}).session == one.session


def test_a_reminder_that_moves_to_the_end_does_not_part_a_conversation() -> None:
    """Aider appends its edit-format reminder anew after each last message."""
    ask = Asking()
    history: list[dict[str, Any]] = []
    sessions = set()
    for turn in range(4):
        history.append({"role": "user", "content": f"turn {turn}"})
        sessions.add(ask({"messages": [*history, {"role": "system", "content": "Reply in diffs."}]}).session)
        history.append({"role": "assistant", "content": f"done {turn}"})
    assert len(sessions) == 1


@pytest.mark.parametrize(
    ("main", "side", "expected"),
    [
        ({"tools": TOOLS, "messages": messages("a")}, {"messages": messages("a", system="Make a title.")}, "side"),
        ({"tools": TOOLS, "messages": messages("a")}, {"messages": messages("a", "b", "c")}, "main"),
        ({"messages": messages("a")}, {"messages": messages("a", system="Summarise.")}, "side"),
        ({"messages": messages("a", system=None)}, {"messages": messages("a", system="Summarise.")}, "main"),
        ({"tools": TOOLS, "messages": messages("a")}, {"tools": TOOLS, "messages": messages("z", system="Q")}, "main"),
    ],
)
def test_side_requests(main: dict[str, Any], side: dict[str, Any], expected: str) -> None:
    ask = Asking()
    headers = {"x-session-affinity": "s"}
    assert ask(main, headers).kind == "main"
    assert ask(side, headers).kind == expected
    assert ask(main, headers).kind == "main"


def test_a_title_asked_before_the_first_main_request_does_not_pass_for_one_later() -> None:
    ask = Asking()
    headers = {"x-session-affinity": "s"}
    title = {"messages": messages("a", system="Make a title.")}
    ask(title, headers)
    assert ask({"tools": TOOLS, "messages": messages("a")}, headers).kind == "main"
    assert ask(title, headers).kind == "side"


def test_the_clients_word_on_kind_and_end() -> None:
    ask = Asking()
    found = ask(headers={"x-session-id": "s", "x-homeport-kind": "side", "x-homeport-final": "1"})
    assert (found.kind, found.final) == ("side", True)


def test_memory_is_bounded() -> None:
    ask = Asking(max_sessions=50)
    for number in range(2000):
        ask({"messages": messages(f"conversation {number}"), "user": f"u{number}"})
    assert ask.identities.remembered <= 50 * 8 + 50 + 50
    table: Bounded[bytes, int] = Bounded(2)
    for number in range(3):
        table.put(bytes([number]), number)
    assert table.get(b"\x00") is None
    assert table.get(b"\x02") == 2


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["messages", "system", "tools", "metadata", "user", "input", "conversation", "instructions"]),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=5),
            lambda x: (
                st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "id"]), x, max_size=3)
            ),
            max_leaves=6,
        ),
        max_size=4,
    ),
    st.sampled_from(["chat", "completions", "responses", "messages", "embeddings"]),
)
def test_any_body_has_an_identity(body: dict[str, Any], api: ApiName) -> None:
    assert Asking()(body or {"x": 1}, api=api).session
