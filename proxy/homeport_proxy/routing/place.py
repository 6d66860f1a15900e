"""One place at run time: its spec, state, load, and the view of it that decisions read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from homeport_engines.base import EngineStats
from homeport_proxy.routing.bursts import Burst
from homeport_proxy.routing.calibration import Confidence, PrefillRates
from homeport_proxy.routing.cost import fixed_s
from homeport_proxy.routing.load import PlaceLoad
from homeport_proxy.routing.views import PlaceSpec, PlaceView, Rates, State

_OWN_OBSERVATIONS = 4
"""Prefills seen before a place's speeds are its own."""

_JOINING_S = 0.05
"""After so long nothing more of one engine step comes."""

_FORGET_EVERY = 40
"""Observations between two rebuilds of a place's index: a systematic fault is shown, not chased."""


@dataclass(frozen=True, slots=True)
class ForeignLoad:
    """What other proxies have in flight at a place."""

    requests: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


_NONE = ForeignLoad()


class Place:
    """Mutable state of a placement unit; survives reloads of its spec."""

    def __init__(self, spec: PlaceSpec, load_window_s: float) -> None:
        self.load = PlaceLoad(load_window_s)
        self.state: State = "unknown"
        self.down_since_s: float | None = None
        self.cool_until_s = 0.0
        self.share = 1.0
        self.foreign = _NONE
        self.stats: EngineStats | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.confidence = Confidence()
        self.cold_since_s = float("-inf")
        """When its cache was last known to be empty."""
        self.forgotten_at = -_FORGET_EVERY
        self.rates = self._spec_rates = Rates(t0_s=-1.0)
        self.prefill_rates = PrefillRates(self.rates)
        self._untold: Burst | None = None
        self.view = PlaceView(spec.name, spec.backend, spec.role)
        self.renew(spec)

    def renew(self, spec: PlaceSpec) -> None:
        """Take a new spec for the same place (reload)."""
        self.spec = spec
        rates = replace(spec.rates, tokens_per_s=spec.rates.tokens_per_s * spec.capacity)
        if self._spec_rates != rates:
            # a reload with the same speeds keeps what was learned
            self._spec_rates = rates
            self.prefill_rates = PrefillRates(rates)
            self.set_rates(rates)
        view = self.view
        view.role, view.pool, view.backend = spec.role, spec.pool, spec.backend
        view.kv_transfer = spec.kv_transfer != "none"
        view.kv_capacity_tokens = spec.kv_capacity_tokens or view.kv_capacity_tokens  # what the engine told stays

    def set_rates(self, rates: Rates) -> None:
        """Newly learned speeds."""
        self.rates = self.view.rates = self.prefill_rates.rates = rates
        self.load.fixed_s = fixed_s(rates)

    def learn_prefill(self, burst: Burst, now_s: float) -> None:
        """A request of ``burst`` is over. What was computed together is told together, when no other can join."""
        if self._untold is not None and self._untold is not burst:
            self._tell(self._untold)
        self._untold = burst
        if not self.load.prefilling or now_s - burst.ended_s > _JOINING_S:
            self._tell(burst)

    def _tell(self, burst: Burst) -> None:
        if burst.whole and not burst.told:
            burst.told = True
            took_s = burst.ended_s - burst.began_s - self.rates.rtt_s
            self.set_rates(self.prefill_rates.observe(burst.parts.values(), took_s))

    def borrow(self, other: Place) -> None:
        """Take another place's learned speeds (scaled by the configured capacities) until there are enough own ones.

        A place never tried would else look faster or slower than the fleet for ever, and draw all traffic or none.
        """
        if self.prefill_rates.observed < _OWN_OBSERVATIONS:
            ratio = self.spec.capacity / other.spec.capacity
            learned = replace(other.rates, tokens_per_s=other.rates.tokens_per_s * ratio, rtt_s=self.rates.rtt_s)
            observed = self.prefill_rates.observed
            self.prefill_rates = PrefillRates(learned)
            self.prefill_rates.observed = observed
            self.prefill_rates.learned = other.prefill_rates.learned
            self.set_rates(learned)

    def believe(self, api: str, expected_tokens: int, reported_tokens: int) -> bool:
        """Compare index and engine; True when the index is so wrong that it should be rebuilt."""
        confidence = self.confidence
        confidence.observe(api, expected_tokens, reported_tokens)
        if confidence.of(api) > 0.3 or confidence.observed - self.forgotten_at < _FORGET_EVERY:
            return False
        self.forgotten_at = confidence.observed
        return True

    def serves(self, model: str, adapter: str | None) -> bool:
        """Whether requests for this model and adapter can run here at all."""
        spec = self.spec
        if spec.models and model not in spec.models:
            return False
        return adapter is None or spec.adapters is None or adapter in spec.adapters

    def fits(self, prompt_tokens: int) -> bool:
        """Whether a prompt leaves room for at least one token of answer."""
        return self.spec.max_model_len is None or prompt_tokens < self.spec.max_model_len

    def refresh(self, now_s: float) -> PlaceView:
        """The view brought up to ``now_s``, without what depends on a request."""
        view = self.view
        view.state = self.state
        view.learned = self.prefill_rates.learned
        view.cooling = now_s < self.cool_until_s
        self.load.show(view, now_s)
        foreign = self.foreign
        if foreign is not _NONE:
            view.wait_s += foreign.prefill_tokens / self.rates.tokens_per_s
            view.requests += foreign.requests
            view.prefill_tokens += foreign.prefill_tokens
            view.decode_tokens += foreign.decode_tokens
        # a place in slow start has only a share of its speed to give: what waits there takes so much longer
        view.wait_s /= self.share
        view.down_s = now_s - self.down_since_s if self.down_since_s is not None else 0.0
        return view

    def restarted(self, stats: EngineStats) -> bool:
        """Whether counters that only grow have fallen: another process answers under the same name."""
        before = self.stats
        if before is None:
            return False
        pairs = (
            (before.prefix_queries_tokens, stats.prefix_queries_tokens),
            (before.prefix_hits_tokens, stats.prefix_hits_tokens),
            (before.preemptions, stats.preemptions),
        )
        return any(old is not None and new is not None and new < old for old, new in pairs)

    def turnover_s(self) -> float | None:
        """Seconds for which a prefix stays resident after its last use: the time the engine takes to fill its cache
        once with fresh tokens, at the pace of the last window; None when capacity or pace is unknown."""
        capacity = self.view.kv_capacity_tokens
        fresh = self.load.fresh_tokens_per_s
        return capacity / fresh if capacity and fresh > 0 else None
