"""Keep a prompt's head still from turn to turn: pure, a body and a state in, a body and a state out.

Tools get a frozen order and canonical definitions; declared volatile text in the system prompt is frozen, moved or
dropped. Messages and model output are never touched, and nothing is ever added to or lost from the tool list.
"""

from __future__ import annotations

import marshal
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256
from typing import Literal, NamedTuple

from homeport import canonical
from homeport.fingerprint import JsonValue
from homeport.volatile import Declared, apply

ToolOrder = Literal["sorted", "caller"]
Body = dict[str, JsonValue]


class ChangeKind(StrEnum):
    """What the stabiliser did, or saw and left alone."""

    TOOLS_ORDERED = "tools_ordered"
    DEFINITION_SORTED = "definition_sorted"
    MARK_KEPT_IN_PLACE = "mark_kept_in_place"
    VOLATILE_FROZEN = "volatile_frozen"
    VOLATILE_MOVED = "volatile_moved"
    VOLATILE_DROPPED = "volatile_dropped"
    DESCRIPTION_REORDERED = "description_reordered"


class Change(NamedTuple):
    """One change: ``pointer`` into the new body. ``description_reordered`` is an observation: the text was left."""

    kind: ChangeKind
    pointer: str
    detail: str


class ToolKey(NamedTuple):
    """A tool's identity; the tuple's order is the frozen order: the caller's by name, then MCP by (server, name)."""

    mcp: bool
    server: str
    name: str
    nth: int


@dataclass(frozen=True, slots=True)
class State:
    """What a session remembers between requests: the slots of its tools, its frozen texts, its descriptions' words."""

    slots: tuple[ToolKey, ...] = ()
    frozen: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[ToolKey, tuple[bytes, bytes]] = field(default_factory=dict)


MAX_SLOTS = 4096
"""Beyond so many tools in one session, those that are not offered now lose their slots."""


class Plan(NamedTuple):
    """The result: ``body`` is the very object that came in when nothing had to change."""

    body: Body
    state: State
    changes: list[Change]


def stabilise(
    body: Body,
    state: State | None = None,
    *,
    tool_order: ToolOrder = "sorted",
    mcp_tools: Mapping[str, tuple[str, str]] | None = None,
    rules: Sequence[Declared] = (),
) -> Plan:
    """Plan the stable form of a request of any API. Neither argument is modified; applying it twice changes nothing.

    ``state``: the plan's state of the session's request before. ``tool_order``: ``sorted``, or the caller's order on
    first sight. ``mcp_tools``: tool name to (server, tool) for MCP tools whose names do not say it. ``rules``: declared
    volatile text.
    """
    if tool_order not in ("sorted", "caller"):
        raise ValueError(f"tool_order must be sorted or caller, not {tool_order!r}")
    before = state or State()
    changes: list[Change] = []
    edits: Body = {}
    after = before
    for name in ("tools", "functions"):
        tools = body.get(name)
        if isinstance(tools, list) and tools:
            edits[name], after = _tools(name, tools, after, tool_order, mcp_tools or {}, changes)
    if rules:
        frozen = dict(before.frozen)
        edits |= _system(body, rules, frozen, changes)
        after = after if frozen == before.frozen else replace(after, frozen=frozen)
    changed = {name: value for name, value in edits.items() if value is not body[name]}
    return Plan({**body, **changed} if changed else body, after, changes)


# --- tools -----------------------------------------------------------------------------------------------------------


def _tools(
    member: str,
    tools: list[JsonValue],
    state: State,
    tool_order: ToolOrder,
    mcp_tools: Mapping[str, tuple[str, str]],
    changes: list[Change],
) -> tuple[JsonValue, State]:
    keys = _keys(tools, mcp_tools)
    known = set(state.slots)
    new = [key for key in keys if key not in known]
    slots = state.slots + tuple(new if tool_order == "caller" else sorted(new))
    if len(slots) > MAX_SLOTS:
        present = set(keys)
        slots = tuple(key for key in slots if key in present)
    rank = {key: index for index, key in enumerate(slots)}
    order = sorted(range(len(keys)), key=lambda index: rank[keys[index]])
    found: list[JsonValue] = [tools[index] for index in order]
    if order != list(range(len(keys))):
        found = _keep_marks(member, tools, found, changes)
        changes.append(Change(ChangeKind.TOOLS_ORDERED, f"/{member}", ", ".join(keys[index].name for index in order)))
    words = {key: value for key, value in state.words.items() if key in rank}
    for place, index in enumerate(order):
        found[place] = _definition(f"/{member}/{place}", found[place], changes)
        _note_words(f"/{member}/{place}", keys[index], found[place], words, changes)
    same = all(one is other for one, other in zip(found, tools, strict=True))
    if words == state.words and slots == state.slots:
        return (tools if same else found), state
    return (tools if same else found), replace(state, slots=slots, words=words)


