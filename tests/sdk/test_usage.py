"""Every provider's usage report, streamed and not, becomes one count; what is not reported stays unknown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeport.usage import Usage, UsageMeter

Counts = tuple[int | None, int | None, int | None, int | None]


def counts(usage: Usage) -> Counts:
    return usage.input_tokens, usage.cached_tokens, usage.cache_write_tokens, usage.output_tokens


def chat(**usage: Any) -> dict[str, Any]:
    return {
        "object": "chat.completion",
        "choices": [],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 20, **usage},
    }


SHAPES: dict[str, tuple[Any, Counts]] = {
    "openai chat": (
        chat(prompt_tokens_details={"cached_tokens": 768, "cache_write_tokens": 128}),
        (1000, 768, 128, 20),
    ),
    "openai chat, reported zero": (chat(prompt_tokens_details={"cached_tokens": 0}), (1000, 0, None, 20)),
    "openai chat, details null": (chat(prompt_tokens_details=None), (1000, None, None, 20)),
    "openai responses": (
        {
            "object": "response",
            "usage": {
                "input_tokens": 1000,
                "input_tokens_details": {"cached_tokens": 512, "cache_write_tokens": 256},
                "output_tokens": 20,
                "output_tokens_details": {"reasoning_tokens": 5},
                "total_tokens": 1020,
            },
        },
        (1000, 512, 256, 20),
    ),
    "openai embeddings": ({"usage": {"prompt_tokens": 7, "total_tokens": 7}}, (7, None, None, 0)),
    "anthropic": (
        {
            "type": "message",
            "usage": {
                "input_tokens": 50,
                "cache_read_input_tokens": 900,
                "cache_creation_input_tokens": 50,
                "output_tokens": 20,
            },
        },
        (1000, 900, 50, 20),
    ),
    "anthropic without cache fields": ({"usage": {"input_tokens": 50, "output_tokens": 2}}, (50, None, None, 2)),
    "anthropic, fields null": (
        {"usage": {"input_tokens": 50, "cache_read_input_tokens": None, "output_tokens": 2}},
        (50, None, None, 2),
    ),
    "bedrock converse": (
        {
            "usage": {
                "inputTokens": 50,
                "outputTokens": 20,
                "totalTokens": 1020,
                "cacheReadInputTokens": 900,
                "cacheWriteInputTokens": 50,
                "cacheDetails": [{"ttl": "5m", "inputTokens": 30}, {"ttl": "1h", "inputTokens": 20}],
            }
        },
        (1000, 900, 50, 20),
    ),
    "bedrock converse stream": (
        {"metadata": {"usage": {"inputTokens": 10, "outputTokens": 2, "totalTokens": 12}}},
        (10, None, None, 2),
    ),
    "bedrock invoke stream": (
        {
            "type": "message_stop",
            "amazon-bedrock-invocationMetrics": {
                "inputTokenCount": 10,
                "outputTokenCount": 2,
                "cacheReadInputTokenCount": 90,
                "cacheWriteInputTokenCount": 0,
            },
        },
        (100, 90, 0, 2),
    ),
    "gemini": (
        {
            "usageMetadata": {
                "promptTokenCount": 1000,
                "cachedContentTokenCount": 800,
                "candidatesTokenCount": 15,
                "thoughtsTokenCount": 5,
                "totalTokenCount": 1020,
            }
        },
        (1000, 800, None, 20),
    ),
    "gemini, python names": (
        {"usage_metadata": {"prompt_token_count": 1000, "candidates_token_count": 20}},
        (1000, None, None, 20),
    ),
    "deepseek": (chat(prompt_cache_hit_tokens=640, prompt_cache_miss_tokens=360), (1000, 640, None, 20)),
    "deepseek, hit and miss alone": (
        {"usage": {"prompt_cache_hit_tokens": 640, "prompt_cache_miss_tokens": 360, "completion_tokens": 20}},
        (1000, 640, None, 20),
    ),
    "moonshot, top level": (chat(cached_tokens=512), (1000, 512, None, 20)),
    "zhipu": (chat(prompt_tokens_details={"cached_tokens": 43}), (1000, 43, None, 20)),
    "minimax, anthropic api": (
        {"usage": {"input_tokens": 488, "cache_read_input_tokens": 512, "output_tokens": 20}},
        (1000, 512, None, 20),
    ),
    "dashscope, explicit cache": (
        chat(
            prompt_tokens_details={
                "cached_tokens": 0,
                "cache_creation_input_tokens": 900,
                "cache_creation": {"ephemeral_5m_input_tokens": 900},
            }
        ),
        (1000, 0, 900, 20),
    ),
    "dashscope, own api": (
        {"usage": {"input_tokens": 1000, "output_tokens": 20, "prompt_tokens_details": {"cached_tokens": 256}}},
        (1000, 256, None, 20),
    ),
    "xai, native": (chat(prompt_text_tokens=1000, cached_prompt_text_tokens=300), (1000, 300, None, 20)),
    "groq, last chunk": (
        {"choices": [], "x_groq": {"usage": {"prompt_tokens": 9, "completion_tokens": 1}}},
        (9, None, None, 1),
    ),
    "openrouter": (
        chat(prompt_tokens_details={"cached_tokens": 10, "cache_write_tokens": 5}, cost=0.1),
        (1000, 10, 5, 20),
    ),
    "vllm": (chat(prompt_tokens_details={"cached_tokens": 992, "created_cache_tokens": 8}), (1000, 992, 8, 20)),
    "vllm without details": (chat(), (1000, None, None, 20)),
    "vllm messages": (
        {
            "usage": {
                "input_tokens": 8,
                "output_tokens": 20,
                "cache_read_input_tokens": 992,
                "cache_creation_input_tokens": 0,
            }
        },
        (1000, 992, 0, 20),
    ),
    "llama.cpp": (
        {"content": "x", "timings": {"cache_n": 236, "prompt_n": 1, "predicted_n": 35}},
        (237, 236, None, 35),
    ),
    "llama.cpp, openai path": (
        {**chat(), "timings": {"cache_n": 900, "prompt_n": 100, "predicted_n": 20}},
        (1000, 900, None, 20),
    ),
    "ollama": (
        {"done": True, "prompt_eval_count": 1000, "eval_count": 20, "prompt_eval_cached_count": 700},
        (1000, 700, None, 20),
    ),
    "lm studio": (chat(), (1000, None, None, 20)),
    "litellm": (
        chat(prompt_tokens_details={"cached_tokens": 900}, cache_read_input_tokens=900, cache_creation_input_tokens=60),
        (1000, 900, 60, 20),
    ),
    "langchain": (
        {
            "usage_metadata": {
                "input_tokens": 1000,
                "output_tokens": 20,
                "total_tokens": 1020,
                "input_token_details": {"cache_read": 900, "cache_creation": 50},
            }
        },
        (1000, 900, 50, 20),
    ),
    "ai sdk": (
        {
            "usage": {
                "inputTokens": 1000,
                "outputTokens": 20,
                "inputTokenDetails": {"noCacheTokens": 50, "cacheReadTokens": 900, "cacheWriteTokens": 50},
            }
        },
        (1000, 900, 50, 20),
    ),
    "ai sdk, older": (
        {"usage": {"inputTokens": 1000, "outputTokens": 20, "cachedInputTokens": 900}},
        (1000, 900, None, 20),
    ),
    "ours": (
        {"input_tokens": 1000, "cached_tokens": 900, "cache_write_tokens": None, "output_tokens": 20},
        (1000, 900, None, 20),
    ),
    "bare usage": ({"prompt_tokens": 10, "completion_tokens": 2}, (10, None, None, 2)),
    "responses event": (
        {
            "type": "response.completed",
            "response": {
                "usage": {"input_tokens": 10, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 8}}
            },
        },
        (10, 8, None, 2),
    ),
    "counted additively in an inclusive shape": (
        chat(prompt_tokens=100, prompt_tokens_details={"cached_tokens": 900}),
        (1000, 900, None, 20),
    ),
    "nothing": ({}, (None, None, None, None)),
    "usage null": ({"usage": None, "choices": []}, (None, None, None, None)),
    "no numbers": (chat(prompt_tokens="many", completion_tokens=True), (None, None, None, None)),
    "negative": (chat(prompt_tokens=-1), (None, None, None, 20)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape(name: str) -> None:
    response, expected = SHAPES[name]
    assert counts(Usage.parse(response)) == expected
    assert counts(Usage.parse(_as_object(response))) == expected
    assert counts(Usage.parse(json.dumps(response))) == expected
    assert counts(Usage.parse(b"data: " + json.dumps(response).encode())) == expected


def _as_object(value: Any) -> Any:
    """The same as an SDK's object: members as attributes."""
    if isinstance(value, dict) and all(name.isidentifier() for name in value):
        return SimpleNamespace(**{name: _as_object(member) for name, member in value.items()})
    if isinstance(value, dict):
        return {name: _as_object(member) for name, member in value.items()}
    return [_as_object(item) for item in value] if isinstance(value, list) else value


