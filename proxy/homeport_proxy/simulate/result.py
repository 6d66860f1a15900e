"""What a run measured: per-request samples of the window, and the token gaps as a histogram."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished request; seconds and tokens."""

    arrived_s: float
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    moved: bool
    crossed: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One line of `homeport replay --json`; ratios in 0..1, None when nothing was measured."""

    policy: str
    seed: int
    requests: int
    hit_ratio: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    itl_p99_s: float | None
    moved_ratio: float | None
    cross_region_ratio: float | None


_PER_DECADE = 100
_LOWEST_S = 1e-4


@dataclass(slots=True, eq=False)
class Samples:
    """Collects samples; only requests that arrived inside ``window_s`` count."""

    window_s: tuple[float, float] = (0.0, math.inf)
    all: list[Sample] = field(default_factory=list)
    _gaps: dict[int, float] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        """Take a finished request."""
        self.all.append(sample)

    def gaps(self, arrived_s: float, step_s: float, tokens: int, stretched: Sequence[tuple[float, float]]) -> None:
        """Token gaps of one answer: ``tokens`` steps, some of them longer by a prefill chunk."""
        if not self._inside(arrived_s) or tokens < 2 or step_s <= 0:
            return
        plain = float(tokens - 1)
        for chunk_s, chunks in stretched:
            count = min(chunks, plain)
            plain -= count
            self._count(step_s + chunk_s, count)
        self._count(step_s, plain)

    def _count(self, gap_s: float, tokens: float) -> None:
        if tokens > 0:
            slot = round(math.log10(max(gap_s, _LOWEST_S)) * _PER_DECADE)
            self._gaps[slot] = self._gaps.get(slot, 0.0) + tokens

    def _inside(self, arrived_s: float) -> bool:
        return self.window_s[0] <= arrived_s <= self.window_s[1]

    @property
    def measured(self) -> list[Sample]:
        """Requests of the window."""
        return [sample for sample in self.all if self._inside(sample.arrived_s)]

    def itl_s(self, quantile: float) -> float | None:
        """A quantile of the token gaps, seconds."""
        total = sum(self._gaps.values())
        seen = 0.0
        for slot in sorted(self._gaps):
            seen += self._gaps[slot]
            if seen >= quantile * total:
                return float(10 ** (slot / _PER_DECADE))
        return None

    def row(self, policy: str, seed: int) -> Row:
        """The run in one line."""
        measured = self.measured
        ttft = sorted(sample.ttft_s for sample in measured)
        prompt = sum(sample.prompt_tokens for sample in measured)
        count = len(measured)
        return Row(
            policy=policy,
            seed=seed,
            requests=count,
            hit_ratio=sum(sample.cached_tokens for sample in measured) / prompt if prompt else None,
            ttft_p50_s=quantile(ttft, 0.5),
            ttft_p90_s=quantile(ttft, 0.9),
            ttft_p99_s=quantile(ttft, 0.99),
            itl_p99_s=self.itl_s(0.99),
            moved_ratio=sum(sample.moved for sample in measured) / count if count else None,
            cross_region_ratio=sum(sample.crossed for sample in measured) / count if count else None,
        )


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Linear quantile of sorted values; None of nothing."""
    if not ordered:
        return None
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
