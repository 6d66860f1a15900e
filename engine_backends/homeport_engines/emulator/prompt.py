"""Prompts: every API's request as one conversation, and the conversation as the model's tokens.

The template is ChatML with tools in the system message and tool calls as JSON between tags, like the templates of
common open models: it renders tools in the order and with the key order they came in, keeps reasoning that the client
sends back, and does not render ids of tool calls. What an answer was generated as is what the template renders for it
in the next turn, so an append-only conversation finds its whole past in the cache.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from homeport.fingerprint import JsonValue
from homeport_engines.emulator.tokenizer import END, IMAGE, START, tokenize


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function by the model; ``arguments`` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message; ``images`` counts the parts that are not text (each is one token)."""

    role: str
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    images: int = 0


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call, and the definition as it stands in the prompt."""

    name: str
    parameters: JsonValue
    definition: JsonValue


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat-like API asks, whichever API it was."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()

    @property
    def turn(self) -> int:
        """How many assistant messages came before."""
        return sum(message.role == "assistant" for message in self.messages)

    def tokens(self, *, generate: bool = True) -> array[int]:
        """The prompt; with ``generate`` it ends where the assistant begins to speak."""
        tokens = array("I")
        for message in self._with_tools():
            tokens.append(START)
            tokens.extend(tokenize(f"{message.role}\n"))
            tokens.extend([IMAGE] * message.images)
            tokens.extend(tokenize(spoken(message.reasoning, message.text, message.tool_calls)))
            tokens.append(END)
        if generate:
            tokens.append(START)
            tokens.extend(tokenize("assistant\n"))
        return tokens

    def _with_tools(self) -> Iterator[Message]:
        rest = iter(self.messages)
        if self.tools:
            first = self.messages[0] if self.messages and self.messages[0].role in ("system", "developer") else None
            if first is not None:
                next(rest)
            definitions = "\n".join(json.dumps(tool.definition, ensure_ascii=False) for tool in self.tools)
            yield Message("system", f"{first.text if first else ''}\n\n# Tools\n{definitions}")
        yield from rest


CALL_START, CALL_MIDDLE, CALL_END = '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"
THINK_START, THINK_END = "<think>\n", "\n</think>\n"


def spoken(reasoning: str, text: str, tool_calls: Sequence[ToolCall]) -> str:
    """An assistant message as the model writes it."""
    thought = THINK_START + reasoning + THINK_END if reasoning else ""
    calls = (CALL_START + call.name + CALL_MIDDLE + call.arguments + CALL_END for call in tool_calls)
    return thought + text + "".join(calls)


def chat(body: Mapping[str, JsonValue]) -> Conversation:
    """A chat completion's body as a conversation. Raises ValueError naming the field that is wrong."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise ValueError("messages: a list is required")
    return Conversation(tuple(_chat_message(item, index) for index, item in enumerate(messages)), _chat_tools(body))


def _chat_message(item: JsonValue, index: int) -> Message:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise ValueError(f"messages[{index}]: an object with a role is required")
    text, images = _parts(item.get("content"))
    calls = item.get("tool_calls")
    reasoning = item.get("reasoning") or item.get("reasoning_content") or ""
    return Message(
        str(item["role"]),
        text,
        reasoning if isinstance(reasoning, str) else "",
        tuple(_chat_call(call) for call in calls) if isinstance(calls, list) else (),
        images,
    )


def _chat_call(call: JsonValue) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError("tool_calls: every call needs a function")
    return ToolCall(str(function.get("name", "")), _arguments(function.get("arguments")))


