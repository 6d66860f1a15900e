"""The `homeport` command itself: the list of commands, what it imports for it, and what is said without an extra."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from homeport.cli import main

_POINTS = {point.name: point for point in entry_points(group="homeport.commands")}
_HEAVY = ("aiohttp", "pydantic", "redis", "rich", "msgspec", "yaml")
_RUN = """
import sys
for name in {hidden!r}:
    sys.modules[name] = None
from homeport.cli import main
try:
    status = main({words!r})
except SystemExit as end:
    status = end.code
print("\\nimported:", *(name for name in {asked!r} if sys.modules.get(name)))
sys.exit(status)
"""


def run(*words: str, hidden: tuple[str, ...] = (), asked: tuple[str, ...] = _HEAVY) -> subprocess.CompletedProcess[str]:
    """The command line in an interpreter of its own, which says which of ``asked`` it imported."""
    program = _RUN.format(words=list(words), hidden=hidden, asked=asked)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("words", [["--help"], ["--version"], []])
def test_the_list_of_commands_imports_none_of_them(words: list[str]) -> None:
    done = run(*words)
    assert done.returncode == (0 if words else 2)
    assert done.stdout.endswith("\nimported:\n")


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["replay", "--help"], ("aiohttp", "rich", "yaml", "homeport_proxy.simulate.run")),
        (["engine", "emulate", "--help"], ("aiohttp", "zmq", "homeport_engines.emulator.server")),
        (["up", "--help"], ("aiohttp", "homeport_proxy.config")),
    ],
)
def test_help_does_not_wait_for_what_only_running_needs(words: list[str], asked: tuple[str, ...]) -> None:
    done = run(*words, asked=asked)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\nimported:\n")


def test_redis_is_imported_by_those_who_share_state() -> None:
    program = "import sys, homeport_proxy.state; sys.exit('redis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_the_list_says_of_every_command_what_it_says_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for name, point in _POINTS.items():
        assert f"{name} {point.load().HELP}" in said


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("usage: homeport ")
    assert captured.err.endswith("homeport: error: name a COMMAND\n")
    assert all(f"\n    {name} " in captured.err for name in _POINTS)


def test_without_the_extra_the_list_and_the_command_name_it() -> None:
    listed = run("--help", hidden=("aiohttp",)).stdout
    assert "serve     needs pip install 'homeport[proxy]'" in listed
    assert "explain   say where" in listed
    for words in (["serve", "-c", "x.yaml"], ["serve", "--help"], ["replay", "x.jsonl"], ["engine", "emulate"]):
        done = run(*words, hidden=("aiohttp",))
        assert done.returncode == 1
        needs = f"`{words[0]}` needs aiohttp; install it with: pip install 'homeport[proxy]'"
        assert done.stderr == f"homeport: {needs}\n"


@pytest.mark.parametrize("verb", ["install", "command", "emulate"])
def test_every_verb_of_engine_says_what_it_does(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["engine", "--help"])
    listed = " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit):
        main(["engine", verb, "--help"])
    description = capsys.readouterr().out.split("\n\n")[1]
    assert f"{verb} {' '.join(description.split())}" in listed


def test_engine_command_explains_its_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["engine", "command", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "--host HOST address that the engine listens on and, for NIXL, where peers reach its side channel" in said
    assert "--port PORT it listens on (default: 8000)" in said
