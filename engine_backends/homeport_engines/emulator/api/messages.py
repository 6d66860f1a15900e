"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API as vLLM serves it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from homeport.fingerprint import JsonValue
from homeport_engines.emulator.answers import Delta
from homeport_engines.emulator.api.jobs import Body, Desk, integer, load_header, make_job, request_id
from homeport_engines.emulator.engine import Generation
from homeport_engines.emulator.http import ApiError, Stream
from homeport_engines.emulator.prompt import Conversation, messages

_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _talk(body: Body) -> Conversation:
    try:
        return messages(body)
    except ValueError as error:
        raise ApiError(400, str(error)) from None


async def count_tokens(desk: Desk, request: web.Request, body: Body) -> web.StreamResponse:
    """The size of a prompt."""
    desk.adapter(body)
    return await desk.wire.reply(request, {"input_tokens": len(_talk(body).tokens())})


async def create(desk: Desk, request: web.Request, body: Body) -> web.StreamResponse:
    """Answer one message."""
    talk = _talk(body)
    limit = integer(body, "max_tokens", least=1)
    if limit is None:
        raise ApiError(400, "max_tokens: Field required", "max_tokens")
    job = make_job(
        desk,
        request,
        body,
        api="messages",
        ident=request_id(request, "chatcmpl"),
        prompt=talk.tokens(),
        talk=talk,
        limit=limit,
        schema=_schema(body),
    )
    generation = desk.engine.submit(job)
    try:
        if body.get("stream"):
            return await _stream(desk, request, body, generation)
        return await _whole(desk, request, body, generation)
    finally:
        generation.close()


def _schema(body: Body) -> JsonValue:
    config = body.get("output_config")
    form = config.get("format") if isinstance(config, dict) else None
    return form.get("schema") or form.get("json_schema") if isinstance(form, dict) else None


def _usage(desk: Desk, generation: Generation, output_tokens: int) -> dict[str, JsonValue]:
    """Anthropic's way of counting: cached tokens are not part of ``input_tokens``."""
    cached = generation.cached_tokens if desk.engine.settings.prompt_tokens_details else 0
    usage: dict[str, JsonValue] = {
        "input_tokens": generation.prompt_tokens - cached,
        "output_tokens": output_tokens,
        "cache_creation_input_tokens": None,
        "cache_read_input_tokens": cached if desk.engine.settings.prompt_tokens_details else None,
    }
    return usage


async def _whole(desk: Desk, request: web.Request, body: Body, generation: Generation) -> web.StreamResponse:
    deltas: list[Delta] = []
    async for step in generation.steps():
        deltas += step.deltas
    answer = generation.answer(0)
    message: JsonValue = {
        "id": generation.job.request_id,
        "type": "message",
        "role": "assistant",
        "content": _content(deltas, answer.call_ids),
        "model": desk.model(body),
        "stop_reason": "stop_sequence" if answer.stop_reason else _STOP[answer.finish],
        "stop_sequence": answer.stop_reason,
        "usage": _usage(desk, generation, generation.output_tokens),
        "kv_transfer_params": generation.transfer_params,
    }
    return await desk.wire.reply(request, message, headers=load_header(desk, request))


def _content(deltas: Sequence[Delta], call_ids: Sequence[str]) -> list[JsonValue]:
    thought = "".join(delta.text for delta in deltas if delta.kind == "reasoning")
    text = "".join(delta.text for delta in deltas if delta.kind == "content")
    blocks: list[JsonValue] = []
    if thought:
        blocks.append({"type": "thinking", "thinking": thought, "signature": "emulated"})
    if text:
        blocks.append({"type": "text", "text": text})
    for delta in deltas:
        if delta.kind == "tool_name":
            given = "".join(d.text for d in deltas if d.kind == "tool_arguments" and d.index == delta.index)
            blocks.append(
                {"type": "tool_use", "id": call_ids[delta.index], "name": delta.text, "input": _arguments(given)}
            )
    return blocks


def _arguments(text: str) -> JsonValue:
    try:
        parsed: JsonValue = json.loads(text or "{}")
    except ValueError:
        return {}  # cut off in the middle
    return parsed


@dataclass(slots=True)
class _Blocks:
    """Opens and closes the content blocks of one stream."""

    stream: Stream
    call_ids: Sequence[str]
    index: int = -1
    kind: str | None = None

    async def show(self, delta: Delta) -> None:
        """Send one piece, in a block of its kind."""
        kind = {"reasoning": "thinking", "content": "text"}.get(delta.kind, "tool_use")
        if kind != self.kind or delta.kind == "tool_name":
            await self.end()
            await self._begin(kind, delta)
        if delta.kind == "tool_name":
            return
        piece: dict[str, JsonValue] = {
            "thinking": {"type": "thinking_delta", "thinking": delta.text},
            "text": {"type": "text_delta", "text": delta.text},
            "tool_use": {"type": "input_json_delta", "partial_json": delta.text},
        }
        await self._send("content_block_delta", delta=piece[kind])

    async def _begin(self, kind: str, delta: Delta) -> None:
        self.index += 1
        self.kind = kind
        blocks: dict[str, JsonValue] = {
            "thinking": {"type": "thinking", "thinking": ""},
            "text": {"type": "text", "text": ""},
        }
        call: JsonValue = {"type": "tool_use", "id": "", "name": delta.text, "input": {}}
        if kind == "tool_use" and isinstance(call, dict):
            call["id"] = self.call_ids[delta.index]
        await self._send("content_block_start", content_block=blocks.get(kind, call))

    async def end(self) -> None:
        """Close the open block."""
        if self.kind is None:
            return
        if self.kind == "thinking":
            await self._send("content_block_delta", delta={"type": "signature_delta", "signature": "emulated"})
        await self._send("content_block_stop")
        self.kind = None

    async def _send(self, kind: str, **members: JsonValue) -> None:
        await self.stream.frame({"index": self.index, "type": kind, **members}, kind)


async def _stream(desk: Desk, request: web.Request, body: Body, generation: Generation) -> web.StreamResponse:
    stream = desk.wire.stream(request, load_header(desk, request))
    await stream.open()
    blocks: _Blocks | None = None
    async for step in generation.steps():
        if blocks is None:
            message: JsonValue = {
                "id": generation.job.request_id,
                "type": "message",
                "role": "assistant",
                "content": [],
                "model": desk.model(body),
                "stop_reason": None,
                "stop_sequence": None,
                "usage": _usage(desk, generation, 0),
            }
            await stream.frame({"type": "message_start", "message": message}, "message_start")
            blocks = _Blocks(stream, generation.answer(0).call_ids)
        for delta in step.deltas:
            await blocks.show(delta)
    if blocks is not None:
        await blocks.end()
    answer = generation.answer(0)
    reason = "stop_sequence" if answer.stop_reason else _STOP[answer.finish]
    ended: JsonValue = {"stop_reason": reason, "stop_sequence": answer.stop_reason}
    usage = _usage(desk, generation, generation.output_tokens)
    await stream.frame({"type": "message_delta", "delta": ended, "usage": usage}, "message_delta")
    await stream.frame({"type": "message_stop"}, "message_stop")
    return await stream.close()
