"""A finished request's lessons: engine speeds, the index's worth, the session's size, the causes of misses."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from homeport_proxy.routing.calibration import learned_step, learned_transfer
from homeport_proxy.routing.causes import Sight
from homeport_proxy.routing.flight import Flight
from homeport_proxy.routing.index import Index
from homeport_proxy.routing.place import Place
from homeport_proxy.routing.views import RequestView, Ticket

_DEFAULT_BLOCK_TOKENS = 128
_ENOUGH_OUTPUT_TOKENS = 8


def learn_speeds(
    ticket: Ticket,
    flight: Flight,
    places: Mapping[str, Place],
    now_s: float,
    cached_tokens: int | None,
    output_tokens: int,
) -> None:
    """Rates of the engines that served the request, from when its tokens came."""
    host, prefiller, request = flight.host, flight.prefiller, flight.request
    if host is None or prefiller is None or ticket.first_token_s is None:
        return
    known = cached_tokens is not None and not flight.parts  # what came before its last part is no speed of that
    cached = min(cached_tokens or 0, request.prompt_tokens) if known else flight.cached
    if flight.burst is not None:
        flight.burst.parts[flight.key] = (request.prompt_tokens - cached, cached)
        prefiller.learn_prefill(flight.burst, now_s)
        for other in places.values():
            if other is not prefiller and other.spec.role == prefiller.spec.role:
                other.borrow(prefiller)
    if output_tokens >= _ENOUGH_OUTPUT_TOKENS and now_s > ticket.first_token_s:
        step_s = (now_s - ticket.first_token_s) / output_tokens * host.view.tokens_per_step
        host.set_rates(learned_step(host.rates, host.load.requests, host.load.decode_tokens, step_s))
    if prefiller is not host and flight.handed_over_s is not None:
        took_s = ticket.first_token_s - flight.handed_over_s - host.rates.step_s
        host.set_rates(learned_transfer(host.rates, request.prompt_tokens, took_s))


def learn_index(flight: Flight, index: Index, prompt_tokens: int, cached_tokens: int, now_s: float) -> None:
    """Compare what the index expected with what the engine reported; rebuild the place's index when it is useless."""
    place = flight.prefiller
    if place is None:
        return
    place.prompt_tokens += prompt_tokens
    place.cached_tokens += min(cached_tokens, prompt_tokens)
    if place.believe(flight.request.api, flight.found_raw, cached_tokens):
        index.forget(place.spec.name)
        place.confidence.trust_again()


def sight(flight: Flight, index: Index, places: Mapping[str, Place], now_s: float, idle_ttl_s: float) -> Sight:
    """What is known of a request's prompt as it is bound, before it is sent (see ``causes``)."""
    request, session, worker = flight.request, flight.session, flight.prefiller
    if worker is None:
        raise ValueError("sight before the prefill place is known")
    trace = session.trace
    elsewhere = _warmest_elsewhere(flight, index, places) if worker.spec.name != session.last_place else 0
    stats = worker.stats
    return Sight(
        previous=trace.tokens if trace is not None else 0,
        shared=trace.shared_tokens(request.prefix.text_blocks, request.prompt_tokens) if trace is not None else 0,
        expected=flight.found_raw,
        elsewhere=elsewhere,
        same_place=session.last_place == worker.spec.name,
        cold=worker.cold_since_s >= flight.previous_use_s and session.requests > 1,
        idle=now_s - flight.previous_use_s > idle_ttl_s,
        block=(stats.block_tokens if stats is not None and stats.block_tokens else _DEFAULT_BLOCK_TOKENS),
    )


def _warmest_elsewhere(flight: Flight, index: Index, places: Mapping[str, Place]) -> int:
    """Cached tokens at the places where the session's prefix may lie: its home and where it last ran."""
    session = flight.session
    here = flight.prefiller.spec.name if flight.prefiller is not None else None
    names = {name for name in (session.home, session.last_place) if name is not None and name != here}
    return max((index.cached_tokens(name, flight.request) for name in names if name in places), default=0)


def scoped(request: RequestView) -> int:
    """What to mix into a prompt's text digests so that scopes that share no cache share no key; 0: nothing."""
    if not request.cache_scope and request.adapter is None:
        return 0
    return xxhash.xxh3_64_intdigest(f"{request.cache_scope}\0{request.adapter or ''}".encode()) >> 1
