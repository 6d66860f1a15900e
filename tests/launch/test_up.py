"""`homeport up` with emulated engines: one line when it cannot start, everything stopped however it ends."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from homeport import cli
from homeport.cli import CommandError
from homeport_engines.launch import speculation
from homeport_proxy.commands import up
from homeport_proxy.local import checks
from homeport_proxy.local.display import last_message
from homeport_proxy.local.plan import Plan, Wanted, make_plan, threads

UP = [sys.executable, "-m", "homeport.cli", "up", "--engine", "emulator", "--port", "0", "--json"]


class Running:
    """A started `homeport up`, its announcement and its processes."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process = process
        self.errors = errors
        line = process.stdout.readline() if process.stdout else ""
        assert line, errors.read_text()
        self.said: dict[str, Any] = json.loads(line)
        self.all = psutil.Process(process.pid).children(recursive=True)

    def part(self, *words: str) -> psutil.Process:
        """The command (not its guard) whose command line has all words."""
        found = [
            process for process in self.all if set(words) <= set(process.cmdline()) and "-I" not in process.cmdline()
        ]
        assert len(found) == 1, found
        return found[0]

    def ask(self) -> int:
        body = {"model": self.said["model"], "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(
            self.said["base_url"] + "/chat/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)

    def nothing_left(self) -> bool:
        return until(lambda: not any(process.is_running() and process.status() != "zombie" for process in self.all))


def until(what: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if what():
            return True
        time.sleep(0.05)
    return False


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Running]:
    errors = folder / "errors"
    with errors.open("w") as stream:
        command = [*UP, "--log-dir", str(folder / "logs"), *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream, text=True)
    with process:
        try:
            yield Running(process, errors)
        finally:
            process.kill()


def test_serves_survives_a_crash_and_stops_everything_on_ctrl_c(tmp_path: Path) -> None:
    with running(tmp_path, "--mixed", "2") as fleet:
        assert fleet.ask() == 200
        port = fleet.said["engines"][0]["url"].rpartition(":")[2]
        fleet.part("emulate", port).kill()
        assert until(lambda: "m0 ended (exit status 137)" in fleet.errors.read_text())
        assert fleet.ask() == 200
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.process.wait(60) == 0
        assert fleet.nothing_left()


def test_the_proxys_end_is_the_end(tmp_path: Path) -> None:
    with running(tmp_path) as fleet:
        assert {engine["role"] for engine in fleet.said["engines"]} == {"prefill", "decode"}
        fleet.part("serve").kill()
        assert fleet.process.wait(60) == 1
        assert "proxy ended (exit status 137)" in fleet.errors.read_text()
        assert fleet.nothing_left()


def test_its_own_sudden_death_leaves_nothing(tmp_path: Path) -> None:
    with running(tmp_path) as fleet:
        fleet.process.kill()
        assert fleet.nothing_left()


def test_stops_everything_on_sigterm_while_starting(tmp_path: Path) -> None:
    command = [*UP, "--log-dir", str(tmp_path / "logs")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        while "starting" not in (line := process.stderr.readline()):
            assert line, "ended before it started anything"
        assert until(lambda: bool(psutil.Process(process.pid).children(recursive=True)))
        started = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert until(lambda: not any(child.is_running() and child.status() != "zombie" for child in started))


def test_an_engine_that_is_never_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--engine", "emulator", "--port", "0", "--timeout", "0", "--log-dir", str(tmp_path)]
    before = set(psutil.Process().children(recursive=True))
    assert cli.main(["up", *options]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "was not ready within 0 s; give more with --timeout; the end of its log" in said.err
    assert until(lambda: set(psutil.Process().children(recursive=True)) <= before)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "vllm-cpu", "--model", "/no/such/folder"], "no such folder"),
        (["--engine", "vllm-cpu", "--model", "."], "has no config.json"),
        (["--engine", "emulator", "--prefill", "0", "--decode", "0"], "no engine is asked for"),
        (["--engine", "emulator", "--prefill", "1", "--decode", "0"], "give --decode"),
        (["--engine", "emulator", "--spec", "eagle3"], "--draft-model"),
        (["--engine", "emulator", "--spec", "magic"], "--spec 'magic'"),
        (["--engine", "emulator", "--port", "99999"], "port"),
        (["--engine", "vllm"], "--engine vllm-cpu"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "gpu_vllm", lambda: None)
    assert cli.main(["up", "--port", "0", *options]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
    assert said.err.count("\n") == 1


def test_the_status_command_can_be_typed_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "homeport"
    program.parent.mkdir()
    program.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert up.status_command("http://127.0.0.1:8080") == f"{program} status"
    monkeypatch.chdir(tmp_path)
    assert up.status_command("http://127.0.0.1:9000") == "bin/homeport status --url http://127.0.0.1:9000"
    monkeypatch.setenv("PATH", str(program.parent))
    assert up.status_command("http://127.0.0.1:8080") == "homeport status"
    program.unlink()
    assert up.status_command("http://127.0.0.1:8080").endswith("python -m homeport.cli status")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], ""),
        (["INFO 11-30 01:00:00 [core.py:12] Loading weights"], "Loading weights"),
        (["INFO 11-30 01:00:00 [core.py:12] A", "/x/y.py:3: UserWarning: old", "  warnings.warn("], "A"),
        (["(EngineCore pid=7) INFO 11-30 01:00:00 [a.py:1] B", "    raise KeyError"], "B"),
        (["Loading shards:  50%|##   | 1/2"], "Loading shards:  50%|##   | 1/2"),
        (["  warnings.warn("], ""),
    ],
)
def test_progress_shows_the_last_message_of_a_log(lines: list[str], said: str) -> None:
    assert last_message(lines) == said


