"""Ten planted reasons for a late first token: `why` names each, and its parts are the whole time to first token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from faults.harbour import Harbour, Reply, black_hole, harbour, until
from homeport_engines.emulator.faults import Fault
from homeport_engines.emulator.settings import Rates
from homeport_proxy.commands.why import parts, verdict

PATIENT = {"timeouts": {"connect_s": 0.3, "first_token_s": 30, "idle_s": 30, "drain_s": 0.5}}
SLOW_PREFILL = Rates(tokens_per_s=50.0)
WORDS = [f"harbour{number} " for number in range(4_000)]


def words(count: int, first: int = 0) -> str:
    return "".join(WORDS[first : first + count])


async def why(fleet: Harbour, reply: Reply) -> tuple[str, dict[str, float], dict[str, Any]]:
    """What `why` says: the verdict, the parts in ms, the whole summary."""
    assert reply.status == 200, reply.raw
    await fleet.at_rest()
    path = f"{fleet.url}/homeport/v1/requests/{reply.headers['x-homeport-request-id']}"
    async with fleet.http.get(path) as answer:
        summary = await answer.json()
    found = parts(summary)
    assert sum(part.ms for part in found) == pytest.approx(summary["ms"]["first_token"], rel=0.05)
    assert all(part.ms > 0 for part in found)
    return verdict(summary, found), {part.name: part.ms for part in found}, summary


async def turn(fleet: Harbour, text: str, session: str = "s", **more: Any) -> Reply:
    return await fleet.chat(text, session=session, stream=True, max_tokens=4, **more)


def slow(delay_s: float) -> Fault:
    return Fault("slow", delay_s=delay_s)


async def test_much_that_is_new() -> None:
    async with harbour({"m0": "mixed"}, rates=SLOW_PREFILL, time_scale=80.0, sections=PATIENT) as fleet:
        await turn(fleet, words(50), session="warm")
        said, _, _ = await why(fleet, await turn(fleet, words(1_500, 100)))
    assert "computed: new" in said


async def test_a_prompt_changed_by_its_caller() -> None:
    async with harbour({"m0": "mixed"}, rates=SLOW_PREFILL, time_scale=80.0, sections=PATIENT) as fleet:
        await turn(fleet, words(1_500))
        said, _, _ = await why(fleet, await turn(fleet, "At noon: " + words(1_500)))
    assert "computed: caller" in said


async def test_an_engine_that_had_to_make_room() -> None:
    async with harbour({"m0": "mixed"}, rates=SLOW_PREFILL, time_scale=80.0, sections=PATIENT, kv_blocks=400) as fleet:
        await turn(fleet, words(800))
        for number in range(3):
            await turn(fleet, words(800, 900 + 800 * number), session=f"other{number}")
        said, _, _ = await why(fleet, await turn(fleet, words(820)))
    assert "computed: evicted" in said


async def test_a_home_that_is_down() -> None:
    async with harbour({"m0": "mixed", "m1": "mixed"}, rates=SLOW_PREFILL, time_scale=80.0, sections=PATIENT) as fleet:
        first = await turn(fleet, words(1_500))
        home = first.headers["x-homeport-backend"]
        await fleet.engines[home].stop()
        await until(lambda: any(place.name == home and place.state == "down" for place in fleet.control.places()))
        said, _, summary = await why(fleet, await turn(fleet, words(1_520)))
    assert "computed: routed_elsewhere" in said
    assert summary["decision"] == "failover"


async def test_an_engine_that_started_anew() -> None:
    async with harbour({"m0": "mixed"}, rates=SLOW_PREFILL, time_scale=80.0, sections=PATIENT) as fleet:
        for _ in range(2):
            await turn(fleet, words(1_500))
        await fleet.at_rest()
        await until(lambda: _queried(fleet))
        fleet.engines["m0"].restart()
        await until(lambda: not _queried(fleet))
        said, _, _ = await why(fleet, await turn(fleet, words(1_520)))
    assert "computed: cold_backend" in said


def _queried(fleet: Harbour) -> bool:
    """Whether the router has seen counters of the engine's prefix cache."""
    place = fleet.control.routers["local"]._places["m0"]
    return bool(place.stats is not None and place.stats.prefix_queries_tokens)


async def test_an_engine_that_is_slow_with_little_to_compute() -> None:
    async with harbour({"m0": "mixed"}, sections=PATIENT) as fleet:
        await turn(fleet, words(1_500))
        fleet.engines["m0"].faults.add(slow(0.4))
        said, named, _ = await why(fleet, await turn(fleet, words(1_500)))
    assert "the engine is busy or slow" in said
    assert named["engine"] >= 400


async def test_an_answer_that_is_not_streamed() -> None:
    """Its time is mostly decoding: neither what was computed of its prompt nor a slow engine is to blame."""
    async with harbour({"m0": "mixed"}, time_scale=80.0, sections=PATIENT) as fleet:
        await turn(fleet, words(50))
        reply = await fleet.chat(words(60), session="s", max_tokens=400, min_tokens=400, ignore_eos=True)
        said, found, summary = await why(fleet, reply)
    assert max(found, key=lambda name: found[name]) == "engine"
    assert "the whole answer, not streamed" in said
    assert f"{summary['tokens']['output']:,} output tokens" in said
    assert "computed" not in said
    assert "first token" not in said


async def test_a_place_tried_in_vain() -> None:
    unwatched = {"health": {"interval_s": 60, "timeout_s": 0.3}}
    async with harbour({"m0": "mixed", "m1": "mixed"}, sections={**PATIENT, **unwatched}) as fleet:
        home = (await turn(fleet, words(100))).headers["x-homeport-backend"]
        port = fleet.engines[home].port
        await fleet.engines[home].stop()
        async with black_hole(port):
            said, named, summary = await why(fleet, await turn(fleet, words(100)))
    assert f"tried in vain on {home}" in said, (named, summary["legs"], summary["retries"])


async def test_held_until_there_is_room() -> None:
    async with harbour({"m0": "mixed"}, rates=Rates(tokens_per_s=100.0), sections=PATIENT, time_scale=40.0) as fleet:
        await turn(fleet, words(300), session="first")
        long = asyncio.create_task(turn(fleet, words(1_200, 700), session="long"))
        await until(lambda: any(place.prefill_tokens for place in fleet.control.places()))
        held = await turn(fleet, words(50, 2_000), session="held")
        await long
        said, _, _ = await why(fleet, held)
    assert "held in the proxy" in said


async def test_a_slow_prefill_engine() -> None:
    async with harbour({"p0": "prefill", "d0": "decode"}, sections=PATIENT) as fleet:
        fleet.engines["p0"].faults.add(slow(0.4))
        said, named, _ = await why(fleet, await turn(fleet, words(300)))
    assert "prefilled on p0" in said, (said, named)


async def test_a_slow_transfer() -> None:
    rates = Rates(transfer_tokens_per_s=5.0)
    async with harbour({"p0": "prefill", "d0": "decode"}, rates=rates, sections=PATIENT) as fleet:
        said, named, _ = await why(fleet, await turn(fleet, words(300)))
    assert "moving the KV to d0" in said, (said, named)
