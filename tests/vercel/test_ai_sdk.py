"""The Vercel AI SDK from npm, unchanged, over all its OpenAI and Anthropic doors, against a split fleet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from emulator.emulating import fast
from harness import harness_install
from homeport_engines.emulator import Emulator
from homeport_engines.emulator.answers import parse_rules
from proxy.scripted_engines import eventually, proxy_for

HERE = Path(__file__).parent
DOORS = ("chat", "responses", "messages", "compatible")
RULES = [
    {
        "tool": "weather",
        "sequence": [
            {"tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}]},
            "It is sunny in Oslo.",
        ],
    }
]

pytestmark = [pytest.mark.harness, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def found() -> AsyncIterator[dict[str, Any]]:
    """What the SDK brought home, door by door, and what the proxy's books say of it."""
    node, script = await asyncio.to_thread(harness_install.node_project, HERE, "ai.mjs")
    rules = parse_rules(RULES)
    async with (
        Emulator(fast(kv="nixl", model="m"), rules) as prefill,
        Emulator(fast(kv="nixl", model="m"), rules) as decode,
    ):
        backends = [
            {"name": "p0", "url": prefill.url, "role": "prefill", "kv_transfer": "nixl"},
            {"name": "d0", "url": decode.url, "role": "decode", "kv_transfer": "nixl"},
        ]
        config = {"listen": "127.0.0.1:0", "regions": {"local": {"backends": backends}}}
        async with proxy_for(config) as (url, proxy):
            process = await asyncio.create_subprocess_exec(
                str(node), str(script), url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
            out, err = await process.communicate()
            assert process.returncode == 0, err.decode()
            await eventually(lambda: proxy.control.placer.open_tickets == 0)
            found = json.loads(out)
            found["books"] = proxy.control.account.requests.latest(100)
            await eventually(lambda: prefill.held_leases == 0)
            yield found


@pytest.mark.parametrize("door", DOORS)
async def test_streams(found: dict[str, Any], door: str) -> None:
    first, again = found[door]["streamed"], found[door]["again"]
    assert first["errors"] == []
    assert first["pieces"] > 1, "as it comes, not all at once"
    assert first["text"] == again["text"]
    assert first["finish"] in ("stop", "length")
    assert first["usage"]["inputTokens"] > 1000
    assert again["usage"]["inputTokenDetails"]["cacheReadTokens"] > 1000, "what the prefill engine found cached"
    assert again["usage"]["outputTokens"] > 0


@pytest.mark.parametrize("door", DOORS)
async def test_tools(found: dict[str, Any], door: str) -> None:
    answer = found[door]["withTools"]
    assert answer["calls"] == [{"city": "Oslo"}]
    assert answer["steps"] == 2
    assert answer["text"] == "It is sunny in Oslo."
    assert found[door]["streamedTools"] == {"text": "It is sunny in Oslo.", "steps": 2}


@pytest.mark.parametrize("door", DOORS)
async def test_structured_output(found: dict[str, Any], door: str) -> None:
    assert found[door]["structured"].keys() == {"name", "berths"}


@pytest.mark.parametrize("door", DOORS)
async def test_a_stream_that_is_aborted(found: dict[str, Any], door: str) -> None:
    assert found[door]["left"] is True


async def test_errors_are_the_sdks_own(found: dict[str, Any]) -> None:
    for error in found["refused"].values():
        assert error["status"] == 404
        assert "absent" in error["message"]


async def test_the_books_hold_every_request(found: dict[str, Any]) -> None:
    """Every answer was booked with its tokens but those that were aborted, and nothing was a failure."""
    books = [line for line in found["books"] if line["status"] == 200]
    assert {line["error"] for line in books} <= {None, "client_closed"}
    whole = [line for line in books if line["error"] is None]
    assert len(whole) >= 7 * len(DOORS)
    assert all(line["tokens"]["output"] for line in whole)
    assert any(line["prefill_backend"] == "p0" for line in whole)