def test_openai_objects() -> None:
    from openai.types import CompletionUsage
    from openai.types.completion_usage import PromptTokensDetails

    details = PromptTokensDetails(cached_tokens=4)
    usage = CompletionUsage(prompt_tokens=5, completion_tokens=1, total_tokens=6, prompt_tokens_details=details)
    assert counts(Usage.parse(usage)) == (5, 4, None, 1)
    assert counts(Usage.parse(SimpleNamespace(usage=usage))) == (5, 4, None, 1)


def test_mistrals_extra_field_of_a_pydantic_model() -> None:
    from openai.types import CompletionUsage

    usage = CompletionUsage.model_validate(
        {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10, "cached_tokens": 8}
    )
    assert counts(Usage.parse(usage)) == (9, 8, None, 1)


def test_anthropic_objects() -> None:
    from anthropic.types import CacheCreation
    from anthropic.types import Usage as AnthropicUsage

    usage = AnthropicUsage(
        input_tokens=5,
        output_tokens=1,
        cache_read_input_tokens=90,
        cache_creation_input_tokens=5,
        cache_creation=CacheCreation(ephemeral_1h_input_tokens=3, ephemeral_5m_input_tokens=2),
    )
    parsed = Usage.parse(usage)
    assert counts(parsed) == (100, 90, 5, 1)
    assert parsed.cache_write_ttl_tokens == {"1h": 3, "5m": 2}


