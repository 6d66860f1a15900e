"""The books of every request: usage and the cause of every miss, ledger, metrics, and the recent past for `why`.

A request that is over is only noted. What the notes make of metrics, ledger, log and the rest is booked a few times a
second, many at a time, and before anybody reads: that halves its cost, and no request waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

from multidict import CIMultiDict, CIMultiDictProxy

from homeport.ledger import Entry, GroupBy, Ledger, Totals
from homeport.prices import PriceBook
from homeport.usage import Usage
from homeport_proxy.config import Config, ConfigError, Price
from homeport_proxy.exchange import GENERATING, Exchange
from homeport_proxy.observe.metrics import Metrics
from homeport_proxy.observe.summary import Summary, code_of, summarise, word_of
from homeport_proxy.routing.views import NO_PREFIX, Word

log = logging.getLogger(__name__)

_NO_HEADERS: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict())

Listener: TypeAlias = Callable[[Exchange, Mapping[str, int]], None]
"""Hears of every booked request: the exchange, and its uncached prompt tokens by cause."""

FIRST_SIGHT = frozenset({"new"})
"""Causes that are no loss: tokens never sent before, which nobody could have had in a cache."""
DEFAULT_BYTES_PER_TOKEN = 4.0
KEPT_REQUESTS = 2000
BOOK_EVERY_S = 0.25
BOOK_AT = 32
"""Requests booked at once at the most: about half a millisecond's work."""


class BytesPerToken:
    """How many body bytes make a prompt token, by model, learned from what engines report (moving average)."""

    def __init__(self) -> None:
        self._ratio: dict[str, float] = {}

    def tokens(self, model: str, body_bytes: int) -> int:
        """An estimate of the prompt's tokens, at least 1."""
        return max(1, round(body_bytes / self._ratio.get(model, DEFAULT_BYTES_PER_TOKEN)))

    def ratios(self) -> dict[str, float]:
        """What was learned, to be told to another process."""
        return {model: round(ratio, 2) for model, ratio in self._ratio.items()}

    def take(self, ratios: Mapping[str, float]) -> None:
        """What another process learned."""
        self._ratio = dict(ratios)

    def learn(self, model: str, body_bytes: int, prompt_tokens: int) -> None:
        """One request's body and its prompt as the engine counted it."""
        if prompt_tokens < 16 or body_bytes < prompt_tokens / 4:
            return  # too small, or pictures and the like: says nothing of text
        ratio = min(64.0, body_bytes / prompt_tokens)
        known = self._ratio.get(model)
        self._ratio[model] = ratio if known is None else known + 0.1 * (ratio - known)


class RequestLog:
    """The most recent requests by id, without their text; the oldest make room."""

    def __init__(self, kept: int = KEPT_REQUESTS) -> None:
        self._kept = kept
        self._by_id: OrderedDict[str, tuple[Exchange, Mapping[str, int]]] = OrderedDict()

    def add(self, exchange: Exchange, causes: Mapping[str, int]) -> None:
        """Remember one; its headers are let go."""
        exchange.headers = _NO_HEADERS
        self._by_id.pop(exchange.request_id, None)
        self._by_id[exchange.request_id] = (exchange, causes)
        if len(self._by_id) > self._kept:
            self._by_id.popitem(last=False)

    def get(self, request_id: str) -> Summary | None:
        """One request, or None when it is unknown or too long ago."""
        known = self._by_id.get(request_id)
        return None if known is None else summarise(*known)

    def latest(self, count: int) -> list[Summary]:
        """The newest ``count``, newest first."""
        return [summarise(*known) for _, known in zip(range(count), reversed(self._by_id.values()), strict=False)]


