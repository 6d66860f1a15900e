"""Each framework's adapter, on its example: one tool call, two turns, against a real HTTP server."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator
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


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """LiteLLM as it was imported, whatever a test installs into it."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download of a price list at import
    module = pytest.importorskip("litellm")
    from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler, HTTPHandler

    for handler in (HTTPHandler, AsyncHTTPHandler):
        monkeypatch.setattr(handler, "create_client", handler.create_client)
    monkeypatch.setattr(module.in_memory_llm_clients_cache, "cache_dict", {})
    monkeypatch.setattr(module.in_memory_llm_clients_cache, "ttl_dict", {})
    yield module
    if module.client_session is not None:
        module.client_session.close()
    module.client_session = module.aclient_session = None


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_litellm(litellm: ModuleType) -> None:
    with serving(model_that_asks_once) as server:
        assert example("with_litellm").run(server.base_url, "m", "litellm-1") == "It is safe."
        check(server, "litellm-1")


def anthropic_answer(_: Seen) -> Answer:
    usage = {"input_tokens": 10, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 0, "output_tokens": 3}
    body = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "stop_reason": "end_turn",
        "content": [{"type": "text", "text": "It is safe."}], "usage": usage,
    }  # fmt: skip
    return Answer([json.dumps(body).encode()])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("used_before", [False, True])
async def test_litellm_providers_with_a_handler_of_their_own(litellm: ModuleType, used_before: bool) -> None:
    """Anthropic's requests do not go over the shared clients; handlers made before and after are attached."""
    from homeport.adapters import litellm as adapter

    question = {
        "model": "anthropic/claude-opus-4-5",
        "messages": [{"role": "user", "content": "hi"}],
        "api_key": "-",
        "max_tokens": 8,
    }
    with serving(anthropic_answer) as server:
        question["api_base"] = server.root
        if used_before:
            await asyncio.to_thread(litellm.completion, **question)
            await litellm.acompletion(**question)
        adapter.install()
        adapter.install()
        with homeport.session("handlers"):
            await asyncio.to_thread(litellm.completion, **question)
            await litellm.acompletion(**question)
        report = homeport.report("handlers")
        names = [seen.headers.get("x-session-affinity") for seen in server.seen]
        await litellm.close_litellm_async_clients()
    assert names == [None] * (2 if used_before else 0) + [affinity_id("", "handlers")] * 2
    assert (report.requests, report.input_tokens, report.cached_tokens) == (2, 200, 180)
    assert not homeport.failures()
