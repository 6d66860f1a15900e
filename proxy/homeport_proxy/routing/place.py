"""One place at run time: its spec, state, load, and the view of it that decisions read."""

from __future__ import annotations

from dataclasses import replace

from homeport_engines.base import EngineStats
from homeport_proxy.routing.load import PlaceLoad
from homeport_proxy.routing.views import PlaceSpec, PlaceView, Rates, State


class Place:
    """Mutable state of a placement unit; survives reloads of its spec."""

    def __init__(self, spec: PlaceSpec, load_window_s: float) -> None:
        self.load = PlaceLoad(load_window_s)
        self.state: State = "unknown"
        self.down_since_s: float | None = None
        self.cool_until_s = 0.0
        self.stats: EngineStats | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.view = PlaceView(spec.name, spec.backend, spec.role)
        self.renew(spec)

    def renew(self, spec: PlaceSpec) -> None:
        """Take a new spec for the same place (reload)."""
        self.spec = spec
        rates = spec.rates
        if spec.capacity != 1.0:
            rates = replace(rates, tokens_per_s=rates.tokens_per_s * spec.capacity)
        self.set_rates(rates)
        view = self.view
        view.role, view.pool, view.backend = spec.role, spec.pool, spec.backend
        view.kv_transfer = spec.kv_transfer != "none"
        view.kv_capacity_tokens = spec.kv_capacity_tokens

    def set_rates(self, rates: Rates) -> None:
        """Newly learned speeds."""
        self.rates = rates
        self.view.rates = rates

    def serves(self, model: str, adapter: str | None, tokens: int) -> bool:
        """Whether a request of ``tokens`` (prompt) for this model and adapter can run here at all."""
        spec = self.spec
        if spec.models and model not in spec.models:
            return False
        if adapter is not None and spec.adapters is not None and adapter not in spec.adapters:
            return False
        return spec.max_model_len is None or tokens < spec.max_model_len

    def refresh(self, now_s: float) -> PlaceView:
        """The view brought up to ``now_s``, without what depends on a request."""
        view, load = self.view, self.load
        view.state = self.state
        view.cooling = now_s < self.cool_until_s
        view.wait_s = load.prefill_left_s(now_s)
        view.rho = load.rho(now_s)
        view.requests = load.requests
        view.waiting = load.waiting
        view.prefill_tokens = load.prefill_tokens
        view.decode_tokens = load.decode_tokens
        view.down_s = now_s - self.down_since_s if self.down_since_s is not None else 0.0
        return view
