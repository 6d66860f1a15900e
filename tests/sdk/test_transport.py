"""What attach does to requests and answers on the wire, over httpx and httpx2, sync and async."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from types import ModuleType

import anthropic
import httpx
import httpx2
import openai
import pytest

import homeport
import homeport.runtime
from homeport.session import affinity_id
from homeport.transport import attach
from sdk.tiny_server import USAGE, Answer, Seen, chat, chat_answer, chat_chunk, serving, sse

BODY = {
    "model": "gpt-4o",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
        for name in ("zoom", "add")
    ],
}
ODD = (
    b'{ "model":"m" ,\n "messages":[{"role":"user","content":"caf\\u00e9 \xe2\x98\x95"}],'
    b' "seed": 1.50e1, "x": {"b":1,"a":2} }'
)


def send(client: object, url: str, content: bytes, headers: dict[str, str] | None = None) -> bytes:
    """One POST by any of the four clients; the raw body of the answer."""
    if isinstance(client, httpx.Client | httpx2.Client):
        with client.stream("POST", url, content=content, headers=headers) as answer:
            return b"".join(answer.iter_raw())

    async def go() -> bytes:
        async with client.stream("POST", url, content=content, headers=headers) as answer:  # type: ignore[attr-defined]
            read = b"".join([chunk async for chunk in answer.aiter_raw()])
        await client.aclose()  # type: ignore[attr-defined]
        return read

    return asyncio.run(go())


CLIENTS: dict[str, Callable[[], object]] = {
    "httpx": lambda: httpx.Client(verify=False),
    "httpx-async": lambda: httpx.AsyncClient(verify=False),
    "httpx2": lambda: httpx2.Client(verify=False),
    "httpx2-async": lambda: httpx2.AsyncClient(verify=False),
}


@pytest.fixture(params=sorted(CLIENTS))
def client(request: pytest.FixtureRequest) -> Iterator[object]:
    made = CLIENTS[request.param]()
    yield made
    if isinstance(made, httpx.Client | httpx2.Client):
        made.close()


def wire(seen: Seen) -> tuple[bytes, dict[str, str]]:
    private = {"host", "user-agent", "accept-encoding"}
    return seen.content, {name: value for name, value in seen.headers.items() if name not in private}


# --- modes -----------------------------------------------------------------------------------------------------------


def test_observe_leaves_every_byte(client: object) -> None:
    with serving(chat) as server:
        attach(client, mode="observe", session="s")
        send(client, f"{server.base_url}/chat/completions", ODD)
        assert server.last.content == ODD
        assert "x-session-affinity" not in server.last.headers
        assert homeport.report("s").cached_tokens == 1024


@pytest.mark.parametrize("module", [httpx, httpx2])
@pytest.mark.parametrize("encoding", ["identity", "gzip"])
@pytest.mark.parametrize("read_before", [False, True])
def test_an_answer_that_was_read_before_is_counted(module: ModuleType, encoding: str, read_before: bool) -> None:
    content = b"".join(chat_answer().chunks)
    packed = gzip.compress(content) if encoding == "gzip" else content
    headers = {"content-type": "application/json", "content-encoding": encoding, "x-kept": "1"}

    def answer(_: object) -> object:
        if not read_before:  # as a test's stand-in gives it
            return module.Response(200, headers=headers, content=packed)
        streamed = module.Response(200, headers=headers, content=iter([packed[:9], packed[9:]]))
        streamed.read()  # as a cache or a log in the way leaves it
        return streamed

    with module.Client(transport=homeport.transport(module.MockTransport(answer), session="s")) as client:
        for _ in range(2):
            got = client.post("http://127.0.0.1:1/v1/chat/completions", json=BODY)
            assert (got.status_code, got.content, got.headers["x-kept"]) == (200, content, "1")
    report = homeport.report("s")
    assert (report.requests, report.cached_tokens) == (2, 2048)


def test_hint_names_the_session_and_leaves_the_body(client: object) -> None:
    with serving(chat) as server:
        attach(client, mode="hint", session="s")
        send(client, f"{server.base_url}/chat/completions", ODD)
        assert server.last.content == ODD
        assert server.last.headers["x-session-affinity"] == affinity_id("", "s")


def test_hint_adds_include_usage_and_nothing_else(client: object) -> None:
    content = ODD[:-2] + b', "stream": true }'
    with serving(chat) as server:
        attach(client, mode="hint", session="s")
        send(client, f"{server.base_url}/chat/completions", content)
        assert server.last.content == content[:-1] + b',"stream_options":{"include_usage":true}}'
        assert server.last.headers["content-length"] == str(len(server.last.content))


def test_stabilise_rewrites_the_tools_and_nothing_else(client: object) -> None:
    tools = json.dumps(BODY["tools"]).encode()
    content = ODD[:-2] + b', "tools": ' + tools + b', "n": 1 }'
    with serving(chat) as server:
        attach(client, session="s")
        send(client, f"{server.base_url}/chat/completions", content)
        before, after = content.split(tools)
        assert server.last.content.startswith(before)
        assert server.last.content.endswith(after)
        assert [tool["function"]["name"] for tool in server.last.body["tools"]] == ["add", "zoom"]


def test_the_four_clients_send_the_same() -> None:
    requests = []
    for make in CLIENTS.values():
        client = make()
        with serving(chat) as server:
            attach(client, session="s")
            read = send(client, f"{server.base_url}/chat/completions", json.dumps({**BODY, "stream": True}).encode())
            requests.append((wire(server.last), read))
            if isinstance(client, httpx.Client | httpx2.Client):
                client.close()
    assert all(request == requests[0] for request in requests)


# --- streams ---------------------------------------------------------------------------------------------------------


def test_the_usage_frame_the_caller_did_not_ask_for_is_hidden(client: object) -> None:
    with serving(chat) as server:
        attach(client, session="s")
        read = send(client, f"{server.base_url}/chat/completions", json.dumps({**BODY, "stream": True}).encode())
        assert read == b"".join(sse(chat_chunk("he"), chat_chunk("llo"), b"[DONE]"))
        assert homeport.report("s").cached_tokens == 1024


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_obfuscation": False}])
def test_every_way_of_not_asking(options: dict | None) -> None:
    body = {**BODY, "stream": True} if options is None else {**BODY, "stream": True, "stream_options": options}
    with serving(chat) as server, httpx2.Client(verify=False) as client:
        attach(client, session="s")
        read = send(client, f"{server.base_url}/chat/completions", json.dumps(body).encode())
        assert server.last.body["stream_options"] == {**(options or {}), "include_usage": True}
        assert b'"usage"' not in read


def test_a_caller_who_asks_gets_it() -> None:
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    with serving(chat) as server, httpx2.Client(verify=False) as client:
        attach(client, session="s")
        assert b'"usage"' in send(client, f"{server.base_url}/chat/completions", json.dumps(body).encode())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_however_the_bytes_arrive(size: int) -> None:
    """Frames cut anywhere; CRLF and LF; a comment; usage in the finish chunk and again, complete, in a last one."""
    early = chat_chunk("llo", usage={"prompt_tokens": 1200, "completion_tokens": 6})
    whole = b": ping\r\n\r\n" + b"".join(sse(chat_chunk("he"), early)).replace(b"\n\n", b"\r\n\r\n")
    tail = b"".join(sse(chat_chunk(None, usage=USAGE), b"[DONE]"))
    data = whole + tail
    chunks = [data[at : at + size] for at in range(0, len(data), size)]

    def script(seen: Seen) -> Answer:
        return Answer(chunks, headers={"content-type": "text/event-stream; charset=utf-8"})

    with serving(script) as server, httpx2.Client(verify=False) as client:
        attach(client, session="s")
        read = send(client, f"{server.base_url}/chat/completions", json.dumps({**BODY, "stream": True}).encode())
        assert read == whole + b"data: [DONE]\n\n"
        report = homeport.report("s")
        assert (report.cached_tokens, report.output_tokens) == (1024, 7)


def test_a_chunk_is_passed_on_before_the_next_one_comes() -> None:
    """No buffering: the server waits for the client to have read a frame before it sends the next one."""
    read_one = threading.Event()

    class Waits(list):
        def __iter__(self):
            first, *rest = sse(chat_chunk("he"), chat_chunk("llo"), b"[DONE]")
            yield first
            assert read_one.wait(20)
            yield from rest

    with serving(lambda seen: Answer(Waits([b"", b""]), headers={"content-type": "text/event-stream"})) as server:
        client = attach(httpx2.Client(verify=False))
        content = json.dumps({**BODY, "stream": True}).encode()
        with client.stream("POST", f"{server.base_url}/chat/completions", content=content) as answer:
            chunks = answer.iter_raw()
            assert next(chunks) == sse(chat_chunk("he"))[0]
            read_one.set()
            assert b"".join(chunks).endswith(b"[DONE]\n\n")
        client.close()


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("stream", [False, True])
def test_compressed_answers(encoding: str, stream: bool) -> None:
    """A server that compresses whatever was asked: usage is read, and the extra frame still hidden."""
    squeeze = gzip.compress if encoding == "gzip" else zlib.compress

    def script(seen: Seen) -> Answer:
        plain = chat(seen)
        data = squeeze(b"".join(plain.chunks))
        return Answer([data[:20], data[20:]], headers={**plain.headers, "content-encoding": encoding})

    with serving(script) as server, httpx2.Client(verify=False) as client:
        attach(client, session="s")
        answer = client.post(f"{server.base_url}/chat/completions", json={**BODY, "stream": stream})
        assert homeport.report("s").cached_tokens == 1024
        if stream:
            assert answer.content == b"".join(sse(chat_chunk("he"), chat_chunk("llo"), b"[DONE]"))
            assert server.last.headers["accept-encoding"] == "identity"
        else:
            assert answer.json()["usage"] == USAGE


@pytest.mark.parametrize("stream", [False, True])
def test_zstd_is_read_where_the_library_is(stream: bool) -> None:
    zstandard = pytest.importorskip("zstandard")

    def script(seen: Seen) -> Answer:
        plain = chat(seen)
        data = b"".join(zstandard.compress(chunk) for chunk in plain.chunks)  # a frame for each: all are read
        return Answer([data[:20], data[20:]], headers={**plain.headers, "content-encoding": "zstd"})

    with serving(script) as server, httpx2.Client(verify=False) as client:
        attach(client, session="s")
        send(client, f"{server.base_url}/chat/completions", json.dumps({**BODY, "stream": stream}).encode())
        assert homeport.report("s").cached_tokens == 1024
        assert homeport.failures() == {}


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress"])
def test_an_encoding_that_cannot_be_read_is_not_reported_and_counted(
    encoding: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("brotli", "brotlicffi", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    data = b"\x0b\x02\x80 whatever"

    def script(seen: Seen) -> Answer:
        return Answer([data], headers={"content-type": "application/json", "content-encoding": encoding})

    with serving(script) as server, httpx2.Client(verify=False) as client:
        attach(client, session="s")
        assert send(client, f"{server.base_url}/chat/completions", json.dumps(BODY).encode()) == data
        report = homeport.report("s")
    assert (report.requests, report.cached_tokens, report.unreported_requests) == (1, None, 1)
    assert homeport.failures() == {"encoding": 1}
    assert repr(encoding) in caplog.text


def test_the_next_turn_parses_only_what_is_new() -> None:
    """Of a session that is named, and of the one conversation of a client that names none."""
    messages = [{"role": "user" if index % 2 == 0 else "assistant", "content": "x" * 500} for index in range(40)]
    for session in ("s", None):
        with serving(chat) as server, httpx2.Client(verify=False) as client:
            attach(client, session=session)
            for count in (37, 39):
                content = json.dumps({"model": "m", "messages": messages[:count]}).encode()
                send(client, f"{server.base_url}/chat/completions", content)
            homeport.runtime.drain()
            memory = next(reversed(homeport.runtime.runtime()._sessions.values()))
            assert memory.document is not None
            assert memory.document.parsed_chars < 1_200 < 18_000 < memory.body_bytes
            assert memory.prompt.read_bytes < 1_200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/threads/t1/messages", {"role": "user", "content": "hi"}),
        ("/channels/7/messages", {"content": "hi"}),
        ("/survey/responses", {"answers": [1]}),
        ("/v1/models", {"messages": []}),
    ],
)
def test_other_services_paths_that_end_alike_are_left_alone(path: str, body: dict) -> None:
    with serving(chat) as server, httpx2.Client(verify=False) as client:
        attach(client, session="s")
        content = json.dumps(body).encode()
        send(client, f"{server.root}{path}", content)
        assert server.last.content == content
        assert "x-session-affinity" not in server.last.headers
        assert homeport.report("s").requests == 0


def test_the_http_client_is_found_where_sdks_keep_it() -> None:
    class Keeper:
        """An SDK's client object that keeps another, under its own name for it."""

        def __init__(self, name: str, kept: object) -> None:
            setattr(self, name, kept)

    for names in (("_client",), ("_api_client", "_httpx_client"), ("_client_wrapper", "httpx_client", "httpx_client")):
        http = httpx.Client(verify=False)
        kept: object = http
        for name in reversed(names):
            kept = Keeper(name, kept)
        with serving(chat) as server, http:
            assert attach(kept, session="s") is kept
            send(http, f"{server.base_url}/chat/completions", ODD)
            assert server.last.headers["x-session-affinity"] == affinity_id("", "s")


