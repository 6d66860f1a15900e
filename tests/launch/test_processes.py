"""The guard: whatever ends the starter or the command, nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from homeport_engines.processes import ManagedProcess, stop_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans are only collected on Linux")

FAMILY = """
import os, signal, sys, time
if {deaf}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    if {away}:
        os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
print("started", flush=True)
time.sleep(600)
"""


def family(log: Path, *, deaf: bool = False, away: bool = False, grace_s: float = 5.0) -> ManagedProcess:
    """A command with a child that ignores SIGTERM; `away`: in a session of its own."""
    code = FAMILY.format(deaf=deaf, away=away)
    process = ManagedProcess("family", [sys.executable, "-c", code], log, grace_s=grace_s)
    assert _until(lambda: "started" in process.output())
    return process


def _until(what: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if what():
            return True
        time.sleep(0.02)
    return False


def _descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def _gone(processes: list[psutil.Process]) -> bool:
    return _until(lambda: not any(process.is_running() and process.status() != "zombie" for process in processes))


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("deaf", [False, True])
def test_stopping_ends_the_whole_family(tmp_path: Path, deaf: bool, away: bool) -> None:
    process = family(tmp_path / "log", deaf=deaf, away=away, grace_s=0.3)
    below = _descendants(process.pid)
    assert len(below) == 2
    stop_all([process])
    assert _gone(below)
    assert process.poll() == 128 + (signal.SIGKILL if deaf else signal.SIGTERM)


@pytest.mark.parametrize("away", [False, True])
def test_a_killed_command_leaves_no_orphans(tmp_path: Path, away: bool) -> None:
    process = family(tmp_path / "log", away=away)
    below = _descendants(process.pid)
    below[0].kill()
    assert process.wait(30) == 128 + signal.SIGKILL
    assert _gone(below)


def test_kill_is_immediate_and_whole(tmp_path: Path) -> None:
    process = family(tmp_path / "log", deaf=True, grace_s=600)
    below = _descendants(process.pid)
    process.kill()
    assert process.poll() is not None
    assert _gone(below)


def test_a_starter_killed_outright_takes_everything_with_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    starter_code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from homeport_engines.processes import ManagedProcess\n"
        "p = ManagedProcess('f', [sys.executable, '-c', sys.argv[1]], Path(sys.argv[2]), grace_s=0.3)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", starter_code, FAMILY.format(deaf=True, away=True), str(log)]
    with subprocess.Popen(command) as starter:
        assert _until(lambda: log.exists() and "started" in log.read_text())
        below = _descendants(starter.pid)
        assert len(below) == 3
        starter.kill()
    assert _gone(below)


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ([sys.executable, "-c", "print('bye'); raise SystemExit(7)"], 7, "bye"),
        (["/no/such/program"], 127, "cannot run /no/such/program"),
    ],
)
def test_status_and_output_are_the_commands(tmp_path: Path, command: list[str], status: int, words: str) -> None:
    process = ManagedProcess("x", command, tmp_path / "log")
    assert process.wait(30) == status
    stop_all([process])
    assert words in process.output()
    assert words in process.last_lines(3)[-1]


def test_a_second_run_reads_its_own_output_only(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for word in ("first", "second"):
        process = ManagedProcess("x", [sys.executable, "-c", f"print({word!r})"], log)
        process.wait(30)
        stop_all([process])
    assert process.output().split() == ["second"]
    assert process.last_lines(5) == ["second"]
    assert log.read_text().split() == ["first", "second"]


def test_environment_is_added_and_standard_input_is_empty(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['HOMEPORT_TEST_WORD'], repr(sys.stdin.read()), 'PATH' in os.environ)"
    process = ManagedProcess("x", [sys.executable, "-c", code], tmp_path / "log", env={"HOMEPORT_TEST_WORD": "hi"})
    assert process.wait(30) == 0
    stop_all([process])
    assert process.output().strip() == "hi '' True"
    assert "HOMEPORT_TEST_WORD" not in os.environ
