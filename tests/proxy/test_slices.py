"""Long prompts prefilled in parts: what engines get, who comes in between, what the client is told, what a failure of a
part costs (nothing), and that nothing is left of any of it."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from homeport_engines.emulator import Emulator, EmulatorSettings
from homeport_proxy import tokens
from homeport_proxy.app import Proxy
from homeport_proxy.commands.why import parts as parts_of
from homeport_proxy.routing.place import Place
from homeport_proxy.routing.views import Ticket
from proxy.scripted_engines import (
    Handler,
    ScriptedEngine,
    Seen,
    backends,
    chunk,
    eventually,
    proxy_for,
    stream,
)
from proxy.test_attempts import cancel_request_at, idle

CHAT = "/v1/chat/completions"
BLOCK = 16
PROMPT_TOKENS = 14_000
KNOWN_TOKENS = 1_600
"""Of every prompt these are the same: a system prompt that engines may hold already."""
TEXT = "The harbour master knows every ship by its home port. " * 1_000


def ids_of(body: dict[str, Any]) -> list[int]:
    """A prompt's tokens: as many as the text is long, the first ones shared by all, the others told by the text."""
    text = json.dumps(body.get("messages") or body.get("prompt"))
    count = min(PROMPT_TOKENS, len(text) // 4)
    own = zlib.crc32(text.encode()) % 10_000 * PROMPT_TOKENS
    return [*range(min(KNOWN_TOKENS, count)), *range(own + KNOWN_TOKENS, own + count)]


@dataclass
class Caching(ScriptedEngine):
    """An engine with a prefix cache: it knows what it computed by scope and block, and says what it found."""

    handler: Handler = field(init=False)
    computed: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    order: list[tuple[str, int]] = field(default_factory=list)
    tells: bool = True
    """Whether it tells tokens."""
    on_part: Handler | None = None
    on_answer: Handler | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.handler = self._answer
        self.gate.set()

    async def _answer(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        if seen.path == "/tokenize" and not self.tells:
            return web.json_response({}, status=404)
        if seen.path == "/tokenize":
            ids = ids_of(seen.body)
            return web.json_response({"tokens": ids, "count": len(ids)})
        part = seen.path == "/v1/completions" and isinstance(seen.body["prompt"], list)
        ids = seen.body["prompt"] if part else ids_of(seen.body)
        self.order.append(("part" if part else "whole", len(ids)))
        instead = self.on_part if part else self.on_answer
        if instead is not None:
            return await instead(request, seen)
        await self.gate.wait()
        usage = {
            "prompt_tokens": len(ids),
            "completion_tokens": 1 if part else 3,
            "total_tokens": len(ids) + 1,
            "prompt_tokens_details": {"cached_tokens": self.compute(ids, seen.body.get("cache_salt") or "")},
        }
        if part:
            return web.json_response({"id": "x", "choices": [{"text": "z"}], "usage": usage})
        if seen.body.get("stream"):
            frames = [chunk(), chunk("Hel"), chunk("lo"), chunk(choices=[], usage=usage), b"data: [DONE]\n\n"]
            return await stream(request, frames)
        message = {"role": "assistant", "content": "Hello"}
        return web.json_response({"id": "c", "choices": [{"index": 0, "message": message}], "usage": usage})

    def compute(self, ids: list[int], scope: str = "") -> int:
        """Tokens of the prompt that were there; then all of its whole blocks are."""
        names = [(scope, tuple(ids[max(0, end - BLOCK) : end])) for end in range(BLOCK, len(ids) + 1, BLOCK)]
        found = next((number for number, name in enumerate(names) if name not in self.computed), len(names))
        self.computed.update(names)
        return min(found * BLOCK, len(ids) - 1)

    @property
    def parts(self) -> list[Seen]:
        """The parts it was asked for."""
        return [seen for seen in self.seen if seen.path == "/v1/completions"]


@asynccontextmanager
async def slicing(*engines: Caching, followed: bool = True, **settings: Any) -> AsyncIterator[tuple[str, Proxy]]:
    """A proxy that slices, in front of engines whose events it is taken to follow."""
    config = {"routing": {"slice_s": 0.001}, **settings}
    async with proxy_for(backends(*[await engine.start() for engine in engines], **config)) as (url, proxy):
        router = proxy.control.routers["local"]
        if followed:
            router.block_tokens = lambda place: BLOCK  # type: ignore[method-assign]
        yield url, proxy


@pytest.fixture(autouse=True)
def at_ease(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an engine may take longer to tell a prompt's tokens than a proxy waits for them, and to answer
    than its speed says."""
    monkeypatch.setattr(tokens, "ANSWER_S", 10.0)
    monkeypatch.setattr(Place, "learn_prefill", lambda *_: None)


def body(text: str = TEXT, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


@dataclass
class Got:
    """An answer."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def usage(self) -> dict[str, Any]:
        if not self.headers["content-type"].startswith("text/event-stream"):
            found: dict[str, Any] = json.loads(self.text)["usage"]
            return found
        frames = [json.loads(line[6:]) for line in self.text.splitlines() if line.startswith("data: {")]
        return next(frame["usage"] for frame in frames if frame.get("usage"))

    @property
    def cached(self) -> int | None:
        found: int | None = self.usage["prompt_tokens_details"]["cached_tokens"]
        return found


async def ask(url: str, sent: dict[str, Any], **headers: str) -> Got:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with aiohttp.request("POST", url + CHAT, json=sent, headers=named) as answer:
        return Got(answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.text())


async def why(url: str, got: Got) -> dict[str, Any]:
    async with aiohttp.request("GET", f"{url}/homeport/v1/requests/{got.headers['x-homeport-request-id']}") as answer:
        found: dict[str, Any] = await answer.json()
        return found


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_long_prompt_goes_in_parts_and_the_client_is_told_what_was_there_before(streamed: bool) -> None:
    engine = Caching()
    async with slicing(engine) as (url, proxy):
        engine.compute(ids_of(body())[:KNOWN_TOKENS])
        asked: list[int] = []
        sliced = proxy.control.placer.sliced

        async def noted(ticket: Ticket, cached_tokens: int | None, *, ok: bool) -> None:
            assert ticket.part_tokens is not None
            assert ok
            asked.append(ticket.part_tokens)
            await sliced(ticket, cached_tokens, ok=ok)

        proxy.control.placer.sliced = noted  # type: ignore[method-assign]
        sent = body(stream=streamed, stream_options={"include_usage": True} if streamed else None, temperature=0.3)
        got = await ask(url, sent, authorization="Bearer mine", x_session_id="s")
        assert got.status == 200
        assert "Hel" in got.text
        counts = [count for what, count in engine.order if what == "part"]
        assert len(counts) >= 2
        assert counts == sorted(set(counts)) == asked
        assert engine.order[-1] == ("whole", len(ids_of(sent)))
        for seen in engine.parts:
            count = len(seen.body["prompt"])
            assert seen.body == {
                "model": "m",
                "prompt": ids_of(sent)[:count],
                "max_tokens": 1,
                "stream": False,
            }
            assert seen.headers["authorization"] == "Bearer mine"
        names = [seen.headers["x-request-id"] for seen in engine.seen if seen.path != "/tokenize"]
        assert len(set(names)) == len(names)
        assert got.cached == KNOWN_TOKENS
        assert got.usage["completion_tokens"] == 3
        assert got.headers["x-homeport-reason"].endswith(f"; prefilled in {len(counts) + 1} parts")
        assert got.headers["x-homeport-expected-cached-tokens"] == "0", "what was expected before the first part"
        assert "prefill;dur=" in got.headers["server-timing"]

        summary = await why(url, got)
        assert summary["tokens"]["cached"] == KNOWN_TOKENS
        assert summary["tokens"]["output"] == 3
        assert sum(summary["miss_causes"].values()) == summary["tokens"]["prompt"] - KNOWN_TOKENS
        assert [leg["part"] for leg in summary["legs"]] == ["slice"] * len(counts) + ["serve"]
        assert {leg["state"] for leg in summary["legs"]} == {"done"}
        found = parts_of(summary)
        until = summary["ms"]["first_token"]
        assert sum(part.ms for part in found) == pytest.approx(until, abs=0.05)
        assert {"slices", "engine"} <= {part.name for part in found}
        async with aiohttp.request("GET", url + "/metrics") as answer:
            metrics = (await answer.text()).splitlines()
        totals = {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in metrics if line[:1] != "#"}
        prompt = {name: float(value) for name, value in totals.items() if "homeport_prompt_tokens_total" in name}
        assert sum(prompt.values()) == summary["tokens"]["prompt"]
        assert sum(value for name, value in prompt.items() if 'source="cached"' in name) in (0, KNOWN_TOKENS)
        await eventually(lambda: idle(proxy))


async def test_the_next_turn_finds_all_of_it() -> None:
    engine = Caching()
    async with slicing(engine) as (url, _):
        await ask(url, body(), x_session_id="s")
        before = len(engine.order)
        got = await ask(url, body(), x_session_id="s")
        count = len(ids_of(body()))
        assert engine.order[before:] == [("whole", count)]
        assert got.cached == (count - 1) // BLOCK * BLOCK
        assert "parts" not in got.headers["x-homeport-reason"]


async def test_short_requests_come_in_between() -> None:
    engine = Caching()
    engine.gate.clear()
    async with slicing(engine) as (url, proxy):
        long = asyncio.create_task(ask(url, body(), x_session_id="long"))
        await eventually(lambda: len(engine.order) == 1)
        short = [asyncio.create_task(ask(url, body(f"{n} hello"), x_session_id=f"s{n}")) for n in range(2)]
        await eventually(lambda: proxy.control.placer.waiting == 2)
        assert [what for what, _ in engine.order] == ["part"], "they wait for the part, not for the whole prompt"
        engine.gate.set()
        assert [got.status for got in await asyncio.gather(*short, long)] == [200] * 3
        # they and the next part are sent at once, each over its own connection
        assert sorted(what for what, _ in engine.order[1:4]) == ["part", "whole", "whole"]
        assert len(engine.parts) >= 2
        summary = await why(url, long.result())
        assert sum(part.ms for part in parts_of(summary)) == pytest.approx(summary["ms"]["first_token"], abs=0.05)
        await eventually(lambda: idle(proxy))


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}, {"type": "image_url"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}, {"type": "input_audio"}]}]},
        {"prompt_logprobs": 1},
        {"truncate_prompt_tokens": 9_000},
    ],
    ids=["image", "audio", "prompt logprobs", "truncated"],
)
async def test_what_is_never_sliced(changes: dict[str, Any]) -> None:
    engine = Caching()
    async with slicing(engine) as (url, _):
        assert (await ask(url, body() | changes)).status == 200
        assert (await ask(url, body(TEXT + "side"), x_homeport_kind="side")).status == 200
    assert [what for what, _ in engine.order] == ["whole", "whole"]


