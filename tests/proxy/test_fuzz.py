"""Whatever a client sends, the proxy answers in shape, never with a fault of its own, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from aiohttp import web

from homeport_proxy.api import BY_PATH
from proxy.scripted_engines import ScriptedEngine, Seen, backends, eventually, pair, proxy_for

ROUNDS = 60
PATHS = [*BY_PATH, "/v1/models", "/v1/models/x", "/v1/responses/r1", "/v1/%2e%2e/x", "/v1/x?y=%zz", "/", "//", "/v1"]
NAMES = [
    "model", "messages", "input", "prompt", "stream", "stream_options", "tools", "metadata", "user", "system", "n",
    "max_tokens", "kv_transfer_params", "conversation", "previous_response_id", "prompt_cache_key", "role", "content",
]  # fmt: skip
HEADERS = [
    "x-request-id", "x-session-affinity", "x-homeport-hops", "x-homeport-kind", "authorization", "content-encoding",
    "x-parent-session-id", "anthropic-version", "thread-id", "session-id", "accept-encoding", "upgrade", "te",
]  # fmt: skip


async def sloppy(request: web.Request, seen: Seen) -> web.StreamResponse:
    """An engine that answers with whatever it got."""
    return web.json_response({"usage": seen.raw.decode("latin-1")[:40], "choices": 3, "kv_transfer_params": [1]})


def value(dice: random.Random, depth: int = 0) -> Any:
    kind = dice.randrange(9 if depth < 3 else 6)
    if kind == 6:
        return [value(dice, depth + 1) for _ in range(dice.randrange(6))]
    if kind > 6:
        return {dice.choice(NAMES): value(dice, depth + 1) for _ in range(dice.randrange(6))}
    return [None, True, dice.randint(-5, 10**12), 0.5, dice.choice(["", "m", "user", "é\ud83d", "x" * 300]), "m"][kind]


def request(dice: random.Random) -> bytes:
    model = dice.choice(["m"] * 9 + ["\ud83d"])
    body = json.dumps({"model": model} | {dice.choice(NAMES): value(dice) for _ in range(dice.randrange(6))}).encode()
    if dice.random() < 0.2:
        body = dice.choice([b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model":"m","messages":"\xff"}', body[:-1]])
    method = dice.choice(["POST"] * 6 + ["GET", "PUT", "DELETE", "OPTIONS", "HEAD"])
    lines = [f"{method} {dice.choice(PATHS)} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {dice.choice(['1', 'a' * 200, '{}', 'identity', 'é'])}" for name in dice.sample(HEADERS, 3)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


@pytest.mark.parametrize("seed", range(6))
async def test_no_request_is_too_odd(seed: int) -> None:
    dice = random.Random(seed)
    one, two = await ScriptedEngine(sloppy).start(), await ScriptedEngine(sloppy).start()
    async with proxy_for(pair(one, two) if seed % 2 else backends(one, two)) as (url, proxy):
        host, port = url.removeprefix("http://").split(":")
        for _ in range(ROUNDS):
            sent = request(dice)
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            async with asyncio.timeout(20):
                raw = await reader.read()
            writer.close()
            status = int(raw.split(b" ", 2)[1])
            assert status != 500, (sent, raw)
            assert b"Traceback" not in raw
            assert b"x-homeport-request-id" in raw.lower() or status == 400, (sent, raw)
        await eventually(lambda: proxy.control.placer.open_tickets == 0)
        assert all(pool.busy_count == 0 for pool in proxy.pipeline.engines.pools())
