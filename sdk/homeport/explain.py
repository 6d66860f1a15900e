"""Why tokens were computed again: two requests of one conversation compared, joined with what the answer reported.

First the prompts: the first point at which they part decides (:mod:`homeport.parting`). Where they do not part, the
answer's usage says whether the prefix was read; the proxy's headers, the pause and the cache's own rules say why not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import cast

from homeport.breaks import HINTS, Blame, CacheBreak, Reason, blame_of
from homeport.diagnostics import joined
from homeport.explicit import MAX_MARKS, count_marks, marks, minimum_tokens, reach
from homeport.parting import Finding, is_thought, parting
from homeport.prices import PriceBook, loss_of
from homeport.prompt import Body, Prompt, api_of, prompt_of
from homeport.providers import provider_for
from homeport.redaction import expand, holds_digests
from homeport.tokens import tokenizer_for
from homeport.usage import Usage

CHARS_PER_TOKEN = 4
_LONGEST_TTL_S = 3600.0
_OPENAI_TTL_S = 600.0


def explain(
    previous: Body | None,
    current: Body,
    usage: object = None,
    diagnostics: object = None,
    *,
    response_headers: Mapping[str, str] | None = None,
    elapsed_s: float | None = None,
    url: str | None = None,
    prices: PriceBook | None = None,
    at: datetime | float | None = None,
) -> list[CacheBreak]:
    """Why ``current`` could not read what ``previous`` had computed: no break, or the one that decides.

    ``previous`` and ``current``: request bodies of any served API, None for a conversation's first request.
    ``usage``: of the current answer, a :class:`Usage` or anything :meth:`Usage.parse` reads. ``diagnostics``: the
    vendor's own, as it came. ``response_headers``: the proxy's say where the request went. ``elapsed_s``: seconds from
    the end of the previous answer to this request. ``url``: where it was sent, for the vendor's rules and prices.
    ``prices``: own prices; default: public ones. ``at``: when, for prices that changed. Pure, and never raises for a
    body of any shape."""
    answer = _Answer(
        current,
        _usage(usage),
        {name.lower(): value for name, value in (response_headers or {}).items()},
        elapsed_s,
        url,
    )
    try:
        now = _prompt(current)
        before = None if previous is None else _prompt(previous, like=now)
        finding = _find(before, now, diagnostics, answer)
    except (RecursionError, ValueError):  # nested deeper than anything can be rendered
        return []
    if finding is None:
        return []
    return [_measured(finding, before, now, answer, _cost_of(now, answer, prices, at))]


@dataclass(frozen=True, slots=True)
class _Answer:
    """What is known of a request and its answer: the body as given, usage, headers by lower-case name, the pause before
    it, where it was sent."""

    body: Body
    usage: Usage | None
    headers: Mapping[str, str]
    elapsed_s: float | None
    url: str | None

    @property
    def own_engine(self) -> bool:
        """Whether a Homeport proxy served it: then no vendor's rules apply."""
        return any(name.startswith("x-homeport-") for name in self.headers)

    def tokens(self, chars: int, prompt: Prompt) -> int:
        """Tokens of so many characters of ``prompt``: by its own usage, else as its tokenizer counts where that is on
        this machine, else 4 characters a token."""
        if self.usage is not None and self.usage.input_tokens and prompt.text:
            return round(chars * self.usage.input_tokens / len(prompt.text))
        return math.ceil(chars / (_counted_chars_per_token(prompt, self.body) or CHARS_PER_TOKEN))


_SAMPLE_CHARS = 16_384


def _counted_chars_per_token(prompt: Prompt, body: Body) -> float | None:
    """Characters a token in the first pages of a prompt; None without its tokenizer, and for a body without text."""
    tokenizer = tokenizer_for(_model(prompt.body))
    if tokenizer is None or holds_digests(dict(body)):
        return None
    sample = prompt.text[:_SAMPLE_CHARS]
    return len(sample) / max(1, tokenizer(sample)) if sample else None


