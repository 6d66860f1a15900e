"""An engine without a model: it plays named scripts over the chat, Responses and Messages APIs and keeps every request.

A prompt that contains ``script:NAME`` is answered step by step from ``SCRIPTS[NAME]``; how far the script has come is
read from the conversation itself (tool calls since the last such prompt), so that restarts, resumed sessions and
sub-agents that run at once need no state here. Requests without tools (titles, summaries) get a short text.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from aiohttp import web

BLOCK_CHARS = 64
"""Characters per cached block; four characters count as one token."""


@dataclass(frozen=True, slots=True)
class Step:
    """One answer of the model: a shell command, sub-agents with scripts of their own, or text."""

    kind: Literal["shell", "agents", "say"]
    text: str = ""
    brief_words: int = 0


def shell(command: str) -> Step:
    """Run a shell command with whatever tool the harness offers for it."""
    return Step("shell", command)


def agents(*scripts: str, brief_words: int = 0) -> Step:
    """Start one sub-agent per script, all in one answer; each with so many words of its own, which none can share."""
    return Step("agents", " ".join(scripts), brief_words)


def say(text: str) -> Step:
    """Answer with text."""
    return Step("say", text)


SCRIPTS: dict[str, tuple[Step, ...]] = {
    "four": (shell("echo one"), shell("echo two"), shell("echo three"), say("All three are done.")),
    "more": (shell("echo four"), say("Done again.")),
    "long": (*(shell(f"seq 1 {120 + n}") for n in range(6)), say("Counted.")),
    "bulk": (*(shell(f"seq -f '%040.0f' {n}000 {n}999") for n in range(1, 9)), say("Printed.")),
    "child": (shell("echo child"), shell("echo child again"), say("The child is done.")),
    "family": (agents("child"), shell("echo parent"), say("The family is done.")),
    "crew": (agents(*["child"] * 8, brief_words=4000), shell("echo parent"), say("All eight are done.")),
    "hello": (say("Hello."),),
}

_SHELLS = ("bash", "Bash", "exec_command", "shell", "run_shell_command", "shell_command", "local_shell")
_AGENTS = ("task", "Task", "Agent", "agent", "spawn_agent")


@dataclass(slots=True)
class Seen:
    """One request as it arrived, and what the books said about it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    raw: bytes
    prompt: str
    prompt_tokens: int
    cached_tokens: int

    @property
    def tools(self) -> list[str]:
        """Names of the tools offered, in their order."""
        return [tool_name(tool) for tool in self.body.get("tools") or []]


def tool_name(tool: Mapping[str, Any]) -> str:
    """A tool's name in any of the three APIs."""
    return str((tool.get("function") or tool).get("name") or tool.get("type"))


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [str(part.get("text") or "") for part in parts if isinstance(part, dict)]


def render(body: Mapping[str, Any]) -> str:
    """The prompt as a template would write it: system, tools, then messages; no ids, no cache marks."""
    out: list[str] = []
    system = body.get("system") or body.get("instructions")
    if system:
        out += ["<system>", *_texts(system)]
    messages = list(body.get("messages") or [])
    items = body.get("input")
    messages += [{"role": "user", "content": items}] if isinstance(items, str) else list(items or [])
    while messages and messages[0].get("role") in ("system", "developer"):
        out += ["<system>", *_texts(messages.pop(0).get("content"))]
    for tool in body.get("tools") or []:
        spec = tool.get("function") or tool
        out += ["<tool>", json.dumps({k: v for k, v in spec.items() if k != "cache_control"})]
    for message in messages:
        out += [f"<{message.get('role') or message.get('type')}>", *_message_texts(message)]
    return "\n".join(out)


