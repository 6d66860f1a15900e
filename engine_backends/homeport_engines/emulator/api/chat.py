"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence

from aiohttp import web

from homeport.fingerprint import JsonValue
from homeport_engines.emulator.answers import Delta
from homeport_engines.emulator.api.jobs import Body, Desk, integer, load_header, make_job, openai_usage, request_id
from homeport_engines.emulator.engine import Generation, Job, Step
from homeport_engines.emulator.http import ApiError
from homeport_engines.emulator.prompt import chat
from homeport_engines.emulator.tokenizer import detokenize, token_bytes


async def create(desk: Desk, request: web.Request, body: Body) -> web.StreamResponse:
    """Answer one chat completion."""
    try:
        talk = chat(body)
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    if not talk.messages:
        raise ApiError(400, "messages: at least one message is required", "messages")
    limit = integer(body, "max_completion_tokens", least=1) or integer(body, "max_tokens", least=1)
    job = make_job(
        desk,
        request,
        body,
        api="chat",
        ident=request_id(request, "chatcmpl"),
        prompt=talk.tokens(),
        talk=talk,
        limit=limit,
        schema=response_schema(body.get("response_format")),
    )
    generation = desk.engine.submit(job)
    try:
        if body.get("stream"):
            return await _stream(desk, request, body, generation)
        return await _whole(desk, request, body, generation)
    finally:
        generation.close()


def response_schema(form: JsonValue) -> JsonValue:
    """The JSON schema a response format asks for; None when it asks for none."""
    if not isinstance(form, dict):
        return None
    if form.get("type") == "json_object":
        return {"type": "object", "properties": {"answer": {"type": "string"}}}
    wrapped = form.get("json_schema")
    return wrapped.get("schema") if isinstance(wrapped, dict) else None


async def _whole(desk: Desk, request: web.Request, body: Body, generation: Generation) -> web.StreamResponse:
    pieces: list[list[Delta]] = [[] for _ in generation.sequences]
    tokens: list[list[int]] = [[] for _ in generation.sequences]
    async for step in generation.steps():
        pieces[step.choice] += step.deltas
        tokens[step.choice] += step.tokens
    choices: list[JsonValue] = [
        {
            "index": index,
            "message": _message(generation.answer(index).call_ids, deltas),
            "logprobs": _logprobs(body, tokens[index]),
            "finish_reason": generation.answer(index).finish,
            "stop_reason": generation.answer(index).stop_reason,
            "token_ids": list(tokens[index]) if body.get("return_token_ids") else None,
        }
        for index, deltas in enumerate(pieces)
    ]
    answer: dict[str, JsonValue] = {
        "id": generation.job.request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": desk.model(body),
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": openai_usage(desk, generation),
        "prompt_logprobs": None,
        "prompt_token_ids": list(generation.job.prompt) if body.get("return_token_ids") else None,
        "kv_transfer_params": generation.transfer_params,
    }
    return await desk.wire.reply(request, answer, headers=load_header(desk, request))


def _message(call_ids: Sequence[str], deltas: Sequence[Delta]) -> dict[str, JsonValue]:
    content = "".join(delta.text for delta in deltas if delta.kind == "content")
    reasoning = "".join(delta.text for delta in deltas if delta.kind == "reasoning")
    calls: list[dict[str, JsonValue]] = []
    for delta in deltas:
        if delta.kind == "tool_name":
            function: JsonValue = {"name": delta.text, "arguments": ""}
            calls.append({"id": call_ids[delta.index], "type": "function", "function": function})
        elif delta.kind == "tool_arguments":
            known = calls[delta.index]["function"]
            if isinstance(known, dict):
                known["arguments"] = str(known["arguments"]) + delta.text
    message: dict[str, JsonValue] = {
        "role": "assistant",
        "content": content if content or not (calls or reasoning) else None,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": reasoning or None,
    }
    if calls:
        message["tool_calls"] = list(calls)
    return message


def _logprobs(body: Body, tokens: Sequence[int]) -> JsonValue:
    """Log probabilities of no meaning, in the right shape."""
    if not body.get("logprobs"):
        return None
    content: list[JsonValue] = [
        {
            "token": detokenize([token], skip_special=False),
            "logprob": -0.5,
            "bytes": list(token_bytes(token)),
            "top_logprobs": [],
        }
        for token in tokens
    ]
    return {"content": content}


class _Chunks:
    """Makes the chunks of one streamed answer."""

    def __init__(self, desk: Desk, body: Body, job: Job) -> None:
        self._base: dict[str, JsonValue] = {
            "id": job.request_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": desk.model(body),
        }

    def choice(self, index: int, delta: JsonValue, **more: JsonValue) -> dict[str, JsonValue]:
        """A chunk with one choice."""
        shown: dict[str, JsonValue] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return {**self._base, "choices": [shown]}

    def usage(self, usage: JsonValue) -> dict[str, JsonValue]:
        """The last chunk."""
        return {**self._base, "choices": [], "usage": usage}


async def _stream(desk: Desk, request: web.Request, body: Body, generation: Generation) -> web.StreamResponse:
    options = body.get("stream_options")
    options = options if isinstance(options, dict) else {}
    chunks = _Chunks(desk, body, generation.job)
    stream = desk.wire.stream(request, load_header(desk, request))
    greeted: set[int] = set()
    await stream.open()
    async for step in generation.steps():
        frames = [chunks.choice(step.choice, {"role": "assistant", "content": ""})] * (step.choice not in greeted)
        greeted.add(step.choice)
        frames += _step_chunks(chunks, generation, body, step)
        for frame in frames:
            if options.get("include_usage") and options.get("continuous_usage_stats"):
                frame = {**frame, "usage": openai_usage(desk, generation)}
            await stream.frame(frame)
    if options.get("include_usage"):
        await stream.frame(chunks.usage(openai_usage(desk, generation)))
    await stream.frame("[DONE]")
    return await stream.close()


def _step_chunks(chunks: _Chunks, generation: Generation, body: Body, step: Step) -> list[dict[str, JsonValue]]:
    answer = generation.answer(step.choice)
    frames = []
    for delta in step.deltas:
        if delta.kind in ("content", "reasoning"):
            frames.append(chunks.choice(step.choice, {delta.kind: delta.text}))
            continue
        call: dict[str, JsonValue] = {"index": delta.index}
        if delta.kind == "tool_name":
            call |= {"id": answer.call_ids[delta.index], "type": "function"}
            call["function"] = {"name": delta.text, "arguments": ""}
        else:
            call["function"] = {"arguments": delta.text}
        frames.append(chunks.choice(step.choice, {"tool_calls": [call]}))
    if body.get("logprobs") and frames:
        shown = frames[-1]["choices"]
        if isinstance(shown, list) and isinstance(shown[0], dict):
            shown[0]["logprobs"] = _logprobs(body, step.tokens)
    if step.finish is not None:
        end = chunks.choice(step.choice, {}, finish_reason=answer.finish, stop_reason=answer.stop_reason)
        frames.append(end)
    return frames
