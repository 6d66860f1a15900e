"""The OpenCode plugin in real `opencode run`s, by the bytes that reach the engine; what one running OpenCode can show
stands in ``test_opencode_turns``."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness import harness_install
from harness.harness_programs import Harness
from harness.scripted_engine import ScriptedEngine, Seen, shared_share

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
TOMORROW = str(HERE / "tomorrow.js")


@pytest.fixture(scope="module", autouse=True)
def built() -> Path:
    return harness_install.plugin()


def opencode(home: Path, project: Path, engine: ScriptedEngine, ours: bool = True, **config: Any) -> Harness:
    """OpenCode with the plugin, or with another that does nothing in its place."""
    settings = {"permission": "allow", "share": "disabled", "autoupdate": False, **config}
    extra = {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)}
    if not ours:
        extra["HOMEPORT_OPENCODE_PLUGIN"] = TOMORROW
    return Harness("opencode", home, project, engine.url, extra)


def test_its_own_tests_pass() -> None:
    """Type check and unit tests, by node's own runner."""
    done = subprocess.run(
        ["npm", "test"], cwd=harness_install.PLUGIN, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def sessions(home: Path) -> list[dict[str, Any]]:
    files = (home / ".local/share/opencode-homeport/sessions").glob("*.json")
    return [json.loads(path.read_text()) for path in files]


async def go(harness: Harness, prompt: str, *, resume: str | None = None) -> None:
    program = await asyncio.to_thread(harness_install.installed, "opencode")
    again = ["-s", resume] if resume else []
    done = await harness.start([str(program), "run", *again, prompt], report=False)
    assert done.status == 0, done.err


@pytest.mark.long
@pytest.mark.parametrize("plugin", [False, True])
async def test_two_projects_share_system_and_tools(tmp_path: Path, plugin: bool) -> None:
    async with ScriptedEngine() as engine:
        for project in ("lighthouse", "harbour"):
            await go(opencode(tmp_path / "home", tmp_path / project, engine, plugin), "script:hello")
        first, other = [seen.prompt for seen in engine.main()]
        share = shared_share(first, other)
        print(f"two projects, {'with' if plugin else 'without'} the plugin: {share:.3f} of the prompt shared")
        assert share >= 0.97 if plugin else share < 0.5
        if plugin:
            kinds = [(seen.headers["x-homeport-kind"], bool(seen.body.get("tools"))) for seen in engine.seen[-2:]]
            assert kinds == [("side", False), ("main", True)]


@pytest.mark.long
@pytest.mark.parametrize("plugin", [False, True])
async def test_the_next_day_keeps_tools_and_history(tmp_path: Path, plugin: bool) -> None:
    """A session of four requests, resumed after midnight."""
    async with ScriptedEngine() as engine:
        harness = opencode(tmp_path / "home", tmp_path / "project", engine, plugin, plugin=[TOMORROW])
        await go(harness, "script:four")
        session, last = engine.main()[-1].headers["x-session-affinity"], engine.main()[-1].prompt
        harness.extra["HOMEPORT_TEST_DAYS"] = "1"
        await go(harness, "script:hello", resume=session)
        resumed = engine.main()[-1].prompt
        share = shared_share(last, resumed)
        print(f"the next day, {'with' if plugin else 'without'} the plugin: {share:.3f} of the prompt shared")
        assert share >= 0.97 if plugin else share < 0.5
        if plugin:
            assert "Today's date is now: " in resumed.split("script:hello")[-1]
        else:
            assert _date(last) != _date(resumed)


@pytest.mark.long
async def test_a_late_server_waits_until_the_prefix_is_gone(tmp_path: Path) -> None:
    """Tools of a server that is gone are still sent, tools of a new one wait, until nothing is left to lose."""

    def server(name: str, tools: int) -> dict[str, Any]:
        command = [sys.executable, str(HERE / "mcp_server.py"), name, str(tools), "0"]
        return {"type": "local", "command": command, "enabled": True, "timeout": 30_000}

    async with ScriptedEngine(headers={"x-homeport-cache": "warm; keep=3600"}) as engine:
        home, project = tmp_path / "home", tmp_path / "project"
        await go(opencode(home, project, engine, mcp={"attic": server("attic", 3)}), "script:hello")
        first = engine.main()[-1]
        assert [name for name in first.tools if name.startswith("attic")] == [f"attic_look_{n}" for n in range(3)]
        session = first.headers["x-session-affinity"]
        swapped = opencode(home, project, engine, mcp={"cellar": server("cellar", 2)})
        engine.headers["x-homeport-cache"] = "warm; keep=0"
        await go(swapped, "script:hello", resume=session)
        held = engine.main()[-1]
        assert held.tools == first.tools
        assert shared_share(first.prompt, held.prompt) == 1.0
        state = sessions(home)[0]["held"]
        assert state["late"] == ["cellar_look_0", "cellar_look_1"]
        assert state["gone"] == ["attic_look_0", "attic_look_1", "attic_look_2"]
        await go(swapped, "script:hello", resume=session)
        assert [name for name in engine.main()[-1].tools if "_look_" in name] == ["cellar_look_0", "cellar_look_1"]


@pytest.mark.long
async def test_the_report_costs_no_request(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine:
        harness = opencode(tmp_path / "home", tmp_path / "project", engine)
        await go(harness, "script:four")
        requests = len(engine.seen)
        session = engine.main()[-1].headers["x-session-affinity"]
        program = await asyncio.to_thread(harness_install.installed, "opencode")
        command = [str(program), "run", "-s", session, "--command", "homeport"]
        done = await harness.start(command, report=False)
        assert len(engine.seen) == requests
        own = [seen for seen in engine.seen if seen.body.get("tools")]
        cached, total = sum(s.cached_tokens for s in own), sum(s.prompt_tokens for s in own)
        assert f"{cached:,} of {total:,} prompt tokens" in done.out
        await go(harness, "script:more", resume=session)
        assert "homeport-report" not in engine.main()[-1].prompt
        assert shared_share(own[-1].prompt, engine.main()[-1].prompt) == 1.0
        node = await asyncio.to_thread(harness_install.installed, "node")
        report = [str(node), str(harness_install.PLUGIN / "dist" / "cli.js"), "report", "--json"]
        summary = json.loads((await harness.start(report, report=False)).out)
        assert summary["cached_tokens"] == sum(s.cached_tokens for s in engine.main())
        assert summary["requests"] == len(engine.main())
        assert summary["breaks"] == []


@pytest.mark.long
async def test_sub_agents_name_their_parent(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine:
        await go(opencode(tmp_path / "home", tmp_path / "project", engine), "script:family")
        mains = [seen for seen in engine.main() if seen.headers["x-homeport-kind"] == "main"]
        children = [seen for seen in engine.main() if seen.headers["x-homeport-kind"] == "subagent"]
        assert len(mains) == 3
        assert len(children) == 3
        parent = mains[0].headers["x-session-affinity"]
        assert {seen.headers["x-parent-session-id"] for seen in children} == {parent}
        assert parent not in {seen.headers["x-session-affinity"] for seen in children}
        assert _append_only(mains)
        assert _append_only(children)
        assert {state["root"] for state in sessions(tmp_path / "home")} == {parent}


@pytest.mark.parametrize(
    "fault",
    [
        "syntax",
        pytest.param("none", marks=pytest.mark.long),
        pytest.param("missing", marks=pytest.mark.long),
        pytest.param("option", marks=pytest.mark.long),
        pytest.param("packed", marks=pytest.mark.long),
    ],
)
async def test_a_failed_load_is_made_visible(tmp_path: Path, fault: str) -> None:
    """OpenCode itself says nothing of a plugin that does not load: the self-test does."""
    entry: Any = str(harness_install.PLUGIN)
    if fault == "packed":
        await asyncio.to_thread(install_packed, tmp_path / "project")
        entry = "./node_modules/opencode-homeport"
    if fault == "syntax":
        broken = tmp_path / "homeport-broken.js"
        broken.write_text("export default {")
        entry = str(broken)
    if fault == "missing":
        entry = str(tmp_path / "homeport-nowhere.js")
    if fault == "option":
        entry = [entry, {"toastTokens": "many"}]
    async with ScriptedEngine() as engine:
        harness = opencode(tmp_path / "home", tmp_path / "project", engine, plugin=[entry])
        if fault == "packed":
            (tmp_path / "project" / "opencode.json").write_text(json.dumps({"plugin": [entry]}))
            harness.extra["OPENCODE_CONFIG_CONTENT"] = "{}"
        harness.extra["OPENCODE_BIN"] = str(await asyncio.to_thread(harness_install.installed, "opencode"))
        node = await asyncio.to_thread(harness_install.installed, "node")
        cli = str(harness_install.PLUGIN / "dist" / "cli.js")
        done = await harness.start([str(node), cli, "check"], report=False)
    said = done.out + done.err
    expected = {
        "none": (0, "was loaded by OpenCode"),
        "packed": (0, "was loaded by OpenCode"),
        "syntax": (1, "did not load"),
        "missing": (1, "there is no such file"),
        "option": (1, "toastTokens must be a number"),
    }
    status, words = expected[fault]
    assert done.status == status, said
    assert words in said


def install_packed(project: Path) -> None:
    """As its README has it: into an empty folder, from what `npm pack` makes of the checkout."""
    project.mkdir(parents=True)
    pack = ["npm", "pack", "--silent", "--pack-destination", str(project), str(harness_install.PLUGIN)]
    packed = subprocess.run(pack, cwd=project, capture_output=True, text=True, check=True).stdout.split()[-1]
    quiet = ["--no-audit", "--no-fund", "--offline"]
    subprocess.run(["npm", "install", *quiet, f"./{packed}"], cwd=project, capture_output=True, check=True)


def _append_only(requests: list[Seen]) -> bool:
    return all(shared_share(before.prompt, after.prompt) == 1.0 for before, after in pairwise(requests))


def _date(prompt: str) -> str:
    return prompt.partition("Today's date: ")[2].partition("\n")[0]
