"""Ways in which clients break their own prompt caches, each before and after: the break is real, then it is prevented.

Every case runs over a real HTTP server: once with ``mode="observe"``, where the server sees what the client wrote, and
once with ``mode="stabilise"``.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import httpx2
import pytest

import homeport
import homeport.runtime
from homeport.fingerprint import segments
from homeport.session import affinity_id
from homeport.transport import attach
from homeport.volatile import forget_declared
from sdk.tiny_server import USAGE, Answer, Seen, TinyServer, chat_answer, chat_chunk, serving, sse


@pytest.fixture(scope="module")
def server() -> Iterator[TinyServer]:
    with serving(lambda _: chat_answer()) as server:
        yield server


def drive(
    server: TinyServer,
    bodies: Sequence[dict],
    mode: str,
    *,
    path: str = "/v1/chat/completions",
    headers: dict[str, str] | None = None,
    session: str | None = "s",
) -> list[Seen]:
    """Send the bodies one after another in a fresh process' state; what the server saw."""
    homeport.runtime._runtime = homeport.runtime.Runtime()
    server.seen.clear()
    with httpx2.Client(verify=False) as client:
        attach(client, mode=mode, session=session)  # type: ignore[arg-type]
        for body in bodies:
            client.post(server.root + path, content=json.dumps(body, ensure_ascii=False).encode(), headers=headers)
    return list(server.seen)


def append_only(seen: Sequence[Seen], api: str = "chat", family: str = "tools_first") -> bool:
    """Whether each prompt continues the one before, as the model sees it."""
    chains = [[segment.digest for segment in segments(api, one.body, family)] for one in seen]  # type: ignore[arg-type]
    return all(after[: len(before)] == before for before, after in itertools.pairwise(chains))


# --- small agents ----------------------------------------------------------------------------------------------------


def tool(name: str, description: str = "Does it.", **properties: object) -> dict:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def turns(
    count: int = 3, system: Callable[[int], str] = lambda _: "Be brief.", tools: Callable[[int], list] = lambda _: []
) -> list[dict]:
    """An agent's requests: its history is append-only, what is rendered around it may not be."""
    history: list[dict] = []
    bodies = []
    for turn in range(count):
        history.append({"role": "user", "content": f"question {turn}"})
        body: dict = {"model": "m", "messages": [{"role": "system", "content": system(turn)}, *history]}
        if tools(turn):
            body["tools"] = tools(turn)
        bodies.append(body)
        history = [*history, {"role": "assistant", "content": f"answer {turn}"}]
    return bodies


NAMES = ["search", "read", "write", "count", "list"]


def shuffled(turn: int, names: Sequence[str] = NAMES) -> list:
    names = list(names)
    random.Random(turn).shuffle(names)
    return [tool(name) for name in names]


def rotated(turn: int) -> list:
    return [tool(name) for name in NAMES[turn:] + NAMES[:turn]]


def by_relevance(turn: int) -> list:
    return [tool(name) for name in sorted(NAMES, key=lambda name: (hash_of(name, turn), name))]


def hash_of(name: str, turn: int) -> int:
    return sum(map(ord, name)) * (turn + 7) % 11


def keys_reordered(turn: int) -> list:
    one = {"type": "string", "description": "A path."}
    two = {"description": "A line.", "type": "integer"}
    properties = {"path": one, "line": two} if turn % 2 else {"line": two, "path": one}
    return [tool("read", **properties)]


def inner_keys_reordered(turn: int) -> list:
    one = {"type": "string", "description": "A path."}
    return [tool("read", path=one if turn % 2 else dict(reversed(one.items())))]


def required_reordered(turn: int) -> list:
    definition = tool("read", a={"type": "string"}, b={"type": "string"})
    definition["function"]["parameters"]["required"] = ["a", "b"] if turn % 2 else ["b", "a"]
    return [definition]


def dependent_required_reordered(turn: int) -> list:
    definition = tool("read", a={"type": "string"})
    names = ["b", "c"] if turn % 2 else ["c", "b"]
    definition["function"]["parameters"]["dependentRequired"] = {"a": names}
    return [definition]


