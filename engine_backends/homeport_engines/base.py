"""What an engine must tell Homeport: how to hand a prefill over, what its telemetry means, what it can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from homeport.fingerprint import Api, JsonValue

Role = Literal["prefill", "decode", "mixed"]


LEASE_MARGIN_S = 5.0
"""Parameters are given up this long before their lease ends: the decode engine still has to be reached, and reading
freed blocks is not refused but answers with wrong text."""


@dataclass(frozen=True, slots=True)
class BodyEdits:
    """Top-level members of a JSON request body to set and to remove.

    Everything else travels byte for byte: the proxy splices these into the client's bytes and never dumps the
    body again. ``drop`` wins over nothing: a name stands in one of the two only.
    """

    set: Mapping[str, JsonValue] = field(default_factory=dict)
    drop: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Leg:
    """One request to one engine: edits to the client's body, and headers to add."""

    edits: BodyEdits
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """An engine as its peers see it.

    ``bootstrap_port`` and ``engine_ids`` (by data-parallel rank) are known only for connectors that need them
    (SGLang, Mooncake).
    """

    name: str
    url: str
    rank: int | None = None
    bootstrap_port: int | None = None
    engine_ids: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Handoff:
    """One prefill to be handed from ``prefill`` to ``decode``; ``transfer_id`` is minted by the proxy, unique."""

    transfer_id: str
    prefill: EngineAddress
    decode: EngineAddress


@dataclass(frozen=True, slots=True)
class HandoffParams:
    """What the prefill engine gave for its decode engine: valid once, and only until ``lease_s`` after its answer."""

    params: Mapping[str, JsonValue]
    prompt_tokens: int | None
    cached_tokens: int | None


class KvTransfer(Protocol):
    """One KV connector's choreography (see docs/engines.md for the sources of each)."""

    name: str
    order: Literal["prefill_first", "concurrent"]
    lease_s: float | None
    """Seconds the prefill engine holds the blocks; parameters older than this are never used."""

    readback_s: float | None
    """Seconds for which the parameters of a decode engine's answer may be given to the next turn's prefill leg, when
    read-back is on; None: this connector has none."""

    def prefill_leg(self, api: Api, handoff: Handoff, last_turn: Mapping[str, JsonValue] | None = None) -> Leg:
        """``last_turn``: the parameters that came with the session's last answer, to be read back from its engine."""

    def accept(self, api: Api, answer: Mapping[str, JsonValue]) -> HandoffParams | None:
        """Take the hand-off parameters from a prefill answer; None when it carries none that can be used."""

    def decode_leg(self, api: Api, handoff: Handoff, params: HandoffParams | None) -> Leg: ...

    def refuses(self, api: Api, body: Mapping[str, JsonValue]) -> str | None:
        """Why this request cannot be split over two engines (a sentence fragment), or None when it can."""


@dataclass(frozen=True, slots=True)
class SpecStats:
    """Speculative decoding counters since the engine started (tokens)."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int

    @property
    def acceptance(self) -> float | None:
        """Accepted / drafted tokens; None before the first draft."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One engine rank's telemetry; None is "not reported", never zero. Counters run since the engine's start."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    kv_capacity_tokens: int | None = None
    block_tokens: int | None = None
    prefix_queries_tokens: int | None = None
    prefix_hits_tokens: int | None = None
    prompt_tokens_by_source: Mapping[str, int] = field(default_factory=dict)
    preemptions: int | None = None
    spec: SpecStats | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine family: its name, its KV connectors, and the paths the proxy asks."""

    name: str
    transfers: Mapping[str, KvTransfer]
    health_path: str = "/health"
    metrics_path: str | None = "/metrics"
    tokens_paths: Mapping[str, str] = field(default_factory=dict)
    """Per client API, where the engine tells a request's prompt in its own tokens."""
    token_ids_path: str | None = None
    """Where the engine takes a prompt as token ids, in the shape of OpenAI's completions; None: nowhere."""

    def tokens_path(self, api: str) -> str | None:
        """Where to ask for the tokens of that API's requests; None when it cannot tell."""
        return self.tokens_paths.get(api)