def test_a_client_that_leaves_early_still_counts() -> None:
    with serving(chat) as server:
        client = attach(openai.OpenAI(base_url=server.base_url, api_key="-"), session="s")
        stream = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
        next(iter(stream))
        stream.close()
        report = homeport.report("s")
        assert report.requests == 1
        client.close()


# --- who speaks ------------------------------------------------------------------------------------------------------


def test_the_open_block_wins_over_the_clients_own_session() -> None:
    with serving(chat) as server, httpx2.Client(verify=False) as client:
        attach(client, session="fixed")
        url = f"{server.base_url}/chat/completions"
        send(client, url, ODD)
        with homeport.session("open"):
            send(client, url, ODD)
        send(client, url, ODD)
        names = [affinity_id("", name) for name in ("fixed", "open", "fixed")]
        assert [seen.headers["x-session-affinity"] for seen in server.seen] == names


@pytest.mark.parametrize(
    "header", ["x-session-affinity", "X-Session-Id", "session_id", "x-grok-conv-id", "x-claude-code-session-id"]
)
def test_a_header_the_caller_set_wins(header: str) -> None:
    with serving(chat) as server, httpx2.Client(verify=False) as client:
        attach(client, session="s")
        send(client, f"{server.base_url}/chat/completions", ODD, {header: "mine"})
        assert server.last.headers[header.lower()] == "mine"
        others = {name for name in server.last.headers if name.startswith(("x-session", "x-homeport"))}
        assert others <= {header.lower()}


