"""The rows of docs/faults.md in which a part of a prompt fails: the request is answered all the same."""

from __future__ import annotations

import asyncio

import pytest

from faults.harbour import OUTPUT_TOKENS, Harbour, harbour, until
from faults.table import Row, cases
from homeport_engines.emulator import Fault
from homeport_engines.emulator.answers import free_text, seed_of
from homeport_engines.emulator.prompt import chat
from homeport_proxy import tokens

PROMPT = "Which harbour is this ship's home? " * 1_600
FIRST = "Ahoy, is anybody there on the quay, or are they all at sea? " * 4
PART = "/v1/completions"


@pytest.mark.parametrize(("row", "stream"), cases("two engines, sliced"))
async def test_row(row: Row, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "ANSWER_S", 10.0)
    sections = {"routing": {"slice_s": 0.001}}
    async with harbour({"m0": "mixed", "m1": "mixed"}, sections=sections) as fleet:
        home = await followed(fleet)
        victim = fleet.engines[home]
        if row.what == "resets the connection":
            victim.faults.add(Fault("reset", path=PART))
        elif row.what == "answers 500":
            victim.faults.add(Fault("status", path=PART, status=500))
        else:
            victim.faults.add(Fault("hang", path=PART))
        asked = asyncio.ensure_future(fleet.chat(PROMPT, stream=stream))
        if row.what == "killed":
            await until(lambda: victim.books.faults_done["hang"])
            await victim.kill()
        reply = await asked
        assert (reply.status, reply.error, reply.broken) == (200, None, False), reply.raw
        assert reply.text == right_answer()
        served = reply.headers["x-homeport-backend"]
        assert (served == home) is ((row.streamed if stream else row.whole) == "answered")
        assert victim.books.seen[PART] == 1
        await fleet.at_rest()
        assert await fleet.total("homeport_requests_total") == fleet.sent
        assert await fleet.total("homeport_output_tokens_total") == OUTPUT_TOKENS * fleet.sent


async def followed(fleet: Harbour) -> str:
    """The session's home, whose events have said how large its blocks are."""
    first = await fleet.chat(FIRST)
    home = first.headers["x-homeport-backend"]
    await until(lambda: fleet.control.routers["local"].block_tokens(home))
    for engine in fleet.engines.values():
        engine.cut_connections()  # one that turns out stale is no fault: the part is sent once more
    await fleet.at_rest()
    return home


def right_answer() -> str:
    """What an engine alone says to the prompt."""
    talk = chat({"messages": [{"role": "user", "content": PROMPT}]})
    return free_text(seed_of(talk.tokens(), "", "", ""), OUTPUT_TOKENS)
