"""Have a part of a prompt prefilled: an engine is asked for one token behind the prompt's first so many token ids.

Their KV then lies in its prefix cache, where the request itself finds it. Why and how much: ``routing/slices.py``.
Nothing depends on a part: when it fails, the request goes as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from homeport_engines.base import BodyEdits, Leg
from homeport_engines.registry import kind
from homeport_proxy import stored
from homeport_proxy.api.completions import COMPLETIONS
from homeport_proxy.downstream import Downstream
from homeport_proxy.exchange import GENERATING, Exchange, State, TokenUsage
from homeport_proxy.handoff import SLOWEST_PREFILL_TOKENS_PER_S, TURNED_AWAY, Attempt, Desk
from homeport_proxy.job import Job
from homeport_proxy.routing.views import Decision
from homeport_proxy.upstream import UpstreamError

LEAST_BYTES = 4096
"""No shorter body holds a prompt worth a part."""
PART_S = 30.0
"""A part is given up after this long and what it takes at the slowest: what was computed of it stays in the cache."""
_AS_JSON = Leg(BodyEdits(), {"content-type": "application/json"})
_SCOPE = ("model", "cache_salt", "priority")
"""Members of the request that decide which cache its prompt lies in, and when it is served."""
_UNCACHED = ("prompt_logprobs", "prompt_embeds", "truncate_prompt_tokens", "echo")
"""Members with which an engine computes the whole prompt, or another one than it tells the tokens of."""
_MEDIA = re.compile(rb'"type"\s*:\s*"(?:input_)?(?:image|audio|video|file|document)')


class Part(NamedTuple):
    """What became of a part. ``cached_tokens``: what the engine found of it, None when it did not say."""

    ok: bool
    cached_tokens: int | None = None


FAILED = Part(ok=False)


def may_slice(exchange: Exchange) -> bool:
    """Whether it is worth the router's while to think of parts; a look at little, as every request gets it."""
    identity = exchange.identity
    return (
        identity is not None
        and identity.kind != "side"
        and exchange.api in GENERATING
        and len(exchange.body) >= LEAST_BYTES
    )


def sliceable(exchange: Exchange) -> bool:
    """Whether parts of this request's prompt may be prefilled by themselves, once its token ids are known."""
    asked = [exchange.members[name] for name in _UNCACHED if name in exchange.members]
    if any(value is not None and value is not False for value in asked):
        return False
    if stored.named(exchange) is not None:
        return False  # another place may have to take it than the one that the router names
    return _MEDIA.search(exchange.body) is None


async def prefill(
    desk: Desk, exchange: Exchange, job: Job, down: Downstream, decision: Decision, ids: Sequence[int]
) -> Part:
    """Have the decision's place prefill these first token ids of the request's prompt. Never fails but by
    cancellation, which aborts it there."""
    try:
        engine = desk.engines.of(decision.place)
    except KeyError:
        return FAILED  # the backend is gone from the configuration
    path = kind(engine.member.backend.engine).token_ids_path if engine.member is not None else None
    if path is None:
        return FAILED
    asked = Job(
        COMPLETIONS,
        "POST",
        path,
        job.headers,
        _body(job, ids),
        drop_credentials=job.drop_credentials,
        hop_by_hop=job.hop_by_hop,
    )
    within_s = min(PART_S + len(ids) / SLOWEST_PREFILL_TOKENS_PER_S, desk.timeouts().first_token_s)
    found = exchange.found_tokens = {} if exchange.found_tokens is None else exchange.found_tokens
    with Attempt(desk, exchange, asked, down, decision) as attempt:
        try:
            head, answer = await attempt.collected(engine, _AS_JSON, "slice", within_s)
        except UpstreamError as fault:
            if fault.sent:
                found.setdefault(engine.place, None)  # who knows what it computed
            return FAILED
    leg = exchange.legs[-1]
    usage = _usage(answer) if head.status == 200 else None
    if usage is None:
        leg.error = f"answered {head.status}" + (" without usage" if head.status == 200 else "")
        if not 400 <= head.status < 500 and head.status not in TURNED_AWAY:
            found.setdefault(engine.place, None)
        return FAILED
    leg.state = State.DONE
    exchange.prefill_s = (exchange.prefill_s or 0.0) + (leg.ended_s or leg.started_s) - leg.started_s
    exchange.slices += 1
    found.setdefault(engine.place, usage.cached_tokens)
    return Part(ok=True, cached_tokens=usage.cached_tokens)


def _usage(answer: bytes) -> TokenUsage | None:
    try:
        usage = COMPLETIONS.read_usage(answer)
    except (ValueError, TypeError, AttributeError, KeyError):
        return None
    return None if usage is None or usage.prompt_tokens is None else usage


def _body(job: Job, ids: Sequence[int]) -> bytes:
    raws = job.raws or {}
    scope = {
        name: job.put.get(name, raws.get(name))
        for name in _SCOPE
        if name not in job.drop and (name in job.put or name in raws)
    }
    return msgspec.json.encode({**scope, "prompt": ids, "max_tokens": 1, "stream": False})
