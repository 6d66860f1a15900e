"""The prepared model is the real one: it knows a fact, and calls a tool when it must."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI

from engines.engine_kit import Pair

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "list_folder",
        "description": "Lists the files of a folder.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "maxLength": 40}},
            "required": ["path"],
            "additionalProperties": False,
        },
    },
}


def test_it_knows_the_capital_of_france(pair: Pair, client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=pair.model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=12,
        temperature=0,
    )
    assert "Paris" in (answer.choices[0].message.content or "")


def test_a_tool_is_called_by_its_schema(pair: Pair, client: OpenAI) -> None:
    said: list[Any] = [{"role": "user", "content": "Which files are in /srv?"}]
    answer = client.chat.completions.create(
        model=pair.model, messages=said, tools=[TOOL], tool_choice="required", max_tokens=64, temperature=0
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    for call in calls:
        assert call.type == "function"
        assert call.function.name == "list_folder"
        assert set(json.loads(call.function.arguments)) == {"path"}


def test_the_history_of_tools_is_part_of_the_prompt(pair: Pair) -> None:
    asked = [{"role": "user", "content": "Which files are in /srv?"}]
    call = {"id": "c1", "type": "function", "function": {"name": "list_folder", "arguments": '{"path": "/srv"}'}}
    history = [
        *asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt, b.txt"},
    ]

    def tokens(messages: list[Any], **more: Any) -> list[int]:
        found: list[int] = pair.ask_engine("d0", "/tokenize", {"model": pair.model, "messages": messages, **more})[
            "tokens"
        ]
        return found

    plain, with_tools, longer = tokens(asked), tokens(asked, tools=[TOOL]), tokens(history, tools=[TOOL])
    assert len(with_tools) > len(plain) + 40
    assert longer[: len(with_tools)] == with_tools
    assert len(longer) > len(with_tools) + 20