def _usage(usage: object) -> Usage | None:
    if usage is None or isinstance(usage, Usage):
        return usage
    parsed = Usage.parse(usage)
    return parsed if parsed.reported else None


def _prompt(body: Body, like: Prompt | None = None) -> Prompt:
    expanded = expand(dict(body)) if isinstance(cast("object", body), Mapping) else {}
    readable: Body = expanded if isinstance(expanded, dict) else {}
    return prompt_of(readable, like.api if like else api_of(readable))


# --- which break decides ---------------------------------------------------------------------------------------------


def _find(before: Prompt | None, now: Prompt, diagnostics: object, answer: _Answer) -> Finding | None:
    if _is_explicit(now, answer) and count_marks(now.body) > MAX_MARKS:
        return Finding(Reason.BREAKPOINTS_TOO_MANY, marks(now.body)[MAX_MARKS].pointer, lost_tokens=0)
    if before is None:
        read = answer.usage is not None and bool(answer.usage.cached_tokens)
        return None if read else Finding(Reason.COLD_START, lost_tokens=0)
    finding, settled = joined(parting(before, now), diagnostics)
    if settled:
        return finding
    if finding is not None:
        return None if _was_read(finding, before, now, answer) else finding
    return _template_loss(before, now, answer) or _cut_short(before, now, answer) or _unread(before, now, answer)


def _was_read(finding: Finding, before: Prompt, now: Prompt, answer: _Answer) -> bool:
    """Whether the engine read on past the difference all the same: it had seen this variant before, or the parameter
    is no part of its prompt."""
    if answer.usage is None or answer.usage.cached_tokens is None:
        return False
    common, whole = (answer.tokens(chars, now) for chars in (finding.at, len(before.text)))
    return answer.usage.cached_tokens > (common + max(common, whole)) / 2


def _cut_short(before: Prompt, now: Prompt, answer: _Answer) -> Finding | None:
    """The end of the history is gone: nothing of what is left has to be computed again, but it is no continuation."""
    shorter = len(now.region("messages")) < len(before.region("messages"))
    if answer.usage is not None or not shorter or not before.text.startswith(now.text):
        return None
    pointer = next((f"/{name}" for name in ("messages", "input", "prompt") if name in now.body), "")
    return Finding(Reason.HISTORY_TRUNCATED, pointer, len(now.text), lost_tokens=0)


