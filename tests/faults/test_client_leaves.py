"""The client hangs up: whatever its request was doing, nothing of it is left on any engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from faults.harbour import Harbour, harbour, until
from homeport_engines.emulator import Emulator, Fault

SPLIT = {"p0": "prefill", "d0": "decode"}
CHAT = "/v1/chat/*"
Setup = Callable[[Harbour], Callable[[], bool]]


def prefilling(fleet: Harbour) -> Callable[[], bool]:
    fleet.engines["p0"].hang()
    return lambda: fleet.engines["p0"].books.running == 1


def prefill_answered_late(fleet: Harbour) -> Callable[[], bool]:
    """The prefill is done on the engine, its answer is still on its way."""
    fleet.engines["p0"].faults.add(Fault("hang", "after_headers", path=CHAT))
    return lambda: fleet.engines["p0"].books.faults_done["hang"] == 1


def waiting_for_kv(fleet: Harbour) -> Callable[[], bool]:
    fleet.engines["d0"].hang()
    return lambda: fleet.engines["d0"].books.running == 1


def generating(fleet: Harbour) -> Callable[[], bool]:
    """Far into an answer that would take minutes."""
    return lambda: any(r.leg != "prefill" and r.output_tokens > 3 for r in records(fleet.engines["d0"]))


def records(engine: Emulator) -> list[Any]:
    return list(engine.books.requests)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("doing", [prefilling, prefill_answered_late, waiting_for_kv, generating])
async def test_the_client_leaves(doing: Setup, stream: bool) -> None:
    async with harbour(SPLIT, time_scale=1.0, lease_s=60.0) as fleet:
        there = doing(fleet)
        asked = asyncio.ensure_future(fleet.chat("Cast off.", stream=stream, max_tokens=20_000))
        await until(there)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        decoding = fleet.engines["d0"]
        # a hung engine goes on later; what waits there must be gone by then
        await until(lambda: not decoding.books.running and not fleet.engines["p0"].books.running)
        for engine in fleet.engines.values():
            engine.resume()
        if doing is not prefill_answered_late:  # there nobody has the parameters: only the lease can end it
            await fleet.at_rest()
        assert decoding.books.generated_tokens < 20_000
        assert decoding.books.read_after_lease == 0


async def test_a_client_that_reads_slowly_holds_its_engine_not_the_proxy() -> None:
    """One client stalls; the others are served as before."""
    async with harbour({"m0": "mixed"}) as fleet:
        body = {
            "model": "m",
            "stream": True,
            "messages": [{"role": "user", "content": "x"}],
            "emulator_answer": "wave " * 200_000,
        }
        async with fleet.http.post(fleet.url + "/v1/chat/completions", json=body) as stalled:
            assert stalled.status == 200
            for turn in range(5):
                assert (await fleet.chat("hello", session=f"other-{turn}")).status == 200
            stalled.close()
        await fleet.at_rest()
