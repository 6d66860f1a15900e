"""Real harness programs behind the real proxy: sessions stay at home, return, do not mix, and the books agree."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from harness import harness_install
from harness.harness_fleet import Fleet, Tools, delegating, emulators, fleet, working
from harness.harness_programs import Done, Harness
from harness.scripted_engine import ScriptedEngine

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900)]

TOOLS = {
    "opencode": Tools(
        "bash",
        "command",
        "todowrite",
        "task",
        {"description": "a step"},
        {"description": "a drawer", "subagent_type": "general"},
    ),
    "codex": Tools("exec_command", "cmd"),
    "claude": Tools(
        "Bash",
        "command",
        "Workflow",
        "Agent",
        {"description": "a step"},
        {"description": "a drawer", "subagent_type": "general-purpose", "run_in_background": False},
    ),
    "qwen": Tools(
        "run_shell_command",
        "command",
        "list_agents",
        "agent",
        {"is_background": False, "description": "a step"},
        {"description": "a drawer", "subagent_type": "general-purpose"},
    ),
}

NAMES = [
    "opencode",
    pytest.param("codex", marks=pytest.mark.long),
    pytest.param("claude", marks=pytest.mark.long),
    pytest.param("qwen", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    harness_install.plugin()


def by_session(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    grouped: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        grouped[record["session"]].append(record)
    return dict(grouped)


async def books_agree(at: Fleet) -> None:
    """What the proxy counted is what the engines did, token by token; only a request whose client left before its usage
    came is in the engines' books alone."""
    records = await at.decisions()
    told = [one["tokens"] for one in records if one["tokens"]["prompt"]]
    prompt, cached = sum(one["prompt"] for one in told), sum(one["cached"] for one in told)
    booked_prompt, booked_cached = at.booked()
    if any(one["error"] == "client_closed" for one in records):
        assert prompt <= booked_prompt
        assert cached <= booked_cached
    else:
        assert (prompt, cached) == (booked_prompt, booked_cached)


@pytest.mark.parametrize("name", NAMES)
async def test_two_at_once_stay_at_home_do_not_mix_and_return(tmp_path: Path, name: str) -> None:
    async with fleet(tmp_path, emulators(working(TOOLS[name]))) as at:
        one = Harness(name, tmp_path / "home1", tmp_path / "lighthouse", at.url)
        two = Harness(name, tmp_path / "home2", tmp_path / "harbour", at.url)
        done = await asyncio.gather(one.run("Please do the three steps."), two.run("Do three steps for me."))
        assert [run.status for run in done] == [0, 0], [run.err for run in done]
        sessions = by_session(await at.main())
        assert len(sessions) == 2
        for session, requests in sessions.items():
            at_home(requests)
            assert len(requests) == 4
            # each report holds its own session whole, and the other as far as it had come
            assert summed(requests) in [reported(run, session) for run in done]
        again = await one.run("And once more.", resume=True)
        assert again.status == 0, again.err
        later = by_session(await at.main())
        # Qwen Code writes its first message anew when it resumes: a new conversation, at the same home by its prefix
        (resumed,) = [key for key, requests in later.items() if len(requests) != len(sessions.get(key, ()))]
        assert (resumed in sessions) == (name != "qwen")
        at_home(later[resumed], warm=name == "qwen")
        new = later[resumed][len(sessions.get(resumed, ())) :]
        assert len(new) >= 2
        assert reported(again, resumed) == summed(new)
        await books_agree(at)
        count, prompt, cached = summed(sessions[min(sessions)])
        print(f"{name}: {cached:,} of {prompt:,} prompt tokens cached in {count} requests")


def at_home(requests: list[dict[str, Any]], warm: bool = False) -> None:
    """Placed once, then at home in a cache that has the prompt; ``warm``: so it has at the first request."""
    assert [one["decision"] for one in requests] == ["placed", *["home"] * (len(requests) - 1)]
    assert len({one["backend"] for one in requests}) == 1
    for one in requests if warm else requests[1:]:
        assert one["tokens"]["cached"] > 0.9 * one["tokens"]["prompt"], one["tokens"]


