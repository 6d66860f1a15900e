"""Text of known harnesses that changes from run to run, left out of the system prompt where the configuration says so.

A proxy keeps no text, and a harness that resumes may come to another of several proxies: what is done here needs no
memory, the same bytes in give the same bytes out. The messages after the system prompt stay as they came.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

import msgspec

from homeport.fingerprint import JsonValue
from homeport.profiles import recognise
from homeport.stabilise import stabilise
from homeport.volatile import Declared
from homeport_proxy.document import Document, decoded, first_spoken

_TEXTS = ("system", "instructions")
_LISTS = ("messages", "input")


def rules_for(wanted: Sequence[str], user_agent: str | None) -> tuple[Declared, ...]:
    """What holds for a request of the harness that sends this ``user-agent``, when its profile is wanted."""
    profile = recognise({"user-agent": user_agent}) if wanted and user_agent else None
    return profile.proxy_rules if profile is not None and profile.name in wanted else ()


def calmed(body: Document, rules: Sequence[Declared]) -> dict[str, msgspec.Raw]:
    """The members of a body that the rules change, as they are to be sent; empty when there are none."""
    head: dict[str, JsonValue] = {name: body[name] for name in _TEXTS if name in body}
    for name in _LISTS:
        items = body.items_of(name) or ()
        head[name] = [decoded(item) for item in items[: first_spoken(items)]]
    after = stabilise(head, rules=rules).body
    changed: dict[str, msgspec.Raw] = {}
    for name, value in after.items():
        if value is not head[name]:
            changed[name] = _with_head(body, name, value) if name in _LISTS else msgspec.Raw(_encoded(value))
    return changed


def _with_head(body: Document, name: str, head: JsonValue) -> msgspec.Raw:
    """A list of messages with other system messages ahead of it; all behind them byte for byte."""
    before = body.list_of(name)
    messages = cast("list[JsonValue]", head)
    end = before.next_ends(before.items()[: len(messages)], 1)[-1]
    texts = b",".join([_encoded(message) for message in messages])
    return msgspec.Raw(b"[" + texts + bytes(memoryview(body.raws[name])[end:]))


def _encoded(value: JsonValue) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()  # ASCII: half a surrogate pair comes through as well