def _template_loss(before: Prompt, now: Prompt, answer: _Answer) -> Finding | None:
    """Reasoning that the template leaves out once a new user turn begins: what follows it is computed again."""
    if now.family.reasoning != "dropped_at_user_turn" or _keeps_thinking(now.body):
        return None
    messages = now.region("messages")
    sent = len(before.region("messages"))
    if not any(part.kind == "message:user" for part in messages[sent:]):
        return None
    turn_start = max((i for i, part in enumerate(messages[:sent]) if part.kind == "message:user"), default=-1)
    turn_end = next(i for i in range(sent, len(messages)) if messages[i].kind == "message:user")
    dropped = next((i for i in range(turn_start + 1, turn_end) if is_thought(messages[i])), None)
    if dropped is None:
        return None
    at = now.start_of("messages") + sum(len(part.text) for part in messages[:dropped])
    lost_chars = sum(len(part.text) for part in messages[dropped:turn_end])
    cached = None if answer.usage is None else answer.usage.cached_tokens
    if cached is not None and cached > answer.tokens(at + lost_chars // 2, now):
        return None
    return Finding(Reason.TEMPLATE_INHERENT, messages[dropped].pointer, at, lost_chars=lost_chars)


def _keeps_thinking(body: Body) -> bool:
    """Whether the request asks the template to keep earlier reasoning (Qwen 3.6, GLM 4.7 and later)."""
    kwargs = body.get("chat_template_kwargs")
    thinking = body.get("thinking")
    flags = [node for node in (body, kwargs, thinking) if isinstance(node, dict)]
    return any(node.get("preserve_thinking") is True or node.get("clear_thinking") is False for node in flags)


# --- intact, but not read --------------------------------------------------------------------------------------------


def _unread(before: Prompt, now: Prompt, answer: _Answer) -> Finding | None:
    """The prompts do not part: why the prefix was not read, as far as the answer tells."""
    intact = min(len(before.text), len(now.text))
    explicit = _is_explicit(now, answer)
    found = reach(before, now) if explicit else None
    if found is not None and found.too_far is not None and found.written <= intact:
        lost = Finding(
            Reason.LOOKBACK_EXCEEDED, found.too_far.pointer, found.readable, lost_chars=found.written - found.readable
        )
        if not _was_read(lost, before, now, answer):
            return lost
    if answer.usage is None or answer.usage.input_tokens is None:
        return None
    if answer.usage.cached_tokens is None:
        return Finding(Reason.NOT_REPORTED)
    readable = answer.tokens(intact if found is None else found.readable, now)
    next_best = None if found is None else answer.tokens(found.earlier, now)
    if not _is_miss(answer.usage.cached_tokens, readable, next_best):
        return _uncovered(found.readable, intact, now, answer) if found is not None else None
    return replace(_why_unread(before, now, answer, explicit), lost_tokens=readable - answer.usage.cached_tokens)


_SMALLEST_BLOCK_TOKENS = 16
_SLACK_TOKENS = 1024
_EXPLICIT_SLACK_TOKENS = 128


def _is_miss(cached: int, readable: int, next_best: int | None) -> bool:
    """Whether less was read than block sizes, estimates and a template's frames account for.

    ``next_best``: tokens up to the entry before the readable one, of a cache that reads whole entries only."""
    missing = readable - cached
    if cached == 0:
        return missing >= _SMALLEST_BLOCK_TOKENS
    if next_best is not None:
        return missing > max(_EXPLICIT_SLACK_TOKENS, readable // 20) and cached < (next_best + readable) / 2
    return missing > max(_SLACK_TOKENS, readable // 4)


def _uncovered(covered: int, intact: int, now: Prompt, answer: _Answer) -> Finding | None:
    """All marks stand early in the prompt: what comes behind them is paid in full each time."""
    lost = answer.tokens(intact - covered, now)
    if lost < minimum_tokens(_model(now.body)):
        return None
    return Finding(Reason.BREAKPOINT_MISSING, "/messages", covered, lost_tokens=lost)


def _why_unread(before: Prompt, now: Prompt, answer: _Answer, explicit: bool) -> Finding:
    if answer.own_engine:
        return _by_route(answer)
    ttl_s = _LONGEST_TTL_S
    if explicit:
        if not marks(now.body):
            return Finding(Reason.BREAKPOINT_MISSING, "/messages" if "messages" in now.body else "")
        if not marks(before.body):
            return Finding(Reason.BREAKPOINT_MISSING, marks(now.body)[-1].pointer, hint=_UNMARKED_BEFORE_HINT)
        ttl_s = marks(before.body)[-1].ttl_s
    elif now.family.name == "openai":
        ttl_s = _OPENAI_TTL_S
    if answer.usage is not None and (answer.usage.input_tokens or 0) < _minimum(now, answer, explicit):
        return Finding(Reason.BELOW_MINIMUM)
    if answer.elapsed_s is not None and answer.elapsed_s > ttl_s:
        return Finding(Reason.EXPIRED)
    return Finding(Reason.EVICTED, hint=_NOTHING_KNOWN_HINT)


_UNMARKED_BEFORE_HINT = "The request before had no cache_control mark and wrote nothing: mark every request."
_NOTHING_KNOWN_HINT = (
    "The prefix was intact and not read: name the session to the provider, or ask what it evicts when."
)
_ELSEWHERE_HINTS = {
    "spill": "Its home was overloaded: add capacity, or let the request wait for home (load_bound).",
    "moved": "The session got a new home, which warms up with this request: see x-homeport-reason.",
    "failover": "Its home was down or refused: look at that backend's health.",
    "peer": "Another region served it: see x-homeport-reason.",
}


def _by_route(answer: _Answer) -> Finding:
    """What the proxy's headers say of a prefix that was not read."""
    word = answer.headers.get("x-homeport-decision", "")
    if word in _ELSEWHERE_HINTS:
        return Finding(Reason.ROUTED_ELSEWHERE, hint=_ELSEWHERE_HINTS[word])
    if answer.elapsed_s is not None and answer.elapsed_s > _LONGEST_TTL_S:
        return Finding(Reason.EXPIRED)
    if word == "placed":
        return Finding(Reason.ROUTED_ELSEWHERE)
    return Finding(Reason.EVICTED, blame=Blame.ENGINE if word == "home" else None)


def _minimum(now: Prompt, answer: _Answer, explicit: bool) -> int:
    """The shortest prefix that is cached at all, in tokens; 0 when nobody published one."""
    if explicit:
        return minimum_tokens(_model(now.body))
    return (provider_for(answer.url).min_prefix_tokens or 0) if answer.url else 0


def _is_explicit(now: Prompt, answer: _Answer) -> bool:
    """Whether only what is marked is cached: Claude anywhere, others where the request carries marks."""
    return not answer.own_engine and (now.family.name == "anthropic" or bool(marks(now.body)))


def _model(body: Body) -> str:
    model = body.get("model")
    return model if isinstance(model, str) else ""


# --- what it cost ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pricing:
    prices: PriceBook
    model: str
    url: str | None
    at: datetime | float | None
    usage: Usage | None

    def loss(self, lost_tokens: int | None) -> Decimal | None:
        if lost_tokens is None:
            return None
        tier = None if self.usage is None else self.usage.service_tier
        price = self.prices.price(self.model, url=self.url, at=self.at, tier=tier)
        return None if price is None else loss_of(lost_tokens, price, self.usage)


_PUBLIC_PRICES = PriceBook()
_OWN_PRICES_ONLY = PriceBook(vendors=False)


def _cost_of(now: Prompt, answer: _Answer, prices: PriceBook | None, at: datetime | float | None) -> _Pricing:
    # one's own engine has no public price, whatever the model is called
    book = prices or (_OWN_PRICES_ONLY if answer.own_engine else _PUBLIC_PRICES)
    return _Pricing(book, _model(now.body), answer.url, at, answer.usage)


def _measured(finding: Finding, before: Prompt | None, now: Prompt, answer: _Answer, pricing: _Pricing) -> CacheBreak:
    """A finding with its place in bytes, its tokens and its cost."""
    at = finding.at
    if at < 0:  # a vendor named a part of the prompt where we saw no difference
        at = now.start_of("messages") if finding.pointer in ("/messages", "/input") else 0
    lost = finding.lost_tokens
    if lost is None and finding.reason is not Reason.NOT_REPORTED:
        lost = _lost_tokens(finding, at, before, now, answer)
    return CacheBreak(
        reason=finding.reason,
        blame=finding.blame or blame_of(finding.reason),
        pointer=finding.pointer,
        offset=len(now.text[:at].encode("utf-8", "surrogatepass")),
        lost_tokens=lost,
        cost_usd=pricing.loss(lost),
        hint=finding.hint or HINTS[finding.reason],
        detail=finding.detail,
    )


def _lost_tokens(finding: Finding, at: int, before: Prompt | None, now: Prompt, answer: _Answer) -> int:
    """What of the earlier prompt was computed again: as measured where the answer says what it read, else from the
    difference on."""
    if finding.lost_chars is not None:
        return answer.tokens(finding.lost_chars, now)
    end = 0 if before is None else len(before.text)
    if answer.usage is not None and answer.usage.cached_tokens is not None:
        return max(0, answer.tokens(end, now) - answer.usage.cached_tokens)
    return answer.tokens(max(0, end - at), now)
