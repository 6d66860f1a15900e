"""A request's rendered prompt as the explainer reads it: segments, where they lie, and what two prompts share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, zip_longest
from typing import Literal

from homeport.fingerprint import Api, JsonValue, Piece, render, resolve
from homeport.templates import Family

Body = Mapping[str, JsonValue]
Region = Literal["params", "system", "tools", "messages"]


@dataclass(frozen=True)
class Part:
    """One tool, system text, parameter or message: its kind, its JSON pointer, the runs of text it is rendered to."""

    kind: str
    pointer: str
    pieces: tuple[Piece, ...]

    @cached_property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True)
class Prompt:
    """A body rendered: ``parts`` in the order the model sees them, ``text`` as a whole."""

    api: Api
    body: Body
    family: Family
    parts: tuple[Part, ...]

    @cached_property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)

    def region(self, name: Region) -> tuple[Part, ...]:
        """The parts of one region, in order; a bare prompt counts as messages."""
        return tuple(part for part in self.parts if _region(part.kind) == name)

    @property
    def order(self) -> tuple[Region, ...]:
        """The regions in the order their first difference counts."""
        if self.family.order == "tools_first":
            return ("tools", "params", "system", "messages")
        if self.family.order == "system_first":
            return ("params", "system", "tools", "messages")
        return ("params", "system", "messages", "tools")

    def start_of(self, name: Region) -> int:
        """Characters before the first part of a region; the whole prompt when it has none."""
        at = 0
        for part in self.parts:
            if _region(part.kind) == name:
                return at
            at += len(part.text)
        return at

    def end_of(self, pointer: str) -> int:
        """Characters up to and including the text that stems from ``pointer`` or from below it; 0 when none does."""
        at = end = 0
        for part in self.parts:
            for piece in part.pieces:
                at += len(piece.text)
                if piece.pointer == pointer or piece.pointer.startswith(pointer + "/"):
                    end = at
        return end


def _region(kind: str) -> Region:
    if kind == "tool":
        return "tools"
    if kind in ("params", "system"):
        return "system" if kind == "system" else "params"
    return "messages"


def prompt_of(body: Body, api: Api, family: str = "default", *, ids: bool = True) -> Prompt:
    """Render a body. ``ids``: with tool-call ids, unless the family is known not to render them."""
    layout = resolve(family, api, body)
    ids = ids and layout.renders_call_ids is not False
    pieces = render(api, body, layout.name, ids=ids)
    parts = tuple(
        Part(kind, root, tuple(run))
        for (kind, root), run in groupby(pieces, key=lambda piece: (piece.kind, _root(piece)))
    )
    return Prompt(api, body, layout, parts)


def _root(piece: Piece) -> str:
    """The pointer of the whole part a piece belongs to: ``/messages/3`` of ``/messages/3/content``."""
    return piece.pointer if piece.kind == "params" else "/".join(piece.pointer.split("/", 3)[:3])


def api_of(body: Body) -> Api:
    """The API a body was made for, by its shape; Messages only where something says so."""
    if "messages" not in body and ("input" in body or "instructions" in body):
        return "responses"
    if "messages" not in body and "prompt" in body:
        return "completions"
    return "messages" if _is_messages(body) else "chat"


_ANTHROPIC_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking"})


def _is_messages(body: Body) -> bool:
    if "system" in body or "anthropic_version" in body or isinstance(body.get("thinking"), dict):
        return True
    tools = body.get("tools")
    if isinstance(tools, list) and any(isinstance(tool, dict) and "input_schema" in tool for tool in tools):
        return True
    messages = body.get("messages")
    return isinstance(messages, list) and any(
        isinstance(block, dict) and isinstance(kind := block.get("type"), str) and kind in _ANTHROPIC_BLOCKS
        for message in messages
        if isinstance(message, dict) and isinstance(content := message.get("content"), list)
        for block in content
    )


def common_chars(first: str, second: str) -> int:
    """How many characters two texts share at the start (by halves: slices compare at memory speed)."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def first_other_piece(before: Part, after: Part) -> tuple[Piece | None, Piece | None]:
    """The first pair of runs in which two parts differ; None for the side that has no more."""
    for one, other in zip_longest(before.pieces, after.pieces):
        if one is None or other is None or one.text != other.text:
            return one, other
    return None, None


def resolve_pointer(body: JsonValue | Body, pointer: str) -> JsonValue:
    """The value at a JSON pointer (RFC 6901); None when there is none."""
    node: JsonValue | Body = body
    for token in pointer.split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(name)
        elif isinstance(node, list) and name.isascii() and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node if not isinstance(node, Mapping) or isinstance(node, dict) else dict(node)


def escaped(name: str) -> str:
    """A member name as a token of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
