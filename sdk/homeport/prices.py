"""What tokens cost, in US dollars: own prices first, then the genai-prices data where it is installed.

Every amount is a Decimal; a price that is not known is None, never 0. Rates are dollars per million tokens, as vendors
publish them.
"""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from functools import cache, lru_cache
from types import ModuleType
from urllib.parse import urlsplit

from homeport.usage import Usage

_MILLION = Decimal(1_000_000)
_STANDARD_TIERS = frozenset({None, "", "default", "standard", "auto", "on_demand"})


@dataclass(frozen=True, slots=True)
class Price:
    """Rates in US dollars per million tokens.

    ``output`` None: not known (a model that only embeds). ``cache_read`` and ``cache_write`` None: charged like any
    input. ``cache_write_ttl``: rates by lifetime (``5m``, ``1h``, ...) where they differ from ``cache_write``; a
    lifetime set to None is priced, but nobody knows how. ``tiers``: rates
    for a whole request whose input exceeds ``Tier.above_tokens``.
    """

    input: Decimal
    output: Decimal | None
    cache_read: Decimal | None = None
    cache_write: Decimal | None = None
    cache_write_ttl: Mapping[str, Decimal | None] = field(default_factory=dict)
    tiers: tuple[Tier, ...] = ()

    def at(self, input_tokens: int) -> Price:
        """The rates for a request of this size."""
        reached = [tier for tier in self.tiers if input_tokens > tier.above_tokens]
        return max(reached, key=lambda tier: tier.above_tokens).price if reached else self

    def write_rate(self, ttl: str | None = None) -> Decimal | None:
        """The rate of writing to the cache for a lifetime; None when not known."""
        general = self.input if self.cache_write is None else self.cache_write
        return self.cache_write_ttl.get(ttl, general) if ttl else general

    @property
    def read_rate(self) -> Decimal:
        """The rate of input read from the cache."""
        return self.input if self.cache_read is None else self.cache_read


@dataclass(frozen=True, slots=True)
class Tier:
    """Rates for requests whose input exceeds ``above_tokens``: they hold for all tokens of the request."""

    above_tokens: int
    price: Price


@dataclass(frozen=True, slots=True)
class Cost:
    """What one request cost, in US dollars. ``saved_usd`` compares with the same request without a cache: negative when
    writing cost more than reading saved; None while the cached count is not reported (``total_usd`` is then what it
    cost at most)."""

    total_usd: Decimal
    input_usd: Decimal
    output_usd: Decimal
    saved_usd: Decimal | None


def cost_of(usage: Usage, price: Price) -> Cost | None:
    """The cost of ``usage`` at ``price``; None when the counts or the rate of a write are not known."""
    if usage.input_tokens is None or usage.output_tokens is None:
        return None
    rates = price.at(usage.input_tokens)
    written = _written(usage, rates)
    if written is None or (rates.output is None and usage.output_tokens):
        return None
    cached = usage.cached_tokens or 0
    fresh = max(0, usage.input_tokens - cached - (usage.cache_write_tokens or 0))
    input_usd = (fresh * rates.input + cached * rates.read_rate + written) / _MILLION
    output_usd = usage.output_tokens * (rates.output or Decimal(0)) / _MILLION
    saved = None if usage.cached_tokens is None else usage.input_tokens * rates.input / _MILLION - input_usd
    return Cost(input_usd + output_usd, input_usd, output_usd, saved)


def loss_of(lost_tokens: int, price: Price, usage: Usage | None = None) -> Decimal | None:
    """What ``lost_tokens`` cost more than if they had been read from the cache, in US dollars.

    They were paid as cache writes when the request wrote to the cache, else as plain input. None when the rate of the
    write is not known."""
    size = lost_tokens if usage is None or usage.input_tokens is None else usage.input_tokens
    rates = price.at(size)
    paid: Decimal | None = rates.input
    if usage is not None and usage.cache_write_tokens:
        written = _written(usage, rates)
        paid = None if written is None else written / usage.cache_write_tokens
    return None if paid is None else lost_tokens * (paid - rates.read_rate) / _MILLION


