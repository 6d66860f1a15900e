"""Free moments: what the proxy's word means, when a frozen clock may move, when late tools may come in."""

from __future__ import annotations

import json

import httpx2
import pytest

import homeport
import homeport.runtime
from homeport.mcp import list_tools
from homeport.moments import KEEP_S, is_free, keep_of
from homeport.transport import attach
from sdk.tiny_server import Answer, Seen, chat, chat_answer, serving


@pytest.mark.parametrize(
    ("word", "before_s", "keep_s"),
    [
        (None, None, None),
        (None, 90.0, 90.0),
        ("warm; keep=240", None, 240.0),
        ("warm; keep=240s", 90.0, 240.0),
        ("warm;keep = 1.5", None, 1.5),
        ("cold", None, KEEP_S),
        ("cold", 90.0, 90.0),
        ("warm", 90.0, 90.0),
        ("lukewarm; keepsake=3", None, KEEP_S),
    ],
)
def test_how_long_it_stays_warm(word: str | None, before_s: float | None, keep_s: float | None) -> None:
    assert keep_of(word, before_s) == keep_s


@pytest.mark.parametrize(
    ("answered_at", "keep_s", "free"),
    [(None, None, True), (None, 240.0, True), (100.0, None, False), (100.0, 240.0, False), (100.0, 50.0, True)],
)
def test_when_a_change_is_free(answered_at: float | None, keep_s: float | None, free: bool) -> None:
    assert is_free(answered_at, keep_s, 200.0) is free


class Clock:
    """The time that Homeport's runtime sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        for module in (homeport.runtime, __import__("homeport.call", fromlist=["call"])):
            monkeypatch.setattr(module, "now_s", lambda: self.now)


def system_texts(words: list[str], pauses_s: list[float], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The system texts that leave in stabilise mode, a declared clock in them, for requests after these pauses."""
    clock = Clock(monkeypatch)
    answers = iter(words)

    def script(_: Seen) -> Answer:
        word = next(answers)
        return chat_answer(headers={"x-homeport-cache": word} if word else {})

    with serving(script) as server, httpx2.Client(verify=False) as client:
        attach(client, session="s")
        for number, pause_s in enumerate(pauses_s):
            clock.now += pause_s
            system = homeport.volatile(f"It is {number} past noon.", name="clock")
            body = {"model": "m", "messages": [{"role": "system", "content": system}, {"role": "user", "content": "?"}]}
            client.post(f"{server.base_url}/chat/completions", content=json.dumps(body))
        return [seen.body["messages"][0]["content"][6] for seen in server.seen]


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["cold", "warm; keep=100", "warm; keep=100", "warm; keep=100"], "0003"),
        (["cold", "cold", "cold", "cold"], "0003"),  # a cold word is no free moment: that answer has warmed it
        (["warm; keep=5", "warm; keep=5", "cold", "cold"], "0123"),
        (["", "", "", ""], "0000"),  # nobody says how long it lives: left alone
    ],
)
def test_a_frozen_clock_moves_on_when_the_prompt_is_cold(
    words: list[str], texts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "".join(system_texts(words, [0, 10, 90, 250], monkeypatch)) == texts


def test_a_free_moment_is_asked_by_session(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert homeport.free_moment("never heard of")
    with pytest.raises(ValueError, match="no session is open"):
        homeport.free_moment()
    with serving(lambda _: chat_answer(headers={"x-homeport-cache": "warm; keep=60"})) as server:
        client = attach(httpx2.Client(verify=False))
        with homeport.session("s") as session:
            assert session.free_moment()
            client.post(f"{server.base_url}/chat/completions", json={"model": "m", "messages": []})
            assert not session.free_moment()
            assert not homeport.free_moment()
        clock.now += 61
        assert homeport.free_moment("s")
        client.close()


@pytest.mark.parametrize("ends", ["read", "left", "refused", "failed"])
def test_while_an_answer_streams_no_moment_is_free(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def script(seen: Seen) -> Answer:
        answer = chat(seen)
        status = 500 if ends == "refused" and len(server.seen) > 1 else 200
        return Answer(answer.chunks, status, {**answer.headers, "x-homeport-cache": "warm; keep=60"})

    with serving(script) as server, httpx2.Client(verify=False) as client:
        attach(client, session="s")
        url = f"{server.base_url}/chat/completions"
        body = {"model": "m", "messages": [], "stream": True}
        client.post(url, json=body)
        clock.now += 1_000
        with client.stream("POST", url, json=body) as answer:
            if ends != "refused":
                assert not homeport.free_moment("s")
            if ends == "read":
                answer.read()
        if ends == "failed":
            with pytest.raises(httpx2.UnsupportedProtocol):
                client.post(url.replace("http", "gopher"), json=body)
        del answer
        clock.now += 1_000
        assert homeport.free_moment("s")


class Server:
    def __init__(self, *names: str) -> None:
        self.names = names

    async def list_tools(self) -> object:
        tools = [type("Tool", (), {"name": name, "description": "", "input_schema": {}})() for name in self.names]
        return type("Page", (), {"tools": tools})()


async def test_late_tools_wait_for_a_free_moment_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with homeport.session("s") as session:
        first = await list_tools({"b": Server("x")}, hold_late=True)
        assert [tool.name for tool in first] == ["x"]
        memory = homeport.runtime.runtime().remembered(session)
        memory.answered_at, memory.keep_s = clock.now, 60.0
        both = {"b": Server("x"), "a": Server("y")}
        held = await list_tools(both, hold_late=True)
        assert ([tool.name for tool in held], held.held) == (["x"], ("mcp__a__y",))
        clock.now += 61
        later = await list_tools(both, hold_late=True)
        assert ([tool.name for tool in later], later.held) == (["x", "y"], ())
        memory.answered_at = clock.now
        assert [tool.name for tool in await list_tools({**both, "c": Server("z")})] == ["x", "y", "z"]
