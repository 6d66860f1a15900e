"""The proxy's metrics: names, labels and what feeds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from homeport_proxy.observe.prometheus import Registry, Sample

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
FINE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
OVERHEAD_SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 1.0)


class Fleetwide(Protocol):
    """What gauges ask for when metrics are read."""

    def inflight_tokens(self) -> Iterable[Sample]: ...

    def backend_up(self) -> Iterable[Sample]: ...

    def sessions(self) -> Iterable[Sample]: ...

    def spec_acceptance(self) -> Iterable[Sample]: ...

    def index_confidence(self) -> Iterable[Sample]: ...

    def wanted_backends(self) -> Iterable[Sample]: ...


class Metrics:
    """Every series the proxy exposes. Label values come from closed sets: models and tenants of the file, backends of
    the fleet, causes and words of the code."""

    def __init__(self) -> None:
        registry = self.registry = Registry()
        self.requests = registry.counter(
            "homeport_requests_total",
            "Requests by API, model, tenant, decision and HTTP status (499: the client left).",
            ("api", "model", "tenant", "decision", "code"),
        )
        self.prompt_tokens = registry.counter(
            "homeport_prompt_tokens_total",
            "Prompt tokens: found cached, computed fresh, or not reported by the engine.",
            ("model", "tenant", "kind"),
        )
        self.output_tokens = registry.counter(
            "homeport_output_tokens_total", "Generated tokens as reported by the engine.", ("model", "tenant")
        )
        self.cache_miss_tokens = registry.counter(
            "homeport_cache_miss_tokens_total",
            "Prompt tokens computed, by the reason they were not cached.",
            ("model", "cause"),
        )
        self.ttft = registry.histogram(
            "homeport_ttft_seconds",
            "Time from arrival to the first generated token; of an answer that is not streamed, to its end.",
            SECONDS,
        )
        self.itl = registry.histogram(
            "homeport_itl_seconds", "Time between the chunks of a stream after the first token.", FINE_SECONDS
        )
        self.overhead = registry.histogram(
            "homeport_overhead_seconds",
            "Time the proxy itself took before the engine had the request.",
            OVERHEAD_SECONDS,
        )
        self.queue = registry.histogram(
            "homeport_queue_seconds", "Time a request was held in the proxy for an engine to be free.", SECONDS
        )
        self.moves = registry.counter(
            "homeport_session_moves_total", "Sessions that got a new home, by reason.", ("reason",)
        )
        self.transfers = registry.counter(
            "homeport_kv_transfers_total",
            "Prefills handed over to a decode backend, by outcome.",
            ("backend", "outcome"),
        )

    def watch(self, fleet: Fleetwide) -> None:
        """Add the gauges."""
        add: Callable[..., object] = self.registry.gauge
        add(
            "homeport_backend_inflight_tokens",
            "Tokens in flight at a backend: prompts being prefilled, sequences being decoded.",
            fleet.inflight_tokens,
            ("backend", "phase"),
        )
        add("homeport_backend_up", "1 when the backend can be used.", fleet.backend_up, ("backend",))
        add("homeport_sessions", "Sessions remembered.", fleet.sessions)
        add(
            "homeport_spec_decode_acceptance",
            "Accepted per drafted token of speculative decoding.",
            fleet.spec_acceptance,
            ("backend",),
        )
        add(
            "homeport_index_confidence",
            "How far the prefix index is believed, 0 to 1.",
            fleet.index_confidence,
            ("backend",),
        )
        add("homeport_wanted_backends", "Backends the load asks for.", fleet.wanted_backends, ("pool", "role"))