def defs_reordered(turn: int) -> list:
    definition = tool("read", a={"$ref": "#/$defs/A"})
    defs = {"A": {"type": "string"}, "B": {"type": "integer"}}
    definition["function"]["parameters"]["$defs"] = defs if turn % 2 else dict(reversed(defs.items()))
    return [definition]


def any_of_members_reordered_inside(turn: int) -> list:
    member = {"type": "string", "minLength": 1}
    return [tool("read", a={"anyOf": [member if turn % 2 else dict(reversed(member.items())), {"type": "null"}]})]


def schema_members_reordered(turn: int) -> list:
    definition = tool("read", a={"type": "string"})
    schema = definition["function"]["parameters"]
    definition["function"]["parameters"] = schema if turn % 2 else dict(reversed(schema.items()))
    return [definition]


def servers_in_turns(turn: int) -> list:
    names = ["mcp__git__log", "mcp__git__diff", "mcp__fs__read", "mcp__web__get"]
    return [tool("own"), *shuffled(turn, names)]


def mcp_before_own(turn: int) -> list:
    own, remote = [tool("plan"), tool("act")], [tool("mcp__git__log")]
    return own + remote if turn % 2 else remote + own


def nested_sets(turn: int) -> list:
    names = NAMES if turn % 2 else NAMES[::-1]
    return [tool(name, **{key: {"type": "string"} for key in names}) for name in names]


# a late tool changes a tools-first prompt whatever one does; behind the others it keeps the tools before it
REORDERINGS: dict[str, Callable[[int], list]] = {
    "tools-in-random-order": shuffled,
    "tools-from-a-map-range": rotated,
    "tools-in-relevance-order": by_relevance,
    "tools-reversed-every-other-turn": lambda turn: [tool(name) for name in (NAMES if turn % 2 else NAMES[::-1])],
    "tools-from-a-query-without-order": lambda turn: shuffled(turn * 31 + 5),
    "mcp-servers-list-in-turns": servers_in_turns,
    "mcp-tools-before-own-ones": mcp_before_own,
    "schema-properties-reordered": keys_reordered,
    "keys-inside-a-property-reordered": inner_keys_reordered,
    "required-reordered": required_reordered,
    "dependent-required-reordered": dependent_required_reordered,
    "definitions-reordered": defs_reordered,
    "keys-inside-anyOf-reordered": any_of_members_reordered_inside,
    "schema-members-reordered": schema_members_reordered,
    "everything-from-sets": nested_sets,
}


@pytest.mark.parametrize("kind", sorted(REORDERINGS))
def test_reordered_definitions(server: TinyServer, kind: str) -> None:
    bodies = turns(4, tools=REORDERINGS[kind])
    assert not append_only(drive(server, bodies, "observe"))
    assert append_only(drive(server, bodies, "stabilise"))


def anthropic(body: dict) -> dict:
    tools = [
        {"name": one["function"]["name"], "description": "d", "input_schema": one["function"]["parameters"]}
        for one in body["tools"]
    ]
    return {"model": "claude", "max_tokens": 9, "tools": tools, "system": "Be brief.", "messages": body["messages"][1:]}


def responses(body: dict) -> dict:
    tools = [{"type": "function", **one["function"]} for one in body["tools"]]
    return {"model": "m", "tools": tools, "instructions": "Be brief.", "input": body["messages"][1:]}


@pytest.mark.parametrize(
    ("api", "path", "shape"),
    [("messages", "/v1/messages", anthropic), ("responses", "/v1/responses", responses)],
)
@pytest.mark.parametrize("kind", ["tools-in-random-order", "schema-properties-reordered", "mcp-servers-list-in-turns"])
def test_reordered_definitions_of_the_other_apis(
    server: TinyServer, kind: str, api: str, path: str, shape: Callable[[dict], dict]
) -> None:
    bodies = [shape(body) for body in turns(4, tools=REORDERINGS[kind])]
    assert not append_only(drive(server, bodies, "observe", path=path), api)
    assert append_only(drive(server, bodies, "stabilise", path=path), api)


