"""Small agent conversations for the explainer's tests: chat, Messages and Responses bodies, and how they grow."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

Body = dict[str, Any]

GUIDE = "You look after a harbour. " + "Answer in one sentence; say only what a tool has shown. " * 8


def tool(name: str, description: str = "", **properties: str) -> Body:
    """A chat tool with string parameters."""
    schema = {
        "type": "object",
        "properties": {one: {"type": kind} for one, kind in properties.items()},
        "required": list(properties),
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description or f"Use {name}.", "parameters": schema},
    }


def flat(name: str, description: str = "") -> Body:
    """A Messages tool."""
    return {
        "name": name,
        "description": description or f"Use {name}.",
        "input_schema": {"type": "object", "properties": {"gauge": {"type": "string"}}},
    }


def chat(model: str = "smollm2", system: str = GUIDE, **more: Any) -> Body:
    """A chat request in mid-conversation: system text, three tools, one tool call and its result."""
    return {
        "model": model,
        "tools": [
            tool("read", gauge="string", day="string"),
            tool("search", word="string"),
            tool("warn", text="string"),
        ],
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": "How high is the water at the north gauge?"},
            {
                "role": "assistant",
                "content": "I will look.",
                "reasoning_content": "The gauge has to be read first, then compared with its limit.",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "read", "arguments": '{"gauge": "north", "day": "today"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "4.31 m above chart datum\n"},
        ],
        **more,
    }


def messages(model: str = "claude-sonnet-4-5", **more: Any) -> Body:
    """The same conversation as a Messages request, without marks."""
    return {
        "model": model,
        "max_tokens": 100,
        "tools": [flat("read"), flat("search"), flat("warn")],
        "system": [{"type": "text", "text": GUIDE}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "How high is the water at the north gauge?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Read it first.", "signature": "c2ln"},
                    {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"gauge": "north"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "4.31 m"}],
            },
        ],
        **more,
    }


def responses(model: str = "gpt-5.6", **more: Any) -> Body:
    """The same conversation as a Responses request."""
    return {
        "model": model,
        "instructions": GUIDE,
        "tools": [{"type": "function", "name": "read", "description": "Use read.", "parameters": {"type": "object"}}],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "How high is the water?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA-" + "x" * 80},
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "read", "arguments": '{"gauge": "n"}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "4.31 m"},
        ],
        **more,
    }


def mark(block: Body, ttl: str | None = None) -> Body:
    """A block with a cache mark."""
    return {**block, "cache_control": {"type": "ephemeral", **({"ttl": ttl} if ttl else {})}}


def grown(body: Body, *, answer: str = "It stands at 4.31 m.", question: str = "And at the south gauge?") -> Body:
    """The conversation's next request: everything as it was, the answer and a new question."""
    later = copy.deepcopy(body)
    history = later["input" if "input" in later else "messages"]
    if "input" in later:
        history.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": answer}]})
    else:
        history.append({"role": "assistant", "content": answer})
    history.append({"role": "user", "content": question})
    return later


def edited(body: Body, edit: Callable[[Body], object]) -> Body:
    """The next request, with something in it changed."""
    later = grown(body)
    edit(later)
    return later


def usage(cached: int | None, total: int = 4000, written: int | None = None) -> Body:
    """An OpenAI usage report."""
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": total, "completion_tokens": 10, "cache_write_tokens": written, **details}
