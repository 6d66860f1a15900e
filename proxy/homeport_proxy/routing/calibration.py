"""Learning an engine's speeds and an index's worth from what requests report; robust to noise and sudden change."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from statistics import median

from homeport_proxy.routing.cost import decode_step_s, fixed_s
from homeport_proxy.routing.views import Rates

_RECENT = 9
_FORGET = 0.98
_PRIOR_WEIGHT = 2.0
_HUBER = 0.5
_RESCALE = math.log(1.4)
_LEAST_TOKENS = 256
_SHARE = 0.1


class PrefillRates:
    """Online fit of ``y = T0 + a u + b u (c + u / 2)`` to observed prefill seconds, ``a = 1 / R``, ``b = 1 / (R A)``.

    Ridge regression in relative error with forgetting (a bad second costs the same share at any length), Huber weights
    against outliers. When the median of the last observations is off by more than 1.4x (first traffic of an unknown
    engine, another engine behind the same name), both rates are rescaled at once and the fit starts anew.
    """

    def __init__(self, prior: Rates) -> None:
        self.rates = prior
        self.observed = 0
        self.learned = False
        """Whether ``tokens_per_s`` was learned: short prompts tell of ``t0_s`` only."""
        self._virgin = True
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._reset()

    def _reset(self) -> None:
        self._base = self.rates
        self._s11 = self._s22 = _PRIOR_WEIGHT
        self._s12 = 0.0
        self._t1 = self._t2 = _PRIOR_WEIGHT

    def observe(self, parts: Collection[tuple[int, int]], took_s: float) -> Rates:
        """Prompts of (uncached, cached) tokens, computed together and with nothing else, took ``took_s``; returns the
        new rates."""
        if took_s <= 0 or not parts:
            return self.rates
        self.observed += 1
        uncached_tokens = sum([uncached for uncached, _ in parts])
        pairs = sum([uncached * (cached + uncached / 2) for uncached, cached in parts])
        work_s = (uncached_tokens + pairs / self.rates.attention_tokens) / self.rates.tokens_per_s
        if uncached_tokens < _LEAST_TOKENS:
            self._learn_t0(took_s - work_s)
            return self.rates
        self.learned = True
        predicted_s = fixed_s(self.rates) + work_s
        self._recent.append(math.log(took_s / predicted_s))
        if self._rescaled():
            return self.rates
        base = self._base
        t0_s = fixed_s(base)
        linear = uncached_tokens / base.tokens_per_s / predicted_s
        attention = pairs / base.tokens_per_s / base.attention_tokens / predicted_s
        target = max(took_s - t0_s, 0.1 * took_s) / predicted_s
        residual = abs(took_s / predicted_s - 1.0)
        weight = 1.0 if residual <= _HUBER else _HUBER / residual
        for name, value in (
            ("_s11", weight * linear * linear),
            ("_s12", weight * linear * attention),
            ("_s22", weight * attention * attention),
            ("_t1", weight * linear * target),
            ("_t2", weight * attention * target),
        ):
            prior = 0.0 if name == "_s12" else _PRIOR_WEIGHT
            setattr(self, name, prior + _FORGET * (getattr(self, name) - prior) + value)
        self._solve()
        return self.rates

    def _solve(self) -> None:
        determinant = self._s11 * self._s22 - self._s12 * self._s12
        if determinant <= 1e-12:
            return
        linear = (self._t1 * self._s22 - self._t2 * self._s12) / determinant
        attention = (self._t2 * self._s11 - self._t1 * self._s12) / determinant
        linear = min(max(linear, 0.2), 5.0)
        attention = min(max(attention, 0.05), 20.0)
        base = self._base
        self.rates = replace(
            self.rates,
            tokens_per_s=base.tokens_per_s / linear,
            attention_tokens=base.attention_tokens * linear / attention,
        )

    def _rescaled(self) -> bool:
        if len(self._recent) < (1 if self._virgin else 3):
            return False
        off = median(self._recent)
        if abs(off) <= _RESCALE:
            return False
        self.rates = replace(self.rates, tokens_per_s=self.rates.tokens_per_s * math.exp(-off))
        self._recent.clear()
        self._virgin = False
        self._reset()
        return True

    def _learn_t0(self, fixed_s: float) -> None:
        fixed_s = max(fixed_s, 0.0)
        # towards the low side: what a short prompt took beyond its own work is often another's prefill
        share = _SHARE / 2 if fixed_s > self.rates.t0_s else _SHARE
        self.rates = replace(self.rates, t0_s=self.rates.t0_s + share * (min(fixed_s, 2.0) - self.rates.t0_s))


def learned_step(rates: Rates, sequences: int, context_tokens: int, step_s: float) -> Rates:
    """Rates after a decode step of ``sequences`` with ``context_tokens`` was seen to take ``step_s``."""
    predicted_s = decode_step_s(rates, max(sequences, 1), context_tokens)
    ratio = min(max(step_s / predicted_s, 0.25), 4.0) ** _SHARE
    return replace(
        rates,
        step_s=rates.step_s * ratio,
        per_sequence_s=rates.per_sequence_s * ratio,
        per_context_token_s=rates.per_context_token_s * ratio,
    )


def learned_transfer(rates: Rates, tokens: int, took_s: float) -> Rates:
    """Rates after a KV transfer of ``tokens`` took ``took_s`` (a step of a tenth in log space, outliers clipped)."""
    if tokens < _LEAST_TOKENS or took_s <= 0:
        return rates
    ratio = min(max(tokens / took_s / rates.transfer_tokens_per_s, 0.1), 10.0) ** _SHARE
    return replace(rates, transfer_tokens_per_s=rates.transfer_tokens_per_s * ratio)


class Confidence:
    """How far an index may be believed: decayed share of expected cached tokens that engines reported, per API.

    One request counts ``share`` of the whole (0.15): a collapse to nothing falls below ``DEGRADED_BELOW`` within five
    requests and is forgotten as fast. A request with little expected says little and counts by its tokens.
    """

    DEGRADED_BELOW = 0.5
    _SHARE = 0.15
    _FULL_WEIGHT_TOKENS = 512

    def __init__(self) -> None:
        self._by_api: dict[str, float] = {}
        self.observed = 0
        self._virgin = True

    def of(self, api: str) -> float:
        """Confidence for prompts of one API, 0..1; 1 before anything was seen."""
        return self._by_api.get(api, 1.0)

    @property
    def least(self) -> float:
        """The worst API's confidence: what is shown."""
        return min(self._by_api.values(), default=1.0)

    def observe(self, api: str, expected_tokens: int, reported_tokens: int) -> None:
        """An engine reported ``reported_tokens`` cached where the raw index expected ``expected_tokens``."""
        if expected_tokens <= 0:
            return
        self.observed += 1
        known = self._by_api.get(api, 1.0)
        share = self._SHARE * min(1.0, expected_tokens / self._FULL_WEIGHT_TOKENS)
        self._by_api[api] = known + share * (min(1.0, reported_tokens / expected_tokens) - known)

    def trust_again(self) -> None:
        """The index was rebuilt from nothing: half trust until it proves itself."""
        for api in self._by_api:
            self._by_api[api] = max(self._by_api[api], 0.75)
