"""Request bodies of every API, made up: tables and hypothesis strategies."""

from __future__ import annotations

from hypothesis import strategies as st

WORDS = st.sampled_from(["alpha", "beta", "gamma", "Delta", "été", "海", "a b", "", "x" * 40, '{"q": "\\n"}', "🚢"])
KEYS = st.text(alphabet="abcxyz_é", min_size=1, max_size=5)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-9, 10**20), st.floats(allow_nan=False), WORDS)


def schemas(depth: int = 1) -> st.SearchStrategy[dict]:
    """JSON schemas with everything whose order may or may not matter."""
    inner = schemas(depth - 1) if depth else st.just({"type": "string"})
    names = st.lists(KEYS, max_size=3)
    return st.fixed_dictionaries(
        {"type": st.sampled_from(["object", "string", "array"])},
        optional={
            "properties": st.dictionaries(
                KEYS | st.sampled_from(["required", "enum", "properties"]), inner, max_size=4
            ),
            "required": names,
            "enum": st.lists(SCALARS, max_size=4),
            "anyOf": st.lists(inner, max_size=2),
            "prefixItems": st.lists(inner, max_size=2),
            "examples": st.lists(st.dictionaries(KEYS, SCALARS, max_size=3), max_size=2),
            "default": st.dictionaries(KEYS, SCALARS, max_size=3),
            "dependentRequired": st.dictionaries(KEYS, names, max_size=2),
            "$defs": st.dictionaries(KEYS, inner, max_size=2),
            "items": inner,
            "description": WORDS,
        },
    )


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
