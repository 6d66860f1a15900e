"""`serve --workers 2`: to the outside one proxy. One fleet for all tests here: starting processes is slow."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from proxy.control_kit import StubEngine, serving, until


class TalkingEngine(StubEngine):
    """A stub that answers chats, with usage as a prefix cache would report it: all it has seen of a conversation."""

    def app(self) -> web.Application:
        app = super().app()
        self.chats: list[str] = []
        self.hold: asyncio.Event | None = None
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.chats.append(body["messages"][0]["content"])
        if self.hold is not None:
            await self.hold.wait()
        usage = {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
        choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
        return web.json_response({"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage})


class Fleet:
    """Two talking engines behind a proxy of two workers."""

    def __init__(self, url: str, engines: dict[str, TalkingEngine], process: asyncio.subprocess.Process) -> None:
        self.url = url
        self.engines = engines
        self.process = process
        self.key = {"authorization": "Bearer k-acme"}

    async def chat(self, text: str, **headers: str) -> aiohttp.ClientResponse:
        """One chat on a connection of its own, so that any worker may get it."""
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        connector = aiohttp.TCPConnector(force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector, headers=self.key) as session,
            session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer,
        ):
            await answer.read()
            return answer

    async def ask(self, path: str, method: str = "GET") -> tuple[int, str]:
        """One question about the proxy itself."""
        connector = aiohttp.TCPConnector(force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector, headers={"authorization": "Bearer k-admin"}) as session,
            session.request(method, f"{self.url}{path}") as answer,
        ):
            return answer.status, await answer.text()

    def workers(self) -> list[int]:
        """The workers' process ids."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    engines = {"b0": TalkingEngine(), "b1": TalkingEngine()}
    async with serving(engines["b0"].app()) as one, serving(engines["b1"].app()) as two:
        file = tmp_path_factory.mktemp("workers") / "homeport.yaml"
        file.write_text(f"""
listen: 127.0.0.1:0
regions: {{r: {{backends: [{{name: b0, url: "{one}"}}, {{name: b1, url: "{two}"}}]}}}}
tenants: [{{name: acme, key_env: KEY_ACME, max_concurrent: 3}}]
admin: {{key_env: KEY_ADMIN}}
timeouts: {{drain_s: 20}}
log: {{level: warning, format: text}}
""")
        env = {**os.environ, "KEY_ACME": "k-acme", "KEY_ADMIN": "k-admin"}
        command = [sys.executable, "-m", "homeport.cli", "serve", "-c", str(file), "--workers", "2"]
        process = await asyncio.create_subprocess_exec(*command, env=env, stderr=asyncio.subprocess.PIPE)
        assert process.stderr is not None
        line = ""
        async with asyncio.timeout(90):
            while "listening on" not in line:
                raw = await process.stderr.readline()
                assert raw, "the proxy ended before it listened"
                line = raw.decode()
        draining = asyncio.create_task(process.stderr.read())
        try:
            yield Fleet(line.split()[-1], engines, process)
        finally:
            if process.returncode is None:
                process.terminate()
            assert await process.wait() == 0
            await draining


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_session_has_one_home_whichever_worker_is_asked(fleet: Fleet) -> None:
    for session in ("s1", "s2", "s3"):
        places = {
            (await fleet.chat(f"hello {session}", **{"x-session-id": session})).headers["x-homeport-backend"]
            for _ in range(8)
        }
        assert len(places) == 1


async def test_a_conversation_without_a_key_is_known_by_all(fleet: Fleet) -> None:
    answers = [await fleet.chat("a conversation that names nothing") for _ in range(6)]
    assert len({answer.headers["x-homeport-session"] for answer in answers}) == 1


async def test_metrics_and_status_count_every_worker_once(fleet: Fleet) -> None:
    async def counted() -> int:
        _, text = await fleet.ask("/metrics")
        return sum(int(n) for n in re.findall(r'^homeport_requests_total\{.*code="200"\} (\d+)$', text, re.M))

    before = await counted()
    for i in range(10):
        assert (await fleet.chat(f"count {i}")).status == 200
    async with asyncio.timeout(20):
        while await counted() != before + 10:  # noqa: ASYNC110 - counted in another process
            await asyncio.sleep(0.02)
    _, text = await fleet.ask("/homeport/v1/status")
    assert '"requests":0,"prefill_tokens":0,"decode_tokens":0' in text, "nothing is left in flight"


async def test_a_tenants_limit_is_one_limit(fleet: Fleet) -> None:
    for engine in fleet.engines.values():
        engine.hold = asyncio.Event()
        engine.chats.clear()
    open_ = [asyncio.create_task(fleet.chat(f"held {i}")) for i in range(3)]
    await until(lambda: sum(len(engine.chats) for engine in fleet.engines.values()) == 3)
    refused = [await fleet.chat("one too many") for _ in range(4)]
    assert {answer.status for answer in refused} == {429}
    assert all("retry-after" in answer.headers for answer in refused)
    for engine in fleet.engines.values():
        assert engine.hold is not None
        engine.hold.set()
        engine.hold = None
    assert {(await task).status for task in open_} == {200}


async def test_a_drain_holds_for_all(fleet: Fleet) -> None:
    status, _ = await fleet.ask("/homeport/v1/backends/b0/drain", "POST")
    assert status == 200
    assert {(await fleet.chat(f"drained {i}")).headers["x-homeport-backend"] for i in range(8)} == {"b1"}
    status, _ = await fleet.ask("/homeport/v1/backends/b0/undrain", "POST")
    assert status == 200


async def test_a_worker_that_dies_is_replaced_and_gives_back_what_it_held(fleet: Fleet) -> None:
    for engine in fleet.engines.values():
        engine.hold = asyncio.Event()
        engine.chats.clear()
    open_ = [asyncio.create_task(fleet.chat(f"lost {i}")) for i in range(3)]
    await until(lambda: sum(len(engine.chats) for engine in fleet.engines.values()) == 3)
    before = fleet.workers()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    lost = await asyncio.gather(*open_, return_exceptions=True)
    assert all(isinstance(error, aiohttp.ClientError) for error in lost)
    for engine in fleet.engines.values():
        assert engine.hold is not None
        engine.hold.set()
        engine.hold = None

    async def answers() -> int:
        try:
            return (await fleet.chat("after")).status
        except aiohttp.ClientError:
            return 0

    async with asyncio.timeout(60):
        while await answers() != 200:  # noqa: ASYNC110 - another process comes up
            await asyncio.sleep(0.05)
    assert not set(before) & set(fleet.workers())
    together = await asyncio.gather(*(fleet.chat(f"again {i}") for i in range(3)))
    assert {answer.status for answer in together} == {200}, "the dead workers' requests count no more"


async def test_a_stop_finishes_what_is_under_way(fleet: Fleet) -> None:
    for engine in fleet.engines.values():
        engine.hold = asyncio.Event()
        engine.chats.clear()
    open_ = asyncio.create_task(fleet.chat("the last one"))
    await until(lambda: sum(len(engine.chats) for engine in fleet.engines.values()) == 1)
    fleet.process.terminate()
    with pytest.raises(aiohttp.ClientError):
        await asyncio.wait_for(_ask_until_refused(fleet), 20)
    assert fleet.process.returncode is None, "it takes nobody in, but it is still there"
    for engine in fleet.engines.values():
        assert engine.hold is not None
        engine.hold.set()
    assert (await open_).status == 200
    assert await fleet.process.wait() == 0


async def _ask_until_refused(fleet: Fleet) -> None:
    while True:
        await fleet.ask("/health/live")
