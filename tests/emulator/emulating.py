"""Helpers for tests that talk to emulated engines: fast settings, a small client, KV event readers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import zmq
import zmq.asyncio
from multidict import CIMultiDict

from homeport_engines.emulator import EmulatorSettings

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def fast(**changes: Any) -> EmulatorSettings:
    """Settings of an engine that is a thousand times faster than its rates say."""
    return EmulatorSettings(**{"time_scale": 1000.0, "load_failure_s": 0.05, **changes})


@dataclass(slots=True)
class Answer:
    """What an engine answered."""

    status: int
    headers: CIMultiDict[str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def frames(self) -> list[Any]:
        """The data of the SSE frames, parsed; ``[DONE]`` as text."""
        lines = [line[6:] for line in self.raw.decode().splitlines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass(slots=True)
class Client:
    """Posts to one engine."""

    http: aiohttp.ClientSession
    url: str

    async def post(self, path: str, body: Any, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(self.url + path, data=data, headers=names) as answer:
            return Answer(answer.status, CIMultiDict(answer.headers), await answer.read())

    async def get(self, path: str) -> Answer:
        async with self.http.get(self.url + path) as answer:
            return Answer(answer.status, CIMultiDict(answer.headers), await answer.read())

    async def chat(self, text: str, **more: Any) -> Any:
        """The answer to a one-message chat, which must succeed."""
        answer = await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more})
        assert answer.status == 200, answer.raw
        return answer.json


@asynccontextmanager
async def client(url: str) -> AsyncIterator[Client]:
    """A client of one engine."""
    async with aiohttp.ClientSession() as http:
        yield Client(http, url)


def said(answer: Any) -> str:
    """The text of a chat answer."""
    return str(answer["choices"][0]["message"]["content"])


def cached(answer: Any) -> int:
    """The cached tokens an OpenAI answer reports."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def until(condition: Any, timeout_s: float = 10.0) -> None:
    """Wait for something that no event announces."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - there is no event for what is awaited
            await asyncio.sleep(0.005)


@dataclass(slots=True)
class Subscriber:
    """Reads one rank's KV events and keeps the index they describe, copy by copy."""

    batches: list[tuple[int, list[Any]]] = field(default_factory=list)
    copies: dict[tuple[int, int, str], int] = field(default_factory=dict)

    def take(self, number: int, payload: bytes) -> None:
        """One batch; both encodings."""
        _, events, _ = msgspec.msgpack.decode(payload)
        self.batches.append((number, events))
        for event in events:
            self._apply(event if isinstance(event, dict) else _named(event))

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.copies.clear()
            return
        change = 1 if event["type"] == "BlockStored" else -1
        for digest in event["block_hashes"]:
            key = (digest, event.get("group_idx") or 0, event.get("medium") or "GPU")
            self.copies[key] = self.copies.get(key, 0) + change
            assert self.copies[key] >= 0, "removed more often than stored"
            if not self.copies[key]:
                del self.copies[key]


def _named(event: list[Any]) -> dict[str, Any]:
    fields = {
        "BlockStored": (
            "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
            "extra_keys", "group_idx",
        ),
        "BlockRemoved": ("block_hashes", "medium", "group_idx"),
        "AllBlocksCleared": (),
    }  # fmt: skip
    return {"type": event[0], **dict(zip(fields[event[0]], event[1:], strict=True))}


async def replay(endpoint: str, start: int = 0) -> list[tuple[int, bytes]]:
    """Every buffered batch from ``start`` on."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    found = []
    try:
        await socket.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            frames = await asyncio.wait_for(socket.recv_multipart(), 5)
            number = int.from_bytes(frames[-2], "big", signed=True)
            if number < 0:
                return found
            found.append((number, frames[-1]))
    finally:
        socket.close(0)
        context.term()