class Account:
    """Notes finished requests and books them. ``has_model`` tells which model names may become label values;
    ``at_once`` hears of a request when it ends, with its body, the ``listeners`` when it is booked; ``booked`` is
    called after that, once for many."""

    def __init__(
        self,
        config: Config,
        metrics: Metrics,
        has_model: Callable[[str], bool],
        listeners: Iterable[Listener] = (),
        at_once: Iterable[Callable[[Exchange], None]] = (),
        booked: Callable[[], None] = lambda: None,
    ) -> None:
        self.metrics = metrics
        self.bytes_per_token = BytesPerToken()
        self._requests = RequestLog()
        self._shares: deque[tuple[float, int, int]] = deque(maxlen=720)
        self._owners: OrderedDict[str, str] = OrderedDict()
        self._over: list[Exchange] = []
        self._timer: asyncio.TimerHandle | None = None
        self._has_model = has_model
        self._listeners = list(listeners)
        self._at_once = list(at_once)
        self._booked = booked
        self._books: dict[str, PriceBook] = {}
        self._default_book: PriceBook | None = None
        self.gap = metrics.itl.observe
        self.reconfigure(config)
        self.ledger = open_ledger(config)

    def reconfigure(self, config: Config) -> None:
        """Take a reloaded file's prices. The ledger's path stays what it was at start."""
        self._config = config
        self._default_book = _book(config.ledger.prices) if config.ledger.prices else None
        self._books = {tenant.name: _book(tenant.prices) for tenant in config.tenants if tenant.prices}

    def done(self, exchange: Exchange, *, body_bytes: int | None = None) -> None:
        """Note a request that is over, once; what is large of it is let go.

        ``body_bytes``: the length of its body when that is not at hand any more.
        """
        if (tokens := exchange.usage.prompt_tokens) is not None:  # the next request is estimated by it
            self.bytes_per_token.learn(exchange.model, len(exchange.body) if body_bytes is None else body_bytes, tokens)
        for listener in self._at_once:
            listener(exchange)
        exchange.body, exchange.document, exchange.ticket, exchange.prefix = b"", None, None, NO_PREFIX
        self._over.append(exchange)
        if len(self._over) >= BOOK_AT:
            self.book()
        elif self._timer is None:
            with suppress(RuntimeError):  # no event loop: booked by who reads
                self._timer = asyncio.get_running_loop().call_later(BOOK_EVERY_S, self._on_timer)

    def book(self) -> None:
        """Book what was noted."""
        over, self._over = self._over, []
        for exchange in over:
            try:
                self._book(exchange)
            except Exception:  # the books of the others must go on
                log.exception("booking request %s failed inside the proxy", exchange.request_id)
        if over:
            self._booked()

    def _book(self, exchange: Exchange) -> None:
        model = exchange.model if self._has_model(exchange.model) else "other" if exchange.model else ""
        causes = miss_causes(exchange)
        self._count(exchange, model, causes)
        if exchange.api in GENERATING:
            self._enter(exchange, causes)
            self._own(exchange.session, exchange.tenant)
        for listener in self._listeners:
            listener(exchange, causes)
        self._requests.add(exchange, causes)

    def _on_timer(self) -> None:
        self._timer = None
        self.book()

    @property
    def requests(self) -> RequestLog:
        """The most recent requests."""
        self.book()
        return self._requests

    @property
    def shares(self) -> Sequence[tuple[float, int, int]]:
        """Per ten seconds: (Unix time, prompt tokens, cached tokens) of requests whose cached tokens are known."""
        self.book()
        return self._shares

    def owner(self, session: str) -> str | None:
        """The tenant whose session this is; None when it is not known."""
        self.book()
        return self._owners.get(session)

    def totals(self, by: Sequence[GroupBy] = ()) -> list[Totals]:
        """The ledger's sums by group. Blocks: not for an event loop. Raises ValueError for an unknown group."""
        return self.ledger.totals(by)

    def close(self) -> None:
        """Write the ledger's last lines. Blocks."""
        self.book()
        self.ledger.close()

    def _count(self, exchange: Exchange, model: str, causes: Mapping[str, int]) -> None:
        metrics, tenant, usage = self.metrics, exchange.tenant, exchange.usage
        decision = exchange.decision
        metrics.requests.add(1, (exchange.api, model, tenant, word_of(exchange) or "none", code_of(exchange)))
        if decision is not None:
            metrics.queue.observe(exchange.queued_s)
            if decision.word is Word.MOVED:
                metrics.moves.add(1, (_move_reason(decision.reason),))
        if exchange.first_token_s is not None:
            metrics.ttft.observe(exchange.first_token_s - exchange.arrived_s)
        if exchange.legs:
            metrics.overhead.observe(max(0.0, exchange.legs[0].started_s - exchange.arrived_s - exchange.held_s))
        if usage.prompt_tokens is not None:
            if usage.cached_tokens is None:
                metrics.prompt_tokens.add(usage.prompt_tokens, (model, tenant, "unknown"))
            else:
                fresh = max(0, usage.prompt_tokens - usage.cached_tokens)
                metrics.prompt_tokens.add(usage.cached_tokens, (model, tenant, "cached"))
                metrics.prompt_tokens.add(fresh, (model, tenant, "fresh"))
                self._share(exchange.arrived_unix_s, usage.prompt_tokens, usage.cached_tokens)
        if usage.output_tokens is not None:
            metrics.output_tokens.add(usage.output_tokens, (model, tenant))
        for cause, tokens in causes.items():
            metrics.cache_miss_tokens.add(tokens, (model, cause))
        if exchange.kv_transfer != "none" and (leg := exchange.serving) is not None:
            metrics.transfers.add(1, (leg.place.partition("/")[0], exchange.kv_transfer))

    def _enter(self, exchange: Exchange, causes: Mapping[str, int]) -> None:
        usage = exchange.usage
        if usage.prompt_tokens is None and usage.cached_tokens is None and usage.output_tokens is None:
            return
        book = self._books.get(exchange.tenant, self._default_book)
        cost = book.cost(_as_usage(exchange), exchange.model) if book else None
        lost = {cause: tokens for cause, tokens in causes.items() if cause not in FIRST_SIGHT}
        serving = exchange.serving
        line = Entry(
            request_id=exchange.request_id,
            model=exchange.model,
            ts=exchange.arrived_unix_s,
            tenant=exchange.tenant,
            session=exchange.session,
            backend=serving.place if serving else "",
            input_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            cost_usd=cost.total_usd if cost else None,
            saved_usd=cost.saved_usd if cost else None,
            cause=max(lost, key=lost.__getitem__) if lost else None,
            lost_tokens=sum(lost.values()) if exchange.usage.cached_tokens is not None else None,
        )
        self.ledger.add(line)

    def _own(self, session: str, tenant: str) -> None:
        if tenant and session:
            self._owners[session] = tenant
            self._owners.move_to_end(session)
            if len(self._owners) > self._config.affinity.max_sessions:
                self._owners.popitem(last=False)

    def _share(self, unix_s: float, prompt_tokens: int, cached_tokens: int) -> None:
        slot = unix_s - unix_s % 10
        if self._shares and self._shares[-1][0] >= slot:
            at, prompt, cached = self._shares.pop()
            self._shares.append((at, prompt + prompt_tokens, cached + cached_tokens))
        else:
            self._shares.append((slot, prompt_tokens, cached_tokens))