def tools_part(seen: Seen) -> list[str]:
    return [json.dumps(one) for one in seen.body["tools"]]


def test_a_tool_that_comes_late_stands_behind_the_known_ones(server: TinyServer) -> None:
    late = turns(2, tools=lambda turn: [tool("zoom"), tool("act"), *([tool("aaa")] if turn else [])])
    before, after = (tools_part(seen) for seen in drive(server, late, "stabilise"))
    assert after[: len(before)] == before


def test_a_tool_set_that_grows_request_by_request(server: TinyServer) -> None:
    sizes = (7, 10, 18)
    bodies = turns(3, tools=lambda turn: [tool(f"t{(n * 7) % 19:02}") for n in range(sizes[turn])])
    seen = [tools_part(one) for one in drive(server, bodies, "stabilise")]
    assert [len(one) for one in seen] == list(sizes)
    assert seen[2][:10] == seen[1]
    assert seen[1][:7] == seen[0]


def test_a_server_that_is_away_for_one_request(server: TinyServer) -> None:
    """The tools are gone and back: back in their old place, and the history is not rewritten meanwhile."""
    bodies = turns(3, tools=lambda turn: [tool(name) for name in ("b", "c") if turn != 1 or name != "b"])
    seen = drive(server, bodies, "stabilise")
    assert tools_part(seen[2]) == tools_part(seen[0])
    assert [one.body["messages"] for one in seen] == [body["messages"] for body in bodies]


def test_a_restart_lists_the_same_tools_in_the_same_order(server: TinyServer) -> None:
    first = drive(server, turns(1, tools=lambda _: shuffled(1)), "stabilise")
    second = drive(server, turns(1, tools=lambda _: shuffled(2)), "stabilise")
    assert first[0].content == second[0].content


SET_ORDER = """
import json, sys
from homeport.stabilise import stabilise
names = {"search", "read", "write", "count", "list", "delete", "move"}
schema = {"properties": {name: {} for name in names}, "required": list(names)}
tools = [{"name": name, "input_schema": schema} for name in names]
print(json.dumps([tools, stabilise({"tools": tools}).body["tools"]]))
"""


