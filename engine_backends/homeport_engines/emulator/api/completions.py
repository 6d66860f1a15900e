"""POST /v1/completions."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

from aiohttp import web

from homeport.fingerprint import JsonValue
from homeport_engines.emulator.api.chat import response_schema
from homeport_engines.emulator.api.jobs import Body, Desk, integer, load_header, make_job, openai_usage, request_id
from homeport_engines.emulator.engine import Generation, Step
from homeport_engines.emulator.http import ApiError
from homeport_engines.emulator.tokenizer import detokenize, tokenize

_DEFAULT_TOKENS = 16


def read_prompts(value: JsonValue) -> list[array[int]]:
    """The prompts of a completions body: text, tokens, or a list of either. Raises ApiError."""
    if isinstance(value, str):
        return [tokenize(value)]
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        try:
            return [array("I", [item for item in value if isinstance(item, int)])]
        except OverflowError:
            raise ApiError(400, "prompt: a token id is out of vocabulary", "prompt") from None
    if isinstance(value, list) and value:
        return [prompt for item in value for prompt in read_prompts(item)]
    raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty.", "prompt")


async def create(desk: Desk, request: web.Request, body: Body) -> web.StreamResponse:
    """Answer one completion; a list of prompts is computed side by side."""
    limit = integer(body, "max_tokens", least=1) or _DEFAULT_TOKENS
    ident = request_id(request, "cmpl")
    jobs = [
        make_job(
            desk,
            request,
            body,
            api="completions",
            ident=f"{ident}-{index}" if index else ident,
            prompt=prompt,
            talk=None,
            limit=limit,
            schema=response_schema(body.get("response_format")),
        )
        for index, prompt in enumerate(read_prompts(body.get("prompt")))
    ]
    generations = [desk.engine.submit(job) for job in jobs]
    try:
        if body.get("stream"):
            return await _stream(desk, request, body, generations)
        return await _whole(desk, request, body, generations)
    finally:
        for generation in generations:
            generation.close()


def _usage(desk: Desk, generations: Sequence[Generation]) -> dict[str, JsonValue]:
    """The prompts' usages added up."""
    usage = openai_usage(desk, generations[0])
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        usage[name] = sum(int(str(openai_usage(desk, generation)[name])) for generation in generations)
    if usage["prompt_tokens_details"] is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": sum(g.cached_tokens for g in generations)}
    return usage


def _base(desk: Desk, body: Body, generations: Sequence[Generation]) -> dict[str, JsonValue]:
    return {
        "id": generations[0].job.request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": desk.model(body),
    }


async def _whole(desk: Desk, request: web.Request, body: Body, generations: list[Generation]) -> web.StreamResponse:
    choices: list[JsonValue] = []
    for generation in generations:
        texts = [""] * len(generation.sequences)
        if body.get("echo"):
            texts = [detokenize(generation.job.prompt)] * len(texts)
        tokens: list[list[int]] = [[] for _ in texts]
        async for step in generation.steps():
            texts[step.choice] += "".join(delta.text for delta in step.deltas)
            tokens[step.choice] += step.tokens
        for index, text in enumerate(texts):
            answer = generation.answer(index)
            choices.append(
                {
                    "index": len(choices),
                    "text": text,
                    "logprobs": _logprobs(body, tokens[index]),
                    "finish_reason": answer.finish,
                    "stop_reason": answer.stop_reason,
                    "token_ids": list(tokens[index]) if body.get("return_token_ids") else None,
                    "prompt_logprobs": None,
                    "prompt_token_ids": list(generation.job.prompt) if body.get("return_token_ids") else None,
                }
            )
    answered = {
        **_base(desk, body, generations),
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": _usage(desk, generations),
        "kv_transfer_params": generations[0].transfer_params,
    }
    return await desk.wire.reply(request, answered, headers=load_header(desk, request))


def _logprobs(body: Body, tokens: Sequence[int]) -> JsonValue:
    if body.get("logprobs") is None:
        return None
    texts = [detokenize([token], skip_special=False) for token in tokens]
    offsets = [sum(len(text) for text in texts[:index]) for index in range(len(texts))]
    return {
        "tokens": list(texts),
        "token_logprobs": [-0.5] * len(texts),
        "top_logprobs": [None] * len(texts),
        "text_offset": list(offsets),
    }


async def _stream(desk: Desk, request: web.Request, body: Body, generations: list[Generation]) -> web.StreamResponse:
    options = body.get("stream_options")
    options = options if isinstance(options, dict) else {}
    stream = desk.wire.stream(request, load_header(desk, request))
    base = _base(desk, body, generations)
    await stream.open()
    for number, generation in enumerate(generations):
        first = number * len(generation.sequences)
        async for step in generation.steps():
            chunk: dict[str, JsonValue] = {**base, "choices": [_choice(generation, first, step)]}
            if options.get("include_usage") and options.get("continuous_usage_stats"):
                chunk["usage"] = openai_usage(desk, generation)
            await stream.frame(chunk)
    if options.get("include_usage"):
        await stream.frame({**base, "choices": [], "usage": _usage(desk, generations)})
    await stream.frame("[DONE]")
    return await stream.close()


def _choice(generation: Generation, first: int, step: Step) -> dict[str, JsonValue]:
    answer = generation.answer(step.choice)
    return {
        "index": first + step.choice,
        "text": "".join(delta.text for delta in step.deltas),
        "logprobs": None,
        "finish_reason": answer.finish if step.finish is not None else None,
        "stop_reason": answer.stop_reason if step.finish is not None else None,
    }