def _message_texts(message: Mapping[str, Any]) -> list[str]:
    out = list(_texts(message.get("content")))
    if message.get("reasoning_content"):
        out.insert(0, str(message["reasoning_content"]))
    functions = [tool_call["function"] for tool_call in message.get("tool_calls") or []]
    out += [function["name"] + function["arguments"] for function in functions]
    for part in message.get("content") if isinstance(message.get("content"), list) else []:
        if part.get("type") == "tool_use":
            out.append(part["name"] + json.dumps(part["input"]))
        elif part.get("type") == "tool_result":
            out += _texts(part.get("content"))
    if message.get("type") == "function_call":
        out.append(message["name"] + message["arguments"])
    if message.get("type") == "function_call_output":
        out.append(message["output"] if isinstance(message["output"], str) else json.dumps(message["output"]))
    return out


def shared_share(before: str, after: str) -> float:
    """How much of `before` the prompt `after` starts with: 1.0 is an append-only continuation."""
    same, over = 0, min(len(before), len(after)) + 1
    while over - same > 1:
        middle = (same + over) // 2
        same, over = (middle, over) if after.startswith(before[:middle]) else (same, middle)
    return same / max(1, len(before))


def _turns(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The conversation as ("user", text) and ("call", "") in order; calls of one answer count once."""
    turns: list[tuple[str, str]] = []
    items = body.get("input")
    listed = [{"role": "user", "content": items}] if isinstance(items, str) else items
    calling = False
    for message in body.get("messages") or listed or []:
        content = message.get("content")
        was_calling, calling = calling, message.get("type") == "function_call"
        if message.get("role") == "user":
            turns.append(("user", "\n".join(_texts(content))))
        elif message.get("tool_calls") or (calling and not was_calling) or _uses_tools(content):
            turns.append(("call", ""))
    return turns


def _uses_tools(content: Any) -> bool:
    return isinstance(content, list) and any(part.get("type") == "tool_use" for part in content)


def next_step(body: Mapping[str, Any]) -> Step:
    """The answer the script gives at this point of the conversation."""
    if not body.get("tools"):
        return say("A short title")
    script, done = "hello", 0
    for kind, text in _turns(body):
        found = re.findall(r"script:([a-z-]+)", text)
        if found:
            script, done = found[-1], 0
        elif kind == "call":
            done += 1
    steps = SCRIPTS.get(script, SCRIPTS["hello"])
    return steps[min(done, len(steps) - 1)]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call; ``group`` is the namespace the tool was offered in (Responses API), or empty."""

    name: str
    arguments: dict[str, Any]
    group: str = ""


def _calls(step: Step, body: Mapping[str, Any]) -> list[Call]:
    if step.kind == "say":
        return []
    groups: dict[str, tuple[str, Any]] = {}
    for tool in body.get("tools") or []:
        inner = tool.get("tools") if tool.get("type") == "namespace" else None
        groups.update({tool_name(one): (tool["name"] if inner else "", one) for one in inner or [tool]})
    known = _SHELLS if step.kind == "shell" else _AGENTS
    name = next(name for name in known if name in groups)
    group, spec = groups[name]
    function = spec.get("function") or spec
    schema = function.get("parameters") or function.get("input_schema") or {}
    texts = [step.text] if step.kind == "shell" else step.text.split()
    if step.brief_words:
        briefs = [" ".join(f"{n}-{word}" for word in range(step.brief_words)) for n in range(len(texts))]
        texts = [f"{text}\n{brief}" for text, brief in zip(texts, briefs, strict=True)]
    calls = [Call(name, _arguments(schema, text, n), group) for n, text in enumerate(texts)]
    if group:
        # Codex does not wait for its sub-agents: give it something to wait for
        calls.append(Call("exec_command", {"cmd": "sleep 25", "yield_time_ms": 30_000}))
    return calls


def _arguments(schema: Mapping[str, Any], text: str, ordinal: int) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    prompt = f"script:{text}"
    known: dict[str, Any] = {
        "command": ["bash", "-c", text] if (properties.get("command") or {}).get("type") == "array" else text,
        "cmd": text,
        "description": "a scripted step",
        "is_background": False,
        "prompt": prompt,
        "message": prompt,
        "subagent_type": "general-purpose" if "run_in_background" in properties else "general",
        "task_name": f"child_{ordinal}",
        "run_in_background": False,
    }
    names = set(schema.get("required") or []) | ({"subagent_type", "run_in_background", "message"} & set(properties))
    return {name: known[name] for name in properties if name in names and name in known}


class ScriptedEngine:
    """The server; use as an async context manager. `seen` is the list of requests, oldest first.

    ``headers`` are put on every answer. With ``tokens_per_s`` prompts are computed one after the other at that rate,
    what is cached for nothing; without it nothing takes time.
    """

    def __init__(self, *, headers: Mapping[str, str] | None = None, tokens_per_s: float | None = None) -> None:
        self.seen: list[Seen] = []
        self.headers = dict(headers or {})
        self._tokens_per_s = tokens_per_s
        self._prefill = asyncio.Lock()
        self._cached: set[int] = set()
        self._ids = count(1)
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> ScriptedEngine:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/messages/count_tokens", self._count)
        app.router.add_post("/v1/{api:chat/completions|responses|messages}", self._generate)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def main(self, session: str | None = None) -> list[Seen]:
        """The requests that carried tools: the agent's own turns, without titles and summaries; of one session."""
        own = [one for one in self.seen if one.body.get("tools")]
        return [one for one in own if session in (None, one.headers.get("x-session-affinity"))]

    def forget(self) -> None:
        """Lose everything that was cached."""
        self._cached.clear()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": "demo-model", "object": "model", "created": 1, "owned_by": "script", "max_model_len": 131072}
        return web.json_response({"object": "list", "data": [model]})

    async def _count(self, request: web.Request) -> web.Response:
        return web.json_response({"input_tokens": len(render(await request.json())) // 4})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw)
        prompt = render(body)
        seen = Seen(
            request.path, {k.lower(): v for k, v in request.headers.items()}, body, raw, prompt, len(prompt) // 4, 0
        )
        self.seen.append(seen)
        async with self._prefill:
            seen.cached_tokens = self._book(prompt)
            if self._tokens_per_s:
                await asyncio.sleep((seen.prompt_tokens - seen.cached_tokens) / self._tokens_per_s)
        step = next_step(body)
        calls = _calls(step, body)
        reply = {"chat/completions": _chat, "responses": _responses, "messages": _messages}[request.match_info["api"]]
        final, frames = reply(next(self._ids), seen, step.text if step.kind == "say" else "", calls)
        if not body.get("stream"):
            return web.json_response(final, headers=self.headers)
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **self.headers})
        await response.prepare(request)
        async for frame in _sse(frames):
            await response.write(frame)
        await response.write_eof()
        return response

    def _book(self, prompt: str) -> int:
        """Cached tokens of this prompt by the books (whole blocks, chained), then remember it."""
        blocks, chain = [], 0
        for start in range(0, len(prompt) - BLOCK_CHARS + 1, BLOCK_CHARS):
            chain = hash((chain, prompt[start : start + BLOCK_CHARS]))
            blocks.append(chain)
        hits = 0
        for block in blocks:
            if block not in self._cached:
                break
            hits += 1
        self._cached.update(blocks)
        return min(hits * BLOCK_CHARS, max(0, len(prompt) - BLOCK_CHARS)) // 4


async def _sse(frames: Sequence[tuple[str | None, Any]]) -> AsyncIterator[bytes]:
    for event, data in frames:
        head = f"event: {event}\n" if event else ""
        text = data if isinstance(data, str) else json.dumps(data)
        yield f"{head}data: {text}\n\n".encode()


def _chat(ident: int, seen: Seen, text: str, calls: Sequence[Call]) -> tuple[Any, list[Any]]:
    tool_calls = [
        {
            "index": n,
            "id": f"call_{ident}_{n}",
            "type": "function",
            "function": {"name": one.name, "arguments": json.dumps(one.arguments)},
        }
        for n, one in enumerate(calls)
    ]
    usage = {
        "prompt_tokens": seen.prompt_tokens,
        "completion_tokens": 8,
        "total_tokens": seen.prompt_tokens + 8,
        "prompt_tokens_details": {"cached_tokens": seen.cached_tokens},
    }
    base = {"id": f"chatcmpl-{ident}", "created": int(time.time()), "model": seen.body.get("model")}
    finish = "tool_calls" if calls else "stop"
    message = {"role": "assistant", "content": text or None, "tool_calls": tool_calls} if calls else None
    final = {
        **base,
        "object": "chat.completion",
        "choices": [
            {"index": 0, "message": message or {"role": "assistant", "content": text}, "finish_reason": finish}
        ],
        "usage": usage,
    }
    delta = {"role": "assistant", **({"tool_calls": tool_calls} if calls else {"content": text})}
    chunk = {**base, "object": "chat.completion.chunk"}
    frames: list[Any] = [
        (None, {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}),
        (None, {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}),
    ]
    if (seen.body.get("stream_options") or {}).get("include_usage"):
        frames.append((None, {**chunk, "choices": [], "usage": usage}))
    return final, [*frames, (None, "[DONE]")]


def _responses(ident: int, seen: Seen, text: str, calls: Sequence[Call]) -> tuple[Any, list[Any]]:
    items: list[dict[str, Any]] = [
        {
            "type": "function_call",
            "id": f"fc_{ident}_{n}",
            "call_id": f"call_{ident}_{n}",
            "name": one.name,
            "arguments": json.dumps(one.arguments),
            "status": "completed",
            **({"namespace": one.group} if one.group else {}),
        }
        for n, one in enumerate(calls)
    ]
    if not calls:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        items = [
            {"type": "message", "id": f"msg_{ident}", "role": "assistant", "status": "completed", "content": content}
        ]
    usage = {
        "input_tokens": seen.prompt_tokens,
        "input_tokens_details": {"cached_tokens": seen.cached_tokens},
        "output_tokens": 8,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": seen.prompt_tokens + 8,
    }
    base = {
        "id": f"resp_{ident}",
        "object": "response",
        "created_at": int(time.time()),
        "model": seen.body.get("model"),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    final = {**base, "status": "completed", "output": items, "usage": usage}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {**base, "status": "in_progress", "output": []}}
    ]
    for n, item in enumerate(items):
        events.append(
            {"type": "response.output_item.added", "output_index": n, "item": {**item, "status": "in_progress"}}
        )
        if item["type"] == "message":
            delta = {"item_id": item["id"], "output_index": n, "content_index": 0, "delta": text, "logprobs": []}
            events.append({"type": "response.output_text.delta", **delta})
        events.append({"type": "response.output_item.done", "output_index": n, "item": item})
    events.append({"type": "response.completed", "response": final})
    return final, [(event["type"], {**event, "sequence_number": n}) for n, event in enumerate(events)]


