"""Sliced prefill: how much of a long prompt an engine computes before others may come in between.

An engine serves prompts in the order in which they came: who comes behind 100,000 tokens waits for all of them. A part
of a prompt, sent by itself, leaves its KV in the prefix cache; the rest then waits in the router's queue, where the
shortest remaining prefill goes first.
"""

from __future__ import annotations

from math import sqrt

from homeport_proxy.routing.cost import fixed_s, prefill_s
from homeport_proxy.routing.views import PrefixKeys, Rates, RequestView, RoutingSettings

_LONG = 1.5
"""Slices: what is not longer than this goes at once, or the rest would hardly be worth a request of its own."""

_OF_HELD = 0.2
"""Parts cost an engine some of its time (a step begins without the next one, a request each). Where much waits, that is
better spent on prompts: on engines past their limit parts of one second doubled what was held."""

_FIXED_S = 0.025
_LONGEST = 4.0
"""Where every prefill takes more than ``_FIXED_S`` however short (a request, the rest of a step), parts are longer in
proportion, but no longer than so many slices: on engines that compute in steps, parts of one second were dear."""

_LEAST_STEPS = 2
"""Engine steps of a slice at least: a slow engine is not asked for a step's tokens at a time."""

ROUND_TOKENS = 512
"""Parts end with whole blocks of any usual size; a block that is not full is not cached."""


def part_tokens(
    rates: Rates, settings: RoutingSettings, prompt_tokens: int, cached_tokens: int, held_s: float = 0.0
) -> int | None:
    """Tokens from the start of a prompt to prefill now, so that about ``slice_s`` seconds pass (more where a part
    is dear), or a fifth of the prefill that is held for the place beside it (``held_s``); None: all of them."""
    if not settings.slice_s:
        return None
    slice_s = max(settings.slice_s * min(max(fixed_s(rates) / _FIXED_S, 1.0), _LONGEST), _OF_HELD * held_s)
    if prefill_s(rates, prompt_tokens - cached_tokens, cached_tokens) <= _LONG * slice_s:
        return None
    uncached = max(tokens_in(rates, slice_s, cached_tokens), _LEAST_STEPS * settings.step_tokens)
    part = (cached_tokens + uncached) // ROUND_TOKENS * ROUND_TOKENS
    return part if cached_tokens < part <= prompt_tokens - settings.step_tokens else None


def tokens_in(rates: Rates, seconds: float, cached_tokens: int) -> int:
    """Tokens that are prefilled after ``cached_tokens`` in so many seconds: :func:`prefill_s` solved for ``u``."""
    left_s = seconds - fixed_s(rates)
    if left_s <= 0:
        return 0
    slope = 1.0 + cached_tokens / rates.attention_tokens
    return int(
        rates.attention_tokens * (sqrt(slope**2 + 2 * rates.tokens_per_s * left_s / rates.attention_tokens) - slope)
    )


def begun(request: RequestView, tokens: int) -> RequestView:
    """The request as if its prompt ended after ``tokens``."""
    prefix = request.prefix
    texts = len(prefix.text_blocks) * tokens // request.prompt_tokens
    keys = PrefixKeys(
        prefix.text_blocks[:texts],
        prefix.text_block_chars,
        {size: blocks[: tokens // size] for size, blocks in prefix.token_blocks.items()},
    )
    return RequestView(
        request.request_id,
        request.api,
        request.model,
        request.session,
        tokens,
        keys,
        cache_scope=request.cache_scope,
        adapter=request.adapter,
    )