def test_a_sub_agent_names_its_parent() -> None:
    with serving(chat) as server, httpx2.Client(verify=False) as client:
        attach(client)
        with homeport.session("task"), homeport.session("task/search", parent="task"):
            send(client, f"{server.base_url}/chat/completions", ODD)
        headers = server.last.headers
        assert headers["x-session-affinity"] == affinity_id("", "task/search")
        assert headers["x-parent-session-affinity"] == affinity_id("", "task")
        assert headers["x-homeport-kind"] == "subagent"


def test_without_a_session_the_conversation_decides() -> None:
    """Two conversations in turns, one of them with a clock in its system prompt and a tool that comes late."""

    def body(system: str, turns: list[str], tools: list[str]) -> bytes:
        roles = ("user", "assistant")
        messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
        definitions = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in tools]
        return json.dumps(
            {"model": "m", "messages": [{"role": "system", "content": system}, *messages], "tools": definitions}
        ).encode()

    with serving(chat) as server, httpx2.Client(verify=False) as client:
        attach(client)
        url = f"{server.base_url}/chat/completions"
        for content in (
            body("Now: 2026-11-29 12:00:01", ["build it"], ["b"]),
            body("You are a cook.", ["build it"], []),
            body("Now: 2026-11-29 12:00:09", ["build it", "ok", "more"], ["b", "a"]),
            body("You are a cook.", ["build it", "soup?", "yes"], []),
            body("Now: 2026-11-29 12:01:00", ["build it", "ok", "more", "done", "thanks"], ["a", "b"]),
        ):
            send(client, url, content)
        ids = [seen.headers["x-session-affinity"] for seen in server.seen]
        assert ids[0] == ids[2] == ids[4]
        assert ids[1] == ids[3] != ids[0]