def _written(usage: Usage, rates: Price) -> Decimal | None:
    """Dollars times a million for what was written to the cache, each lifetime at its own rate."""
    total, rest = Decimal(0), usage.cache_write_tokens or 0
    for ttl, tokens in usage.cache_write_ttl_tokens.items():
        rate = rates.write_rate(ttl)
        if rate is None:
            return None
        total += tokens * rate
        rest -= tokens
    return total + max(0, rest) * (rates.write_rate() or Decimal(0))


class PriceBook:
    """Prices by model: own ones first (names or ``*`` patterns), then genai-prices when ``vendors`` and installed.

    >>> book = PriceBook({"smollm2": {"input": "0.02", "output": "0.06", "cache_read": "0.002"}})

    An own price is a :class:`Price` or a mapping of its rates (also ``cache_write``, ``cache_write_1h`` and so on).
    Raises ValueError that names the model and the rate for a price that is not one.
    """

    def __init__(
        self, prices: Mapping[str, Price | Mapping[str, object]] | None = None, *, vendors: bool = True
    ) -> None:
        self._own = {model: _own_price(model, price) for model, price in (prices or {}).items()}
        self._vendors = vendors

    def price(
        self,
        model: str,
        *,
        provider: str | None = None,
        url: str | None = None,
        at: datetime | float | None = None,
        tier: str | None = None,
    ) -> Price | None:
        """The price of ``model``, or None when nobody knows it.

        ``url`` (the API's address) or ``provider`` (its genai-prices name) says who serves it: a model behind an
        address no vendor is known for has no vendor's price. With neither, the name decides. ``at``: when the request
        was made (prices change); ``tier``: the service tier it was billed under."""
        own = self._own.get(model) or next(
            (price for name, price in self._own.items() if "*" in name and fnmatch.fnmatchcase(model, name)), None
        )
        if own is not None or not self._vendors or not model or (provider is None and url and _is_local(url)):
            return own
        when = at if isinstance(at, datetime) else datetime.fromtimestamp(at, UTC) if at else datetime.now(UTC)
        if provider is not None:
            url = None
        if provider is None and url is None and "/" in model:
            provider = "litellm"  # `vendor/model`, as LiteLLM and OpenRouter write it
        # the library walks its match rules on each call, and no price changes within a quarter of an hour
        when = when.replace(minute=when.minute // 15 * 15, second=0, microsecond=0)
        return _vendor_price(model, provider, url, when, None if tier in _STANDARD_TIERS else tier)

    def cost(
        self,
        usage: Usage,
        model: str,
        *,
        provider: str | None = None,
        url: str | None = None,
        at: datetime | float | None = None,
    ) -> Cost | None:
        """What a request cost; None when its price or its counts are not known. Arguments as for :meth:`price`."""
        price = self.price(model, provider=provider, url=url, at=at, tier=usage.service_tier)
        return None if price is None else cost_of(usage, price)


# --- own prices ------------------------------------------------------------------------------------------------------


def _own_price(model: str, price: Price | Mapping[str, object]) -> Price:
    if isinstance(price, Price):
        return price
    if not isinstance(price, Mapping):
        raise ValueError(f"price of {model!r}: give a mapping with `input` and `output` in dollars per million tokens")
    base = _own_rates(model, {name: value for name, value in price.items() if name != "tiers"})
    return replace(base, tiers=tuple(_own_tier(model, tier) for tier in _list(model, price.get("tiers"))))


def _own_rates(model: str, price: Mapping[str, object]) -> Price:
    rates = {name: _rate(model, name, value) for name, value in price.items() if value is not None}
    unknown = [name for name in rates if name not in _RATES and not name.startswith("cache_write_")]
    missing = [name for name in ("input", "output") if name not in rates]
    if unknown or missing:
        what = f"unknown rate {unknown[0]!r}" if unknown else f"`{missing[0]}` is missing"
        raise ValueError(f"price of {model!r}: {what}; rates are {', '.join(_RATES)}, cache_write_<lifetime> and tiers")
    prefix = "cache_write_"
    by_ttl = {name.removeprefix(prefix): rate for name, rate in rates.items() if name.startswith(prefix)}
    return Price(rates["input"], rates["output"], rates.get("cache_read"), rates.get("cache_write"), by_ttl)


def _own_tier(model: str, tier: object) -> Tier:
    above = tier.get("above_tokens") if isinstance(tier, Mapping) else None
    if not isinstance(tier, Mapping) or not isinstance(above, int) or isinstance(above, bool) or above < 0:
        raise ValueError(f"price of {model!r}: each of `tiers` needs `above_tokens` (a whole number) beside its rates")
    return Tier(above, _own_rates(model, {name: value for name, value in tier.items() if name != "above_tokens"}))


def _list(model: str, value: object) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"price of {model!r}: `tiers` must be a list, not {value!r}")
    return value


