"""The kill matrix with real processes: SIGKILL and SIGSTOP at each phase, engines and the proxy itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from multidict import CIMultiDict

from faults.harbour import PATIENCE, Reply, document, until

pytestmark = pytest.mark.long
PROMPT = "All hands on deck. " * 60
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@dataclass(slots=True)
class Program:
    """One `homeport` process that can be killed, stopped and started again on its port."""

    arguments: list[str]
    ready: str
    stream: str = "stdout"
    run: asyncio.subprocess.Process | None = None
    url: str = ""

    async def start(self) -> None:
        """Start it and wait until it says that it is ready."""
        self.run = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "homeport.cli", *self.arguments,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=dict(os.environ),
        )  # fmt: skip
        pipe = self.run.stdout if self.stream == "stdout" else self.run.stderr
        assert pipe is not None
        async with asyncio.timeout(60):
            while True:
                line = (await pipe.readline()).decode()
                assert line, "ended before it was ready"
                if self.ready in line:
                    self.url = line.split()[-1]
                    break
        self._drains = [asyncio.ensure_future(_drain(p)) for p in (self.run.stdout, self.run.stderr)]

    _drains: list[asyncio.Future[None]] = field(default_factory=list)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.run is not None
        self.run.send_signal(number)

    async def end(self) -> None:
        """Kill it."""
        if self.run is not None and self.run.returncode is None:
            self.run.send_signal(signal.SIGCONT)
            self.run.kill()
            await self.run.wait()
        await asyncio.gather(*self._drains, return_exceptions=True)


async def _drain(pipe: asyncio.StreamReader | None) -> None:
    while pipe is not None and await pipe.read(65536):
        pass


@dataclass(slots=True)
class Fleet:
    """Processes by name, and a client."""

    programs: dict[str, Program]
    http: aiohttp.ClientSession
    got_bytes: int = 0

    async def ask(self, *, stream: bool, tokens: int, session: str = "s") -> Reply:
        body = {
            "model": "m", "stream": stream, "max_tokens": tokens, "ignore_eos": True,
            "messages": [{"role": "user", "content": PROMPT}],
        }  # fmt: skip
        self.got_bytes = 0
        async with asyncio.timeout(60):
            url = self.programs["proxy"].url + "/v1/chat/completions"
            async with self.http.post(url, json=body, headers={"x-session-id": session}) as answer:
                raw, broken = b"", False
                try:
                    async for piece in answer.content.iter_any():
                        raw += piece
                        self.got_bytes = len(raw)
                except aiohttp.ClientPayloadError:
                    broken = True
                return Reply(answer.status, CIMultiDict(answer.headers), raw, broken)

    async def books(self, name: str) -> dict[str, Any]:
        async with self.http.get(self.programs[name].url + "/emulator/books") as answer:
            return json.loads(await answer.read())

    async def hang(self, name: str) -> None:
        """Let an engine take requests and never get on with them, so that it is at work however late one looks."""
        async with self.http.post(self.programs[name].url + "/emulator/hang") as answer:
            assert answer.status == 200

    async def at_work(self, name: str) -> None:
        """Wait until an engine computes something."""
        async with asyncio.timeout(20):
            while not (await self.books(name))["running"]:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)

    async def at_rest(self, *names: str) -> None:
        async with asyncio.timeout(20):
            for name in names:
                while True:
                    books = await self.books(name)
                    if not books["running"] and not books["used_blocks"]:
                        assert books["read_after_lease"] == books["reused_params"] == books["deaths"] == 0
                        break
                    await asyncio.sleep(0.05)


def engine(role: str) -> Program:
    """An engine that takes about two seconds for a prompt and as long for an answer."""
    options = {
        "--port": "0", "--model": "m", "--role": role, "--kv": "nixl", "--lease-s": "8", "--load-failure-s": "0.2",
        "--t0-s": "1.0", "--step-s": "0.05",
    }  # fmt: skip
    words = [word for option in options.items() for word in option]
    return Program(["engine", "emulate", *words], "ready at")


@asynccontextmanager
async def processes(folder: Path) -> AsyncIterator[Fleet]:
    """One prefill engine, two decode engines and the proxy."""
    async with AsyncExitStack() as stack:
        programs = {"p0": engine("prefill"), "d0": engine("decode"), "d1": engine("decode")}
        for program in programs.values():
            stack.push_async_callback(program.end)
        await asyncio.gather(*(program.start() for program in programs.values()))
        backends = [
            {"name": name, "url": program.url, "role": "prefill" if name == "p0" else "decode", "kv_transfer": "nixl"}
            for name, program in programs.items()
        ]
        written = document(backends, timeouts={**PATIENCE, "first_token_s": 4.0, "idle_s": 1.5})
        file = folder / "homeport.yaml"
        file.write_text(yaml.safe_dump({"listen": "127.0.0.1:0", **written}))
        proxy = Program(["serve", "-c", str(file)], "listening on", "stderr")
        stack.push_async_callback(proxy.end)
        await proxy.start()
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)))
        yield Fleet({**programs, "proxy": proxy}, http)


CASES = [
    # who, signal, when, streamed, what the client gets
    ("prefill", KILL, "computing", False, "answer"),
    ("prefill", KILL, "computing", True, "answer"),
    ("prefill", STOP, "computing", True, "answer"),
    ("decode", KILL, "before", True, "answer"),
    ("decode", KILL, "computing", False, "answer"),
    ("decode", KILL, "generating", True, "error frame"),
    ("decode", STOP, "computing", True, "504"),
    ("decode", STOP, "computing", False, "504"),
    ("decode", STOP, "generating", True, "error frame"),
]


@pytest.mark.parametrize(("who", "number", "when", "stream", "outcome"), CASES)
async def test_signal(who: str, number: signal.Signals, when: str, stream: bool, outcome: str, tmp_path: Path) -> None:
    async with processes(tmp_path) as fleet:
        first = await fleet.ask(stream=False, tokens=2)
        assert first.status == 200, first.raw
        home = first.headers["x-homeport-backend"]
        victim = "p0" if who == "prefill" else home
        if when == "before":
            fleet.programs[victim].signal(number)
        elif when == "computing":
            await fleet.hang(victim)
        # long enough that a busy machine does not miss it
        asked = asyncio.ensure_future(fleet.ask(stream=stream, tokens=400 if when == "generating" else 40))
        if when == "computing":
            await fleet.at_work(victim)
            fleet.programs[victim].signal(number)
        elif when == "generating":
            await until(lambda: fleet.got_bytes > 1500, 20)
            fleet.programs[victim].signal(number)
        reply = await asked
        if outcome == "answer":
            assert (reply.status, reply.error, reply.broken) == (200, None, False), reply.raw
            assert (reply.headers["x-homeport-backend"] == home) == (who == "prefill")
        elif outcome == "error frame":
            assert reply.status == 200
            assert reply.error is not None
            assert "[DONE]" not in reply.frames
            assert not reply.broken
        else:
            assert reply.status == int(outcome), reply.raw
            assert reply.headers["x-should-retry"] == "false"
        await fleet.at_rest(*(name for name in ("p0", "d0", "d1") if name != victim))


async def test_a_killed_proxy_leaves_nothing_running_on_the_engines(tmp_path: Path) -> None:
    async with processes(tmp_path) as fleet:
        asked = [asyncio.ensure_future(fleet.ask(stream=True, tokens=4000, session=f"s{n}")) for n in range(4)]
        await until(lambda: fleet.got_bytes > 0, 30)
        fleet.programs["proxy"].signal(KILL)
        replies = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(reply, aiohttp.ClientError) or reply.broken for reply in replies)  # type: ignore[union-attr]
        await fleet.at_rest("p0", "d0", "d1")


async def test_an_engine_that_comes_back_is_used_again(tmp_path: Path) -> None:
    async with processes(tmp_path) as fleet:
        first = await fleet.ask(stream=False, tokens=2)
        home = fleet.programs[first.headers["x-homeport-backend"]]
        port = home.url.rsplit(":", 1)[1]
        home.signal(KILL)
        assert home.run is not None
        await home.run.wait()
        assert (await fleet.ask(stream=False, tokens=2)).status == 200
        home.arguments[home.arguments.index("--port") + 1] = port
        await home.start()
        async with asyncio.timeout(20):
            while True:
                async with fleet.http.get(fleet.programs["proxy"].url + "/homeport/v1/status") as answer:
                    backends = (await answer.json())["regions"]["local"]["backends"]
                if all(backend["state"] == "up" for backend in backends):
                    break
                await asyncio.sleep(0.05)
        assert (await fleet.ask(stream=False, tokens=2)).status == 200