async def test_off() -> None:
    engine = Caching()
    async with slicing(engine, routing={"slice_s": 0}) as (url, _):
        assert (await ask(url, body())).status == 200
    assert [what for what, _ in engine.order] == ["whole"]


@pytest.mark.parametrize("tells", [True, False])
async def test_without_events_the_tokens_are_asked_for_when_a_part_is_due(tells: bool) -> None:
    engine = Caching(tells=tells)
    async with slicing(engine, followed=False) as (url, proxy):
        for turn in range(2):
            got = await ask(url, body(f"{turn}. {TEXT}"))
            assert got.status == 200
            assert got.cached == (KNOWN_TOKENS if turn else 0)
            assert ("parts" in got.headers["x-homeport-reason"]) is tells
        short = await ask(url, body("Ahoy."))
        assert short.status == 200
        await eventually(lambda: idle(proxy))
    assert len([seen for seen in engine.seen if seen.path == "/tokenize"]) == (2 if tells else 1)
    assert len(engine.parts) >= (4 if tells else 0)
    assert {len(seen.body["prompt"]) % 512 for seen in engine.parts} <= {0}, "a block that is not full is not cached"
    assert [what for what, _ in engine.order].count("whole") == 3


async def test_the_tenants_scope_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLICE_KEY", "secret")
    engine = Caching()
    async with slicing(engine, tenants=[{"name": "t", "key_env": "SLICE_KEY"}]) as (url, _):
        got = await ask(url, body(cache_salt="theirs", priority=3), authorization="Bearer secret")
        assert got.status == 200
    whole = next(seen for seen in engine.seen if seen.path == CHAT)
    assert whole.body["cache_salt"] != "theirs"
    assert len(engine.parts) >= 2
    for seen in engine.parts:
        assert seen.body["cache_salt"] == whole.body["cache_salt"]
        assert "priority" not in seen.body
        assert "authorization" not in seen.headers
    assert got.cached == 0


