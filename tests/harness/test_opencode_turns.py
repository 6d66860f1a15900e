"""The OpenCode plugin over many turns of one running OpenCode: midnight, late servers, prunes, compactions, toasts."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from harness import harness_install
from harness.harness_programs import Harness
from harness.opencode_server import OpenCode, opencode_server
from harness.scripted_engine import ScriptedEngine, Seen, shared_share

HERE = Path(__file__).parent
WARM, GONE_AT_ONCE = "warm; keep=604800", "warm; keep=0"
"""Days, because a day is nothing here."""
CLEARED = "[Old tool result content cleared]"

pytestmark = [pytest.mark.harness, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]


@dataclass(slots=True)
class Rig:
    """One OpenCode with the plugin, one engine behind it, and a calendar."""

    server: OpenCode
    engine: ScriptedEngine
    calendar: Path
    folder: Path

    async def session(self, name: str) -> str:
        """A session in a project of its own, on today's date, with an engine that keeps what it has."""
        self.calendar.write_text("0")
        self.engine.headers["x-homeport-cache"] = WARM
        return await self.server.session(self.folder / name)

    async def say(self, session: str, text: str) -> Seen:
        """One turn; its last request."""
        await self.server.say(session, text)
        return self.engine.main(session)[-1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    harness_install.plugin()
    folder = tmp_path_factory.mktemp("opencode")
    calendar = folder / "days"
    calendar.write_text("0")
    async with ScriptedEngine() as engine:
        config: dict[str, Any] = {
            "permission": "allow",
            "share": "disabled",
            "autoupdate": False,
            "snapshot": False,
            "compaction": {"auto": False, "prune": True},
            "plugin": [str(HERE / "tomorrow.js")],
        }
        extra = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "HOMEPORT_TEST_DAYS_FILE": str(calendar)}
        harness = Harness("opencode", folder / "home", folder / "start", engine.url, extra)
        async with opencode_server(harness) as server:
            yield Rig(server, engine, calendar, folder)


def mcp(name: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "mcp_server.py"), name, "2", "0"]
    return {"type": "local", "command": command, "enabled": True}


def append_only(requests: list[Seen]) -> bool:
    return all(shared_share(before.prompt, after.prompt) == 1.0 for before, after in pairwise(requests))


async def test_two_projects_share_system_and_tools(rig: Rig) -> None:
    first, other = [await rig.say(await rig.session(name), "script:hello") for name in ("lighthouse", "harbour")]
    assert shared_share(first.prompt, other.prompt) >= 0.97
    kinds = [(seen.headers["x-homeport-kind"], bool(seen.body.get("tools"))) for seen in rig.engine.seen[-2:]]
    assert sorted(kinds) == [("main", True), ("side", False)]


async def test_midnight_changes_nothing_that_was_sent(rig: Rig) -> None:
    session = await rig.session("midnight")
    await rig.say(session, "script:four")
    rig.calendar.write_text("1")
    next_day = await rig.say(session, "script:hello")
    assert append_only(rig.engine.main(session))
    assert "Today's date is now: " in next_day.prompt.split("script:hello")[-1]


async def test_what_an_answer_found_cold_is_no_free_moment(rig: Rig) -> None:
    """`cold` tells of the moment before: the answer itself has made the prefix warm."""
    session = await rig.session("cold")
    rig.engine.headers["x-homeport-cache"] = "cold"
    await rig.say(session, "script:hello")
    await rig.server.add_mcp(rig.folder / "cold", "cellar", mcp("cellar"))
    await rig.say(session, "script:hello")
    assert append_only(rig.engine.main(session))


async def test_a_server_that_comes_late_waits_until_the_prefix_is_gone(rig: Rig) -> None:
    session = await rig.session("late")
    first = await rig.say(session, "script:hello")
    await rig.server.add_mcp(rig.folder / "late", "attic", mcp("attic"))
    rig.engine.headers["x-homeport-cache"] = GONE_AT_ONCE
    assert (await rig.say(session, "script:hello")).tools == first.tools
    await rig.server.told("2 late tools are held back")
    assert "attic_look_1" in (await rig.say(session, "script:hello")).tools


async def test_a_compaction_takes_everything_held_with_it(rig: Rig) -> None:
    session = await rig.session("compacted")
    before = await rig.say(session, "script:four")
    await rig.server.add_mcp(rig.folder / "compacted", "loft", mcp("loft"))
    rig.calendar.write_text("1")
    held = await rig.say(session, "script:hello")
    assert held.tools == before.tools
    await rig.server.compact(session)
    after = await rig.say(session, "script:hello")
    assert "loft_look_1" in after.tools
    assert date(after) not in (None, date(before))
    assert "Today's date is now: " not in after.prompt
    await rig.say(session, "script:four")
    assert append_only([one for one in rig.engine.main(session) if "loft_look_1" in one.tools])


async def test_prunes_wait_until_the_prefix_is_gone(rig: Rig) -> None:
    session = await rig.session("pruned")
    await rig.say(session, "script:bulk")
    await rig.say(session, "script:hello")
    await rig.say(session, "script:hello")

    async with asyncio.timeout(60):
        while not await stores_prunes(rig, session):  # noqa: ASYNC110 - OpenCode tells nobody of it
            await asyncio.sleep(0.1)
    rig.engine.headers["x-homeport-cache"] = GONE_AT_ONCE
    assert CLEARED not in (await rig.say(session, "script:hello")).prompt
    assert append_only(rig.engine.main(session))
    rig.engine.headers["x-homeport-cache"] = WARM
    assert CLEARED in (await rig.say(session, "script:hello")).prompt


async def test_a_costly_break_is_told_at_once(rig: Rig) -> None:
    session = await rig.session("told")
    last = await rig.say(session, "script:long")
    rig.engine.forget()
    await rig.say(session, "script:hello")
    told = f"{last.prompt_tokens:,} tokens were computed again: the engine no longer had it."
    await rig.server.told(told)


async def stores_prunes(rig: Rig, session: str) -> bool:
    """Whether OpenCode, behind its answer, has pruned what it stores."""
    parts = [part for message in await rig.server.messages(session) for part in message["parts"]]
    return any("compacted" in part["state"]["time"] for part in parts if part["type"] == "tool")


def date(seen: Seen) -> str | None:
    found = seen.prompt.partition("Today's date: ")[2].partition("\n")[0]
    return found or None
