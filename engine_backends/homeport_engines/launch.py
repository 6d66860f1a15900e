"""How an engine is started: what is asked, and the exact command line and environment that answer it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from homeport.fingerprint import JsonValue
from homeport_engines.base import Role

Connector = Literal["none", "nixl", "nixl-push", "mooncake", "lmcache", "mooncake-store", "shared-folder"]
PLACEHOLDER = "<REPLACE-WITH-DRAFT-MODEL: {kind} for {model}>"
"""Stands where a preset needs a model that nobody named; no engine starts with it."""


class LaunchError(ValueError):
    """What was asked cannot be started; says which option and what to give instead."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """A way to guess tokens ahead, in terms that every engine knows.

    ``draft_model`` is None where the method needs none, or none was given (``needs_draft`` tells which).
    ``options`` are the engine's own, passed as they are.
    """

    method: Literal["ngram", "suffix", "eagle3", "draft-model", "mtp", "custom"]
    tokens: int
    needs_draft: bool = False
    draft_model: str | None = None
    options: Mapping[str, JsonValue] = field(default_factory=dict)


SPECULATION: Mapping[str, Speculation] = {
    "ngram": Speculation("ngram", 4, options={"prompt_lookup_max": 4, "prompt_lookup_min": 2}),
    "suffix": Speculation("suffix", 16),
    "eagle3": Speculation("eagle3", 3, needs_draft=True),
    "draft-model": Speculation("draft-model", 3, needs_draft=True),
    "mtp": Speculation("mtp", 1),
}
"""The presets for speculative decoding. n-gram and suffix guess from text already seen, which tool calls, edits and
quoted files repeat; EAGLE-3 and a draft model need weights made for the target; MTP needs heads in its checkpoint."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Scheduler settings for a kind of workload. ``batched_tokens`` bounds one engine step's tokens: large steps
    favour prefill throughput, small ones keep the gap between a decoding session's tokens short."""

    batched_tokens: int
    sequences: int


SHAPES: Mapping[str, Shape] = {
    "agents": Shape(batched_tokens=8192, sequences=64),
    "chat": Shape(batched_tokens=2048, sequences=256),
    "batch": Shape(batched_tokens=16384, sequences=512),
}
"""The presets for a workload's shape: few long sessions, many short ones, throughput alone."""


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What to start. ``model`` is a name or path on the machine where the command will run; it is never opened.

    Ports: ``port`` for HTTP, ``side_channel_port`` for NIXL (rank i of a data-parallel engine uses it + i),
    ``bootstrap_port`` for Mooncake and SGLang, ``events_port`` for KV events with their replay 1000 above, where rank i
    too uses port + i. ``events_socket`` publishes them on a local socket of that name instead (Linux, one rank); with
    neither there are none.
    ``cpu_threads`` and ``kv_gib`` matter to the CPU build alone. None leaves a setting to the engine.
    """

    model: str
    role: Role = "mixed"
    served_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    kv: Connector = "none"
    kv_readback: bool = False
    """NIXL: prefill engines read the last turn back from their decode engines; the same on both."""
    speculation: Speculation | None = None
    shape: Shape | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    tool_parser: str | None = None
    tensor_parallel: int = 1
    data_parallel: int = 1
    gpus: tuple[int, ...] | None = None
    side_channel_port: int = 5600
    bootstrap_port: int = 8998
    events_port: int | None = None
    events_socket: str | None = None
    cpu_threads: int | None = None
    kv_gib: int = 1
    store_path: str = "/tmp/kv-store"
    program: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """The answer. ``env`` is added to the environment; ``notes`` say what a person must still do."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)  # may hold a key
    notes: tuple[str, ...] = ()

    def shell(self) -> str:
        """One line for a POSIX shell."""
        assignments = (f"{name}={shlex.quote(value)}" for name, value in self.env.items())
        return " ".join((*assignments, shlex.join(self.argv)))


def speculation(text: str, draft_model: str | None = None) -> Speculation:
    """A preset by name, or an engine's own settings as a JSON object. Raises LaunchError."""
    if preset := SPECULATION.get(text):
        if draft_model is not None and not preset.needs_draft:
            raise LaunchError(f"--spec {text} takes no draft model")
        return Speculation(preset.method, preset.tokens, preset.needs_draft, draft_model, preset.options)
    if not text.lstrip().startswith("{"):
        raise LaunchError(f"--spec {text!r}: expected {', '.join(SPECULATION)} or a JSON object")
    try:
        options = json.loads(text)
    except ValueError as error:
        raise LaunchError(f"--spec is no valid JSON: {error}") from None
    return custom_speculation(options)


def custom_speculation(options: Mapping[str, JsonValue]) -> Speculation:
    """The engine's own settings, passed through; `num_speculative_tokens` must be there."""
    tokens = options.get("num_speculative_tokens")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise LaunchError("--spec: the JSON object needs num_speculative_tokens, a number of 1 or more")
    return Speculation("custom", tokens, options=options)


def draft_model(request: LaunchRequest, wanted: Speculation) -> tuple[str, tuple[str, ...]]:
    """The draft model to name, and notes: a marked placeholder when none was given."""
    if wanted.draft_model is not None:
        return wanted.draft_model, ()
    kind = "EAGLE-3 head" if wanted.method == "eagle3" else "small model with the same tokenizer"
    placeholder = PLACEHOLDER.format(kind=kind, model=request.model)
    return placeholder, (f"put the draft model's name in place of {placeholder}, or give --draft-model",)
