"""Embeddings, tokenize and detokenize, and the rendered prompt."""

from __future__ import annotations

import base64
import math
import struct
from array import array
from collections.abc import Callable, Sequence

from aiohttp import web

from homeport.fingerprint import JsonValue
from homeport_engines.emulator.answers import seed_of
from homeport_engines.emulator.api.completions import read_prompts
from homeport_engines.emulator.api.jobs import Api, Body, Desk, integer, request_id
from homeport_engines.emulator.http import ApiError
from homeport_engines.emulator.prompt import Conversation, chat
from homeport_engines.emulator.tokenizer import detokenize, tokenize

_DIMENSIONS = 64


def _tokens(read: Callable[[Body], Conversation], body: Body) -> array[int]:
    """The prompt of a request that ``read`` understands; raises ApiError."""
    try:
        return read(body).tokens(generate=body.get("add_generation_prompt", True) is not False)
    except ValueError as error:
        raise ApiError(400, str(error)) from None


async def tokenize_prompt(desk: Desk, request: web.Request, body: Body) -> web.StreamResponse:
    """The tokens of a prompt or of a chat."""
    desk.adapter(body)
    prompt = body.get("prompt")
    if "messages" in body:
        tokens = _tokens(chat, body)
    elif isinstance(prompt, str):
        tokens = tokenize(prompt)
    else:
        raise ApiError(400, "prompt: Field required", "prompt")
    wants = body.get("return_token_strs")
    answer: JsonValue = {
        "count": len(tokens),
        "max_model_len": desk.engine.settings.longest_tokens,
        "tokens": list(tokens),
        "token_strs": [detokenize([token], skip_special=False) for token in tokens] if wants else None,
    }
    return await desk.wire.reply(request, answer)


async def detokenize_tokens(desk: Desk, request: web.Request, body: Body) -> web.StreamResponse:
    """The text of tokens."""
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise ApiError(400, "tokens: a list of integers is required", "tokens")
    text = detokenize([token for token in tokens if isinstance(token, int)], skip_special=False)
    return await desk.wire.reply(request, {"prompt": text})


def rendering(read: Callable[[Body], Conversation], prefix: str) -> Api:
    """The endpoint that shows a request as the engine would compute it, without computing it."""

    async def render(desk: Desk, request: web.Request, body: Body) -> web.StreamResponse:
        desk.adapter(body)
        tokens: list[JsonValue] = list(_tokens(read, body))
        ident = request_id(request, prefix)
        return await desk.wire.reply(request, {"request_id": ident, "token_ids": tokens, "model": desk.model(body)})

    return render


async def embed(desk: Desk, request: web.Request, body: Body) -> web.StreamResponse:
    """Vectors that follow from the text and mean nothing."""
    desk.adapter(body)
    prompts = read_prompts(body.get("input"))
    size = integer(body, "dimensions", least=1) or _DIMENSIONS
    as_text = body.get("encoding_format") == "base64"
    data: list[JsonValue] = [
        {"index": index, "object": "embedding", "embedding": _encoded(_vector(prompt, size), as_text)}
        for index, prompt in enumerate(prompts)
    ]
    count = sum(len(prompt) for prompt in prompts)
    usage: JsonValue = {
        "prompt_tokens": count,
        "total_tokens": count,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }
    ident = request_id(request, "embd")
    answer: JsonValue = {"id": ident, "object": "list", "model": desk.model(body), "data": data, "usage": usage}
    return await desk.wire.reply(request, answer)


def _vector(prompt: array[int], size: int) -> list[float]:
    digest = seed_of(prompt)
    values = [math.sin(digest[index % len(digest)] + index) for index in range(size)]
    length = math.sqrt(sum(value * value for value in values)) or 1.0
    return [value / length for value in values]


def _encoded(vector: Sequence[float], as_text: bool) -> JsonValue:
    if as_text:
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    return list(vector)