def test_plain_threads_take_a_session_by_hand() -> None:
    with serving(chat) as server, httpx2.Client(verify=False) as client:
        attach(client)
        session = homeport.session("threaded")

        def work() -> None:
            with session:
                send(client, f"{server.base_url}/chat/completions", ODD)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {seen.headers["x-session-affinity"] for seen in server.seen} == {session.affinity}
        assert session.report().requests == 4


async def test_the_block_goes_through_tasks() -> None:
    with serving(chat) as server:
        client = attach(openai.AsyncOpenAI(base_url=server.base_url, api_key="-"))

        async def agent(name: str) -> None:
            with homeport.session(name):
                calls = [
                    client.chat.completions.create(model="m", messages=[{"role": "user", "content": f"{name} {n}"}])
                    for n in range(3)
                ]
                await asyncio.gather(*calls)

        await asyncio.gather(agent("a"), agent("b"))
        for name in ("a", "b"):
            mine = [seen for seen in server.seen if f'"{name} ' in seen.content.decode()]
            assert {seen.headers["x-session-affinity"] for seen in mine} == {affinity_id("", name)}
        await client.close()


# --- answers that are none of ours, errors, retries ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("POST", "/v1/embeddings", b'{"input":"x"}'),
        ("GET", "/v1/models", b""),
        ("POST", "/v1/messages/count_tokens", b"{}"),
        ("POST", "/v1/chat/completions", b"not json"),
        ("POST", "/v1/chat/completions", b"[1]"),
        ("POST", "/v1/chat/completions", b"\xff\xfe"),
        ("POST", "/v1/chat/completions", b'{"messages": 3}'),
        ("POST", "/v1/chat/completions", b'{"messages": [[], null, {"role": 5, "content": {"a": 1}}], "tools": {}}'),
        ("POST", "/v1/responses", b'{"input": {"x": [1]}, "tools": ["a", null]}'),
    ],
)
def test_what_cannot_be_read_passes(method: str, path: str, content: bytes) -> None:
    with serving(lambda _: Answer([b"fine"])) as server, httpx2.Client(verify=False) as client:
        attach(client)
        assert client.request(method, server.root + path, content=content).content == b"fine"
        assert server.last.content == content
        assert homeport.failures() == {}