def _arguments(arguments: JsonValue) -> str:
    """Arguments as templates render them: parsed and written again, key order kept."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return str(arguments)
    return json.dumps(arguments or {}, ensure_ascii=False)


def _chat_tools(body: Mapping[str, JsonValue]) -> tuple[Tool, ...]:
    tools = body.get("tools")
    if not isinstance(tools, list):
        return ()
    found = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tools[{index}].function.name: required")
        found.append(Tool(str(function["name"]), function.get("parameters", {}), tool))
    return tuple(found)


def _parts(content: JsonValue) -> tuple[str, int]:
    """The text of a content field and the number of its parts that are not text."""
    if content is None or isinstance(content, str):
        return content or "", 0
    if not isinstance(content, list):
        raise ValueError("content: a string or a list of parts is required")
    texts, others = [], 0
    for part in content:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(str(part["text"]))
        elif isinstance(part, str):
            texts.append(part)
        else:
            others += 1
    return "".join(texts), others


def messages(body: Mapping[str, JsonValue]) -> Conversation:
    """An Anthropic messages body as the conversation vLLM makes of it."""
    items = body.get("messages")
    if not isinstance(items, list):
        raise ValueError("messages: a list is required")
    found: list[Message] = []
    system = body.get("system")
    if system:
        texts = [system] if isinstance(system, str) else _texts(system)
        # vLLM leaves out the attribution line that Claude Code puts first: it differs in every request
        found.append(Message("system", "".join(t for t in texts if not t.startswith("x-anthropic-billing-header"))))
    for index, item in enumerate(items):
        if not isinstance(item, dict) or not isinstance(item.get("role"), str):
            raise ValueError(f"messages[{index}]: an object with a role is required")
        found += _anthropic_message(str(item["role"]), item.get("content"))
    return Conversation(tuple(found), _anthropic_tools(body))


def _texts(blocks: JsonValue) -> list[str]:
    listed = blocks if isinstance(blocks, list) else []
    return [str(b["text"]) for b in listed if isinstance(b, dict) and isinstance(b.get("text"), str)]


def _anthropic_message(role: str, content: JsonValue) -> Iterator[Message]:
    if not isinstance(content, list):
        yield Message(role, _parts(content)[0])
        return
    texts, thoughts, calls, images, results = [], [], [], 0, []
    for block in content:
        if not isinstance(block, dict):
            raise ValueError("content: every block must be an object")
        kind = block.get("type")
        if kind == "text":
            texts.append(str(block.get("text", "")))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            calls.append(ToolCall(str(block.get("name", "")), _arguments(block.get("input"))))
        elif kind == "tool_result":
            text, others = _parts(block.get("content"))
            results.append(Message("tool", text, images=others))
        elif kind != "redacted_thinking":
            images += 1
    yield from results
    if texts or thoughts or calls or images or not results:
        yield Message(role, "".join(texts), "".join(thoughts), tuple(calls), images)


def _anthropic_tools(body: Mapping[str, JsonValue]) -> tuple[Tool, ...]:
    tools = body.get("tools")
    found = []
    for index, tool in enumerate(tools if isinstance(tools, list) else []):
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise ValueError(f"tools[{index}].name: required")
        name, schema = str(tool["name"]), tool.get("input_schema", {})
        function: JsonValue = {"name": name, "description": tool.get("description"), "parameters": schema}
        found.append(Tool(name, schema, {"type": "function", "function": function}))
    return tuple(found)


def responses(body: Mapping[str, JsonValue]) -> Conversation:
    """A Responses body as a conversation."""
    found: list[Message] = []
    if isinstance(body.get("instructions"), str) and body["instructions"]:
        found.append(Message("system", str(body["instructions"])))
    given = body.get("input")
    if isinstance(given, str):
        found.append(Message("user", given))
    elif isinstance(given, list):
        for index, item in enumerate(given):
            if not isinstance(item, dict):
                raise ValueError(f"input[{index}]: an object is required")
            _append_item(found, item)
    else:
        raise ValueError("input: a string or a list of items is required")
    return Conversation(tuple(found), _responses_tools(body))


def _append_item(found: list[Message], item: Mapping[str, JsonValue]) -> None:
    kind = item.get("type", "message")
    if kind == "function_call":
        name = flat_name(str(item.get("namespace") or ""), str(item.get("name", "")))
        call = ToolCall(name, _arguments(item.get("arguments")))
        _extend_assistant(found, Message("assistant", tool_calls=(call,)))
    elif kind == "function_call_output":
        text, others = _parts(item.get("output"))
        found.append(Message("tool", text, images=others))
    elif kind == "reasoning":
        texts = _texts(item.get("content")) or _texts(item.get("summary"))
        _extend_assistant(found, Message("assistant", reasoning="".join(texts)))
    else:
        text, others = _parts(item.get("content"))
        message = Message(str(item.get("role", "user")), text, images=others)
        if message.role == "assistant":
            _extend_assistant(found, message)
        else:
            found.append(message)


def _extend_assistant(found: list[Message], more: Message) -> None:
    """Items of one answer come one by one; the template has one message for them."""
    if found and found[-1].role == "assistant":
        last = found.pop()
        more = Message(
            "assistant", last.text + more.text, last.reasoning + more.reasoning, last.tool_calls + more.tool_calls
        )
    found.append(more)


def flat_name(namespace: str, name: str) -> str:
    """A namespaced function as the model reads and calls it; vLLM joins the two names with two underscores."""
    return f"{namespace}__{name}" if namespace else name


def namespaced(body: Mapping[str, JsonValue]) -> dict[str, tuple[str, str]]:
    """The namespaced functions of a Responses body: flat name to (namespace, name)."""
    return {flat_name(space, name): (space, name) for space, name, _ in _responses_functions(body) if space}


def _responses_functions(body: Mapping[str, JsonValue]) -> Iterator[tuple[str, str, Mapping[str, JsonValue]]]:
    """(namespace or "", name, function) of every function offered; vLLM renders no other kind of tool."""
    for tool in _objects(body.get("tools")):
        space = str(tool.get("name", "")) if tool.get("type") == "namespace" else ""
        for function in _objects(tool.get("tools")) if space else [tool]:
            name = function.get("name")
            if function.get("type") == "function" and isinstance(name, str):
                yield space, name, function


def _objects(listed: JsonValue) -> list[dict[str, JsonValue]]:
    return [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []


def _responses_tools(body: Mapping[str, JsonValue]) -> tuple[Tool, ...]:
    found = []
    for space, name, function in _responses_functions(body):
        flat = flat_name(space, name)
        rest = {key: value for key, value in function.items() if key != "type"} | {"name": flat}
        found.append(Tool(flat, function.get("parameters", {}), {"type": "function", "function": rest}))
    return tuple(found)