def test_tools_from_a_set_in_processes_with_other_hash_seeds() -> None:
    raw, stable = set(), set()
    for seed in ("1", "2", "3"):
        run = [sys.executable, "-c", SET_ORDER]
        done = subprocess.run(run, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
        one, other = json.loads(done.stdout)
        raw.add(json.dumps(one))
        stable.add(json.dumps(other))
    assert (len(raw), len(stable)) == (3, 1)


# --- volatile system prompts -----------------------------------------------------------------------------------------

CLOCKS: dict[str, tuple[Callable[[int], str], str]] = {
    "clock-with-seconds": (lambda t: f"The time is 12:00:{t:02}.\nBe brief.", r"The time is [\d:]+\.\n"),
    "clock-by-the-hour": (lambda t: f"Be brief. It is past {12 + t} o'clock.", r"past \d+ o'clock"),
    "date-over-midnight": (lambda t: f"Today's date: 2026-11-{29 + t}\nBe brief.", r"Today's date: [\d-]+"),
    "working-folder-on-resume": (lambda t: f"cwd: /home/ada/app{t}\nBe brief.", r"cwd: \S+"),
    "git-state": (lambda t: f"Be brief.\nGit status: {t} files changed", r"Git status: .*"),
    "is-a-git-repo-flag": (lambda t: f"Is a git repo: {'yes' if t else 'no'}\nBe brief.", r"Is a git repo: \w+"),
    "request-id": (lambda t: f"Request {t:08x}-0000-4000-8000-000000000000. Be brief.", r"Request [0-9a-f-]+"),
    "turn-counter": (lambda t: f"Be brief. This is turn {t} of 9.", r"turn \d+ of 9"),
    "retrieved-memories": (lambda t: f"Be brief.\n<memory>{t * 'fact '}</memory>", r"<memory>.*?</memory>"),
    "connection-state": (lambda t: f"Be brief.\nMCP: {['pending', 'up', 'up'][t]}", r"MCP: \w+"),
}


@pytest.mark.parametrize("kind", sorted(CLOCKS))
def test_declared_volatile_text_is_held(server: TinyServer, kind: str) -> None:
    system, pattern = CLOCKS[kind]
    bodies = turns(3, system=system)
    assert not append_only(drive(server, bodies, "observe"))
    assert not append_only(drive(server, bodies, "stabilise"))  # nobody declared it: it is not ours to change
    homeport.volatile(re.compile(pattern), kind="timestamp")
    assert append_only(drive(server, bodies, "stabilise"))
    forget_declared()


def test_a_clock_declared_where_it_is_made(server: TinyServer) -> None:
    bodies = turns(3, system=lambda t: f"{homeport.volatile(f'Now: 12:00:{t:02} UTC', name='clock')}\nBe brief.")
    assert append_only(drive(server, bodies, "stabilise"))


def test_the_stable_part_before_a_moved_clock_is_shared(server: TinyServer) -> None:
    guide = "You are careful. " * 40
    bodies = turns(2, system=lambda t: f"It is 12:00:{t:02}.\n{guide}")
    homeport.volatile(re.compile(r"It is [\d:]+\.\n"), policy="move")
    first, second = (seen.body["messages"][0]["content"] for seen in drive(server, bodies, "stabilise"))
    assert first.startswith(guide)
    assert second.startswith(guide)


@pytest.mark.parametrize(("host_header", "kept"), [("claude-cli/2.1.332 (external, cli)", False), ("curl/8", True)])
def test_claude_codes_billing_line_on_ones_own_engine(server: TinyServer, host_header: str, kept: bool) -> None:
    def body(nonce: str) -> dict:
        line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.332.{nonce};"}
        return {"model": "m", "system": [line, {"type": "text", "text": "You are Claude Code."}], "messages": []}

    bodies = [body("aaa"), body("bbb")]
    options = {"path": "/v1/messages", "headers": {"user-agent": host_header}}
    assert not append_only(drive(server, bodies, "observe", **options), "messages")  # type: ignore[arg-type]
    assert append_only(drive(server, bodies, "stabilise", **options), "messages") is not kept  # type: ignore[arg-type]


def test_opencodes_date_over_midnight(server: TinyServer) -> None:
    env = "You are OpenCode.\n<env>\n  Working directory: /w\n  Today's date: {}\n</env>\nBe brief."
    bodies = turns(2, system=lambda t: env.format(["Sun Nov 29 2026", "Mon Nov 30 2026"][t]))
    headers = {"user-agent": "opencode/1.18.33 runtime/bun"}
    assert not append_only(drive(server, bodies, "observe", headers=headers))
    assert append_only(drive(server, bodies, "stabilise", headers=headers))
    assert not append_only(drive(server, bodies, "stabilise"))  # another client with such a text is left alone


# --- what a stabiliser must not do itself ----------------------------------------------------------------------------

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"z": 1,  "a": "\\u00e9"}'}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}}
MARKED = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
THOUGHT = {"type": "thinking", "thinking": "t", "signature": "s=="}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {"z": 1, "a": 2}}
VERBATIM = {
    "tool-call-arguments-in-the-models-order": {"role": "assistant", "content": None, "tool_calls": [CALL]},
    "trailing-whitespace-of-an-answer": {"role": "assistant", "content": "done. \n\n"},
    "reasoning": {"role": "assistant", "content": "x", "reasoning_content": " because \n"},
    "empty-reasoning": {"role": "assistant", "content": "x", "reasoning_content": ""},
    "thinking-with-signature": {"role": "assistant", "content": [THOUGHT]},
    "tool-input-in-the-models-order": {"role": "assistant", "content": [USE]},
    "tool-call-ids": {"role": "tool", "tool_call_id": "call_8f3b", "content": "ok"},
    "pictures": {"role": "user", "content": [PICTURE]},
    "marks-in-messages": {"role": "user", "content": [MARKED]},
    "type-after-payload": {"role": "user", "content": [{"text": "x", "type": "text"}]},
    "unknown-members": {"role": "user", "content": "x", "vendor_extra": {"z": [1], "a": None}},
    "large-numbers": {"role": "user", "content": "x", "n": 12345678901234567890},
    "a-late-system-message": {"role": "system", "content": "It is 12:00:01."},
}


