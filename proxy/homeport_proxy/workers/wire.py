"""What parent and worker tell each other, as values that can travel."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

from multidict import CIMultiDict, CIMultiDictProxy

from homeport_proxy.config import Backend, Config
from homeport_proxy.exchange import Exchange
from homeport_proxy.routing.views import PrefixKeys, State


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """One backend as a worker needs to know it."""

    region: str
    backend: Backend
    models: frozenset[str] | None
    max_model_len: int | None
    ranks: tuple[int, ...] | None
    state: State
    carry: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """What the parent knows and workers act on; sent again whenever it changes."""

    config: Config
    members: Mapping[str, MemberFacts]
    bytes_per_token: Mapping[str, float]
    peers_down: frozenset[str]
    block_tokens: Mapping[str, int]
    stopping: bool


@dataclass(frozen=True, slots=True)
class TravellingError:
    """A ProxyError's parts: exceptions with keyword arguments do not travel by themselves."""

    status: int
    code: str
    message: str
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class EndedTicket:
    """A ticket given back in a worker: the parent's number for it, and the tokens as the engine reported them."""

    number: int
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    ok: bool


def to_travel(exchange: Exchange, *, keep_document: bool) -> Exchange:
    """A finished exchange without what is large or lives in its process only."""
    sent = copy.copy(exchange)
    sent.body = b""
    sent.ticket = None
    sent.prefix = PrefixKeys()
    sent.headers = CIMultiDict(exchange.headers)  # type: ignore[assignment]
    if not keep_document:
        sent.document = None
    return sent


def arrived(exchange: Exchange) -> Exchange:
    """The other end of :func:`to_travel`."""
    exchange.headers = CIMultiDictProxy(CIMultiDict(exchange.headers))
    return exchange
