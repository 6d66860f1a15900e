"""OpenCode against real vLLM engines: a tiny random model whose context takes a whole harness prompt."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from harness import harness_install
from harness.harness_programs import Harness
from homeport_engines.vllm import telemetry

HERE = Path(__file__).parent
START_S = 900
"""For two engines, installed when they are missing."""

pytestmark = [pytest.mark.harness, pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(1500)]


@dataclass(frozen=True, slots=True)
class Up:
    """What `homeport up --json` printed."""

    proxy: str
    engines: Sequence[str]

    async def decisions(self, http: aiohttp.ClientSession) -> list[dict[str, Any]]:
        """The proxy's memory of each request, oldest first."""
        async with http.get(f"{self.proxy}/homeport/v1/decisions?limit=100") as answer:
            return list(reversed((await answer.json())["decisions"]))

    async def counted(self, http: aiohttp.ClientSession) -> tuple[int, int]:
        """(prompt tokens, cached tokens) by the engines' own counters, over both."""
        prompt = cached = 0
        for url in self.engines:
            async with http.get(f"{url}/metrics") as answer:
                ranks = telemetry.read(await answer.text())
            prompt += sum(rank.prefix_queries_tokens or 0 for rank in ranks.values())
            cached += sum(rank.prefix_hits_tokens or 0 for rank in ranks.values())
        return prompt, cached


@asynccontextmanager
async def up(*options: str) -> AsyncIterator[Up]:
    """`homeport up`, as a user starts it."""
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.prefix) / "bin" / "homeport"),
        *("up", "--engine", "vllm-cpu", "--port", "0", "--json", *options),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        assert line, "`homeport up` ended"
        said = json.loads(line)
        yield Up(said["base_url"].removesuffix("/v1"), [one["url"] for one in said["engines"]])
    finally:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 60)


async def test_a_session_stays_at_home_and_returns(tmp_path: Path) -> None:
    """Four requests of thousands of tokens in four processes; what Homeport reports is what vLLM counted."""
    harness_install.plugin()
    options = ("--mixed", "2", "--model", "tiny", "--max-model-len", "65536")
    async with up(*options) as engines, aiohttp.ClientSession() as http:
        config = {"permission": "allow", "share": "disabled", "autoupdate": False, "plugin": [str(HERE / "brief.js")]}
        extra = {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}
        harness = Harness("opencode", tmp_path / "home", tmp_path / "project", engines.proxy, extra)
        before = await engines.counted(http)
        for turn in range(4):
            done = await harness.run(f"Say {turn}.", resume=turn > 0)
            assert done.status == 0, done.err
        requests = await engines.decisions(http)
        main = [one for one in requests if one["kind"] == "main"]
        assert len({one["session"] for one in main}) == 1
        assert [one["decision"] for one in main] == ["placed", "home", "home", "home"]
        assert len({one["backend"] for one in main}) == 1
        for one in main[1:]:
            assert one["tokens"]["cached"] > 0.9 * one["tokens"]["prompt"], one["tokens"]
        after = await engines.counted(http)
        told = [sum(one["tokens"][kind] for one in requests) for kind in ("prompt", "cached")]
        assert told == [now - then for now, then in zip(after, before, strict=True)]
        prompt, cached = (sum(one["tokens"][kind] for one in main) for kind in ("prompt", "cached"))
        print(f"opencode on vLLM: {len(main)} requests, {cached:,} of {prompt:,} prompt tokens cached")
