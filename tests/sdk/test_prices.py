"""Prices: own ones first, exact decimals, tiers and cache lifetimes, and None for what nobody knows."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeport.prices import Price, PriceBook, Tier, cost_of, loss_of
from homeport.usage import Usage

MILLION = 1_000_000
CLAUDE = Price(Decimal("3"), Decimal("15"), Decimal("0.3"), Decimal("3.75"), {"1h": Decimal("6")})
JUNE = datetime(2026, 6, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("usage", "total", "saved"),
    [
        (Usage(MILLION, 0, 0, 0), "3", "0"),
        (Usage(MILLION, MILLION, 0, 0), "0.3", "2.7"),
        (Usage(MILLION, 0, MILLION, 0), "3.75", "-0.75"),
        (Usage(MILLION, 0, MILLION, 0, {"5m": MILLION}), "3.75", "-0.75"),
        (Usage(MILLION, 0, MILLION, 0, {"1h": MILLION}), "6", "-3"),
        (Usage(MILLION, 0, MILLION, 0, {"1h": 400_000, "5m": 600_000}), "4.65", "-1.65"),
        (Usage(MILLION, 600_000, 100_000, MILLION), "16.455", "1.545"),
    ],
)
def test_one_request(usage: Usage, total: str, saved: str) -> None:
    cost = cost_of(usage, CLAUDE)
    assert cost is not None
    assert (cost.total_usd, cost.saved_usd) == (Decimal(total), Decimal(saved))
    assert cost.total_usd == cost.input_usd + cost.output_usd


def test_unknown_is_never_zero() -> None:
    assert cost_of(Usage(None, None, None, 5), CLAUDE) is None
    assert cost_of(Usage(5, None, None, None), CLAUDE) is None
    unreported = cost_of(Usage(MILLION, None, None, 0), CLAUDE)
    assert unreported is not None
    assert unreported.total_usd == 3
    assert unreported.saved_usd is None
    only_embeds = Price(Decimal("1"), None)
    assert cost_of(Usage(MILLION, None, None, 0), only_embeds) is not None
    assert cost_of(Usage(MILLION, None, None, 1), only_embeds) is None


def test_a_lifetime_whose_price_nobody_knows() -> None:
    price = Price(Decimal("3"), Decimal("15"), Decimal("0.3"), Decimal("3.75"), {"1h": None})
    assert cost_of(Usage(10, 0, 10, 0, {"1h": 10}), price) is None
    assert cost_of(Usage(10, 0, 10, 0, {"5m": 10}), price) is not None
    assert loss_of(5, price, Usage(10, 0, 10, 0, {"1h": 10})) is None


def test_a_tier_holds_for_the_whole_request() -> None:
    price = Price(Decimal("1"), Decimal("2"), tiers=(Tier(200_000, Price(Decimal("2"), Decimal("4"))),))
    below = cost_of(Usage(200_000, 0, None, 0), price)
    above = cost_of(Usage(200_001, 0, None, 0), price)
    assert below is not None
    assert above is not None
    assert below.total_usd == Decimal("0.2")
    assert above.total_usd == Decimal("0.400002")


@pytest.mark.parametrize(
    ("usage", "loss"),
    [
        (None, "2.7"),
        (Usage(MILLION, 0, None, 5), "2.7"),
        (Usage(MILLION, 0, MILLION, 5, {"5m": MILLION}), "3.45"),
        (Usage(MILLION, 0, MILLION, 5, {"1h": MILLION}), "5.7"),
    ],
)
def test_lost_tokens_were_paid_as_input_or_as_writes(usage: Usage | None, loss: str) -> None:
    assert loss_of(MILLION, CLAUDE, usage) == Decimal(loss)


def test_no_cache_discount_no_loss() -> None:
    assert loss_of(MILLION, Price(Decimal("1"), Decimal("1"))) == 0


def test_own_prices_win_and_patterns_follow_names() -> None:
    own: dict[str, Any] = {
        "claude-sonnet-4-5": {"input": 1, "output": "2"},
        "qwen*": {"input": 0.2, "output": "0.6", "cache_read": "0.02", "cache_write_1h": 9},
    }
    book = PriceBook(own)
    assert book.price("claude-sonnet-4-5") == Price(Decimal("1"), Decimal("2"))
    qwen = book.price("qwen3-30b")
    assert qwen is not None
    assert (qwen.input, qwen.cache_write_ttl) == (Decimal("0.2"), {"1h": Decimal("9")})
    assert PriceBook(own, vendors=False).price("gpt-4o") is None


def test_own_tiers() -> None:
    tier = {"above_tokens": 100, "input": 2, "output": 4}
    book = PriceBook({"m": {"input": 1, "output": 2, "tiers": [tier]}}, vendors=False)
    cost = book.cost(Usage(101, 0, None, 0), "m")
    assert cost is not None
    assert cost.total_usd == Decimal("0.000202")


@pytest.mark.parametrize(
    ("price", "says"),
    [
        ({"input": 1}, "`output` is missing"),
        ({"input": 1, "output": -1}, "`output` must be dollars"),
        ({"input": "x", "output": 1}, "`input` must be dollars"),
        ({"input": float("nan"), "output": 1}, "`input` must be dollars"),
        ({"input": True, "output": 1}, "`input` must be dollars"),
        ({"input": 1, "output": 1, "cached": 1}, "unknown rate 'cached'"),
        ({"input": 1, "output": 1, "tiers": 5}, "`tiers` must be a list"),
        ({"input": 1, "output": 1, "tiers": [{"input": 1, "output": 1}]}, "above_tokens"),
        (5, "give a mapping"),
    ],
)
def test_a_bad_price_is_named(price: Any, says: str) -> None:
    with pytest.raises(ValueError, match="'m'") as raised:
        PriceBook({"m": price})
    assert says in str(raised.value)


class TestVendors:
    """With the public price data."""

    book = PriceBook()

    def test_anthropic_with_both_lifetimes(self) -> None:
        price = self.book.price("claude-sonnet-4-5", at=JUNE)
        assert price is not None
        assert (price.input, price.cache_read, price.write_rate("5m"), price.write_rate("1h")) == (
            Decimal("3"),
            Decimal("0.3"),
            Decimal("3.75"),
            Decimal("6"),
        )

    def test_tiers_come_along(self) -> None:
        price = self.book.price("gemini-2.5-pro", at=JUNE)
        assert price is not None
        assert price.at(200_001).input == 2 * price.at(200_000).input

    def test_prices_change_with_time(self) -> None:
        before, after = (self.book.price("gpt-5.6", at=datetime(2026, month, 25, tzinfo=UTC)) for month in (7, 9))
        assert before is not None
        assert after is not None
        assert before.input > after.input

    def test_the_name_of_the_vendor_before_the_model(self) -> None:
        assert self.book.price("anthropic/claude-sonnet-4-5", at=JUNE) == self.book.price("claude-sonnet-4-5", at=JUNE)

    @pytest.mark.parametrize("url", ["http://127.0.0.1:8080/v1", "https://llm.example.com/v1", "nonsense"])
    def test_a_model_behind_an_unknown_address_has_no_vendors_price(self, url: str) -> None:
        assert self.book.price("gpt-4o", url=url) is None
        assert self.book.cost(Usage(10, 0, None, 1), "gpt-4o", url=url) is None

    def test_a_vendors_address(self) -> None:
        assert self.book.price("gpt-4o", url="https://api.openai.com/v1/chat/completions") is not None

    @pytest.mark.parametrize("model", ["smollm2", "", "no-such-model", "Qwen/Qwen3-8B"])
    def test_unknown_model(self, model: str) -> None:
        assert self.book.price(model) is None

    def test_a_service_tier_is_priced_or_unknown(self) -> None:
        standard = self.book.price("gpt-5", at=JUNE)
        batch = self.book.price("gpt-5", at=JUNE, tier="batch")
        assert standard is not None
        assert batch is None or batch.input < standard.input
        assert self.book.price("gpt-5", at=JUNE, tier="default") == standard
        assert self.book.price("gpt-5", at=JUNE, tier="by-appointment") is None


def test_without_the_extra_vendors_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    from homeport import prices

    monkeypatch.setattr(prices, "_genai", lambda: None)
    prices._vendor_price.cache_clear()
    try:
        assert PriceBook().price("gpt-4o") is None
    finally:
        prices._vendor_price.cache_clear()


tokens = st.integers(0, 10**7)


@settings(deadline=None)
@given(fresh=tokens, read=tokens, written=tokens, output=tokens)
def test_what_was_saved_is_the_difference_to_no_cache(fresh: int, read: int, written: int, output: int) -> None:
    total = fresh + read + written
    with_cache = cost_of(Usage(total, read, written, output), CLAUDE)
    without = cost_of(Usage(total, 0, 0, output), CLAUDE)
    assert with_cache is not None
    assert without is not None
    assert with_cache.saved_usd == without.total_usd - with_cache.total_usd
