"""The cluster file: replicas, speeds, cache sizes and how a trace is laid over them. Seconds and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from homeport_proxy.config_faults import StrictLoader, validation_faults, yaml_fault
from homeport_proxy.routing.views import Rates


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Prefill(_Section):
    """Prefill of ``u`` uncached after ``c`` cached tokens: ``t0_s + u / R * (1 + (c + u / 2) / A)``."""

    t0_s: float = Field(default=0.02, ge=0)
    tokens_per_s: float = Field(default=16_000, gt=0)
    attention_tokens: float = Field(default=53_000, gt=0)


class Decode(_Section):
    """A decode step of n sequences, k context tokens: ``step_s + n * per_sequence_s + k * per_context_token_s``."""

    step_s: float = Field(default=0.03, gt=0)
    per_sequence_s: float = Field(default=0.0001, ge=0)
    per_context_token_s: float = Field(default=1.2e-8, ge=0)


class Sessions(_Section):
    """How a closed-loop trace's sessions are started and cut."""

    spread_s_per_session: float = Field(default=10.6, gt=0)
    think_cap_s: float = Field(default=600, ge=0)
    max_start_tokens: int = Field(default=150_000, gt=0)
    max_context_tokens: int = Field(default=200_000, gt=0)


class Region(_Section):
    """A region of the cluster: its share of the replicas and of the arriving sessions, and its distance."""

    replicas: int = Field(gt=0)
    share: float = Field(default=1.0, ge=0)
    rtt_ms: float = Field(default=0, ge=0)


class Cluster(_Section):
    """A cluster file as it stands, with its defaults."""

    replicas: int = Field(default=8, gt=0)
    cache_tokens: int = Field(default=2_600_000, gt=0)
    block_tokens: int = Field(default=512, gt=0)
    prefill: Prefill = Prefill()
    decode: Decode = Decode()
    sessions: Sessions = Sessions()
    rate_scale: float = Field(default=1.0, gt=0)
    window: tuple[float, float] = (0.2, 1.0)
    telemetry_lag_s: float = Field(default=0, ge=0)
    noise: float = Field(default=0, ge=0, lt=1)
    """Every prefill takes up to this share more or less than the engine's rate says, so that what is learned of rates
    and predicted by them is off."""
    uneven: float = Field(default=0, ge=0, lt=1)
    """Engines are faster or slower than the file says by up to this share, for good; their caches are no larger."""
    prefill_replicas: int = Field(default=0, ge=0)
    decode_replicas: int = Field(default=0, ge=0)
    regions: dict[str, Region] = Field(default_factory=dict)
    transfer_tokens_per_s: float = Field(default=400_000, gt=0)
    chunk_tokens: int = Field(default=2048, gt=0)
    steps: bool = False
    """Prefill in chunks beside the decode batch, step by step, as vLLM computes; else one prompt after the other."""
    slices: bool = True
    """Whether engines take prompts in tokens, so that long prefills can be sent in parts; peers' rules never do."""
    index: Literal["approximate", "exact"] = "approximate"
    session_ids: bool = True
    end_hints: bool = False

    @model_validator(mode="after")
    def _whole(self) -> Cluster:
        start, end = self.window
        if not 0 <= start < end <= 1:
            raise ValueError("window must be two shares of the run, 0 <= start < end <= 1")
        if bool(self.prefill_replicas) != bool(self.decode_replicas):
            raise ValueError("prefill_replicas and decode_replicas go together: give both or neither")
        if self.regions and self.prefill_replicas:
            raise ValueError("regions hold mixed replicas: leave out prefill_replicas and decode_replicas")
        return self

    @property
    def rates(self) -> Rates:
        """The engines' true speeds."""
        return Rates(
            t0_s=self.prefill.t0_s,
            tokens_per_s=self.prefill.tokens_per_s,
            attention_tokens=self.prefill.attention_tokens,
            step_s=self.decode.step_s,
            per_sequence_s=self.decode.per_sequence_s,
            per_context_token_s=self.decode.per_context_token_s,
            transfer_tokens_per_s=self.transfer_tokens_per_s,
        )


class ClusterError(ValueError):
    """A cluster file that cannot be used; the text names each field and what it should be."""


_EXAMPLE = "{replicas: 8, cache_tokens: 2600000}"
_PLACES = frozenset({"backends", "discovery", "proxy"})
"""Every region of a proxy's configuration has one of these, none of a cluster file."""


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file (YAML or JSON). Raises :class:`ClusterError`."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), StrictLoader)
    except OSError as error:
        raise ClusterError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ClusterError(f"{path}: not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ClusterError(f"{path}: not YAML: {yaml_fault(error).removeprefix('not YAML: ')}") from error
    if not isinstance(data, dict):
        raise ClusterError(f"{path}: a cluster file is a mapping such as {_EXAMPLE}")
    if _configures_a_proxy(data):
        raise ClusterError(f"{path}: this is a proxy configuration; a cluster file looks like {_EXAMPLE}")
    try:
        return Cluster.model_validate(data)
    except ValidationError as error:
        raise ClusterError(f"{path}: " + "; ".join(validation_faults(error, Cluster))) from error


def _configures_a_proxy(data: Mapping[Any, Any]) -> bool:
    regions = data.get("regions")
    return isinstance(regions, dict) and any(
        isinstance(region, dict) and not _PLACES.isdisjoint(region) for region in regions.values()
    )
