"""A real proxy process in front of emulated engines that play a harness's script, with all their books at hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from harness.scripted_engine import ScriptedEngine, Seen
from homeport_engines.emulator import Emulator, EmulatorSettings, parse_rules
from homeport_engines.emulator.books import Record

Answer = dict[str, Any] | str


@dataclass(frozen=True, slots=True)
class Tools:
    """How a harness runs a command and starts a sub-agent."""

    shell: str
    command: str
    parent: str = ""
    """A tool that only the parent is offered: by it the script knows who speaks."""
    agent: str = ""
    fixed: dict[str, Any] = field(default_factory=dict)
    agent_fixed: dict[str, Any] = field(default_factory=dict)

    def run(self, text: str) -> Answer:
        """An answer that runs one command."""
        return {"tool_calls": [{"name": self.shell, "arguments": {self.command: text, **self.fixed}}]}

    def start(self, count: int) -> Answer:
        """An answer that starts so many sub-agents at once."""
        calls = [
            {"name": self.agent, "arguments": {"prompt": f"Look into drawer {n}.", **self.agent_fixed}}
            for n in range(count)
        ]
        return {"tool_calls": calls}


def working(tools: Tools) -> list[dict[str, Any]]:
    """Three commands and a word, then on every further turn a command and a word: four requests, then two each."""
    more: list[Answer] = [tools.run("echo once more"), "And that too."] * 4
    return [{"tool": tools.shell, "sequence": [*(tools.run(f"echo step {n}") for n in range(3)), "Done.", *more]}]


def delegating(tools: Tools, children: int) -> list[dict[str, Any]]:
    """A parent that starts sub-agents, runs a command and is done; each child runs two commands."""
    parent = [tools.start(children), tools.run("echo parent"), "All are back."]
    child = [tools.run("echo child"), tools.run("echo child again"), "The drawer is empty."]
    return [{"tool": tools.parent, "sequence": parent}, {"tool": tools.shell, "sequence": child}]


Engine = Emulator | ScriptedEngine


def emulators(script: Sequence[Any], count: int = 2) -> list[Engine]:
    """Fast emulated engines that play these rules."""
    settings = EmulatorSettings(model="demo-model", time_scale=50.0, kv_blocks=65536)
    rules = parse_rules(list(script))
    return [Emulator(settings, rules) for _ in range(count)]


@dataclass(slots=True)
class Fleet:
    """The running proxy and its engines."""

    url: str
    engines: Sequence[Engine]
    http: aiohttp.ClientSession

    async def decisions(self) -> list[dict[str, Any]]:
        """What the proxy remembers of each request, oldest first."""
        async with self.http.get(f"{self.url}/homeport/v1/decisions?limit=1000") as answer:
            return list(reversed((await answer.json())["decisions"]))

    async def main(self) -> list[dict[str, Any]]:
        """The agents' own requests, without side requests and without what is no generation."""
        generating = ("chat", "responses", "messages", "completions")
        return [one for one in await self.decisions() if one["kind"] != "side" and one["api"] in generating]

    def booked(self) -> tuple[int, int]:
        """(prompt tokens, cached tokens) of all requests by the engines' own books."""
        records = [one for engine in self.engines for one in _records(engine)]
        return sum(one.prompt_tokens for one in records), sum(one.cached_tokens for one in records)


def _records(engine: Engine) -> Sequence[Record | Seen]:
    return list(engine.books.requests) if isinstance(engine, Emulator) else engine.seen


@asynccontextmanager
async def fleet(folder: Path, engines: Sequence[Engine], **more: Any) -> AsyncIterator[Fleet]:
    """Engines in this process, the proxy in its own; both are gone afterwards. ``more``: sections of its file."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        kind = "vllm" if isinstance(engines[0], Emulator) else "openai"
        backends = [{"name": f"e{n}", "url": one.url, "role": "mixed"} for n, one in enumerate(engines)]
        config = {
            "listen": "127.0.0.1:0",
            "region": "local",
            "models": [{"name": "demo-model", "aliases": ["claude-*"]}],
            "regions": {"local": {"defaults": {"engine": kind}, "backends": backends}},
            **more,
        }
        path = folder / "homeport.yaml"
        path.write_text(json.dumps(config))
        url = await stack.enter_async_context(_proxy(path))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Fleet(url, engines, http)


@asynccontextmanager
async def _proxy(path: Path) -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.prefix) / "bin" / "homeport"), "serve", "-c", str(path), stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    said: list[str] = []
    url = ""
    while not url:
        line = (await asyncio.wait_for(process.stderr.readline(), 60)).decode()
        assert line, "the proxy did not start:\n" + "".join(said)
        said.append(line)
        url = line.strip().rpartition("listening on ")[2] if "listening on" in line else ""
    rest = asyncio.create_task(process.stderr.read())
    try:
        await _ready(url)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 15)
        except TimeoutError:
            process.kill()
            await process.wait()
        print((await rest).decode()[-4000:])


async def _ready(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{url}/health/ready") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.05)
