"""Each host hears what it wants to hear: header, body key, both, or nothing."""

from __future__ import annotations

import json

import httpx2
import pytest

from homeport.call import Settings, Wire, plan
from homeport.providers import OWN, PROVIDERS, Provider, _registered, provider_for, register
from homeport.session import Session, affinity_id, affinity_uuid
from homeport.transport import attach
from sdk.tiny_server import chat, serving

SESSION = Session("s")
ID, UUID = affinity_id("", "s"), affinity_uuid("", "s")
KEY = {"prompt_cache_key": ID}


@pytest.mark.parametrize(
    ("url", "headers", "members"),
    [
        ("https://api.openai.com/v1/chat/completions", {}, KEY),
        ("https://api.openai.com/v1/responses", {}, KEY),
        ("https://eu.api.openai.com/v1/responses", {}, KEY),
        (
            "https://chatgpt.com/backend-api/codex/responses",
            {"session-id": UUID, "session_id": UUID, "thread-id": UUID},
            KEY,
        ),
        ("https://res.openai.azure.com/openai/v1/chat/completions", {}, KEY),
        ("https://res.openai.azure.com/openai/deployments/d/chat/completions?api-version=2024-06-01", {}, {}),
        ("https://api.anthropic.com/v1/messages", {}, {}),
        ("https://us-east5-aiplatform.googleapis.com/v1/p/messages", {"x-vertex-ai-session-id": ID}, {}),
        ("https://generativelanguage.googleapis.com/v1beta/openai/chat/completions", {}, {}),
        ("https://api.deepseek.com/chat/completions", {}, {}),
        ("https://api.moonshot.ai/v1/chat/completions", {}, KEY),
        ("https://api.kimi.com/coding/v1/messages", {}, {}),
        ("https://api.z.ai/api/paas/v4/chat/completions", {"x-session-id": ID}, {}),
        ("https://api.minimax.io/v1/chat/completions", {}, {}),
        ("https://dashscope.aliyuncs.com/compatible-mode/v1/chat/completions", {}, {}),
        ("https://api.mistral.ai/v1/chat/completions", {"x-affinity": ID}, KEY),
        ("https://api.x.ai/v1/chat/completions", {"x-grok-conv-id": ID}, {}),
        ("https://api.x.ai/v1/responses", {}, KEY),
        ("https://api.groq.com/openai/v1/chat/completions", {}, {}),
        ("https://api.fireworks.ai/inference/v1/chat/completions", {"x-session-affinity": ID}, KEY),
        ("https://api.deepinfra.com/v1/openai/chat/completions", {"x-session-affinity": ID}, {}),
        ("https://api.together.xyz/v1/chat/completions", {}, {}),
        ("https://api.cloudflare.com/client/v4/accounts/a/ai/v1/chat/completions", {"x-session-affinity": ID}, {}),
        ("https://openrouter.ai/api/v1/chat/completions", {"x-session-id": ID}, {}),
        ("https://api.cerebras.ai/v1/chat/completions", {}, KEY),
        ("https://ai-gateway.vercel.sh/v1/chat/completions", {}, {}),
        ("https://opencode.ai/zen/v1/chat/completions", {"x-opencode-session": ID}, {}),
        ("http://127.0.0.1:8080/v1/chat/completions", {"x-session-affinity": ID}, {}),
        ("http://vllm.internal/v1/messages", {"x-session-affinity": ID}, {}),
        # a name that only ends or begins alike is another host
        ("https://evil-api.openai.com.example.org/v1/chat/completions", {"x-session-affinity": ID}, {}),
        ("https://notopenrouter.ai/v1/chat/completions", {"x-session-affinity": ID}, {}),
    ],
)
def test_by_host(url: str, headers: dict[str, str], members: dict[str, str]) -> None:
    content = b'{"model":"m"}'
    planned = plan(Wire("POST", url, {}, content), Settings(mode="hint", session=SESSION))
    assert planned is not None
    sent = planned[0]
    assert sent.headers == headers
    assert json.loads(sent.content) == {"model": "m", **members}
    if not members:
        assert sent.content is content


@pytest.mark.parametrize("key", ["prompt_cache_key", "promptCacheKey"])
def test_the_callers_own_key_wins(key: str) -> None:
    content = json.dumps({"model": "m", key: "mine"}).encode()
    wire = Wire("POST", "https://api.openai.com/v1/responses", {}, content)
    planned = plan(wire, Settings(mode="hint", session=SESSION))
    assert planned is not None
    assert planned[0].content is content


@pytest.mark.parametrize(
    "url",
    [
        "https://api.mistral.ai/v1/chat/completions",
        "https://res.openai.azure.com/openai/deployments/d/chat/completions?api-version=2024-06-01",
    ],
)
def test_a_host_that_refuses_unknown_members_is_not_asked_for_usage(url: str) -> None:
    content = b'{"model":"m","stream":true,"prompt_cache_key":"k"}'
    planned = plan(Wire("POST", url, {}, content), Settings(mode="hint", session=SESSION))
    assert planned is not None
    assert planned[0].content is content


def test_sub_agents_share_their_parents_cache_key_where_the_head_is_shared() -> None:
    def ask(session: Session, system: str) -> str:
        body = {
            "model": "m",
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": session.id}],
        }
        wire = Wire("POST", "https://api.openai.com/v1/chat/completions", {}, json.dumps(body).encode())
        planned = plan(wire, Settings(session=session))
        assert planned is not None
        call = planned[1]
        from homeport.runtime import runtime

        runtime().keep_body(call.memory, call.body, call.document, 10)
        return json.loads(planned[0].content)["prompt_cache_key"]

    parent = ask(Session("task"), "You are an engineer." * 300)
    assert ask(Session("task/same", parent="task", kind="subagent"), "You are an engineer." * 300) == parent
    other = Session("task/other", parent="task", kind="subagent")
    assert ask(other, "You summarise." * 300) == affinity_id("", "task/other")
    assert ask(other, "You are an engineer." * 300) == affinity_id("", "task/other")  # decided once
    assert ask(Session("orphan", parent="unheard of"), "x") == affinity_id("", "unheard of")


def test_a_gateway_of_ones_own_can_be_registered() -> None:
    register(Provider("smg", ("127.0.0.1",), headers=("x-smg-routing-key",)))
    try:
        with serving(chat) as server, attach(httpx2.Client(verify=False), session="s") as client:
            client.post(f"{server.base_url}/chat/completions", json={"model": "m"})
            assert server.last.headers["x-smg-routing-key"] == ID
            assert "x-session-affinity" not in server.last.headers
    finally:
        _registered.clear()


def test_the_table_is_sound() -> None:
    assert len({provider.name for provider in PROVIDERS}) == len(PROVIDERS)
    for provider in PROVIDERS:
        assert provider.hosts
        assert all(name == name.lower() for name in (*provider.hosts, *provider.headers))
    assert provider_for("") is provider_for("http://localhost/v1") is OWN
