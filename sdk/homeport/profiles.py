"""Volatile text of known harnesses, recognised for certain or left alone.

A profile acts only when both the sender says it is that harness (``user-agent``) and the text has the harness's own
form; in another wording, as of another version, it is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from homeport.volatile import Declared


@dataclass(frozen=True, slots=True)
class Profile:
    """A harness: how it names itself, and which of its system texts change.

    ``rules`` hold everywhere, ``foreign_rules`` only where the upstream is not the harness's own vendor.
    ``proxy_rules`` are for a proxy, which remembers no text: they do the same whatever came before.
    """

    name: str
    user_agent: re.Pattern[str]
    rules: tuple[Declared, ...] = ()
    foreign_rules: tuple[Declared, ...] = ()
    vendor_hosts: tuple[str, ...] = ()
    proxy_rules: tuple[Declared, ...] = ()

    def rules_for(self, host: str) -> tuple[Declared, ...]:
        """The rules that hold for requests to that host."""
        at_home = any(host == vendor or host.endswith("." + vendor) for vendor in self.vendor_hosts)
        return self.rules if at_home else self.rules + self.foreign_rules


# Claude Code 2.1: the first system block, one line; its last part changes with every first user message. Anthropic
# reads it for attribution, nobody else can.
_CLAUDE_BILLING = Declared(
    "claude-code:billing", re.compile(r"x-anthropic-billing-header:[^\n]*\Z"), "drop", "billing", whole_block=True
)
# OpenCode 1.18: the environment block of the system prompt, with working folder, git flag and "Today's date"
_OPENCODE_ENV = Declared("opencode:env", re.compile(r"<env>\n(?:[ \t]+\S[^\n]*\n)+[ \t]*</env>"), "freeze", "date")
# Qwen Code 0.24: a git snapshot in the system prompt, before its tools; every process takes a new one, resumed or not
_QWEN_GIT = Declared("qwen-code:git", re.compile(r"(?m)^```text\n(?:git: [^\n]*\n)+```$"), "freeze", "git")
# the snapshot's own heading says that it may be stale and that live git commands are to be preferred
_QWEN_NO_GIT = replace(
    _QWEN_GIT, policy="drop", instead="```text\n(left out: `git status` and `git log -5` tell the state)\n```"
)
# Kilo 7.7 puts "Message time" into each user message once and sends it again unchanged: append-only, nothing to do

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            "claude-code",
            re.compile(r"^claude-(?:cli|code)/"),
            foreign_rules=(_CLAUDE_BILLING,),
            vendor_hosts=("anthropic.com", "claude.ai"),
            proxy_rules=(_CLAUDE_BILLING,),
        ),
        Profile("opencode", re.compile(r"^(?:opencode|Kilo-Code)/"), rules=(_OPENCODE_ENV,)),
        Profile("qwen-code", re.compile(r"^QwenCode/"), rules=(_QWEN_GIT,), proxy_rules=(_QWEN_NO_GIT,)),
    )
}
"""Every profile by name."""


def recognise(headers: Mapping[str, str]) -> Profile | None:
    """The profile of the harness that sent a request, by its ``user-agent`` (header names in lower case)."""
    agent = headers.get("user-agent", "")
    return next((profile for profile in PROFILES.values() if profile.user_agent.search(agent)), None)


def named(name: str) -> Profile:
    """The profile of that name; raises ValueError that names those there are."""
    try:
        return PROFILES[name]
    except KeyError:
        raise ValueError(f"profile {name!r} is not known; there are {', '.join(sorted(PROFILES))}") from None