def summed(requests: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Requests, prompt tokens and cached tokens of a session."""
    prompt, cached = (sum(one["tokens"][kind] for one in requests) for kind in ("prompt", "cached"))
    return len(requests), prompt, cached


def reported(run: Done, session: str) -> tuple[int, int, int]:
    """The same as `homeport wrap` told it."""
    (line,) = [line for line in run.report if line["session"] == session]
    return line["requests"], line["prompt_tokens"], line["cached_tokens"]


async def test_sub_agents_are_sticky_and_name_their_parent(tmp_path: Path) -> None:
    async with fleet(tmp_path, emulators(delegating(TOOLS["opencode"], 2))) as at:
        harness = Harness("opencode", tmp_path / "home", tmp_path / "project", at.url)
        done = await harness.run("Let others look into the drawers.")
        assert done.status == 0, done.err
        _, children = await family(at)
        assert len(children) == 2
        await books_agree(at)


@pytest.mark.long
@pytest.mark.parametrize(("name", "flags"), [("claude", []), ("codex", ["-c", "agents.max_threads=8"])])
async def test_eight_at_once_spread_and_the_parent_never_moves(tmp_path: Path, name: str, flags: list[str]) -> None:
    """Each sub-agent has a long task of its own: more than one engine could begin at once."""
    async with fleet(tmp_path, [ScriptedEngine(tokens_per_s=6000) for _ in range(3)]) as at:
        harness = Harness(name, tmp_path / "home", tmp_path / "project", at.url)
        done = await harness.run("script:crew", flags=flags)
        assert done.status == 0, done.err
        parent, children = await family(at)
        assert len(children) == 8
        places = [child[0]["backend"] for child in children]
        print(f"{name}: parent on {parent[0]['backend']}, children on {', '.join(sorted(places))}")
        assert len(set(places)) >= 2
        await books_agree(at)


async def family(at: Fleet) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """The parent's requests and each child's. Nobody's home changes: what is not at home was spilled "this once"."""
    sessions = by_session(await at.main())
    (parent,) = [one for one in sessions.values() if one[0]["kind"] == "main"]
    children = [one for one in sessions.values() if one[0]["kind"] == "subagent"]
    assert len(parent) >= 3
    for requests in (parent, *children):
        words = [one["decision"] for one in requests]
        assert words[0] == "placed"
        assert set(words[1:]) <= {"home", "spill"}, words
        assert {one["backend"] for one in requests if one["decision"] != "spill"} == {requests[0]["backend"]}
    decisions = [one["decision"] for requests in (parent, *children) for one in requests]
    assert decisions.count("spill") <= len(decisions) / 4, decisions
    return parent, children


@pytest.mark.long
async def test_a_server_that_joins_codex_late_is_named(tmp_path: Path) -> None:
    """Codex waits for no MCP server: its tools come in the middle of a session, and the explanation says so."""
    step = [TOOLS["codex"].run("sleep 3")] * 4
    script = [{"tool": "exec_command", "sequence": [*step, "Done."]}]
    recorded = tmp_path / "requests.jsonl"
    async with fleet(tmp_path, emulators(script), record={"file": str(recorded), "text": True}) as at:
        harness = Harness("codex", tmp_path / "home", tmp_path / "project", at.url)
        server = [str(Path(__file__).parent / "mcp_server.py"), "attic", "3", "5"]
        flags = ["-c", f"mcp_servers.attic.command={json.dumps(sys.executable)}"]
        flags += ["-c", f"mcp_servers.attic.args={json.dumps(server)}"]
        done = await harness.run("Look around.", flags=flags)
        assert done.status == 0, done.err
        requests = await at.main()
        assert {one["backend"] for one in requests} == {requests[0]["backend"]}
        await books_agree(at)
    homeport = str(Path(sys.prefix) / "bin" / "homeport")
    command = [homeport, "explain", str(recorded), "--json"]
    told = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    breaks = [one for one in json.loads(told.stdout)["breaks"] if one["reason"] == "tools_added"]
    assert len(breaks) == 1, told.stdout[-3000:]
    assert breaks[0]["blame"] == "caller"
    assert breaks[0]["lost_tokens"] > 1000


@pytest.mark.long
async def test_qwen_sub_agents_have_sessions_of_their_own(tmp_path: Path) -> None:
    """Qwen Code names neither session nor parent: conversations alone tell them apart."""
    async with fleet(tmp_path, emulators(delegating(TOOLS["qwen"], 2), 3)) as at:
        harness = Harness("qwen", tmp_path / "home", tmp_path / "project", at.url)
        done = await harness.run("Let others look into the drawers.")
        assert done.status == 0, done.err
        sessions = by_session(await at.main())
        assert len(sessions) == 3
        for requests in sessions.values():
            assert len({one["backend"] for one in requests}) == 1
        await books_agree(at)


@pytest.mark.long
@pytest.mark.parametrize(("profiles", "least", "most"), [([], 0.0, 0.6), (["qwen-code"], 0.9, 1.0)])
async def test_qwen_resumed_after_a_file_changed(
    tmp_path: Path, profiles: list[str], least: float, most: float
) -> None:
    """Its git snapshot stands ahead of tools and history; left out by the proxy's profile, the resumed session is as
    warm as it was."""
    async with fleet(tmp_path, emulators(working(TOOLS["qwen"])), profiles=profiles) as at:
        harness = Harness("qwen", tmp_path / "home", tmp_path / "project", at.url)
        for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
            who = ["-c", "user.name=Ann", "-c", "user.email=ann@example.net"]
            await asyncio.to_thread(subprocess.run, ["git", *who, *words], cwd=harness.project, check=True)
        done = await harness.run("Please do the three steps.")
        assert done.status == 0, done.err
        before = len(await at.main())
        (harness.project / "keel.txt").write_text("oak")
        again = await harness.run("And once more.", resume=True)
        assert again.status == 0, again.err
        first = (await at.main())[before]["tokens"]
        print(f"profiles {profiles}: {first['cached']:,} of {first['prompt']:,} prompt tokens cached on resume")
        assert least <= first["cached"] / first["prompt"] <= most
        await books_agree(at)


@pytest.mark.long
async def test_aider_keeps_its_session_though_it_moves_its_reminder(tmp_path: Path) -> None:
    """Aider names no session and repeats its reminder behind the last message: what can be shared stays shared."""
    async with fleet(tmp_path, emulators([])) as at:
        harness = Harness("aider", tmp_path / "home", tmp_path / "project", at.url)
        done = await harness.run("", stdin="Say one.\nSay two.\nSay three.\nSay four.\n/exit\n")
        assert done.status == 0, done.err
        sessions = by_session(await at.main())
        assert max(len(one) for one in sessions.values()) >= 4
        assert len({one["backend"] for one in max(sessions.values(), key=len)}) == 1
        await books_agree(at)


@pytest.mark.long
@pytest.mark.parametrize("kit", ["agents", "pydantic"])
async def test_a_framework_keeps_its_session(tmp_path: Path, kit: str) -> None:
    """The OpenAI Agents SDK and pydantic-ai, unchanged, name no session: the conversation does."""
    async with fleet(tmp_path, emulators(working(Tools("look", "drawer")))) as at:
        harness = Harness(kit, tmp_path / "home", tmp_path / "project", at.url)
        program = [sys.executable, str(Path(__file__).parent / "framework_agent.py"), kit]
        done = await asyncio.gather(
            harness.start([*program, "Look into the first three drawers."]),
            harness.start([*program, "Into three drawers, please."]),
        )
        assert [one.status for one in done] == [0, 0], [one.err for one in done]
        sessions = by_session(await at.main())
        assert sorted(len(one) for one in sessions.values()) == [6, 6]
        for requests in sessions.values():
            assert len({one["backend"] for one in requests}) == 1
            assert [one["decision"] for one in requests] == ["placed", *["home"] * 5]
        await books_agree(at)