@pytest.mark.parametrize("kind", sorted(VERBATIM))
def test_the_history_travels_byte_for_byte(server: TinyServer, kind: str) -> None:
    """Also while tools and system prompt around it are rewritten, escapes and spaces included."""
    message = json.dumps(VERBATIM[kind]).replace(": ", " :  ")
    messages = (
        f'[ {{"role":"system","content":"It is 12:00:01."}}, {{"content":"\\u0068i","role":"user"}} , {message} ]'
    )
    content = f'{{"messages": {messages}, "tools": {json.dumps(shuffled(1))} , "seed": 1.0}}'.encode()
    homeport.runtime._runtime = homeport.runtime.Runtime()
    homeport.volatile(re.compile(r"It is [\d:]+\."), policy="move")
    with httpx2.Client(verify=False) as client:
        attach(client, session="s")
        client.post(f"{server.base_url}/chat/completions", content=content)
    sent = server.last.content
    assert sent != content
    assert message.encode() in sent
    assert b'{"content":"\\u0068i","role":"user"}' in sent
    assert sent.endswith(b' , "seed": 1.0}')


def test_the_number_and_places_of_marks_stay(server: TinyServer) -> None:
    mark = {"type": "ephemeral"}

    def body(turn: int) -> dict:
        names = ["mcp__s__z", "read", "act"] if turn % 2 else ["act", "mcp__s__z", "read"]
        tools: list[dict] = [{"name": name, "input_schema": {"type": "object"}} for name in names]
        tools[1]["cache_control"] = tools[2]["cache_control"] = mark
        return {
            "model": "m",
            "system": [{"type": "text", "text": "s", "cache_control": mark}],
            "tools": tools,
            "messages": [],
        }

    for seen in drive(server, [body(0), body(1)], "stabilise", path="/v1/messages"):
        assert ["cache_control" in one for one in seen.body["tools"]] == [False, True, True]
        assert [one["name"] for one in seen.body["tools"]] == ["act", "read", "mcp__s__z"]  # own ones first
        assert seen.content.count(b"cache_control") == 3


# --- affinity --------------------------------------------------------------------------------------------------------


def ids(seen: Sequence[Seen]) -> list[str | None]:
    return [one.headers.get("x-session-affinity") for one in seen]


def test_no_session_header_at_all(server: TinyServer) -> None:
    assert ids(drive(server, turns(3), "observe", session=None)) == [None] * 3
    found = ids(drive(server, turns(3), "stabilise", session=None))
    assert len(set(found)) == 1
    assert found[0] is not None


def test_an_id_of_its_own_for_every_client_object(server: TinyServer) -> None:
    """Two clients, two processes, one conversation: one id."""
    first = ids(drive(server, turns(1), "stabilise", session="chat-7"))
    second = ids(drive(server, turns(1), "stabilise", session="chat-7"))
    assert first == second == [affinity_id("", "chat-7")]


def test_an_unnamed_conversation_after_a_restart(server: TinyServer) -> None:
    """The head decides: a resumed conversation has the same one."""
    before = ids(drive(server, turns(2), "stabilise", session=None))
    resumed = ids(drive(server, turns(3)[2:], "stabilise", session=None))
    assert resumed[0] == before[0]


def test_a_clock_in_an_unnamed_conversations_system_prompt(server: TinyServer) -> None:
    bodies = turns(4, system=lambda t: f"It is 2026-11-29 12:00:{t:02}. Be brief.")
    assert len(set(ids(drive(server, bodies, "stabilise", session=None)))) == 1