async def test_the_clients_own_scope_and_priority_go_along() -> None:
    engine = Caching()
    async with slicing(engine) as (url, _):
        assert (await ask(url, body(cache_salt="mine", priority=3))).cached == 0
    assert {(seen.body["cache_salt"], seen.body["priority"]) for seen in engine.parts} == {("mine", 3)}


def answering(status: int) -> Handler:
    async def handler(request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}} if status >= 400 else {"choices": []}, status=status)

    return handler


async def _reset(request: web.Request, seen: Seen) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _silent(request: web.Request, seen: Seen) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def _garbage(request: web.Request, seen: Seen) -> web.StreamResponse:
    return web.Response(text='{"usage": [1, {"prompt_tokens": "x"}', content_type="application/json")


FAILURES: dict[str, tuple[Handler, bool]] = {
    **{str(status): (answering(status), True) for status in (400, 404, 429, 503)},
    "500": (answering(500), False),
    "no usage": (answering(200), False),
    "garbage": (_garbage, False),
    "reset": (_reset, False),
    "silence": (_silent, False),
}
"""What may happen to a part; whether what its engine finds afterwards is known not to be the part's own."""


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("failure", list(FAILURES))
async def test_when_a_part_fails_the_request_goes_as_it_is(failure: str, streamed: bool) -> None:
    handler, known = FAILURES[failure]
    engine = Caching(on_part=handler)
    async with slicing(engine, timeouts={"first_token_s": 0.3 if failure == "silence" else 60}) as (url, proxy):
        sent = body(stream=streamed, stream_options={"include_usage": True} if streamed else None)
        got = await ask(url, sent)
        assert got.status == 200, got.text
        assert "Hel" in got.text
        assert [what for what, _ in engine.order] == ["part", "whole"]
        assert got.cached == (0 if known else None)
        assert "parts" not in got.headers["x-homeport-reason"]
        summary = await why(url, got)
        assert summary["legs"][0]["error"]
        assert sum(part.ms for part in parts_of(summary)) == pytest.approx(
            summary["ms"]["first_token"] or summary["ms"]["total"], abs=0.05
        )
        await eventually(lambda: idle(proxy) and engine.open == 0)


