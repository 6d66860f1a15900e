"""Request bodies of every API, made up: tables and hypothesis strategies."""

from __future__ import annotations

import random

from hypothesis import strategies as st

WORDS = st.sampled_from(["alpha", "beta", "gamma", "Delta", "été", "海", "a b", "", "x" * 40, '{"q": "\\n"}', "🚢"])


def _schema(source: random.Random, depth: int) -> dict:
    """A JSON schema with members whose order may or may not matter."""

    def word() -> str:
        return source.choice(["a", "b", "x", "zz", "é", "_", "required", "enum", "properties"])

    def inner() -> dict:
        return _schema(source, depth - 1) if depth else {"type": "string"}

    def scalar() -> object:
        return source.choice([None, True, 0, -3, 10**20, 1.5, "beta", "alpha", "海"])

    def names() -> list[str]:
        return [word() for _ in range(source.randrange(4))]

    members = {
        "properties": lambda: {word(): inner() for _ in range(3)},
        "required": names,
        "enum": lambda: [scalar() for _ in range(3)],
        "anyOf": lambda: [inner() for _ in range(2)],
        "prefixItems": lambda: [inner() for _ in range(2)],
        "examples": lambda: [{word(): scalar() for _ in range(3)}],
        "default": lambda: {word(): scalar() for _ in range(3)},
        "dependentRequired": lambda: {word(): names() for _ in range(2)},
        "$defs": lambda: {word(): inner() for _ in range(2)},
        "items": inner,
        "description": lambda: source.choice(["b, a", "", "été"]),
    }
    chosen = source.sample(sorted(members), source.randrange(6))
    return {"type": source.choice(["object", "string", "array"]), **{name: members[name]() for name in chosen}}


# made once: drawing every member of every schema is slow, and what matters is that there are many kinds
SCHEMAS = [_schema(random.Random(seed), 2) for seed in range(300)]


def schemas() -> st.SearchStrategy[dict]:
    """One of many schemas."""
    return st.integers(0, len(SCHEMAS) - 1).map(SCHEMAS.__getitem__)


MARK = st.sampled_from([{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}])
NAMES = st.sampled_from(["read", "write", "Zoom", "mcp__git__log", "mcp__fs__read", "mcp__git__diff", "é", "a.b"])


def chat_tools() -> st.SearchStrategy[dict]:
    function = st.fixed_dictionaries(
        {"name": NAMES}, optional={"description": WORDS, "parameters": schemas(), "strict": st.booleans()}
    )
    return st.fixed_dictionaries({"type": st.just("function"), "function": function}, optional={"cache_control": MARK})


def flat_tools() -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries(
        {"type": st.just("function"), "name": NAMES, "parameters": schemas()}, optional={"description": WORDS}
    )


def anthropic_tools() -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries(
        {"name": NAMES, "input_schema": schemas()}, optional={"description": WORDS, "cache_control": MARK}
    )


BUILT_IN = st.sampled_from(
    [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5, "allowed_domains": ["b.org", "a.org"]},
        {"type": "mcp", "server_label": "docs", "server_url": "https://mcp.example.org"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "custom", "name": "grep", "format": {"type": "text"}},
    ]
)
TOOLS = st.one_of(chat_tools(), flat_tools(), anthropic_tools(), BUILT_IN)
TOOL_LISTS = st.lists(TOOLS, max_size=4)

PLAIN_TOOLS = st.lists(
    st.sampled_from(
        [
            {
                "type": "function",
                "function": {"name": "read", "parameters": {"type": "object", "properties": {"é": {}}}},
            },
            {"type": "function", "name": "write", "description": "Writes.", "parameters": {"b": 1, "a": [2]}},
            {"name": "list", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
            {"type": "web_search_20250305", "name": "web_search"},
        ]
    ),
    max_size=3,
)


@st.composite
def histories(draw: st.DrawFn) -> list[dict]:
    """Chat messages as an agent grows them: a system message, then turns with tool calls."""
    messages: list[dict] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(WORDS)})
    for turn in range(draw(st.integers(1, 4))):
        content = draw(WORDS)
        parts = [{"type": "text", "text": content}] if draw(st.booleans()) else content
        messages.append({"role": "user", "content": parts})
        if draw(st.booleans()):
            call = {"id": f"call_{turn}", "type": "function", "function": {"name": "read", "arguments": draw(WORDS)}}
            messages.append({"role": "assistant", "content": draw(st.none() | WORDS), "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": draw(WORDS)})
        messages.append({"role": "assistant", "content": draw(WORDS), "reasoning_content": draw(WORDS)})
    return messages


@st.composite
def chat_bodies(draw: st.DrawFn) -> dict:
    body: dict = {"model": draw(st.sampled_from(["m", "qwen3", "kimi-k2", "mistral-small", "gpt-4o"]))}
    body["messages"] = draw(histories())
    tools = draw(PLAIN_TOOLS)
    if tools:
        body["tools"] = tools
    return body