def _keys(tools: Sequence[JsonValue], mcp_tools: Mapping[str, tuple[str, str]]) -> list[ToolKey]:
    seen: dict[tuple[bool, str, str], int] = {}
    keys: list[ToolKey] = []
    for tool in tools:
        mcp, server, name = origin(tool, mcp_tools)
        nth = seen[mcp, server, name] = seen.get((mcp, server, name), -1) + 1
        keys.append(ToolKey(mcp, server, name, nth))
    return keys


# the convention of several harnesses: two underscores around the server's name. One underscore says nothing for
# certain (`read_file` is not tool `file` of a server `read`), so such names need `mcp_tools`.
_MCP_NAME = re.compile(r"^mcp__(?P<server>.+?)__(?P<tool>.+)$", re.DOTALL)


def origin(tool: JsonValue, mcp_tools: Mapping[str, tuple[str, str]]) -> tuple[bool, str, str]:
    """Whose tool it is: (is it MCP, its server, its name).

    MCP: what ``mcp_tools`` names, a name ``mcp__server__tool``, and the Responses and Messages APIs' remote servers
    (``type: mcp`` / ``mcp_toolset``). Everything else is the caller's.
    """
    name = _name(tool)
    if name in mcp_tools:
        return (True, *mcp_tools[name])
    if match := _MCP_NAME.match(name):
        return True, match["server"], match["tool"]
    if isinstance(tool, dict) and tool.get("type") in ("mcp", "mcp_toolset"):
        label = tool.get("server_label", tool.get("mcp_server_name"))
        return True, label if isinstance(label, str) else "", ""
    return False, "", name


def _name(tool: JsonValue) -> str:
    if not isinstance(tool, dict):
        return ""
    function = tool.get("function")
    for source in (function if isinstance(function, dict) else tool, tool):
        name = source.get("name")
        if isinstance(name, str):
            return name
    kind = tool.get("type")
    return kind if isinstance(kind, str) else ""


def _keep_marks(
    member: str, before: Sequence[JsonValue], after: list[JsonValue], changes: list[Change]
) -> list[JsonValue]:
    """Cache marks belong to a place in the list, not to a tool: what is cached ends there."""
    marks = [_mark(tool) for tool in before]
    if not any(marks):
        return after
    placed: list[JsonValue] = []
    for place, (tool, mark) in enumerate(zip(after, marks, strict=True)):
        placed.append(_marked(tool, mark))
        if mark is not None:
            changes.append(Change(ChangeKind.MARK_KEPT_IN_PLACE, f"/{member}/{place}/cache_control", ""))
    return placed


class _Mark(NamedTuple):
    inside: bool
    """In the ``function`` object rather than beside it."""
    value: JsonValue


def _mark(tool: JsonValue) -> _Mark | None:
    if isinstance(tool, dict):
        if "cache_control" in tool:
            return _Mark(False, tool["cache_control"])
        function = tool.get("function")
        if isinstance(function, dict) and "cache_control" in function:
            return _Mark(True, function["cache_control"])
    return None


def _marked(tool: JsonValue, mark: _Mark | None) -> JsonValue:
    if not isinstance(tool, dict) or mark == _mark(tool):
        return tool
    function = tool.get("function")
    bare = {key: value for key, value in tool.items() if key != "cache_control"}
    inner = (
        {key: value for key, value in function.items() if key != "cache_control"}
        if isinstance(function, dict)
        else None
    )
    if mark is not None and mark.inside and inner is not None:
        inner["cache_control"] = mark.value
    elif mark is not None:
        bare["cache_control"] = mark.value
    return bare if inner is None else {**bare, "function": inner}


