"""`homeport wrap`: overlays that point each harness at the proxy, a child that behaves as without us, a true report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from homeport.overlays import KEY, Model, Target, overlay
from homeport.wrapped import report_of

TARGET = Target("http://127.0.0.1:8080", (Model("tiny", 8192), Model("big")), "tiny")
HOMEPORT = str(Path(sys.prefix) / "bin" / "homeport")


@pytest.mark.parametrize(
    ("command", "harness", "words", "variables"),
    [
        (["python", "agent.py"], "python", (), {"OPENAI_BASE_URL": "http://127.0.0.1:8080/v1", "OPENAI_API_KEY": KEY}),
        (["claude", "-p", "hi"], "claude", (), {"CLAUDE_CODE_ATTRIBUTION_HEADER": "0", "ANTHROPIC_MODEL": "tiny"}),
        (["/opt/bin/claude"], "claude", (), {"ANTHROPIC_BASE_URL": "http://127.0.0.1:8080"}),
        (["claude"], "claude", (), {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": "8192"}),
        (["npx", "-y", "@openai/codex@0.171.0", "exec"], "codex", ('model="tiny"',), {}),
        (["codex", "exec", "hi"], "codex", ('model_providers.homeport.wire_api="responses"',), {}),
        (["qwen", "-p", "hi"], "qwen", ("--auth-type", "openai"), {"OPENAI_MODEL": "tiny"}),
        (["aider"], "aider", (), {"AIDER_MODEL": "openai/tiny"}),
    ],
)
def test_each_harness_is_pointed_at_the_proxy(
    tmp_path: Path, command: list[str], harness: str, words: tuple[str, ...], variables: dict[str, str]
) -> None:
    plan = overlay(command, TARGET, {}, tmp_path)
    assert plan.harness == harness
    assert set(words) <= set(plan.command)
    assert variables.items() <= plan.environment.items()
    assert [word for word in plan.command if word in command] == command


def test_flags_come_right_behind_the_harness(tmp_path: Path) -> None:
    plan = overlay(["npx", "@openai/codex", "exec", "-m", "x"], TARGET, {}, tmp_path)
    assert plan.command[:3] == ("npx", "@openai/codex", "-c")
    assert plan.command[-3:] == ("exec", "-m", "x")


def test_opencode_gets_provider_models_and_plugin_over_the_users_own(tmp_path: Path) -> None:
    own = {"permission": "allow", "provider": {"mine": {}}, "plugin": ["other"]}
    given = {"OPENCODE_CONFIG_CONTENT": json.dumps(own), "HOMEPORT_OPENCODE_PLUGIN": "/p/index.js"}
    config = json.loads(overlay(["opencode"], TARGET, given, tmp_path).environment["OPENCODE_CONFIG_CONTENT"])
    assert config["permission"] == "allow"
    assert set(config["provider"]) == {"mine", "homeport"}
    assert config["provider"]["homeport"]["options"]["baseURL"] == "http://127.0.0.1:8080/v1"
    assert config["provider"]["homeport"]["models"]["tiny"]["limit"]["context"] == 8192
    assert "limit" not in config["provider"]["homeport"]["models"]["big"]
    assert config["model"] == "homeport/tiny"
    assert config["plugin"] == ["other", "/p/index.js"]


@pytest.mark.parametrize("listed", [["opencode-homeport"], [["/x/homeport/index.js", {"tools": "off"}]]])
def test_a_plugin_the_user_configured_is_not_added_twice(tmp_path: Path, listed: list[Any]) -> None:
    given = {"OPENCODE_CONFIG_CONTENT": json.dumps({"plugin": listed}), "HOMEPORT_OPENCODE_PLUGIN": "/p/index.js"}
    config = json.loads(overlay(["opencode"], TARGET, given, tmp_path).environment["OPENCODE_CONFIG_CONTENT"])
    assert config["plugin"] == listed


def test_kilo_gets_the_same_provider_under_its_own_name_and_no_plugin(tmp_path: Path) -> None:
    plan = overlay(
        ["kilo", "run", "--auto", "hi"], TARGET, {"KILO_CONFIG_CONTENT": '{"permission": "allow"}'}, tmp_path
    )
    config = json.loads(plan.environment["KILO_CONFIG_CONTENT"])
    assert config["permission"] == "allow"
    assert config["provider"]["homeport"]["options"]["baseURL"] == "http://127.0.0.1:8080/v1"
    assert config["model"] == "homeport/tiny"
    assert "plugin" not in config


def test_pi_gets_a_linked_copy_with_a_provider_that_names_sessions(tmp_path: Path) -> None:
    home = tmp_path / "home" / ".pi" / "agent"
    home.mkdir(parents=True)
    (home / "settings.json").write_text("{}")
    (home / "models.json").write_text('{"providers": {"mine": {}}}')
    plan = overlay(["pi", "-p", "hi"], TARGET, {"HOME": str(tmp_path / "home")}, tmp_path / "work")
    models = json.loads(plan.files["pi/models.json"])
    assert set(models["providers"]) == {"mine", "homeport"}
    assert models["providers"]["homeport"]["compat"] == {"sendSessionAffinityHeaders": True}
    assert plan.links == {"pi/settings.json": home / "settings.json", "pi/sessions": home / "sessions"}
    assert plan.environment["PI_CODING_AGENT_DIR"] == str(tmp_path / "work" / "pi")
    assert plan.command == ("pi", "--provider", "homeport", "--model", "tiny", "-p", "hi")


def test_a_key_for_the_proxy_replaces_the_users_own_and_without_one_they_stay(tmp_path: Path) -> None:
    own = {"OPENAI_API_KEY": "sk-mine", "ANTHROPIC_API_KEY": "sk-ant"}
    bare = overlay(["x"], TARGET, own, tmp_path).environment
    assert bare["OPENAI_API_KEY"] == "sk-mine"
    assert "ANTHROPIC_AUTH_TOKEN" not in bare
    keyed = Target(TARGET.url, TARGET.models, "tiny", key="hp-key")
    assert overlay(["x"], keyed, own, tmp_path).environment["OPENAI_API_KEY"] == "hp-key"
    assert overlay(["x"], keyed, own, tmp_path).environment["ANTHROPIC_AUTH_TOKEN"] == "hp-key"


def record(session: str, ts: float, **changes: Any) -> dict[str, Any]:
    tokens = {"prompt": 1000, "cached": 900}
    base = {"session": session, "ts": ts, "kind": "main", "backend": "d0", "decision": "home", "tokens": tokens}
    return {**base, "miss_causes": {"new": 60, "evicted": 40}, **changes}


def test_the_report_counts_sessions_since_the_start() -> None:
    newest_first = [
        record("b", 30.0, tokens={"prompt": None, "cached": None}),
        record("a", 20.0, kind="side"),
        record("a", 19.0, backend="d1", decision="spill"),
        record("a", 10.0, decision="placed"),
        record("old", 5.0),
        {"session": None, "ts": 40.0},
        {"ts": "odd"},
    ]
    report = report_of(newest_first, began_s=10.0)
    a, b = report.sessions
    assert (a.session, a.requests, a.side_requests) == ("a", 2, 1)
    assert (a.cached_tokens, a.prompt_tokens, a.cached_share) == (1800, 2000, 0.9)
    assert a.backends == {"d0": 1, "d1": 1}
    assert a.lost == {"evicted": 80}
    assert (b.cached_tokens, b.cached_share) == (None, None), "not reported is not zero"
    assert "not reported" in str(report)
    assert "  a  2 requests and 1 on the side, 1 on d0, 1 on d1 (1 placed, 1 away while home was busy)  1,800" in str(
        report
    )
    assert "\n      computed again: 80 tokens (the engine had dropped them)\n" in str(report)
    assert "  b  1 request on d0 (1 at home)  cached: not reported" in str(report)
    assert "1,800 of 2,000 prompt tokens cached (90.0%)" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["sessions"][0]["decisions"] == {"placed": 1, "spill": 1}
    assert "no request reached" in str(report_of([], 0.0))


class _Proxy(BaseHTTPRequestHandler):
    """A proxy that serves one model and remembers one request."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            document: Any = {"object": "list", "data": [{"id": "claude-*"}, {"id": "tiny", "max_model_len": 8192}]}
        else:
            document = {"decisions": [record("abc", time.time() + 1)]}
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def proxy() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def wrap(proxy: str, *words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HOMEPORT, "wrap", "--url", proxy, *words], capture_output=True, text=True, timeout=60, **how)


