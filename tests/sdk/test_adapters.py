"""Each framework's adapter, on its example: one tool call, two turns, against a real HTTP server."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

import homeport
from homeport.session import affinity_id
from sdk.tiny_server import USAGE, Answer, Seen, TinyServer, chat_answer, serving

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model_that_asks_once(seen: Seen) -> Answer:
    """Calls the tool at the first question, answers in words after that."""
    if any(message["role"] == "tool" for message in seen.body["messages"]):
        return chat_answer("It is safe.")
    call = {"id": "call_1", "type": "function", "function": {"name": "water_level", "arguments": '{"gauge":"north"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = {
        "id": "c", "object": "chat.completion", "created": 1, "model": "m", "usage": USAGE,
        "choices": [{"index": 0, "finish_reason": "tool_calls", "message": message}],
    }  # fmt: skip
    return Answer([json.dumps(body).encode()])


def check(server: TinyServer, session_id: str) -> None:
    assert len(server.seen) == 3
    assert {seen.headers["x-session-affinity"] for seen in server.seen} == {affinity_id("", session_id)}
    report = homeport.report(session_id)
    assert report.requests == 3
    assert report.cached_tokens == 3 * 1024
    assert not homeport.failures()


async def test_openai_agents() -> None:
    with serving(model_that_asks_once) as server:
        assert await example("with_openai_agents").run(server.base_url, "m", "agents-1") == "It is safe."
        check(server, "agents-1")


async def test_pydantic_ai() -> None:
    with serving(model_that_asks_once) as server:
        assert await example("with_pydantic_ai").run(server.base_url, "m", "pydantic-1") == "It is safe."
        check(server, "pydantic-1")


def test_langgraph_thread_is_the_session() -> None:
    with serving(model_that_asks_once) as server:
        assert example("with_langgraph").run(server.base_url, "m", "graph-1") == "It is safe."
        check(server, "graph-1")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_litellm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download of a price list at import
    litellm = pytest.importorskip("litellm")
    with serving(model_that_asks_once) as server:
        assert example("with_litellm").run(server.base_url, "m", "litellm-1") == "It is safe."
        check(server, "litellm-1")
    litellm.client_session.close()
    litellm.client_session = litellm.aclient_session = None
