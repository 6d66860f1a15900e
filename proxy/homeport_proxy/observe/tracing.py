"""OpenTelemetry spans of finished requests, through the tracer provider of the process (``opentelemetry-instrument
homeport serve ...`` sets one up from its environment; without one, spans go nowhere).

Spans are made when the request is over, with the times that were measured anyway: tracing costs nothing while a
request runs. The client's ``traceparent`` is their parent.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from homeport import __version__
from homeport_proxy.exchange import Exchange
from homeport_proxy.observe.summary import word_of


class Tracing:
    """Turns exchanges into spans: the request, time in the queue, each leg, and the wait for the first token."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("homeport.proxy", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, exchange: Exchange, _: Mapping[str, int]) -> None:
        """Emit one request's spans."""
        parent = self._propagator.extract(dict(exchange.headers), context=Context())

        def at(loop_s: float) -> int:
            return int((exchange.arrived_unix_s + loop_s - exchange.arrived_s) * 1e9)

        end_s = exchange.ended_s or exchange.arrived_s
        root = self._tracer.start_span(
            f"{exchange.method} {exchange.api}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=at(exchange.arrived_s),
            attributes=_attributes(exchange),
        )
        inside = trace.set_span_in_context(root, Context())
        decided_s = exchange.legs[0].started_s if exchange.legs else end_s
        queues = [(decided_s - exchange.held_s, exchange.held_s)]
        queues += [(leg.ended_s or end_s, leg.held_s) for leg in exchange.legs]
        for start_s, seconds in queues:
            if seconds > 0:
                self._tracer.start_span("queue", inside, start_time=at(start_s)).end(at(start_s + seconds))
        for leg in exchange.legs:
            span = self._tracer.start_span(
                f"{leg.part} {leg.place}",
                inside,
                kind=SpanKind.CLIENT,
                start_time=at(leg.started_s),
                attributes={"homeport.place": leg.place, "homeport.state": leg.state.name.lower()},
            )
            if leg.first_token_s is not None:
                span.add_event("first token", timestamp=at(leg.first_token_s))
            if leg.error is not None:
                span.set_status(Status(StatusCode.ERROR, leg.error))
            span.end(at(leg.ended_s or end_s))
        if exchange.error is not None or (exchange.status or 0) >= 500:
            root.set_status(Status(StatusCode.ERROR, exchange.error))
        root.end(at(end_s))


def _attributes(exchange: Exchange) -> Mapping[str, str | int | bool]:
    """Names of the GenAI semantic conventions where there is one; nothing of the prompt."""
    usage = exchange.usage
    values: dict[str, str | int | bool | None] = {
        "http.response.status_code": exchange.status,
        "gen_ai.request.model": exchange.model,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.conversation.id": exchange.session or None,
        "homeport.request_id": exchange.request_id,
        "homeport.tenant": exchange.tenant or None,
        "homeport.region": exchange.region or None,
        "homeport.decision": word_of(exchange),
        "homeport.stream": exchange.stream,
    }
    return {name: value for name, value in values.items() if value is not None}