def test_exit_status_output_and_environment_are_the_childs(proxy: str) -> None:
    code = "import os, sys; print(os.environ['OPENAI_BASE_URL'], sys.stdin.read()); sys.exit(7)"
    done = wrap(proxy, "--", sys.executable, "-c", code, input="in")
    assert done.returncode == 7
    assert done.stdout == f"{proxy}/v1 in\n"
    assert "900 of 1,000 prompt tokens cached (90.0%)" in done.stderr


def test_the_report_as_json_and_not_at_all(proxy: str) -> None:
    quiet = wrap(proxy, "--no-report", "--", sys.executable, "-c", "")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    report = json.loads(wrap(proxy, "--json", "--", sys.executable, "-c", "").stderr)
    assert report["sessions"][0]["backends"] == {"d0": 1}


@pytest.mark.parametrize("loads", [True, False])
def test_a_plugin_that_was_not_loaded_is_told(proxy: str, tmp_path: Path, loads: bool) -> None:
    """OpenCode skips a plugin that fails to load without a word."""
    fake = tmp_path / "opencode"
    sign = tmp_path / "data" / "loaded.json"
    sign.parent.mkdir()
    fake.write_text(f"#!/bin/sh\n{f'echo > {sign}' if loads else ''}\n")
    fake.chmod(0o755)
    variables = {"HOMEPORT_OPENCODE_DATA": str(sign.parent), "HOMEPORT_OPENCODE_PLUGIN": "/p/index.js"}
    done = wrap(proxy, "--", str(fake), env={**os.environ, **variables})
    assert done.returncode == 0
    assert ("the opencode plugin was not loaded" in done.stderr) is not loads


