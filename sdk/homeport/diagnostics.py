"""What vendors say themselves about a cache miss, in our words.

Anthropic answers ``diagnostics.cache_miss_reason`` to a request with ``diagnostics.previous_message_id``; OpenAI's
Responses answers ``prompt_cache_diagnostics`` to ``prompt_cache_options.comparison_response_id``. They know for certain
whether and from which part of the prompt on; the byte, the field and the remedy are for our own comparison to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from homeport.breaks import Reason
from homeport.parting import Finding

_TOOLS = frozenset(
    {Reason.TOOL_SCHEMA_CHANGED, Reason.TOOLS_REORDERED, Reason.TOOLS_ADDED, Reason.TOOLS_REMOVED}
)  # fmt: skip
_HISTORY = frozenset(
    {
        Reason.HISTORY_EDITED, Reason.HISTORY_TRUNCATED, Reason.WHITESPACE_CHANGED, Reason.REASONING_DROPPED,
        Reason.TOOL_CALL_IDS_CHANGED, Reason.ARGUMENTS_REENCODED, Reason.IMAGES_CHANGED, Reason.TEMPLATE_INHERENT,
    }
)  # fmt: skip
_SYSTEM = frozenset({Reason.SYSTEM_CHANGED, Reason.WHITESPACE_CHANGED})


@dataclass(frozen=True, slots=True)
class _Verdict:
    """A vendor's word: our reason where ours has none of ``fits``, and where in the body it lies."""

    reason: Reason
    fits: frozenset[Reason]
    pointer: str


def _exactly(reason: Reason, pointer: str) -> _Verdict:
    return _Verdict(reason, frozenset({reason}), pointer)


_VERDICTS = {
    "model_changed": _exactly(Reason.MODEL_CHANGED, "/model"),
    "prompt_cache_key_changed": _exactly(Reason.CACHE_KEY_CHANGED, "/prompt_cache_key"),
    "tools_changed": _Verdict(Reason.TOOL_SCHEMA_CHANGED, _TOOLS, "/tools"),
    "system_changed": _Verdict(Reason.SYSTEM_CHANGED, _SYSTEM, "/system"),
    "messages_changed": _Verdict(Reason.HISTORY_EDITED, _HISTORY, "/messages"),
    "input_changed": _Verdict(Reason.HISTORY_EDITED, _HISTORY | _SYSTEM, "/input"),
    "context_compacted": _exactly(Reason.HISTORY_TRUNCATED, "/input"),
    "text_format_changed": _exactly(Reason.PARAMS_CHANGED, "/text/format"),
    "reasoning_effort_changed": _exactly(Reason.PARAMS_CHANGED, "/reasoning/effort"),
    "verbosity_changed": _exactly(Reason.PARAMS_CHANGED, "/text/verbosity"),
    "service_tier_changed": _exactly(Reason.PARAMS_CHANGED, "/service_tier"),
}


def joined(ours: Finding | None, diagnostics: object) -> tuple[Finding | None, bool]:
    """Our finding with the vendor's word; whether that word settles the matter (then usage is not asked any more).

    ``diagnostics``: the object or dict as it came, alone or within the response. Where both agree on the part of the
    prompt, ours is the more precise one and theirs has the better count; where they do not, theirs holds."""
    word, missed_tokens = _word(diagnostics)
    if word == "cache_hit":
        return None, True
    verdict = _VERDICTS.get(word)
    if verdict is None:
        return ours, False
    if ours is None or ours.reason not in verdict.fits:
        ours = Finding(verdict.reason, verdict.pointer, at=-1)
    return dataclasses.replace(ours, lost_tokens=missed_tokens), True


def _word(diagnostics: object) -> tuple[str, int | None]:
    """The vendor's reason and its count of missed tokens; an empty word when it says nothing (yet)."""
    node = diagnostics
    for name in ("diagnostics", "prompt_cache_diagnostics"):
        inner = _member(node, name)
        node = node if inner is None else inner
    miss = _member(node, "cache_miss_reason")
    kind = _member(miss if miss is not None else node, "type")
    reason = _member(node, "reason") if kind == "cache_miss" else kind
    counts = [_member(miss, "cache_missed_input_tokens"), _member(node, "cache_missed_tokens")]
    tokens = next((count for count in counts if isinstance(count, int) and not isinstance(count, bool)), None)
    return (reason if isinstance(reason, str) else ""), tokens


def _member(node: object, name: str) -> object:
    return node.get(name) if isinstance(node, Mapping) else getattr(node, name, None)