def test_new_tool_call_ids_in_an_unnamed_conversation(server: TinyServer) -> None:
    """A framework that mints new ids for its history on each request is still the same conversation."""

    def body(turn: int) -> dict:
        messages: list[dict] = [{"role": "user", "content": "go"}]
        for step in range(turn + 1):
            call = {"id": f"call_{turn}_{step}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"call_{turn}_{step}", "content": f"result {step}"})
        return {"model": "m", "messages": messages}

    assert len(set(ids(drive(server, [body(turn) for turn in range(3)], "stabilise", session=None)))) == 1


def test_unrelated_agents_do_not_fall_into_one_session(server: TinyServer) -> None:
    bodies = [turns(1, system=lambda _, n=n: f"You are agent {chr(97 + n)}.")[0] for n in range(4)]
    headers = {"authorization": "Bearer one-token"}
    assert len(set(ids(drive(server, bodies, "stabilise", session=None, headers=headers)))) == 4


def test_a_request_id_is_no_session(server: TinyServer) -> None:
    for name in ("x-request-id", "x-client-request-id"):
        seen = drive(server, turns(1), "stabilise", headers={name: "r1"}) + drive(
            server, turns(1), "stabilise", headers={name: "r2"}
        )
        assert len(set(ids(seen))) == 1


def test_siblings_of_one_parent(server: TinyServer) -> None:
    """Each sub-agent has its own id, and each names the same parent."""
    homeport.runtime._runtime = homeport.runtime.Runtime()
    server.seen.clear()
    with httpx2.Client(verify=False) as client:
        attach(client)
        for name in ("a", "b", "c"):
            with homeport.session(f"task/{name}", parent="task"):
                client.post(f"{server.base_url}/chat/completions", json=turns(1)[0])
    assert len(set(ids(server.seen))) == 3
    assert {one.headers["x-parent-session-affinity"] for one in server.seen} == {affinity_id("", "task")}


def test_the_name_itself_does_not_leave_the_machine(server: TinyServer) -> None:
    seen = drive(server, turns(1), "stabilise", session="ada@example.org")
    assert "ada" not in json.dumps(seen[0].headers)
    assert b"ada" not in seen[0].content


# --- usage -----------------------------------------------------------------------------------------------------------

STREAMS = {
    "usage-only-in-the-last-chunk": [chat_chunk("x"), chat_chunk(None, usage=USAGE)],
    "usage-in-the-finish-chunk-and-again-complete": [
        chat_chunk("x", usage={"prompt_tokens": 1200, "completion_tokens": 7}),
        chat_chunk(None, usage=USAGE),
    ],
    "usage-null-until-the-end": [chat_chunk("x", usage=None), chat_chunk(None, usage=USAGE)],
    "usage-with-the-providers-extras": [chat_chunk("x"), chat_chunk(None, usage=USAGE, x_groq={"id": "1"})],
}


@pytest.mark.parametrize("kind", sorted(STREAMS))
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_usage_of_a_stream_nobody_asked_it_of(kind: str, newline: bytes) -> None:
    frames = [frame.replace(b"\n", newline) for frame in sse(*STREAMS[kind], b"[DONE]")]
    script: Callable[[Seen], Answer] = lambda _: Answer(frames, headers={"content-type": "text/event-stream"})  # noqa: E731
    with serving(script) as server, attach(httpx2.Client(verify=False), session="s") as client:
        read = client.post(f"{server.base_url}/chat/completions", json={"model": "m", "stream": True}).content
    report = homeport.report("s")
    assert (report.input_tokens, report.cached_tokens, report.output_tokens) == (1200, 1024, 7)
    assert read == b"".join(frame for frame in frames if b'"choices": []' not in frame)


def test_usage_that_is_not_reported_is_not_zero() -> None:
    with (
        serving(lambda _: chat_answer(usage=None)) as server,
        attach(httpx2.Client(verify=False), session="s") as client,
    ):
        client.post(f"{server.base_url}/chat/completions", json={"model": "m"})
    report = homeport.report("s")
    assert (report.requests, report.cached_tokens, report.unreported_requests) == (1, None, 1)
