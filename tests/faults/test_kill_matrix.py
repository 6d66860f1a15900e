"""Every row of the table in docs/faults.md, streamed and not, and what must hold afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from faults.harbour import OUTPUT_TOKENS, Harbour, Reply, black_hole, harbour, until
from faults.table import Row, cases
from homeport_engines.emulator import Emulator, Fault
from homeport_engines.emulator.answers import free_text, seed_of
from homeport_engines.emulator.prompt import chat

PROMPT = "Which harbour is this ship's home?"
CHAT = "/v1/chat/*"
FLEETS = {
    "two engines": {"m0": "mixed", "m1": "mixed"},
    "split": {"p0": "prefill", "d0": "decode", "d1": "decode"},
    "split, recompute": {"p0": "prefill", "d0": "decode", "d1": "decode"},
}
PHASES = {"before headers": "before_headers", "after headers": "after_headers", "mid-answer": "mid_stream"}
KINDS = {
    "resets the connection": "reset",
    "answers half a frame": "half_frame",
    "answers garbage": "garbage",
    "promises more bytes than come": "content_length",
}


@pytest.mark.parametrize(("row", "stream"), cases(*FLEETS))
async def test_row(row: Row, stream: bool) -> None:
    settings = {"load_failure": "recompute" if row.fleet.endswith("recompute") else "fail", "lease_s": 3.0}
    async with harbour(FLEETS[row.fleet], **settings) as fleet:
        home = await warmed_up(fleet)
        victims = {"home": [home], "decode": [home], "prefill": ["p0"], "all": list(fleet.engines)}[row.who]
        before = seen_by(fleet)
        async with contained(fleet, row, victims, stream) as strike:
            asked = asyncio.ensure_future(fleet.chat(PROMPT, stream=stream))
            await strike()
            reply = await asked
        await judge(fleet, row, reply, row.streamed if stream else row.whole, home, before)


async def warmed_up(fleet: Harbour) -> str:
    """A first turn gives the session its home; its connections are then closed, so that none is stale."""
    first = await fleet.chat("Ahoy.")
    assert first.status == 200, first.raw
    for engine in fleet.engines.values():
        engine.cut_connections()
    await fleet.at_rest()
    return first.headers["x-homeport-backend"]


def seen_by(fleet: Harbour) -> dict[str, int]:
    """Chat requests that each engine got so far."""
    return {name: engine.books.seen["/v1/chat/completions"] for name, engine in fleet.engines.items()}


# what happens

Strike = Callable[[], Coroutine[Any, Any, None]]


@asynccontextmanager
async def contained(fleet: Harbour, row: Row, victims: list[str], stream: bool) -> AsyncIterator[Strike]:
    """Prepare the row's trouble; the strike is called once the request is on its way."""
    engines = [fleet.engines[name] for name in victims]
    if row.what == "killed":
        async with killed(fleet, row, engines, stream) as strike:
            yield strike
        return
    if row.what == "swallows connections":
        for engine in engines:
            await engine.refuse()
            engine.cut_connections()
        async with black_hole(engines[0].port):
            yield nothing
        return
    if row.what == "closed an idle connection":
        await fleet.chat("Ahoy again.")
        engines[0].faults.add(Fault("close", path=CHAT))
        yield nothing
        return
    for engine in engines:
        add_faults(engine, row)
    yield nothing
    for engine in engines:
        engine.faults.clear()


async def nothing() -> None:
    """The trouble was there before the request."""


def add_faults(engine: Emulator, row: Row) -> None:
    phase: Any = PHASES[row.when]
    if row.what == "hangs":
        engine.faults.add(Fault("hang", phase, path=CHAT, times=None))
        for path in ("/health", "/metrics", "/v1/models"):
            engine.faults.add(Fault("hang", path=path, times=None))
    elif row.what.startswith("answers ") and row.what[8:].isdigit():
        engine.faults.add(Fault("status", path=CHAT, status=int(row.what[8:]), retry_after_s=1))
    else:
        kind: Any = KINDS[row.what]
        engine.faults.add(Fault(kind, phase, path=CHAT, times=None if row.who == "all" else 1))