_RATES = ("input", "output", "cache_read", "cache_write")


def _rate(model: str, name: str, value: object) -> Decimal:
    try:
        rate = Decimal(str(value)) if isinstance(value, (int, float, str, Decimal)) else None
    except InvalidOperation:
        rate = None
    if rate is None or isinstance(value, bool) or not rate.is_finite() or rate < 0:
        raise ValueError(f"price of {model!r}: `{name}` must be dollars per million tokens, 0 or more, not {value!r}")
    return rate


# --- genai-prices ----------------------------------------------------------------------------------------------------


@cache
def _genai() -> ModuleType | None:
    try:
        return importlib.import_module("genai_prices")
    except ImportError:
        return None


@lru_cache(maxsize=1024)
def _is_local(url: str) -> bool:
    """Whether an address is a host of one's own: a bare name or an IP address. No vendor is; the price data, which take
    most of a second to load, need not be asked."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return True  # no address at all
    return "." not in host or host.endswith((".local", ".internal", ".svc")) or not host.rpartition(".")[2].isalpha()


@lru_cache(maxsize=4096)
def _vendor_price(model: str, provider: str | None, url: str | None, when: datetime, tier: str | None) -> Price | None:
    library = _genai()
    if library is None:
        return None
    context = {"processing": "batch"} if tier == "batch" else {"service_tier": tier} if tier else None
    try:
        result = library.calc_price(
            library.Usage(input_tokens=0, output_tokens=0),
            model,
            **({"provider_id": provider} if provider else {"provider_api_url": url} if url else {}),
            genai_request_timestamp=when,
            price_context=context,
        )
    except (LookupError, ValueError):
        return None
    variants = [variant for variant in result.model.price_variants or () if context == variant.when]
    if context and not any(one.constraint is None or one.constraint.active(when) for one in variants):
        return None  # billed under a tier whose price nobody published
    return _from_vendor(lambda key: getattr(result.model_price, key, None))


def _from_vendor(rate: Callable[[str], object]) -> Price | None:
    """A genai-prices ModelPrice as ours: each of its rates is a Decimal or has ``base`` and ``tiers``."""
    keys = {name: rate(f"{name}_mtok") for name in ("input", "output", "cache_read", "cache_write", "cache_write_1h")}
    starts = sorted({tier.start for value in keys.values() for tier in getattr(value, "tiers", ())})
    base = _flat(keys, None)
    if base is None:
        return None
    above = ((start, _flat(keys, start)) for start in starts)
    return replace(base, tiers=tuple(Tier(start, price) for start, price in above if price is not None))


def _flat(keys: Mapping[str, object], above: int | None) -> Price | None:
    rates = {name: _level(value, above) for name, value in keys.items()}
    if rates["input"] is None:
        return None
    by_ttl = {} if rates["cache_write"] is None else {"1h": rates["cache_write_1h"]}
    return Price(rates["input"], rates["output"], rates["cache_read"], rates["cache_write"], by_ttl)


def _level(value: object, above: int | None) -> Decimal | None:
    """A rate for requests of more than ``above`` tokens (None: the smallest)."""
    if value is None or isinstance(value, Decimal):
        return value
    tiers: Iterable[object] = getattr(value, "tiers", ())
    reached = [tier for tier in tiers if above is not None and getattr(tier, "start", 0) <= above]
    level: object = getattr(reached[-1], "price", None) if reached else getattr(value, "base", None)
    return level if isinstance(level, Decimal) else None