async def test_a_later_part_fails() -> None:
    engine = Caching()

    async def second(request: web.Request, seen: Seen) -> web.StreamResponse:
        if len(engine.parts) > 1:
            return web.json_response({}, status=500)
        engine.on_part = None
        try:
            return await engine._answer(request, seen)
        finally:
            engine.on_part = second

    engine.on_part = second
    async with slicing(engine) as (url, proxy):
        engine.compute(ids_of(body())[:KNOWN_TOKENS])
        got = await ask(url, body())
        assert got.status == 200
        assert len(engine.parts) == 2
        assert got.cached == KNOWN_TOKENS
        assert got.headers["x-homeport-reason"].endswith("; prefilled in 2 parts")
        await eventually(lambda: idle(proxy))


@pytest.mark.parametrize("status", [429, 503])
async def test_a_retry_elsewhere_tells_what_was_found_there(status: int) -> None:
    first, second = Caching(), Caching()
    async with slicing(first, second) as (url, proxy):
        for engine in (first, second):
            engine.on_answer = answering(status)
        second.compute(ids_of(body())[:KNOWN_TOKENS])
        asked = asyncio.create_task(ask(url, body()))
        await eventually(lambda: bool(first.parts or second.parts))
        began, other = (first, second) if first.parts else (second, first)
        other.on_answer = None
        got = await asked
        assert got.status == 200
        assert len(began.parts) >= 2
        assert not other.parts
        assert got.cached == (KNOWN_TOKENS if other is second else 0)
        await eventually(lambda: idle(proxy))


