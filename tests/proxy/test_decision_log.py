"""A live proxy's decision log: every decision is in it, and decides the same when it is replayed."""

import argparse
import asyncio
import contextlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from homeport_engines.emulator import Emulator, EmulatorSettings
from homeport_proxy.commands import replay as command
from homeport_proxy.routing.decisions import parse
from proxy.scripted_engines import proxy_for

SESSIONS, TURNS = 6, 3


async def converse(http: aiohttp.ClientSession, url: str, session: int) -> None:
    """A conversation whose prompt grows; every second session begins with a prompt that is prefilled in parts."""
    words = f"Session {session}: which ship sailed to which port, and with what? " * (400 if session % 2 else 5)
    messages = [{"role": "user", "content": words}]
    for turn in range(TURNS):
        body: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": 4}
        headers = {"x-session-affinity": f"session-{session}"}
        async with http.post(url + "/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            said = (await answer.json())["choices"][0]["message"]
        messages += [said, {"role": "user", "content": f"And then, in turn {turn}?"}]


@pytest.mark.parametrize("policy", ["cost", "prefix"])
async def test_a_live_log_replays_to_the_same_decisions(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decisions.jsonl"
    async with contextlib.AsyncExitStack() as stack:
        speeds = (50.0, 100.0, 200.0)
        engines = [
            await stack.enter_async_context(Emulator(EmulatorSettings(model="m", time_scale=scale))) for scale in speeds
        ]
        config = {
            "listen": "127.0.0.1:0",
            "regions": {"local": {"backends": [{"name": f"b{n}", "url": one.url} for n, one in enumerate(engines)]}},
            "routing": {"policy": policy, "slice_s": 0.01, "shadow": ["session"]},
            "decisions": {"file": str(path)},
        }
        url, _ = await stack.enter_async_context(proxy_for(config))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        await asyncio.gather(*[converse(http, url, session) for session in range(SESSIONS)])
    with path.open("rb") as file:
        records = list(parse(file))
    placed = {record.request.request_id for record in records}
    assert len(placed) == SESSIONS * TURNS
    assert all(len(record.places) == len(speeds) for record in records)
    assert command.run(argparse.Namespace(decisions=path)) == 0
    assert f"{len(records)} decisions" in capsys.readouterr().out
