"""One finished request in plain values: what `why` shows, and the words that logs and metrics share with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from homeport_proxy.exchange import Exchange
from homeport_proxy.routing.views import Word

Summary: TypeAlias = dict[str, object]


def word_of(exchange: Exchange) -> str | None:
    """The decision in one word; None when none was made."""
    if exchange.peer_region:
        return Word.PEER.value
    return exchange.decision.word if exchange.decision else None


def code_of(exchange: Exchange) -> str:
    """The HTTP status as a label: 499 when the client left before the end, 0 when nothing was sent."""
    if exchange.error == "client_closed":
        return "499"
    return str(exchange.status or 0)


def summarise(exchange: Exchange, causes: Mapping[str, int]) -> Summary:
    """What `why` shows of one request: no text, no secrets; times in milliseconds since arrival."""
    decision, identity, usage = exchange.decision, exchange.identity, exchange.usage
    serving = exchange.serving

    def since(at_s: float | None) -> float | None:
        return None if at_s is None else round((at_s - exchange.arrived_s) * 1000, 3)

    return {
        "request_id": exchange.request_id,
        "ts": exchange.arrived_unix_s,
        "api": exchange.api,
        "model": exchange.model,
        "tenant": exchange.tenant or None,
        "session": exchange.session or None,
        "session_from": identity.source if identity else None,
        "kind": identity.kind if identity else None,
        "stream": exchange.stream,
        "region": exchange.region or None,
        "backend": serving.place if serving else None,
        "prefill_backend": exchange.prefilled_by,
        "decision": word_of(exchange),
        "reason": decision.reason if decision else None,
        "status": exchange.status,
        "error": exchange.error,
        "retries": exchange.retries,
        "tokens": {
            "prompt": usage.prompt_tokens,
            "cached": usage.cached_tokens,
            "expected_cached": exchange.expected_cached_tokens,
            "output": usage.output_tokens,
            "estimated_prompt": exchange.prompt_tokens_estimate or None,
        },
        "costs": dict(decision.costs) if decision else {},
        "miss_causes": dict(causes),
        "ms": {
            "queue": round(exchange.queued_s * 1000, 3),
            "decide": round(exchange.decide_s * 1000, 3),
            "prefill_leg": None if exchange.prefill_s is None else round(exchange.prefill_s * 1000, 3),
            "headers": since(exchange.headers_sent_s),
            "first_token": since(exchange.first_token_s),
            "last_token": since(exchange.last_token_s),
            "total": since(exchange.ended_s),
        },
        "prefill_skipped": exchange.prefill_skipped,
        "legs": [
            {
                "part": leg.part,
                "place": leg.place,
                "engine_request_id": leg.engine_request_id,
                "state": leg.state.name.lower(),
                "status": leg.status,
                "error": leg.error,
                "start_ms": since(leg.started_s),
                "first_token_ms": since(leg.first_token_s),
                "end_ms": since(leg.ended_s),
                "held_ms": round(leg.held_s * 1000, 3),
            }
            for leg in exchange.legs
        ],
        "chunks": exchange.chunks,
        "response_bytes": exchange.response_bytes,
    }