def test_a_streamed_request_body_passes() -> None:
    with serving(chat) as server, httpx2.Client(verify=False) as client:
        attach(client)
        url = f"{server.base_url}/chat/completions"
        client.post(url, content=iter([ODD[:10], ODD[10:]]), headers={"content-length": str(len(ODD))})
        assert server.last.content == ODD


def test_an_sdk_retry_is_the_same_request_and_counts_once() -> None:
    answers = iter([Answer([b'{"error":{}}'], status=503), Answer([b"{}"], status=429), chat_answer()])
    with serving(lambda _: next(answers)) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="-", max_retries=3)
        client._calculate_retry_timeout = lambda *_: 0.0  # type: ignore[method-assign, assignment, misc]
        attach(client, session="s")
        client.chat.completions.create(**BODY)
        assert len({seen.content for seen in server.seen}) == 1
        assert len({seen.headers["x-session-affinity"] for seen in server.seen}) == 1
        assert homeport.report("s").requests == 1
        client.close()


def test_errors_reach_the_caller_as_they_are() -> None:
    error = {"error": {"message": "no", "type": "invalid_request_error", "param": "tools", "code": "x"}}
    with serving(lambda _: Answer([json.dumps(error).encode()], status=400)) as server:
        client = attach(openai.OpenAI(base_url=server.base_url, api_key="-"), session="s")
        with pytest.raises(openai.BadRequestError, match="no"):
            client.chat.completions.create(**BODY)
        report = homeport.report("s")
        assert (report.requests, report.failed_requests) == (0, 1)
        client.close()


