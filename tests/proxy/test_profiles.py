"""Harness profiles at the proxy: what changes from run to run is left out, everything else stays byte for byte."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from homeport_proxy import config as configuration
from homeport_proxy.document import Document
from homeport_proxy.profiles import calmed, rules_for
from homeport_proxy.splice import edit, raw_members
from proxy.scripted_engines import ScriptedEngine, backends, chat, proxy_for

QWEN, CLAUDE = "QwenCode/0.24.4 (linux; x64)", "claude-cli/2.1.332 (external, sdk-cli)"
BOTH = ["claude-code", "qwen-code"]
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.4fb; cc_entrypoint=sdk-cli;"}
KEEPER = {"type": "text", "text": "You keep a harbour.", "cache_control": {"type": "ephemeral"}}


def qwen(status: str, *more: str) -> bytes:
    """A body of Qwen Code with that status, spelled in a way of its own, with more messages behind."""
    system = f"You keep a harbour.\n\nGit snapshot at conversation start.\n```text\n{status}```\n\n# auto memory\n"
    messages = [json.dumps({"role": "system", "content": system}), *more]
    return ('{ "model" : "m", "messages": [ ' + " ,\n ".join(messages) + ' ], "temperature": 1.0}').encode()


def after(body: bytes, agent: str | None, wanted: list[str] | None = None) -> bytes:
    raws = raw_members(body)
    return edit(body, calmed(Document(raws), rules_for(BOTH if wanted is None else wanted, agent)))


LATER = '{"content":"caf\\u00e9 ```text\\ngit: M a\\n``` ", "role":"user", "n":1.50}'


def test_another_git_status_is_the_same_prompt_and_history_is_untouched() -> None:
    one = after(qwen("git: Current branch: main\ngit: Status:\ngit: M a.py\n", LATER, LATER), QWEN)
    two = after(qwen("git: Current branch: main\ngit: (clean)\n", LATER, LATER), QWEN)
    assert one == two
    assert b"git: " not in one[: one.index(b"caf")]
    assert b"`git status`" in one
    assert one.endswith((f' ,\n {LATER} ,\n {LATER} ], "temperature": 1.0}}').encode())


def test_twice_is_once() -> None:
    once = after(qwen("git: (clean)\n", LATER), QWEN)
    assert after(once, QWEN) is once


@pytest.mark.parametrize(
    ("agent", "wanted"),
    [(None, BOTH), ("openai-python/2", BOTH), (CLAUDE, BOTH), (QWEN, []), (QWEN, ["claude-code"])],
)
def test_nobody_elses_request_is_changed(agent: str | None, wanted: list[str]) -> None:
    body = qwen("git: (clean)\n", LATER)
    assert after(body, agent, wanted) is body


@pytest.mark.parametrize(
    "more",
    [
        {"messages": "no list"},
        {"messages": []},
        {"messages": [{"role": "user", "content": "```text\ngit: M a\n```"}]},
        {"messages": [{"role": "system", "content": "no snapshot"}, 7]},
        {"messages": [7]},
        {"system": 7, "input": [None]},
    ],
)
def test_text_of_another_form_is_left_alone(more: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", **more}).encode()
    assert after(body, QWEN) is body


def test_the_billing_block_goes_and_the_cache_mark_stays() -> None:
    body = json.dumps({"system": [BILLING, KEEPER], "messages": [{"role": "user", "content": "Hi"}]}).encode()
    assert json.loads(after(body, CLAUDE))["system"] == [KEEPER]


@pytest.mark.parametrize(("profiles", "distinct"), [(["qwen-code"], 1), ([], 2)])
async def test_the_engine_gets_the_calmed_prompt(profiles: list[str], distinct: int) -> None:
    """Two runs with another git status: one prompt at the engine; without the profile two."""
    engine = await ScriptedEngine(chat).start()
    async with (
        proxy_for(backends(engine, profiles=profiles)) as (url, _),
        aiohttp.ClientSession(headers={"user-agent": QWEN, "content-type": "application/json"}) as http,
    ):
        for status in ("git: (clean)\n", "git: M a.py\n"):
            body = qwen(status, '{"role":"user","content":"Do it."}')
            async with http.post(url + "/v1/chat/completions", data=body) as answer:
                assert answer.status == 200
        prompts = [seen.body["messages"][0]["content"] for seen in engine.seen if seen.path.endswith("/completions")]
        assert len(prompts) == 2
        assert len(set(prompts)) == distinct


@pytest.mark.parametrize("name", ["opencode", "qwen"])
def test_a_profile_that_does_nothing_here_is_refused(name: str) -> None:
    with pytest.raises(configuration.ConfigError) as caught:
        configuration.parse(f"regions: {{r: {{backends: [{{name: a, url: 'http://h'}}]}}}}\nprofiles: [{name}]")
    (fault,) = caught.value.errors
    assert fault.startswith("profiles")
    assert "claude-code, qwen-code" in fault
