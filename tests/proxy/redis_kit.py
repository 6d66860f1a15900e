"""A real redis-server of a test's own."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest


class RedisServer:
    """One redis-server on a free port, kept in memory only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        """Start it, or start it again after ``kill`` (empty then)."""
        program = shutil.which("redis-server")
        if program is None:
            pytest.fail("redis-server is not installed; get it with: apt-get install redis-server")
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = await asyncio.create_subprocess_exec(
            program, *options, "--dir", str(self._folder), stdout=asyncio.subprocess.DEVNULL
        )
        async with asyncio.timeout(20):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    return

    async def kill(self) -> None:
        """End it without a word."""
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._process = None

    async def hang(self) -> None:
        """Let it hold its connections and answer nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End the hang."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def redis_server(folder: Path) -> AsyncIterator[RedisServer]:
    """A running server."""
    server = RedisServer(folder)
    await server.start()
    try:
        yield server
    finally:
        await server.kill()