def test_a_refused_connection_raises_what_it_would_and_is_counted() -> None:
    with attach(httpx2.Client(verify=False), session="down") as client, pytest.raises(httpx2.ConnectError):
        client.post("http://127.0.0.1:9/v1/chat/completions", json=BODY)
    assert homeport.failures() == {}
    report = homeport.report("down")
    assert (report.requests, report.failed_requests) == (0, 1)
    assert str(report).splitlines()[1:] == [
        "  requests               none answered",
        "  failed requests        1  (no answer, or refused)",
    ]


async def test_a_refused_connection_is_counted_over_async_clients_too() -> None:
    async with attach(httpx.AsyncClient(verify=False), session="down") as client:
        with pytest.raises(httpx.ConnectError):
            await client.post("http://127.0.0.1:9/v1/chat/completions", json=BODY)
    assert homeport.report("down").failed_requests == 1


# --- the other APIs --------------------------------------------------------------------------------------------------

ANTHROPIC_USAGE = {
    "input_tokens": 12,
    "output_tokens": 4,
    "cache_read_input_tokens": 1000,
    "cache_creation_input_tokens": 188,
}


def anthropic_stream(seen: Seen) -> Answer:
    message = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "content": [], "stop_reason": None,
        "stop_sequence": None, "usage": {**ANTHROPIC_USAGE, "output_tokens": 1},
    }  # fmt: skip
    events = [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 4}},
        {"type": "message_stop"},
    ]
    frames = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events]
    return Answer(frames, headers={"content-type": "text/event-stream"})


def test_anthropic_stream() -> None:
    tools = [{"name": name, "input_schema": {"type": "object", "properties": {}}} for name in ("b", "a")]
    with serving(anthropic_stream) as server:
        client = attach(anthropic.Anthropic(base_url=server.root, api_key="-"), session="s")
        with client.messages.stream(
            model="claude-sonnet-4-5", max_tokens=9, messages=[{"role": "user", "content": "hi"}], tools=tools
        ) as stream:
            assert stream.get_final_text() == "hi"
        assert [tool["name"] for tool in server.last.body["tools"]] == ["a", "b"]
        assert server.last.body.keys() == {"model", "max_tokens", "messages", "tools", "stream"}
        report = homeport.report("s")
        assert (report.input_tokens, report.cached_tokens, report.output_tokens) == (1200, 1000, 4)
        client.close()


def test_responses_stream() -> None:
    usage = {
        "input_tokens": 1200, "input_tokens_details": {"cached_tokens": 1024}, "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 1207,
    }  # fmt: skip
    final = {"type": "response.completed", "response": {"id": "r", "output": [], "usage": usage}}
    frames = sse({"type": "response.output_text.delta", "delta": "x"}, final)
    script = lambda _: Answer(frames, headers={"content-type": "text/event-stream"})  # noqa: E731
    with serving(script) as server, attach(httpx2.Client(verify=False), session="s") as client:
        read = send(client, f"{server.base_url}/responses", b'{"model":"m","input":"hi","stream":true}')
        assert read == b"".join(frames)
        assert server.last.content == b'{"model":"m","input":"hi","stream":true}'
        assert homeport.report("s").cached_tokens == 1024