def test_pydantic_ai_fills_with_zero_what_it_was_not_told() -> None:
    from pydantic_ai.usage import RequestUsage

    assert counts(Usage.parse(RequestUsage(input_tokens=5, output_tokens=1))) == (5, None, None, 1)
    assert counts(Usage.parse(RequestUsage(input_tokens=5, cache_read_tokens=3, output_tokens=1))) == (5, 3, None, 1)


def test_lifetimes_of_cache_writes() -> None:
    responses = {
        "input_tokens": 1000,
        "output_tokens": 1,
        "input_tokens_details": {
            "cached_tokens": 0,
            "cache_write_tokens": 900,
            "cache_write_tokens_details": {"ttl_30m_tokens": 600, "ttl_12h_tokens": 300},
        },
    }
    assert Usage.parse(responses).cache_write_ttl_tokens == {"30m": 600, "12h": 300}
    assert Usage.parse(SHAPES["bedrock converse"][0]).cache_write_ttl_tokens == {"5m": 30, "1h": 20}
    only_split = {"input_tokens": 10, "output_tokens": 1, "cache_creation": {"ephemeral_1h_input_tokens": 90}}
    assert counts(Usage.parse(only_split)) == (100, None, 90, 1)


def test_fireworks_reports_in_headers() -> None:
    headers = {"Fireworks-Prompt-Tokens": "1000", "fireworks-cached-prompt-tokens": "900"}
    assert counts(Usage.parse({}, headers=headers)) == (1000, 900, None, None)
    assert counts(Usage.parse(chat(prompt_tokens=7), headers=headers)) == (7, 900, None, 20)
    assert counts(Usage.parse({}, headers={"fireworks-prompt-tokens": "lots"})) == (None, None, None, None)


def test_who_normalised_may_be_said() -> None:
    anthropic = {"input_tokens": 1000, "cache_read_input_tokens": 900, "output_tokens": 20}
    assert counts(Usage.parse(anthropic, counting="inclusive")) == (1000, 900, None, 20)
    assert counts(Usage.parse(anthropic)) == (1900, 900, None, 20)