async def test_the_place_goes_while_a_part_is_computed() -> None:
    first, second = Caching(), Caching()
    async with slicing(first, second) as (url, proxy):
        for engine in (first, second):
            engine.gate.clear()
        asked = asyncio.create_task(ask(url, body()))
        await eventually(lambda: bool(first.parts or second.parts))
        began, other = (first, second) if first.parts else (second, first)
        other.gate.set()
        await began.stop()
        got = await asked
        assert got.status == 200
        assert got.cached == 0
        assert other.order[-1][0] == "whole"
        await eventually(lambda: idle(proxy))


@pytest.mark.parametrize(("streamed", "followed"), [(False, True), (True, True), (True, False)])
async def test_cancelled_at_every_await_nothing_is_left(streamed: bool, followed: bool) -> None:
    """Beside another long request, so that it also waits between its parts."""
    engine = Caching()
    async with slicing(engine, followed=followed) as (url, proxy):
        at: set[str] = set()
        for step in range(1, 200):
            beside = asyncio.create_task(ask(url, body(f"{step} beside. {TEXT}")))
            await eventually(lambda: proxy.control.placer.open_tickets == 1)
            before, reached = len(engine.order), list[bool]()
            restore = cancel_request_at(proxy, step, reached)
            try:
                assert (await ask(url, body(f"{step} cancelled. {TEXT}", stream=streamed))).status == 200
                assert not reached
            except aiohttp.ClientError:
                assert reached
            restore()
            assert (await beside).status == 200
            await eventually(lambda: idle(proxy) and engine.open == 0)
            assert proxy.control.placer.waiting == 0
            at.update(what for what, _ in engine.order[before:])
            if not reached:
                break
        assert step > 5
        assert not reached
        assert at == {"part", "whole"}


