"""How chat templates lay a prompt out: what comes first, what is rendered, what is dropped, by model name.

The facts are those of the published chat templates and of the vendors' documentation. A model that is not known by
name is taken for the common open-weight layout (system text, then tools, then messages).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Order = Literal["tools_first", "system_first", "tools_at_last_user"]
Reasoning = Literal["kept", "dropped_at_user_turn", "unknown"]


@dataclass(frozen=True, slots=True)
class Family:
    """One template family.

    ``order``: what stands at the head of the prompt. ``renders_call_ids``: whether tool-call ids are prompt text
    (None: not known). ``reasoning``: what becomes of earlier turns' reasoning when a new user turn begins.
    ``sorts_tool_keys``: the template sorts the keys of definitions itself. ``gathers_system``: later system messages
    are moved to the front. ``effort_in_head``: the reasoning effort is rendered before the messages.
    """

    name: str
    order: Order
    renders_call_ids: bool | None = None
    reasoning: Reasoning = "unknown"
    sorts_tool_keys: bool = False
    gathers_system: bool = False
    effort_in_head: bool = False


_ALL = (
    Family("system_first", "system_first"),
    Family("tools_first", "tools_first"),
    Family("openai", "tools_first", renders_call_ids=False),
    Family("anthropic", "tools_first", renders_call_ids=None, reasoning="kept"),
    Family("gpt-oss", "system_first", renders_call_ids=False, reasoning="dropped_at_user_turn", effort_in_head=True),
    Family("kimi", "tools_first", renders_call_ids=False, reasoning="unknown"),
    Family("kimi-thinking", "tools_first", renders_call_ids=True, reasoning="dropped_at_user_turn"),
    Family(
        "kimi-k3", "tools_first", renders_call_ids=None, reasoning="kept", sorts_tool_keys=True, effort_in_head=True
    ),
    Family("glm", "tools_first", renders_call_ids=False, reasoning="dropped_at_user_turn"),
    Family("glm-5", "tools_first", renders_call_ids=False, reasoning="kept", effort_in_head=True),
    Family("qwen", "system_first", renders_call_ids=False, reasoning="dropped_at_user_turn"),
    Family("deepseek", "system_first", renders_call_ids=False, reasoning="dropped_at_user_turn", gathers_system=True),
    Family("deepseek-v3.2", "system_first", renders_call_ids=False, reasoning="dropped_at_user_turn"),
    Family("deepseek-v4", "system_first", renders_call_ids=False, reasoning="kept"),
    Family("minimax", "system_first", renders_call_ids=False, reasoning="dropped_at_user_turn"),
    Family("llama", "system_first", renders_call_ids=False, reasoning="kept"),
    Family("mistral", "tools_at_last_user", renders_call_ids=True, reasoning="unknown"),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
"""Every family by name."""

# the first match wins, so the narrower names stand before the wider ones
_BY_MODEL: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), family)
    for pattern, family in (
        (r"gpt-oss", "gpt-oss"),
        (r"kimi-?k?3|\bk3\b", "kimi-k3"),
        (r"kimi.*think", "kimi-thinking"),
        (r"kimi|moonshot", "kimi"),
        (r"glm-?(?:4\.[7-9]|[5-9])", "glm-5"),
        (r"glm|chatglm", "glm"),
        (r"qwen|qwq", "qwen"),
        (r"deepseek.*v?3\.2", "deepseek-v3.2"),
        (r"deepseek.*v[4-9]", "deepseek-v4"),
        (r"deepseek", "deepseek"),
        (r"minimax", "minimax"),
        (r"llama", "llama"),
        (r"mi[sx]tral|devstral|magistral|codestral", "mistral"),
        (r"claude|anthropic", "anthropic"),
        (r"(?:^|[/:])(?:gpt-\d|chatgpt|o[1-9](?:-|$)|codex)", "openai"),
    )
)


@lru_cache(maxsize=1024)
def family_of(model: str, api: str = "chat") -> Family:
    """The template family of a model by its name; an unknown model of the Messages API renders tools first."""
    name = model.lower()
    for pattern, family in _BY_MODEL:
        if pattern.search(name):
            return FAMILIES[family]
    return FAMILIES["tools_first" if api == "messages" else "system_first"]