def test_what_pi_leaves_in_its_sessions_outlives_the_run(proxy: str, tmp_path: Path) -> None:
    fake = tmp_path / "pi"
    fake.write_text('#!/bin/sh\necho told > "$PI_CODING_AGENT_DIR/sessions/one"\n')
    fake.chmod(0o755)
    done = wrap(proxy, "--no-report", "--", str(fake), env={**os.environ, "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".pi" / "agent" / "sessions" / "one").read_text() == "told\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_child_and_its_end_is_ours(proxy: str, number: signal.Signals) -> None:
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "try: print('up', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt: sys.exit(6)\n"
    )
    command = [HOMEPORT, "wrap", "--url", proxy, "--", sys.executable, "-c", code]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        # a terminal sends Ctrl-C to the whole group, a supervisor's SIGTERM goes to us alone
        if number is signal.SIGINT:
            os.killpg(child.pid, number)
        else:
            os.kill(child.pid, number)
        assert child.wait(30) == (6 if number is signal.SIGINT else 5)


def test_a_child_ended_by_a_signal_is_told_as_shells_do(proxy: str) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert wrap(proxy, "--no-report", "--", sys.executable, "-c", code).returncode == 137


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "http://127.0.0.1:9", "--", "true"], "no proxy answers at http://127.0.0.1:9"),
        (["--"], "say what to run"),
        (["--", "no-such-program-here"], "there is no program 'no-such-program-here'"),
    ],
)
def test_what_cannot_be_done_is_one_readable_line(proxy: str, words: list[str], said: str) -> None:
    done = wrap(proxy, *words)
    assert done.returncode == 1
    assert done.stderr.startswith("homeport: ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