def test_a_port_in_use_is_named_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["up", "--engine", "emulator", "--port", str(port)]) == 1
    assert f"port {port} is in use" in capsys.readouterr().err


def test_memory_for_all_engines_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 2**20)
    monkeypatch.setattr(checks, "available_memory_gib", lambda: 5.0)
    checks.require_memory(1, tmp_path, 1, bytes_per_weight_byte=2.0)
    with pytest.raises(CommandError, match=r"2 CPU engines .* 5\.4 GiB .* 5\.0 GiB are available; .*--mixed 1"):
        checks.require_memory(2, tmp_path, 1, bytes_per_weight_byte=2.0)
    monkeypatch.setattr(checks, "available_memory_gib", lambda: None)
    checks.require_memory(2, tmp_path, 1, bytes_per_weight_byte=2.0)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], ["p0", "d0"]),
        (["--mixed", "2"], ["m0", "m1"]),
        (["--prefill", "2"], ["p0", "p1", "d0"]),
        (["--decode", "2"], ["p0", "d0", "d1"]),
        (["--prefill", "0"], ["d0"]),
        (["--prefill", "1", "--mixed", "1"], ["p0", "d0", "m0"]),
        (["--prefill", "0", "--decode", "0", "--mixed", "1"], ["m0"]),
    ],
)
def test_how_many_of_each(options: list[str], names: list[str]) -> None:
    parser = argparse.ArgumentParser()
    up.configure(parser)
    plan = up.plan_from(parser.parse_args(["--engine", "emulator", "--port", "0", *options]))
    assert [engine.name for engine in plan.engines] == names


def planned(**changes: Any) -> Plan:
    ports = iter(range(20_000, 21_000))
    wanted = Wanted(engine="vllm-cpu", model="/models/m", served_name="m", **changes)
    return make_plan(wanted, lambda: next(ports))


def test_keys_differ_and_stand_in_no_file_or_command_line() -> None:
    plan = planned(prefill=2, decode=2)
    keys = {engine.key for engine in plan.engines}
    assert len(keys) == 4
    commands = "".join(" ".join(engine.launch.argv) for engine in plan.engines)
    visible = yaml.safe_dump(dict(plan.config)) + commands + repr(plan)
    assert not [key for key in keys if key in visible]
    assert set(plan.proxy_env.values()) == keys
    assert all(engine.launch.env["VLLM_API_KEY"] == engine.key for engine in plan.engines)


def test_no_port_is_planned_twice() -> None:
    plan = planned(prefill=2, decode=2, mixed=1)
    used = [engine.port for engine in plan.engines]
    for engine in plan.engines:
        text = " ".join([*engine.launch.argv, *engine.launch.env.values()])
        others = [other.port for other in plan.engines if other is not engine]
        assert not [port for port in others if str(port) in text]
    assert len(set(used)) == len(used)


def test_the_proxy_is_told_what_the_engines_are() -> None:
    plan = planned(mixed=1, speculation=speculation("ngram"), spec="ngram", min_uncached_tokens=64)
    config: Any = plan.config
    backends = {backend["name"]: backend for backend in config["regions"]["local"]["backends"]}
    assert {name: backend["kv_transfer"] for name, backend in backends.items()} == {
        "p0": "nixl",
        "d0": "nixl",
        "m0": "none",
    }
    assert {name: backend.get("spec") for name, backend in backends.items()} == {
        "p0": None,
        "d0": "ngram",
        "m0": "ngram",
    }
    assert config["disaggregation"] == {"min_uncached_tokens": 64}
    speculating = {engine.name for engine in plan.engines if "--speculative-config" in engine.launch.argv}
    assert speculating == {"d0", "m0"}


@pytest.mark.parametrize(
    ("role", "cores", "expected"), [("prefill", 2, 2), ("decode", 2, 1), ("decode", 1, 1), ("mixed", 8, 8)]
)
def test_threads(role: Any, cores: int, expected: int) -> None:
    assert threads(role, cores) == expected
