"""What every API has in common: which model, how much, for whom; and the usage that comes back."""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from aiohttp import web

from homeport.fingerprint import JsonValue
from homeport_engines.emulator.answers import Script, Wanted, json_object
from homeport_engines.emulator.engine import Engine, Generation, Job
from homeport_engines.emulator.handoff import read_legs
from homeport_engines.emulator.http import ApiError, Wire
from homeport_engines.emulator.prompt import Conversation

Body = Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True)
class Desk:
    """What an API module works with."""

    engine: Engine
    wire: Wire
    started_s: int

    def adapter(self, body: Body) -> str | None:
        """The adapter the model name stands for; None for the base model. Raises ApiError for an unknown name."""
        model = body.get("model")
        if model is None or model == "" or model == self.engine.settings.model:
            return None
        if isinstance(model, str) and model in self.engine.adapters:
            return model
        raise ApiError(404, f"The model `{model}` does not exist.", "model")

    def model(self, body: Body) -> str:
        """The name an answer carries."""
        return self.adapter(body) or self.engine.settings.model


Api = Callable[[Desk, web.Request, Body], Awaitable[web.StreamResponse]]
"""Answers one request of one API."""


def integer(body: Body, name: str, *, least: int = 0) -> int | None:
    """A whole number from the body; None when absent. Raises ApiError naming the field."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ApiError(400, f"{name}: Input should be a valid integer", name)
    if value < least:
        raise ApiError(400, f"{name} must be at least {least}, got {value}.", name)
    return value


def request_id(request: web.Request, prefix: str) -> str:
    """vLLM's id: the client's ``X-Request-Id`` after the API's prefix, or a fresh one."""
    return f"{prefix}-{request.headers.get('X-Request-Id') or uuid.uuid4().hex}"


def make_job(
    desk: Desk,
    request: web.Request,
    body: Body,
    *,
    api: str,
    ident: str,
    prompt: array[int],
    talk: Conversation | None,
    limit: int | None,
    schema: JsonValue = None,
) -> Job:
    """Check a request the way vLLM does and make it a job. Raises ApiError, or EngineDeathError from the connector."""
    settings = desk.engine.settings
    longest = settings.longest_tokens
    if not prompt:
        raise ApiError(400, "The prompt cannot be empty", "prompt")
    if len(prompt) + (limit or 1) > longest:
        raise ApiError(
            400,
            f"This model's maximum context length is {longest} tokens. However, you requested {limit or 1} output "
            f"tokens and your prompt contains at least {len(prompt)} input tokens, for a total of at least "
            f"{len(prompt) + (limit or 1)} tokens. Please reduce the length of the input prompt or the number of "
            "requested output tokens.",
            "input_tokens",
        )
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ApiError(400, "Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    session = request.headers.get("X-Session-ID") or body.get("session_id")
    seed = body.get("seed")
    return Job(
        ident,
        api,
        prompt,
        _wanted(body, talk, limit or longest - len(prompt), schema),
        talk,
        integer(body, "n", least=1) or 1,
        str(seed) if seed is not None else "",
        desk.adapter(body),
        salt,
        _priority(body),
        session if isinstance(session, str) else None,
        _rank(request, settings.data_parallel),
        read_legs(settings.kv, _object(body, "kv_transfer_params")),
    )


def _object(body: Body, name: str) -> Body:
    try:
        return json_object(body, name)
    except ValueError as error:
        raise ApiError(400, str(error), name) from None


def _priority(body: Body) -> int:
    value = body.get("priority") or 0
    if not isinstance(value, int):
        raise ApiError(400, "priority: Input should be a valid integer", "priority")
    return value


def _rank(request: web.Request, ranks: int) -> int | None:
    text = request.headers.get("X-data-parallel-rank")
    if text is None:
        return None
    try:
        rank = int(text)
    except ValueError:
        return None  # vLLM ignores what is no number
    if not 0 <= rank < ranks:
        raise ApiError(400, f"data_parallel_rank {rank} is out of range [0, {ranks}).", "data_parallel_rank")
    return rank


def _wanted(body: Body, talk: Conversation | None, limit: int, schema: JsonValue) -> Wanted:
    stop = body.get("stop") or body.get("stop_sequences") or []
    listed = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    words = tuple(str(word) for word in listed if word)
    required, forced = _tool_choice(body.get("tool_choice"))
    if forced is not None and all(tool.name != forced for tool in (talk.tools if talk else ())):
        raise ApiError(400, f"tool_choice: the tool `{forced}` is not among the tools", "tool_choice")
    scripted = body.get("emulator_answer")
    try:
        script = Script.parse(scripted) if scripted is not None else None
    except ValueError as error:
        raise ApiError(400, f"emulator_answer: {error}", "emulator_answer") from None
    return Wanted(
        limit,
        integer(body, "min_tokens") or 0,
        bool(body.get("ignore_eos")),
        words,
        forced,
        required,
        schema,
        script,
    )


def _tool_choice(choice: JsonValue) -> tuple[bool, str | None]:
    """Whether a tool must be called, and which, in any API's words."""
    if choice == "required":
        return True, None
    if not isinstance(choice, dict):
        return False, None
    if choice.get("type") == "any":
        return True, None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    return False, name if isinstance(name, str) else None


def openai_usage(desk: Desk, generation: Generation) -> dict[str, JsonValue]:
    """``usage`` of chat and completions."""
    prompt, output = generation.prompt_tokens, generation.output_tokens
    details: JsonValue = {"cached_tokens": generation.cached_tokens}
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + output,
        "completion_tokens": output,
        "prompt_tokens_details": details if desk.engine.settings.prompt_tokens_details else None,
    }


def load_header(desk: Desk, request: web.Request) -> dict[str, str]:
    """The ORCA header, when the request asks for it."""
    wanted = request.headers.get("endpoint-load-metrics-format", "").upper()
    ranks = desk.engine.ranks
    figures = {
        "kv_cache_usage_perc": sum(rank.cache.usage for rank in ranks) / len(ranks),
        "num_requests_waiting": float(sum(len(rank.waiting) for rank in ranks)),
    }
    if wanted == "JSON":
        named = ", ".join(f'"{name}": {value}' for name, value in figures.items())
        return {"endpoint-load-metrics": f'JSON {{"named_metrics": {{{named}}}}}'}
    if wanted == "TEXT":
        return {"endpoint-load-metrics": "TEXT " + ", ".join(f"named_metrics.{n}={v}" for n, v in figures.items())}
    return {}
