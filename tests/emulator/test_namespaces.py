"""Functions in namespaces, as Codex offers them: in the prompt by their flat name, called by both their names."""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from emulator.emulating import fast
from homeport_engines.emulator import Emulator, parse_rules
from homeport_engines.emulator.prompt import responses

SCHEMA = {"type": "object", "properties": {"task": {"type": "string"}}, "required": ["task"]}
SPAWN: dict[str, Any] = {"type": "function", "name": "spawn", "description": "Start one.", "parameters": SCHEMA}
TOOLS: list[Any] = [
    {"type": "function", "name": "shell", "parameters": {"type": "object"}},
    {"type": "namespace", "name": "agents", "description": "Others.", "tools": [SPAWN]},
    {"type": "web_search"},
]
CALL = {"tool_calls": [{"name": "agents__spawn", "arguments": {"task": "look"}}]}
SCRIPT = parse_rules([{"tool": "agents__spawn", "sequence": [CALL, "done"]}])


def test_the_prompt_has_the_flat_name() -> None:
    talk = responses({"input": "hi", "tools": TOOLS})
    assert [tool.name for tool in talk.tools] == ["shell", "agents__spawn"]
    assert json.loads(json.dumps(talk.tools[1].definition)) == {
        "type": "function",
        "function": {"name": "agents__spawn", "description": "Start one.", "parameters": SCHEMA},
    }


async def test_a_call_comes_back_under_both_names_and_goes_on_from_the_cache() -> None:
    async with (
        Emulator(fast(), SCRIPT) as engine,
        AsyncOpenAI(base_url=engine.url + "/v1", api_key="-") as openai,
    ):
        asked: Any = {"model": "emulated", "tools": TOOLS}
        whole = await openai.responses.create(**asked, input="Let others look. " * 40)
        call = whole.output[0]
        assert call.type == "function_call"
        assert (call.name, call.namespace, json.loads(call.arguments)) == ("spawn", "agents", {"task": "look"})
        history: list[Any] = [
            {"role": "user", "content": "Let others look. " * 40},
            call.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": call.call_id, "output": "seen"},
        ]
        async with openai.responses.stream(**asked, input=history) as stream:
            answer = await stream.get_final_response()
        assert answer.output_text == "done"
        assert answer.usage is not None
        assert answer.usage.input_tokens_details.cached_tokens >= whole.usage.input_tokens - 16  # type: ignore[union-attr]
