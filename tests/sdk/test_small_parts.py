"""Spans, frames, tokens, traces, the append-only fixture: one table each."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import homeport
from homeport.spans import Document
from homeport.sse import Frames, data_of
from homeport.testing import PromptWatch
from homeport.tokens import Calibration, count, tokenizer_for
from homeport.transport import attach
from sdk.tiny_server import chat, serving

pytest_plugins = ["pytester", "homeport.testing"]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON, max_size=5)


# --- edits by span ---------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(OBJECTS, OBJECTS, st.sampled_from([None, 1, 3]), st.booleans())
def test_edits_mean_what_they_say(before: dict, members: dict, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(before, indent=indent, ensure_ascii=ascii_only)
    document = Document(f" {text}\n")
    assert json.dumps(document.body) == json.dumps(before)
    assert json.dumps(json.loads(document.with_members(members))) == json.dumps({**before, **members})


def test_what_is_not_named_stays() -> None:
    text = '{ "a" : 1.50e1 , "tools":[ {"x" : 1},\n {"y":2} , {"z":3}], "b":"\\u00e9" , "a2":[1 ,2] }'
    document = Document(text)
    tools = document.body["tools"]
    assert isinstance(tools, list)
    edited = document.with_members({"tools": [tools[0], {"new": True}, tools[2]], "c": None})
    assert edited == text.replace('{"y":2}', '{"new":true}').replace(" }", ' ,"c":null}')


def test_doubled_keys_are_read_as_parsers_do() -> None:
    document = Document('{"a":1,"a":2}')
    assert document.body == {"a": 2}
    assert json.loads(document.with_members({"a": 3})) == {"a": 3}


REQUESTS = st.fixed_dictionaries(
    {"messages": st.lists(JSON, max_size=6)}, optional={"tools": st.lists(JSON, max_size=3) | JSON, "x": JSON}
)


@settings(max_examples=150)
@given(REQUESTS, REQUESTS, st.integers(0, 6), st.sampled_from([None, 1]))
def test_a_document_after_another_reads_the_same(one: dict, other: dict, kept: int, indent: int | None) -> None:
    before = Document(json.dumps(one, indent=indent))
    body = {**other, "messages": one["messages"][:kept] + other["messages"]}
    text = json.dumps(body, indent=indent)
    after = Document(text, before)
    assert json.dumps(after.body, indent=indent) == text
    edited = {"messages": [*body["messages"], {"new": 1}], "tools": []}
    assert json.loads(after.with_members(edited)) == {**body, **edited}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"messages":[1]}', '{"messages":[12]}'),
        ('{"messages":[1,2]}', '{"messages":[1,2.5]}'),
        ('{"messages":[[1],2]}', '{"messages":[[1],23,4]}'),
        ('{"messages":[{"a":1}]}', '{"messages":[{"a":1} , {"a":2}]}'),
        ('{"messages":[{"a":1}]}', '{"messages":[{"a":1}]}'),
        ('{"messages":[{"a":1},{"b":2}]}', '{"messages":[{"a":1}]}'),
        ('{"messages":[{"a":1}],"x":1}', '{"x":12,"messages":[]}'),
        ('{"messages":"hi","tools":["a"]}', '{"messages":["hi"],"tools":"a"}'),
        ('{"tools":[1],"tools":["x"]}', '{"tools":["x"],"tools":[true]}'),
        ('{"messages":["\u00e9"]}', '{"messages":["\u00e9","\U0001f6a2"]}'),
    ],
)
def test_values_are_taken_over_only_whole(one: str, other: str) -> None:
    assert Document(other, Document(one)).body == json.loads(other)


@pytest.mark.parametrize("bad", ['{"messages":[{"a":1},]}', '{"messages":[{"a":1} {"b":2}]}', '{"messages":[{"a":1}'])
def test_what_is_no_object_is_refused_after_another_too(bad: str) -> None:
    with pytest.raises(ValueError):
        Document(bad, Document('{"messages":[{"a":1}]}'))


def test_of_a_longer_conversation_only_the_new_part_is_parsed() -> None:
    messages = [{"role": "user", "content": "x" * 1_000} for _ in range(100)]
    before = Document(json.dumps({"messages": messages, "model": "m", "tools": [{"name": "a"}]}))
    assert before.parsed_chars > 100_000
    longer = [*messages, {"role": "user", "content": "y"}]
    after = Document(json.dumps({"messages": longer, "model": "m", "tools": [{"name": "a"}]}), before)
    assert after.parsed_chars < 50
    one, other = before.body["messages"], after.body["messages"]
    assert isinstance(one, list)
    assert isinstance(other, list)
    assert all(left is right for left, right in zip(one, other, strict=False))
    moved = Document(json.dumps({"messages": messages[50:], "model": "m"}), before)
    assert moved.body["messages"] == messages[50:]


@pytest.mark.parametrize(
    "bad", ["", "[]", "3", "{", '{"a"}', '{"a":1,}', '{"a":1} x', "{'a':1}", '{"a":1 "b":2}', "null"]
)
def test_what_is_no_object_is_refused(bad: str) -> None:
    with pytest.raises(ValueError):
        Document(bad)


# --- frames ----------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.sampled_from([b"data: a", b"\n", b"\r\n", b"\r", b"event: x", b"\n\n", b": c", b"z" * 30]), max_size=20
    ),
    st.integers(1, 9),
)
def test_frames_give_back_what_was_fed(parts: list[bytes], size: int) -> None:
    data = b"".join(parts)
    frames = Frames()
    out = [frame for at in range(0, len(data), size) for frame in frames.feed(data[at : at + size])]
    assert b"".join(out) + frames.rest() == data


def test_a_frame_without_end_is_not_held_for_ever() -> None:
    frames = Frames()
    passed = sum(len(b"".join(frames.feed(b"x" * 65536))) for _ in range(64))
    assert passed >= 3 << 20
    assert len(frames.held) <= 1 << 20


@pytest.mark.parametrize(
    ("frame", "data"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:{}\r\n\r\n", b"{}"),
        (b"event: x\ndata: a\ndata:  b\n\n", b"a\n b"),
        (b": ping\n\n", b""),
        (b"database: x\n\n", b""),
    ],
)
def test_data_of_a_frame(frame: bytes, data: bytes) -> None:
    assert data_of(frame) == data


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_usage_calibrates_bytes_per_token() -> None:
    calibration = Calibration()
    assert calibration.bytes_per_token("m") is None
    calibration.learn("m", 3_000, 1_000)
    for bad in ((10, 5), (3_000, None), (3_000, 0), (1_000_000, 10), (300, 100_000)):
        calibration.learn("m", *bad)
    assert calibration.bytes_per_token("m") == 3.0
    calibration.learn("m", 4_000, 1_000)
    assert 3.0 < (calibration.bytes_per_token("m") or 0) < 4.0
    for index in range(1_000):
        calibration.learn(f"m{index}", 4_000, 1_000)
    assert len(calibration._bytes_per_token) <= 256


def test_answers_of_attached_clients_calibrate() -> None:
    body = {"model": "own-model", "messages": [{"role": "user", "content": "x" * 3_600}]}
    assert count("y" * 300, "own-model") == 75
    with serving(chat) as server, attach(httpx2.Client(verify=False), session="s") as client:
        client.post(f"{server.base_url}/chat/completions", json=body)
    assert count("y" * 300, "own-model") == 100


def test_a_tokenizer_on_disk_is_used_and_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert count("a b c a", str(tmp_path)) == 4
    hub = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "1"
    hub.mkdir(parents=True)
    tokenizer.save(str(hub / "tokenizer.json"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    tokenizer_for.cache_clear()
    assert count("a b", "org/tiny") == 2
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    tokenizer_for.cache_clear()
    assert tokenizer_for("gpt-4o") is None
    assert count("x" * 40, "gpt-4o") == 10
    tokenizer_for.cache_clear()


# --- traces ----------------------------------------------------------------------------------------------------------


def test_usage_on_the_current_span() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    tracer = sdk.TracerProvider().get_tracer("t")
    with serving(chat) as server, attach(httpx2.Client(verify=False), session="s") as client:
        with tracer.start_as_current_span("step") as span:
            client.post(f"{server.base_url}/chat/completions", json={"model": "m"})
        attributes = dict(span.attributes)
        client.post(f"{server.base_url}/chat/completions", json={"model": "m"})  # outside of a span: nothing happens
    assert attributes == {
        "gen_ai.conversation.id": homeport.affinity_id("", "s"),
        "gen_ai.usage.input_tokens": 1200,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 1024,
    }


# --- the append-only fixture -----------------------------------------------------------------------------------------


def agent(client: openai.OpenAI, *, edit: bool) -> None:
    messages: list = [{"role": "system", "content": "Be brief."}]
    for question in ("one", "two", "three"):
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(model="m", messages=messages)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        if edit and question == "two":
            messages[1] = {"role": "user", "content": "pruned"}


def test_an_append_only_agent_passes(append_only: PromptWatch) -> None:
    with serving(chat) as server:
        client = append_only.attach(openai.OpenAI(base_url=server.base_url, api_key="-"))
        agent(client, edit=False)
        agent(client, edit=False)  # the agent once more from the start is no change
        client.close()
    append_only.check()


def test_a_pruning_agent_fails_with_place_and_remedy() -> None:
    watch = PromptWatch()
    homeport.runtime.runtime().watchers.append(watch.watch)
    with serving(chat) as server:
        client = watch.attach(openai.OpenAI(base_url=server.base_url, api_key="-"))
        agent(client, edit=True)
        client.close()
    with pytest.raises(AssertionError, match=r"request 3 of session .*history_edited at /messages/1"):
        watch.check()


def test_the_fixture_fails_the_users_test(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    pytester.makepyfile(
        """
        pytest_plugins = ["homeport.testing"]
        from homeport.fingerprint import segments
        from homeport.runtime import Observation, runtime
        from homeport.session import Session
        from homeport.usage import Usage

        def send(*texts):
            body = {"model": "m", "messages": [{"role": "user", "content": text} for text in texts]}
            seen = Observation(Session("s"), "chat", "", body, None, Usage(), 200, 0.0, 0.0)
            for watcher in runtime().watchers:
                watcher(seen)

        def test_good(append_only):
            send("a"); send("a", "b")

        def test_bad(append_only):
            send("a", "b"); send("b")
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*prompts are not append-only*"])
