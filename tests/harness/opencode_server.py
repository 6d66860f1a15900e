"""`opencode serve` behind ``homeport wrap``: many turns, projects and clients at the price of one start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from harness import harness_install
from harness.harness_programs import PATIENCE_S, Harness


@dataclass(slots=True)
class OpenCode:
    """The running server. ``toasts``: what plugins told the person so far, of all projects that have a session."""

    url: str
    http: aiohttp.ClientSession
    model: str = "homeport/demo-model"
    toasts: list[str] = field(default_factory=list)
    _told: asyncio.Condition = field(default_factory=asyncio.Condition)
    _watched: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _projects: dict[str, str] = field(default_factory=dict)

    async def session(self, project: Path) -> str:
        """A new session in a project folder."""
        await asyncio.to_thread(project.mkdir, parents=True, exist_ok=True)
        await self._watch(str(project))
        session = str((await self._post("/session", str(project), {}))["id"])
        self._projects[session] = str(project)
        return session

    async def say(self, session: str, text: str, *, model: str | None = None) -> None:
        """One user turn, until the agent is done with it."""
        body = {"parts": [{"type": "text", "text": text}], "model": self._model(model)}
        await self._post(f"/session/{session}/message", self._projects[session], body)

    async def compact(self, session: str) -> None:
        """Have the session summarised."""
        await self._post(f"/session/{session}/summarize", self._projects[session], self._model(None))

    async def add_mcp(self, project: Path, name: str, config: dict[str, Any]) -> None:
        """Another MCP server from now on."""
        await self._post("/mcp", str(project), {"name": name, "config": config})

    async def messages(self, session: str) -> list[dict[str, Any]]:
        """The session as OpenCode stores it."""
        where = {"directory": self._projects[session]}
        async with self.http.get(f"{self.url}/session/{session}/message", params=where) as answer:
            return list(await answer.json())

    def _model(self, name: str | None) -> dict[str, str]:
        provider, _, model = (name or self.model).partition("/")
        return {"providerID": provider, "modelID": model}

    async def _post(self, path: str, project: str, body: dict[str, Any]) -> Any:
        patience = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with self.http.post(
            self.url + path, params={"directory": project}, json=body, timeout=patience
        ) as answer:
            text = await answer.text()
            assert answer.status == 200, f"{path}: {answer.status} {text[:500]}"
            return json.loads(text) if text else None

    async def _watch(self, project: str) -> None:
        if project in self._watched:
            return
        opened = asyncio.Event()
        self._watched[project] = asyncio.create_task(self._events(project, opened))
        await asyncio.wait_for(opened.wait(), PATIENCE_S)

    async def _events(self, project: str, opened: asyncio.Event) -> None:
        endless = aiohttp.ClientTimeout(total=None)
        async with self.http.get(f"{self.url}/event", params={"directory": project}, timeout=endless) as stream:
            async for line in stream.content:
                opened.set()
                event = json.loads(line[5:]) if line.startswith(b"data:") else {}
                if event.get("type") == "tui.toast.show":
                    async with self._told:
                        self.toasts.append(event["properties"]["message"])
                        self._told.notify_all()

    async def told(self, text: str) -> None:
        """Wait for a toast that holds this text."""
        async with self._told:
            told = self._told.wait_for(lambda: any(text in toast for toast in self.toasts))
            await asyncio.wait_for(told, PATIENCE_S)

    async def close(self) -> None:
        """Stop listening."""
        for task in self._watched.values():
            task.cancel()
        await asyncio.gather(*self._watched.values(), return_exceptions=True)


@asynccontextmanager
async def opencode_server(harness: Harness) -> AsyncIterator[OpenCode]:
    """Start it with this harness's home and environment; it is gone afterwards."""
    program = await asyncio.to_thread(harness_install.installed, "opencode")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.prefix) / "bin" / "homeport"), "wrap", "--url", harness.url, "--no-report", "--"]
    command += [str(program), "serve", "--hostname", "127.0.0.1", "--port", str(port)]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=harness.project,
        env=await harness.environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    said: list[str] = []
    try:
        while "listening on" not in "".join(said[-1:]):
            line = (await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)).decode()
            assert line, "opencode did not start:\n" + "".join(said)
            said.append(line)
        rest = asyncio.create_task(process.stdout.read())
        async with aiohttp.ClientSession() as http:
            server = OpenCode(f"http://127.0.0.1:{port}", http)
            try:
                yield server
            finally:
                await server.close()
                os.killpg(process.pid, signal.SIGTERM)
                print((await asyncio.wait_for(rest, PATIENCE_S)).decode()[-4000:])
    finally:
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