def open_ledger(config: Config) -> Ledger:
    """The configured ledger. Raises ConfigError when its file cannot be used."""
    try:
        return Ledger(config.ledger.path)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError([f"ledger.path: cannot use {config.ledger.path}: {error}"]) from None


def miss_causes(exchange: Exchange) -> dict[str, int]:
    """Every prompt token that was not cached, by cause; sums with the cached ones to the prompt. Empty when either
    count is not known."""
    prompt, cached = exchange.usage.prompt_tokens, exchange.usage.cached_tokens
    if prompt is None or cached is None:
        return {}
    left = max(0, prompt - cached)
    causes: dict[str, int] = {}
    for cause, tokens in (exchange.outcome.causes if exchange.outcome else {}).items():
        taken = min(tokens, left)
        if taken > 0:
            causes[cause] = taken
            left -= taken
    if left:
        causes["unknown"] = causes.get("unknown", 0) + left
    return causes


def _as_usage(exchange: Exchange) -> Usage:
    usage = exchange.usage
    return Usage(usage.prompt_tokens, usage.cached_tokens, None, usage.output_tokens)


def _move_reason(reason: str) -> str:
    for word in ("drain", "down", "gone", "dearer", "wait"):
        if word in reason:
            return {"drain": "draining", "gone": "down", "wait": "dearer"}.get(word, word)
    return "other"


def _book(prices: Mapping[str, Price]) -> PriceBook:
    return PriceBook({model: price.model_dump(exclude_none=True) for model, price in prices.items()}, vendors=False)
