"""Everything an emulated engine can be told, with vLLM's defaults where vLLM has one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from homeport_engines.base import Role

Kv = Literal["none", "nixl", "mooncake"]
EventEncoding = Literal["map", "array"]
LoadFailure = Literal["fail", "recompute"]


@dataclass(frozen=True, slots=True)
class Rates:
    """The emulated hardware's speed, in emulated seconds and tokens.

    Prefill of ``u`` uncached after ``c`` cached tokens takes
    ``t0_s + u / tokens_per_s * (1 + (c + u / 2) / attention_tokens)``; a decode step of n sequences that hold k
    context tokens in all takes ``step_s + n * per_sequence_s + k * per_context_token_s``.
    """

    t0_s: float = 0.02
    tokens_per_s: float = 16_000.0
    attention_tokens: float = 53_000.0
    step_s: float = 0.03
    per_sequence_s: float = 1e-4
    per_context_token_s: float = 1.2e-8
    transfer_t0_s: float = 0.001
    transfer_tokens_per_s: float = 400_000.0
    host_tokens_per_s: float = 100_000.0

    def prefill_s(self, cached_tokens: int, uncached_tokens: int) -> float:
        """Seconds of compute for one prefill, without ``t0_s``."""
        middle = cached_tokens + uncached_tokens / 2
        return uncached_tokens / self.tokens_per_s * (1 + middle / self.attention_tokens)

    def decode_s(self, sequences: int, context_tokens: int) -> float:
        """Seconds of one decode step; 0 for an empty batch."""
        if not sequences:
            return 0.0
        return self.step_s + sequences * self.per_sequence_s + context_tokens * self.per_context_token_s


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One kind of attention layers of a hybrid model, with blocks of its own.

    ``window_tokens`` None is full attention; a number is a sliding window; 1 behaves as a state-space layer that
    needs only its last block.
    """

    kind: str = "full_attention"
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding: ``draft_tokens`` per step, each accepted with probability ``acceptance`` while the one
    before it was."""

    draft_tokens: int = 4
    acceptance: float = 0.7


@dataclass(frozen=True, slots=True)
class EmulatorSettings:
    """One emulated engine. Port 0 takes a free port. Times of protocols (leases, keep-alive) are real seconds; only
    compute is scaled by ``time_scale`` (emulated seconds per real second)."""

    model: str = "emulated"
    host: str = "127.0.0.1"
    port: int = 0
    role: Role = "mixed"
    kv: Kv = "none"
    api_key: str | None = None
    rates: Rates = field(default_factory=Rates)
    time_scale: float = 1.0
    block_tokens: int = 16
    kv_blocks: int = 8192
    groups: tuple[CacheGroup, ...] = (CacheGroup(),)
    host_blocks: int = 0
    max_model_len: int = 131_072
    max_sequences: int = 256
    chunk_tokens: int = 8192
    data_parallel: int = 1
    adapters: tuple[str, ...] = ()
    speculation: Speculation | None = None
    output_tokens: int = 32
    prompt_tokens_details: bool = True
    priority_scheduling: bool = False
    store_responses: bool = False
    script: Path | None = None
    keep_alive_s: float = 5.0
    lease_s: float = 30.0
    readback_ttl_s: float | None = None
    """Seconds a decode engine keeps a finished answer's blocks for the next turn's prefill; None: no read-back."""
    load_failure: LoadFailure = "fail"
    load_failure_s: float = 5.0
    side_channel_port: int = 0
    bootstrap_port: int = 0
    kv_events: bool = True
    event_encoding: EventEncoding = "map"
    event_port: int = 0
    replay_port: int = 0
    event_topic: str = ""
    event_buffer: int = 10_000
    dies: bool = False
    """Whether a request that kills a real engine ends this process too; else it is recorded and the connection cut."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("time_scale", "block_tokens", "kv_blocks", "max_sequences", "chunk_tokens", "data_parallel"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if not self.groups:
            raise ValueError("groups must name at least one kind of attention")

    @property
    def longest_tokens(self) -> int:
        """The longest sequence that is accepted: bounded by the KV cache, as in a real engine."""
        return min(self.max_model_len, self.kv_blocks * self.block_tokens // len(self.groups))