def _messages(ident: int, seen: Seen, text: str, calls: Sequence[Call]) -> tuple[Any, list[Any]]:
    usage = {
        "input_tokens": seen.prompt_tokens - seen.cached_tokens,
        "cache_read_input_tokens": seen.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": 8,
    }
    blocks: list[dict[str, Any]] = [
        {"type": "tool_use", "id": f"toolu_{ident}_{n}", "name": one.name, "input": one.arguments}
        for n, one in enumerate(calls)
    ] or [{"type": "text", "text": text}]
    stop = "tool_use" if calls else "end_turn"
    base = {"id": f"msg_{ident}", "type": "message", "role": "assistant", "model": seen.body.get("model")}
    final = {**base, "content": blocks, "stop_reason": stop, "stop_sequence": None, "usage": usage}
    start = {**base, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for n, block in enumerate(blocks):
        if block["type"] == "text":
            empty: dict[str, Any] = {"type": "text", "text": ""}
            delta: dict[str, Any] = {"type": "text_delta", "text": text}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        events.append({"type": "content_block_start", "index": n, "content_block": empty})
        events.append({"type": "content_block_delta", "index": n, "delta": delta})
        events.append({"type": "content_block_stop", "index": n})
    events.append({"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": usage})
    events.append({"type": "message_stop"})
    return final, [(event["type"], event) for event in events]
