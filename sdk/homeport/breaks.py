"""A cache break: where two prompts part, why, whose doing it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import TypeAlias

from homeport.volatile import VolatileKind

Detail: TypeAlias = VolatileKind
"""What kind of volatile text changed."""


class Reason(StrEnum):
    """Why tokens that had been computed before were computed again."""

    MODEL_CHANGED = "model_changed"
    PARAMS_CHANGED = "params_changed"
    CACHE_KEY_CHANGED = "cache_key_changed"
    TOOLS_REORDERED = "tools_reordered"
    TOOLS_ADDED = "tools_added"
    TOOLS_REMOVED = "tools_removed"
    TOOL_SCHEMA_CHANGED = "tool_schema_changed"
    SYSTEM_CHANGED = "system_changed"
    HISTORY_TRUNCATED = "history_truncated"
    HISTORY_EDITED = "history_edited"
    WHITESPACE_CHANGED = "whitespace_changed"
    REASONING_DROPPED = "reasoning_dropped"
    TOOL_CALL_IDS_CHANGED = "tool_call_ids_changed"
    ARGUMENTS_REENCODED = "arguments_reencoded"
    IMAGES_CHANGED = "images_changed"
    BREAKPOINT_MISSING = "breakpoint_missing"
    BREAKPOINTS_TOO_MANY = "breakpoints_too_many"
    LOOKBACK_EXCEEDED = "lookback_exceeded"
    BELOW_MINIMUM = "below_minimum"
    EXPIRED = "expired"
    ROUTED_ELSEWHERE = "routed_elsewhere"
    EVICTED = "evicted"
    COLD_START = "cold_start"
    TEMPLATE_INHERENT = "template_inherent"
    NOT_REPORTED = "not_reported"


class Blame(StrEnum):
    """Whose doing a break is: the caller's prompt, a parameter, the route a request took, the engine or provider and
    its cache, the model's chat template, or nobody can say."""

    CALLER = "caller"
    PARAMETER = "parameter"
    ROUTE = "route"
    ENGINE = "engine"
    TEMPLATE = "template"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CacheBreak:
    """One break.

    ``pointer``: JSON pointer into the request body, empty where the whole request is meant. ``offset``: bytes from the
    start of the rendered prompt. ``lost_tokens``: tokens computed again that could have been read (estimated at 4
    characters a token without better knowledge; None: nobody can say). ``cost_usd``: what they cost more than if they
    had been read, None when unpriced. ``hint``: what to do. ``detail``: what kind of volatile text changed, if any.
    """

    reason: Reason
    blame: Blame
    pointer: str = ""
    offset: int = 0
    lost_tokens: int | None = None
    cost_usd: Decimal | None = None
    hint: str = ""
    detail: Detail | None = None

    def to_dict(self) -> dict[str, str | int | None]:
        """The fields as JSON values; dollars as decimal text."""
        return {
            "reason": self.reason.value,
            "blame": self.blame.value,
            "pointer": self.pointer,
            "offset": self.offset,
            "lost_tokens": self.lost_tokens,
            "cost_usd": None if self.cost_usd is None else format(self.cost_usd, "f"),
            "hint": self.hint,
            "detail": None if self.detail is None else self.detail.value,
        }


_BLAMES = {
    Reason.MODEL_CHANGED: Blame.PARAMETER,
    Reason.PARAMS_CHANGED: Blame.PARAMETER,
    Reason.CACHE_KEY_CHANGED: Blame.PARAMETER,
    Reason.BELOW_MINIMUM: Blame.ENGINE,
    Reason.EXPIRED: Blame.ENGINE,
    Reason.ROUTED_ELSEWHERE: Blame.ROUTE,
    Reason.EVICTED: Blame.UNKNOWN,
    Reason.COLD_START: Blame.UNKNOWN,
    Reason.TEMPLATE_INHERENT: Blame.TEMPLATE,
    Reason.NOT_REPORTED: Blame.UNKNOWN,
}


def blame_of(reason: Reason) -> Blame:
    """Whose doing a reason is unless more is known; what is not listed is the caller's prompt."""
    return _BLAMES.get(reason, Blame.CALLER)


HINTS = {
    Reason.MODEL_CHANGED: "Stay with one model for a conversation; each model has a cache of its own.",
    Reason.PARAMS_CHANGED: "Fix this parameter for the whole conversation: it is part of the prompt.",
    Reason.CACHE_KEY_CHANGED: "Send one cache key per conversation, the same on every request and after a restart.",
    Reason.TOOLS_REORDERED: 'Send the tools in a fixed order: sort them by name, or use mode="stabilise".',
    Reason.TOOLS_ADDED: "Declare every tool from the first request on, or append new ones at the end of the list.",
    Reason.TOOLS_REMOVED: "Keep a tool in the list for the whole conversation, even while its server is away.",
    Reason.TOOL_SCHEMA_CHANGED: "Freeze tool definitions at session start; sort what is generated into them.",
    Reason.SYSTEM_CHANGED: "Build the system prompt once per session, or move what changes behind the stable part.",
    Reason.HISTORY_TRUNCATED: "Drop history rarely and in one batch: every cut costs the whole rest once.",
    Reason.HISTORY_EDITED: "Leave sent messages as they are and only append.",
    Reason.WHITESPACE_CHANGED: "Replay text byte for byte; do not trim or reformat it.",
    Reason.REASONING_DROPPED: "Send the reasoning back as it came, at least until the next user turn.",
    Reason.TOOL_CALL_IDS_CHANGED: "Replay the tool-call ids that the model gave; do not mint new ones.",
    Reason.ARGUMENTS_REENCODED: "Replay the argument string as the model wrote it; do not parse and dump it.",
    Reason.IMAGES_CHANGED: "Send images again unchanged, or drop old ones rarely and in one batch.",
    Reason.BREAKPOINT_MISSING: "Mark the last message with cache_control, or set cache_control on the request.",
    Reason.BREAKPOINTS_TOO_MANY: "At most 4 cache_control marks are allowed, those set by frameworks included.",
    Reason.LOOKBACK_EXCEEDED: "Put a second mark in between: a mark finds earlier entries at most 20 blocks back.",
    Reason.BELOW_MINIMUM: "Nothing to mend: the prompt is shorter than this model's shortest cacheable prefix.",
    Reason.EXPIRED: "The pause was longer than the cache lives: use a longer lifetime, or keep it warm.",
    Reason.ROUTED_ELSEWHERE: "Name the session on every request, so that it comes back to the replica that knows it.",
    Reason.EVICTED: "The cache lost it: give the engine more KV memory, or fewer sessions.",
    Reason.COLD_START: "Nothing to mend: the first request of a conversation has nothing to read.",
    Reason.TEMPLATE_INHERENT: "The chat template does this by itself; only a template option changes it.",
    Reason.NOT_REPORTED: "Turn on usage details (vLLM: --enable-prompt-tokens-details, SGLang: --enable-cache-report).",
}
"""What to do about each reason, in one sentence, where nothing more precise is known."""