# --- attaching -------------------------------------------------------------------------------------------------------


def test_the_same_object_and_class_come_back() -> None:
    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="-")
    assert attach(client) is client
    assert type(client) is openai.OpenAI
    client.close()


def test_attaching_twice_wraps_once_and_the_newest_settings_hold() -> None:
    twice = attach(attach(httpx2.Client(verify=False), mode="observe"), mode="hint", session="s")
    with serving(chat) as server, twice as client:
        send(client, f"{server.base_url}/chat/completions", ODD)
        assert server.last.headers["x-session-affinity"] == affinity_id("", "s")
        assert homeport.report("s").requests == 1


def test_transports_for_those_who_build_their_own_client() -> None:
    with serving(chat) as server:
        for client in (
            httpx2.Client(transport=homeport.transport(session="s")),  # type: ignore[arg-type]
            httpx.Client(transport=homeport.transport(httpx.HTTPTransport(), session="s")),  # type: ignore[arg-type]
            httpx2.AsyncClient(transport=homeport.async_transport(session="s")),  # type: ignore[arg-type]
            httpx.AsyncClient(transport=homeport.async_transport(httpx.AsyncHTTPTransport(), session="s")),  # type: ignore[arg-type]
        ):
            send(client, f"{server.base_url}/chat/completions", ODD)
            if isinstance(client, httpx.Client | httpx2.Client):
                client.close()
        assert homeport.report("s").requests == 4


def test_copies_of_an_openai_client_stay_attached() -> None:
    with serving(chat) as server:
        client = attach(openai.OpenAI(base_url=server.base_url, api_key="-"), session="s")
        client.with_options(timeout=5).chat.completions.create(**BODY)
        assert homeport.report("s").requests == 1
        client.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "fast"}, "observe, hint or stabilise"),
        ({"tool_order": "random"}, "sorted or caller"),
        ({"profile": "emacs"}, "claude-code"),
        ({"session": ""}, "session id"),
    ],
)
def test_bad_options_say_what_is_right(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        attach(httpx2.Client(verify=False), **options)


def test_a_thing_without_an_http_client_is_refused() -> None:
    with pytest.raises(TypeError, match="no httpx or httpx2 client in dict"):
        attach({})


# --- finish ----------------------------------------------------------------------------------------------------------


def test_finish_tells_the_proxies_that_served_the_session() -> None:
    def script(seen: Seen) -> Answer:
        return (
            chat_answer(headers={"x-homeport-session": "d1gest"})
            if seen.path.endswith("completions")
            else Answer([b""])
        )

    with serving(script) as server:
        attach(client := httpx2.Client(verify=False))
        with homeport.session("s"):
            send(client, f"{server.base_url}/chat/completions", ODD, {"authorization": "Bearer tenant-key"})
        homeport.finish("s")
        assert "tenant-key" not in repr(homeport.runtime.runtime().proxies_of(affinity_id("", "s")))
        assert (server.last.method, server.last.path) == ("POST", "/homeport/v1/sessions/d1gest/finish")
        assert server.last.headers["authorization"] == "Bearer tenant-key"
        assert homeport.report("s").requests == 1  # the books stay
        client.close()


def test_finish_of_a_session_no_proxy_served_asks_nobody() -> None:
    with serving(chat) as server:
        attach(client := httpx2.Client(verify=False), session="s")
        send(client, f"{server.base_url}/chat/completions", ODD)
        homeport.finish("s")
        homeport.finish("unheard of")
        assert len(server.seen) == 1
        client.close()


def test_a_proxy_that_is_gone_does_not_fail_finish() -> None:
    with serving(lambda _: chat_answer(headers={"x-homeport-session": "d"})) as server:
        attach(client := httpx2.Client(verify=False), session="s")
        send(client, f"{server.base_url}/chat/completions", ODD)
        client.close()
    homeport.finish("s")
    assert homeport.failures() == {"finish": 1}