async def test_a_client_that_leaves_between_parts_is_waited_for_no_more() -> None:
    engine = Caching()
    engine.gate.clear()

    async def second_waits(request: web.Request, seen: Seen) -> web.StreamResponse:
        if len(engine.parts) == 2:
            await engine.gate.wait()
        usage = {"prompt_tokens": len(seen.body["prompt"])}
        return web.json_response({"choices": [], "usage": usage})

    async with slicing(engine) as (url, proxy):
        asked = asyncio.create_task(ask(url, body()))
        await eventually(lambda: bool(engine.parts))
        shorter = asyncio.create_task(ask(url, body("Shorter. " + TEXT[: len(TEXT) * 6 // 10])))
        await eventually(lambda: proxy.control.placer.waiting == 1)
        engine.on_part = second_waits
        engine.gate.set()
        engine.gate.clear()
        await eventually(lambda: len(engine.parts) == 2)
        assert proxy.control.placer.waiting == 1, "the longer one waits between its parts"
        asked.cancel()
        await eventually(lambda: proxy.control.placer.waiting == 0)
        assert proxy.control.placer.open_tickets == 1
        engine.gate.set()
        assert (await shorter).status == 200
        await eventually(lambda: idle(proxy))
        assert [what for what, _ in engine.order].count("whole") == 1


async def test_a_client_that_leaves_aborts_the_part() -> None:
    engine = Caching()
    engine.gate.clear()
    async with slicing(engine) as (url, proxy):
        asked = asyncio.create_task(ask(url, body()))
        await eventually(lambda: engine.open == 1 and bool(engine.parts))
        asked.cancel()
        await eventually(lambda: engine.open == 0)
        assert engine.parts[0].aborted
        await eventually(lambda: idle(proxy))


# emulated engines, whose own events tell what they hold

SHORT = "How long does a ship stay in its home harbour before it leaves again? " * 4


@asynccontextmanager
async def emulated() -> AsyncIterator[Emulator]:
    async with Emulator(EmulatorSettings(model="m", time_scale=20.0)) as engine:
        yield engine


def before(url: str) -> dict[str, Any]:
    """A configuration of one backend, whose events are followed."""
    return {
        "listen": "127.0.0.1:0",
        "regions": {"local": {"backends": [{"name": "b0", "url": url}]}},
        "routing": {"slice_s": 0.001},
    }


APIS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "chat": (CHAT, body(max_tokens=8), lambda d: (d["choices"][0]["message"]["content"], _found(d["usage"]))),
    "completions": (
        "/v1/completions",
        {"model": "m", "prompt": TEXT, "max_tokens": 8},
        lambda d: (d["choices"][0]["text"], _found(d["usage"])),
    ),
    "messages": (
        "/v1/messages",
        body(max_tokens=8),
        lambda d: (d["content"][0]["text"], d["usage"]["cache_read_input_tokens"]),
    ),
    "responses": (
        "/v1/responses",
        {"model": "m", "input": TEXT, "max_output_tokens": 8},
        lambda d: (d["output"][0]["content"][0]["text"], d["usage"]["input_tokens_details"]["cached_tokens"]),
    ),
}


def _found(usage: dict[str, Any]) -> int:
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.parametrize("api", list(APIS))
async def test_an_engine_answers_as_if_nothing_had_been(api: str) -> None:
    path, sent, read = APIS[api]
    async with emulated() as engine, emulated() as alone, proxy_for(before(engine.url)) as (url, proxy):
        assert (await ask(url, body(SHORT))).status == 200
        await eventually(lambda: bool(proxy.control.routers["local"].block_tokens("b0")))
        async with aiohttp.request("POST", alone.url + path, json=sent) as answer:
            expected = read(await answer.json())
        async with aiohttp.request("POST", url + path, json=sent) as answer:
            assert answer.status == 200
            reason = answer.headers["x-homeport-reason"]
            assert read(await answer.json()) == expected
            assert answer.headers["x-homeport-expected-cached-tokens"] == "0"
        assert re.search(r"; prefilled in [3-9] parts$", reason)
        async with aiohttp.request("POST", url + path, json=sent) as answer:
            again = await answer.json()
            assert read(again)[0] == expected[0]
            assert read(again)[1] == int(answer.headers["x-homeport-expected-cached-tokens"])
            assert read(again)[1] > 13_000
        await eventually(lambda: idle(proxy))


async def test_workers_slice_as_well(tmp_path: Path) -> None:
    file = tmp_path / "homeport.yaml"
    async with emulated() as engine:
        file.write_text(json.dumps(before(engine.url) | {"log": {"level": "warning", "format": "text"}}))
        command = [sys.executable, "-m", "homeport.cli", "serve", "-c", str(file), "--workers", "2"]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        assert process.stderr is not None
        try:
            line = ""
            async with asyncio.timeout(90):
                while "listening on" not in line:
                    line = (await process.stderr.readline()).decode()
                    assert line, "the proxy ended before it listened"
            url = line.split()[-1]
            await ask(url, body(SHORT))
            for attempt in range(50):  # until the workers hear that the engine's events are followed
                got = await ask(url, body(f"{attempt}. {TEXT}"))
                assert got.status == 200
                if "parts" in got.headers["x-homeport-reason"]:
                    break
                await asyncio.sleep(0.1)
            assert got.headers["x-homeport-reason"].endswith("parts")
            assert got.cached == 0
            summary = await why(url, got)
            assert summary["tokens"]["cached"] == 0
            assert [leg["part"] for leg in summary["legs"]][:2] == ["slice", "slice"]
        finally:
            process.terminate()
            await process.communicate()
        assert process.returncode == 0