def test_a_server_that_leaves_zero_out() -> None:
    assert Usage.parse(chat()).cached_tokens is None
    assert Usage.parse(chat(), absent_is_zero=True).cached_tokens == 0
    assert Usage.parse({}, absent_is_zero=True).cached_tokens is None


def test_service_tier() -> None:
    assert Usage.parse({**chat(), "service_tier": "priority"}).service_tier == "priority"
    assert (
        Usage.parse({"usage": {"input_tokens": 1, "output_tokens": 1, "service_tier": "batch"}}).service_tier == "batch"
    )


@dataclass(frozen=True)
class Stream:
    events: list[Any]
    expected: Counts


STREAMS = {
    "anthropic: start, cumulative deltas": Stream(
        [
            {
                "type": "message_start",
                "message": {
                    "usage": {
                        "input_tokens": 3,
                        "cache_read_input_tokens": 90,
                        "cache_creation_input_tokens": 7,
                        "output_tokens": 1,
                    }
                },
            },
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hi"}},
            {"type": "message_delta", "usage": {"output_tokens": 12}},
            {"type": "message_delta", "usage": {"output_tokens": 30, "input_tokens": 3, "cache_read_input_tokens": 90}},
        ],
        (100, 90, 7, 30),
    ),
    "vllm: usage with the finish chunk, then again and complete": Stream(
        [
            {"choices": [{"delta": {"content": "a"}}], "usage": None},
            {"choices": [{"finish_reason": "stop"}], "usage": {"prompt_tokens": 100, "completion_tokens": 5}},
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": 100,
                    "completion_tokens": 6,
                    "prompt_tokens_details": {"cached_tokens": 96},
                },
            },
        ],
        (100, 96, None, 6),
    ),
    "continuous usage: the last one wins": Stream(
        [{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": n}} for n in range(1, 5)],
        (9, None, None, 4),
    ),
    "a later chunk without details keeps what was said": Stream(
        [
            chat(prompt_tokens_details={"cached_tokens": 64}),
            chat(completion_tokens=21),
        ],
        (1000, 64, None, 21),
    ),
    "responses": Stream(
        [
            {"type": "response.created", "response": {"usage": None}},
            {"type": "response.output_text.delta", "delta": "x"},
            SHAPES["responses event"][0],
        ],
        (10, 8, None, 2),
    ),
    "nothing said": Stream([{"choices": [], "usage": None}], (None, None, None, None)),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("encode", [lambda e: e, json.dumps, lambda e: f"data: {json.dumps(e)}\n\n", _as_object])
def test_streams(name: str, encode: Any) -> None:
    meter = UsageMeter()
    for event in STREAMS[name].events:
        meter.feed(encode(event))
    meter.feed("[DONE]")
    assert counts(meter.usage) == STREAMS[name].expected


def test_generated_text_about_usage_is_not_usage() -> None:
    meter = UsageMeter()
    said = {"choices": [{"delta": {"content": 'see {"usage": {"prompt_tokens": 5, "completion_tokens": 1}}'}}]}
    assert not meter.feed(json.dumps(said))
    assert not meter.usage.reported


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["usage", "prompt_tokens"]), inner),
    max_leaves=20,
)


@settings(deadline=None)
@given(json_values | st.binary() | st.text())
def test_never_raises(value: Any) -> None:
    usage = Usage.parse(value)
    assert usage.cached_tokens is None or usage.cached_tokens >= 0


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_additive_and_inclusive_agree(fresh: int, read: int, written: int, output: int) -> None:
    additive = {
        "input_tokens": fresh,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": written,
        "output_tokens": output,
    }
    inclusive = {
        "prompt_tokens": fresh + read + written,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": read, "cache_write_tokens": written},
    }
    assert Usage.parse(additive) == Usage.parse(inclusive)
    assert Usage.parse(Usage.parse(additive).to_dict()) == Usage.parse(additive)
    assert Usage.parse(additive).fresh_tokens == fresh


def test_shares() -> None:
    assert Usage(1000, 250, None, 1).cached_share == 0.25
    assert Usage(1000, None, None, 1).cached_share is None
    assert Usage(0, 0, None, 1).cached_share is None