@asynccontextmanager
async def killed(fleet: Harbour, row: Row, engines: list[Emulator], stream: bool) -> AsyncIterator[Strike]:
    victim = engines[0]
    if row.when == "before the request":
        for engine in engines:
            await engine.kill()
        yield nothing
        return
    if row.when == "after the hand-off":
        others = [engine for engine in fleet.engines.values() if engine is not victim]
        for engine in others:
            engine.hang()
        started = {id(engine): engine.books.started for engine in others}

        async def strike() -> None:
            await until(lambda: any(engine.books.started > started[id(engine)] for engine in others))
            await victim.kill()
            for engine in others:
                engine.resume()

        yield strike
        return
    generating = row.when == "while it generates"
    before_bytes = fleet.arrived_bytes
    if generating:
        victim.faults.add(Fault("hang", "mid_stream", path=CHAT))
    else:
        victim.hang()

    async def strike_at_work() -> None:
        if generating and stream:
            await until(lambda: fleet.arrived_bytes > before_bytes)
        await until(lambda: victim.books.faults_done["hang"] if generating else victim.books.running)
        await victim.kill()
        victim.resume()

    yield strike_at_work


# what must hold


async def judge(fleet: Harbour, row: Row, reply: Reply, outcome: str, home: str, before: dict[str, int]) -> None:
    served = reply.headers.get("x-homeport-backend")
    if outcome in ("other", "itself", "answered"):
        assert (reply.status, reply.error, reply.broken) == (200, None, False), reply.raw
        assert reply.text == right_answer()
        assert "x-should-retry" not in reply.headers
    if outcome == "other":
        assert served != home
        assert reply.headers["x-homeport-decision"] in ("failover", "spill", "moved")
    elif outcome in ("itself", "answered"):
        assert served == home
    elif outcome == "error frame":
        assert reply.status == 200
        assert reply.error is not None
        assert not reply.broken
        # what the engine itself ended is passed on as it is; a stream that broke has no such end
        assert ("[DONE]" in reply.frames) == (row.when == "after the hand-off")
        assert right_answer().startswith(reply.text)
    else:
        assert reply.status == int(outcome), reply.raw
        assert reply.error["message"]
    if outcome == "itself":
        assert "prefill" in reply.headers["x-homeport-reason"]
    if outcome == "504":
        assert reply.headers["x-should-retry"] == "false"
    if outcome in ("503", "429"):
        assert "retry-after" in reply.headers
    served_now = {name: count - before[name] for name, count in seen_by(fleet).items() if name != "p0"}
    if outcome in ("504", "500", "400", "error frame"):
        assert sum(served_now.values()) <= 1, "asked again where the engine may have generated"
    await afterwards(fleet, ok=outcome in ("other", "itself", "answered"))
    orphans = sum(engine.books.orphans for engine in fleet.engines.values())
    # on a busy machine a prefill may miss its short deadline here: its answer is lost then, too
    late = "no token within" in reply.headers.get("x-homeport-reason", "")
    assert orphans <= int(may_orphan(row) or late), "KV was left pinned until its lease ended"


def may_orphan(row: Row) -> bool:
    """Where nobody can tell the prefill engine that its blocks are not wanted: see the page."""
    if row.who == "prefill":
        return row.when == "after headers"
    return row.fleet == "split" and row.when == "before headers"


def right_answer() -> str:
    """What an engine alone says to the prompt."""
    talk = chat({"messages": [{"role": "user", "content": PROMPT}]})
    return free_text(seed_of(talk.tokens(), "", "", ""), OUTPUT_TOKENS)


async def afterwards(fleet: Harbour, *, ok: bool) -> None:
    """Nothing is left, nothing was counted twice, nothing was read that was not there."""
    await fleet.at_rest()
    assert await fleet.total("homeport_requests_total") == fleet.sent
    for name, engine in fleet.engines.items():
        assert engine.books.read_after_lease == 0, name
        assert engine.books.reused_params == 0, name
        assert engine.books.deaths == 0, name
    answered = [reply for reply in fleet.replies if reply.status == 200 and reply.error is None]
    assert bool(answered[1:]) is ok or not ok
    if ok:
        assert await fleet.total("homeport_output_tokens_total") == OUTPUT_TOKENS * len(answered)
        assert await fleet.total("homeport_prompt_tokens_total") == prompt_tokens(fleet)


def prompt_tokens(fleet: Harbour) -> int:
    """The prompt tokens of everything that was asked."""
    texts = ["Ahoy.", *["Ahoy again."] * (fleet.sent - 2), PROMPT]
    return sum(len(chat({"messages": [{"role": "user", "content": text}]}).tokens()) for text in texts)
