"""What routing sees and says: plain values, no I/O, no clock. All times in seconds, all sizes in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

Role = Literal["prefill", "decode", "mixed"]
State = Literal["up", "down", "draining", "unknown"]
Kind = Literal["main", "side", "subagent"]


class Word(StrEnum):
    """The decision in one word, as in ``x-homeport-decision``."""

    PLACED = "placed"
    HOME = "home"
    SPILL = "spill"
    MOVED = "moved"
    FAILOVER = "failover"
    PEER = "peer"


@dataclass(frozen=True, slots=True)
class Rates:
    """An engine's speed. Prefill of ``u`` uncached after ``c`` cached tokens takes
    ``t0_s + u / tokens_per_s * (1 + (c + u / 2) / attention_tokens)``; a decode step of n sequences with k context
    tokens in all takes ``step_s + n * per_sequence_s + k * per_context_token_s``."""

    t0_s: float = 0.02
    tokens_per_s: float = 16_000.0
    attention_tokens: float = 53_000.0
    step_s: float = 0.03
    per_sequence_s: float = 1e-4
    per_context_token_s: float = 1.2e-8
    transfer_tokens_per_s: float = 400_000.0
    rtt_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """A prompt's prefix as index keys.

    ``text_blocks``: chained digests of the canonical text, one per ``text_block_chars`` characters (the last, partial
    block left out). ``token_blocks``: the engine's own block hashes by block size in tokens, where known.
    """

    text_blocks: Sequence[int] = ()
    text_block_chars: int = 512
    token_blocks: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request as the policy sees it. ``session`` is an opaque digest and never empty."""

    request_id: str
    api: str
    model: str
    session: str
    prompt_tokens: int
    prefix: PrefixKeys = field(default_factory=PrefixKeys)
    tenant: str = ""
    tenant_weight: float = 1.0
    user: str = ""
    parent: str | None = None
    kind: Kind = "main"
    final: bool = False
    expected_output_tokens: int = 256
    adapter: str | None = None
    split_refused: str | None = None
    """Why prefill and decode must stay on one engine (from the capability table); None when they may part."""


@dataclass(frozen=True, slots=True)
class PlaceSpec:
    """A place a request can run: a backend, or one data-parallel rank of it (``d0/dp3``)."""

    name: str
    backend: str
    role: Role
    models: frozenset[str]
    pool: str = "default"
    kv_transfer: str = "none"
    rank: int | None = None
    rates: Rates = field(default_factory=Rates)
    capacity: float = 1.0
    kv_capacity_tokens: int | None = None
    max_model_len: int | None = None
    adapters: frozenset[str] | None = None
    """Adapters served; None: unknown, so any may be tried."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a place would cost this request, in seconds, by part; ``total_s`` is what the policy compares."""

    total_s: float
    wait_s: float = 0.0
    prefill_s: float = 0.0
    shadow_s: float = 0.0
    load_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    rtt_s: float = 0.0
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request runs and why. ``expected_cached_tokens`` is None only when no index exists."""

    place: str
    word: Word
    reason: str
    prefill_place: str | None = None
    expected_cached_tokens: int | None = None
    prefill_cached_tokens: int | None = None
    home: str | None = None
    """The session's home after this decision (unchanged by a spill or a side request)."""
    costs: Mapping[str, Cost] = field(default_factory=dict)