def _definition(pointer: str, tool: JsonValue, changes: list[Change]) -> JsonValue:
    try:
        packed = marshal.dumps(tool, 2)
    except ValueError:
        return canonical.tool(tool)  # holds objects that are not plain JSON: nothing to compare them by
    after = _sorted_packed(packed) if len(packed) <= _CACHED_BYTES else _sort_packed(packed)
    if after == packed:
        return tool
    changes.append(Change(ChangeKind.DEFINITION_SORTED, pointer, _name(tool)))
    sorted_tool: JsonValue = marshal.loads(after)
    return sorted_tool


def _sort_packed(packed: bytes) -> bytes:
    return marshal.dumps(canonical.tool(marshal.loads(packed)), 2)


# the same definitions come with every request of every session: at most 512 of 16 kB, twice
_CACHED_BYTES = 16_384
_sorted_packed = lru_cache(maxsize=512)(_sort_packed)

_WORD = re.compile(r"\w+")


def _note_words(
    pointer: str,
    key: ToolKey,
    tool: JsonValue,
    words: dict[ToolKey, tuple[bytes, bytes]],
    changes: list[Change],
) -> None:
    """Tell a description whose words came in another order (a list somebody rendered from a set) from a new one."""
    text = _description(tool)
    if text is None:
        return
    exact = sha256(text.encode("utf-8", "surrogatepass")).digest()[:8]
    known = words.get(key)
    if known is not None and known[0] == exact:
        return
    joined = "\0".join(sorted(_WORD.findall(text)))
    bag = sha256(joined.encode("utf-8", "surrogatepass")).digest()[:8]
    words[key] = (exact, bag)
    if known is not None and known[1] == bag:
        changes.append(Change(ChangeKind.DESCRIPTION_REORDERED, f"{pointer}", f"a list in the text of {key.name}"))


def _description(tool: JsonValue) -> str | None:
    if not isinstance(tool, dict):
        return None
    function = tool.get("function")
    text = (function if isinstance(function, dict) else tool).get("description")
    return text if isinstance(text, str) else None


# --- declared volatile text in the system prompt ---------------------------------------------------------------------

_VERB = {
    "freeze": ChangeKind.VOLATILE_FROZEN,
    "move": ChangeKind.VOLATILE_MOVED,
    "drop": ChangeKind.VOLATILE_DROPPED,
}


def _system(body: Body, rules: Sequence[Declared], frozen: dict[str, str], changes: list[Change]) -> Body:
    """The members with system text after the rules: ``system``, ``instructions``, and the system messages that lead."""
    edits: Body = {}
    for name in ("system", "instructions"):
        if body.get(name):
            edits[name] = _content(f"/{name}", body[name], rules, frozen, changes)
    for name in ("messages", "input"):
        messages = body.get(name)
        if not isinstance(messages, list):
            continue
        after = list(messages)
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
                break
            pointer = f"/{name}/{index}/content"
            content = _content(pointer, message.get("content"), rules, frozen, changes)
            if content is not message.get("content"):
                after[index] = {**message, "content": content}
        if any(one is not other for one, other in zip(after, messages, strict=True)):
            edits[name] = after
    return edits


def _content(
    pointer: str,
    content: JsonValue,
    rules: Sequence[Declared],
    frozen: dict[str, str],
    changes: list[Change],
) -> JsonValue:
    if isinstance(content, str):
        text, acted = apply(content, rules, frozen)
        changes += [Change(_VERB[rule.policy], pointer, rule.kind or rule.name) for rule in acted]
        return text if acted else content
    if not isinstance(content, list):
        return content
    after: list[JsonValue] = []
    for index, block in enumerate(content):
        if isinstance(block, dict) and isinstance(old := block.get("text"), str):
            changed = _content(f"{pointer}/{index}/text", old, rules, frozen, changes)
            if changed is not old:
                # an empty text block is refused by some APIs; one with a cache mark stays, so that the marks stay
                if changed or "cache_control" in block:
                    after.append({**block, "text": changed or old})
                continue
        after.append(block)
    same = len(after) == len(content) and all(one is other for one, other in zip(after, content, strict=True))
    return content if same or not after else after
