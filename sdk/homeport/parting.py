"""Where two prompts part, and by what kind of change: the first point of difference decides."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from homeport.breaks import Blame, Detail, Reason
from homeport.fingerprint import JsonValue, Piece
from homeport.prompt import Part, Prompt, common_chars, escaped, first_other_piece, prompt_of, resolve_pointer
from homeport.volatile import VolatileKind, scan


@dataclass(frozen=True, slots=True)
class Finding:
    """A break before it is measured. ``at``: characters of the current prompt before the difference. ``lost_chars``
    and ``lost_tokens``: what was lost, where the place alone does not say it."""

    reason: Reason
    pointer: str = ""
    at: int = 0
    detail: Detail | None = None
    blame: Blame | None = None
    hint: str | None = None
    lost_chars: int | None = None
    lost_tokens: int | None = None


def parting(before: Prompt, after: Prompt) -> Finding | None:
    """The first difference between two prompts that costs cached tokens, or None for a continuation.

    A parameter that is part of the prompt only on some servers decides when nothing else differs."""
    sure, possible = _parameter_changes(before, after)
    candidates = [_identity_change(before, after), sure, _content_change(before, after)]
    found = [finding for finding in candidates if finding is not None]
    return min(found, key=lambda finding: finding.at, default=possible)


# --- the request around the prompt -----------------------------------------------------------------------------------

_CACHE_KEYS = ("prompt_cache_key", "promptCacheKey", "cache_salt")


def _identity_change(before: Prompt, after: Prompt) -> Finding | None:
    if before.body.get("model") != after.body.get("model"):
        return Finding(Reason.MODEL_CHANGED, "/model")
    for name in _CACHE_KEYS:
        if before.body.get(name) != after.body.get(name):
            return Finding(Reason.CACHE_KEY_CHANGED, f"/{name}")
    return None


_EFFORT = ("/reasoning_effort", "/reasoning/effort", "/output_config/effort")
_FORMAT = ("/response_format", "/text/format", "/text/verbosity", "/verbosity")
_THINKING = ("/thinking", "/enable_thinking", "/chat_template_kwargs/enable_thinking", "/chat_template_kwargs/thinking")
_PARAMETERS = (*_EFFORT, *_THINKING, *_FORMAT, "/tool_choice", "/service_tier")
# what vendors say is part of their prompt or of their cache's key
_SURE = {
    "openai": frozenset({*_EFFORT, *_FORMAT, "/service_tier"}),
    "anthropic": frozenset({*_EFFORT, "/thinking", "/tool_choice"}),
}
# what stands at the tail of a family's prompt, behind everything that can be read again
_HARMLESS = {
    "qwen": frozenset(_THINKING),
    "kimi-k3": frozenset({"/tool_choice", "/response_format"}),
    "deepseek": frozenset(_THINKING),
    "deepseek-v3.2": frozenset(_THINKING),
    "deepseek-v4": frozenset(_THINKING),
}


def _parameter_changes(before: Prompt, after: Prompt) -> tuple[Finding | None, Finding | None]:
    """The first changed parameter that surely counts, and the first that counts on some servers.

    Anthropic keeps tools and system text through such a change; elsewhere everything may be lost."""
    family = after.family.name
    at = after.start_of("messages") if family == "anthropic" else 0
    sure: Finding | None = None
    possible: Finding | None = None
    for pointer in _PARAMETERS:
        if pointer in _HARMLESS.get(family, ()):
            continue
        if resolve_pointer(before.body, pointer) != resolve_pointer(after.body, pointer):
            finding = Finding(Reason.PARAMS_CHANGED, pointer, at)
            if pointer in _SURE.get(family, ()):
                sure = sure or finding
            else:
                possible = possible or finding
    return sure, possible


# --- the prompt itself -----------------------------------------------------------------------------------------------


def _content_change(before: Prompt, after: Prompt) -> Finding | None:
    at = common_chars(before.text, after.text)
    if at == len(after.text):
        return None  # the same, or cut short: nothing that was sent has to be computed again
    if at == len(before.text):
        if _ends_alike(before, after):
            return None  # continued
        at -= 1  # the line break that ended the last message has become the one before the next
    for region in after.order:
        old, new = before.region(region), after.region(region)
        if region == "messages" and _stored_elsewhere(after):
            continue
        index = _first_other(old, new, open_end=region == "messages")
        if index is None:
            continue
        if region == "params":
            return Finding(Reason.PARAMS_CHANGED, (new or old)[min(index, len(new or old) - 1)].pointer, at)
        if region == "tools":
            return _tools_change(before, after, old, new, index, at)
        if region == "system":
            return _system_change(before, after, old, new, index, at)
        return _history_change(before, after, old, new, index, at)
    if _stored_elsewhere(after):
        return None
    return Finding(Reason.TEMPLATE_INHERENT, _pointer_at(after, at), at, hint=_MOVED_HINT)


_MOVED_HINT = "This template moves a block when the conversation grows; put the tools into the system text instead."


def _ends_alike(before: Prompt, after: Prompt) -> bool:
    """Whether the last part of a prompt that goes on is still the beginning of the same part."""
    if not before.parts:
        return True
    last = len(before.parts) - 1
    return len(after.parts) > last and after.parts[last].text.startswith(before.parts[last].text)


def _stored_elsewhere(prompt: Prompt) -> bool:
    """Whether the history lies with the provider, so that the body shows only what is new."""
    return prompt.body.get("previous_response_id") is not None or prompt.body.get("conversation") is not None


def _first_other(old: Sequence[Part], new: Sequence[Part], *, open_end: bool) -> int | None:
    """Index of the first part that differs; with ``open_end``, further new parts are no difference."""
    for index, part in enumerate(old):
        if index >= len(new) or part.kind != new[index].kind or part.text != new[index].text:
            return index
    return None if open_end or len(new) == len(old) else len(old)


def _pointer_at(prompt: Prompt, at: int) -> str:
    seen = 0
    for part in prompt.parts:
        for piece in part.pieces:
            seen += len(piece.text)
            if seen > at:
                return piece.pointer
    return ""


# --- tools -----------------------------------------------------------------------------------------------------------


def _tools_change(
    before: Prompt, after: Prompt, old: Sequence[Part], new: Sequence[Part], index: int, at: int
) -> Finding:
    was = [_tool_name(resolve_pointer(before.body, part.pointer)) for part in old]
    now = [_tool_name(resolve_pointer(after.body, part.pointer)) for part in new]
    here = new[index].pointer if index < len(new) else "/tools"
    added, removed = set(now) - set(was), set(was) - set(now)
    if added and (not removed or (index < len(now) and now[index] in added)):
        first = next(position for position, name in enumerate(now) if name in added)
        return Finding(Reason.TOOLS_ADDED, new[first].pointer, at)
    if removed or len(now) < len(was):
        return Finding(Reason.TOOLS_REMOVED, here, at)
    if len(now) > len(was):
        return Finding(Reason.TOOLS_ADDED, here, at)
    if was[index] != now[index]:
        return Finding(Reason.TOOLS_REORDERED, here, at)
    one, other = (resolve_pointer(body, part[index].pointer) for body, part in ((before.body, old), (after.body, new)))
    pointer, hint = _inside_tool(one, other, here)
    return Finding(Reason.TOOL_SCHEMA_CHANGED, pointer, at, _detail(old[index].text, new[index].text), hint=hint)


def _tool_name(tool: JsonValue) -> str:
    if not isinstance(tool, dict):
        return ""
    function = tool.get("function")
    inner = function if isinstance(function, dict) else tool
    return str(inner.get("name") or inner.get("type"))


_KEY_ORDER_HINT = 'The same schema came with its keys in another order: dump it sorted, or use mode="stabilise".'
_LIST_ORDER_HINT = "The same lines came in another order: sort what is generated into a description."


def _inside_tool(one: JsonValue, other: JsonValue, pointer: str) -> tuple[str, str | None]:
    """The pointer of the first difference inside a definition, and a hint when only an order changed."""
    if isinstance(one, dict) and isinstance(other, dict):
        if isinstance(one.get("function"), dict) and isinstance(other.get("function"), dict):
            one, other, pointer = one["function"], other["function"], f"{pointer}/function"
        assert isinstance(one, dict)
        assert isinstance(other, dict)
        names = [*dict.fromkeys(("name", "description", *other, *one))]
        for name in names:
            if name != "cache_control" and _dump(one.get(name)) != _dump(other.get(name)):
                return _inside(one.get(name), other.get(name), f"{pointer}/{escaped(name)}")
    return pointer, None


def _inside(one: JsonValue, other: JsonValue, pointer: str) -> tuple[str, str | None]:
    if isinstance(one, dict) and isinstance(other, dict):
        if list(one) != list(other) and set(one) == set(other):
            return pointer, _KEY_ORDER_HINT
        for name in [*other, *one]:
            if name not in one or name not in other or _dump(one[name]) != _dump(other[name]):
                return _inside(one.get(name), other.get(name), f"{pointer}/{escaped(name)}")
    if isinstance(one, list) and isinstance(other, list):
        if sorted(map(_dump, one)) == sorted(map(_dump, other)):
            return pointer, _KEY_ORDER_HINT
        for index, (left, right) in enumerate(zip(one, other, strict=False)):
            if _dump(left) != _dump(right):
                return _inside(left, right, f"{pointer}/{index}")
    if isinstance(one, str) and isinstance(other, str) and sorted(one.splitlines()) == sorted(other.splitlines()):
        return pointer, _LIST_ORDER_HINT
    return pointer, None


def _dump(value: JsonValue) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- system text -----------------------------------------------------------------------------------------------------

_GATHERED_HINT = "This template moves a late system message to the front; send it as a user message."


def _system_change(
    before: Prompt, after: Prompt, old: Sequence[Part], new: Sequence[Part], index: int, at: int
) -> Finding:
    if index == len(old) and after.family.gathers_system and all(_in_history(part) for part in new[index:]):
        return Finding(Reason.TEMPLATE_INHERENT, new[index].pointer, at, hint=_GATHERED_HINT)
    if index >= len(old) or index >= len(new):
        pointer = new[index].pointer if index < len(new) else (new or old)[-1].pointer
        only = old[index].text if index < len(old) else new[index].text
        return Finding(Reason.SYSTEM_CHANGED, pointer, at, _detail(only, ""))
    one, other = first_other_piece(old[index], new[index])
    pointer = (other or one or new[index].pieces[0]).pointer
    if _same_but_for_space(old[index].text, new[index].text):
        return Finding(Reason.WHITESPACE_CHANGED, pointer, at)
    detail = _detail(old[index].text, new[index].text)
    return Finding(Reason.SYSTEM_CHANGED, pointer, at, detail, hint=_VOLATILE_HINTS.get(detail) if detail else None)


def _in_history(part: Part) -> bool:
    return part.pointer.startswith(("/messages/", "/input/"))


_VOLATILE_HINTS = {
    VolatileKind.TIMESTAMP: "The clock stands in the prompt: declare it (homeport.volatile) or send it at the tail.",
    VolatileKind.DATE: "The date stands in the prompt: freeze it at session start, or send it at the tail.",
    VolatileKind.UUID: "A random id stands in the prompt: leave it out, or make one per session.",
    VolatileKind.PATH: "A path stands in the prompt: freeze it at session start, or put it behind the stable part.",
    VolatileKind.GIT: "The git state stands in the prompt: take it once per session, or send it at the tail.",
    VolatileKind.COUNTER: "A counter stands in the prompt: send it at the tail, or leave it out.",
    VolatileKind.BILLING: "A billing line heads the prompt: switch it off (CLAUDE_CODE_ATTRIBUTION_HEADER=0).",
}


# --- messages --------------------------------------------------------------------------------------------------------


def _history_change(
    before: Prompt, after: Prompt, old: Sequence[Part], new: Sequence[Part], index: int, at: int
) -> Finding:
    if index < len(new) and (finding := _ids_change(before, after, old[index], new[index], at)):
        return finding
    if finding := _reasoning_change(after, old, new, index, at):
        return finding
    if index >= len(new) or _moved_up(old[index:], new[index:]):
        pointer = new[index].pointer if index < len(new) else _history_pointer(after)
        return Finding(Reason.HISTORY_TRUNCATED, pointer, at)
    one, other = first_other_piece(old[index], new[index])
    pointer = (other or one or new[index].pieces[0]).pointer
    if one and other and _same_arguments(before, after, one, other):
        return Finding(Reason.ARGUMENTS_REENCODED, other.pointer, at)
    if one and (_is_media(before, one) or (other and _is_media(after, other))):
        return Finding(Reason.IMAGES_CHANGED, pointer, at)
    if _same_but_for_space(old[index].text, new[index].text):
        return Finding(Reason.WHITESPACE_CHANGED, pointer, at)
    hint = _TAIL_HINT if index == len(old) - 1 else None
    return Finding(Reason.HISTORY_EDITED, pointer, at, _detail(old[index].text, new[index].text), hint=hint)


_TAIL_HINT = "The end of the last prompt was not kept: append passing context after the last message, or keep it."


def _history_pointer(prompt: Prompt) -> str:
    return next((f"/{name}" for name in ("messages", "input", "prompt") if name in prompt.body), "")


def _ids_change(before: Prompt, after: Prompt, one: Part, other: Part, at: int) -> Finding | None:
    """Two messages differ, and without tool-call ids they do not."""
    if after.family.renders_call_ids is False or one.kind != other.kind:
        return None
    if _without_ids(before, one) != _without_ids(after, other):
        return None
    return Finding(Reason.TOOL_CALL_IDS_CHANGED, _id_pointer(before, after, other.pointer), at)


def _without_ids(prompt: Prompt, part: Part) -> str:
    """One message rendered alone, without tool-call ids."""
    name = part.pointer.split("/")[1]
    alone = {name: [resolve_pointer(prompt.body, part.pointer)]}
    return prompt_of(alone, prompt.api, prompt.family.name, ids=False).text


def _id_pointer(before: Prompt, after: Prompt, pointer: str) -> str:
    """The first id that differs in a message, a call or a result."""
    places = [pointer]
    for name in ("tool_calls", "content"):
        items = resolve_pointer(after.body, f"{pointer}/{name}")
        places += [f"{pointer}/{name}/{index}" for index in range(len(items) if isinstance(items, list) else 0)]
    for place in places:
        for name in ("id", "call_id", "tool_call_id", "tool_use_id"):
            one, other = (resolve_pointer(prompt.body, f"{place}/{name}") for prompt in (before, after))
            if other is not None and one != other and not (name == "id" and place == pointer):
                return f"{place}/{name}"
    return pointer


_REASONING_NAMES = ("/reasoning_content", "/reasoning", "/thinking", "/encrypted_content")


def is_thought(part: Part) -> bool:
    """Whether a message holds what the model thought."""
    return _is_reasoning_item(part) or any(_looks_thought(piece) for piece in part.pieces)


def _reasoning_change(after: Prompt, old: Sequence[Part], new: Sequence[Part], index: int, at: int) -> Finding | None:
    """The earlier message had reasoning where the later has none, and is the same without it."""
    one = old[index]
    spoken = _spoken(one)
    if spoken == one.text:
        return None
    if not spoken.strip() or _is_reasoning_item(one):  # an item of its own: the next one takes its place
        follows = old[index + 1].text if index + 1 < len(old) else None
        dropped = index >= len(new) or follows is None or follows == new[index].text
    else:
        dropped = index < len(new) and _spoken(new[index]) == spoken and len(new[index].text) < len(one.text)
    if not dropped:
        return None
    pointer = new[index].pointer if index < len(new) else _history_pointer(after)
    if after.family.reasoning == "dropped_at_user_turn" and any(
        part.kind == "message:user" for part in new[index + 1 :]
    ):
        return Finding(Reason.TEMPLATE_INHERENT, pointer, at)
    return Finding(Reason.REASONING_DROPPED, pointer, at)


def _spoken(part: Part) -> str:
    """A message's text without what is marked as thought."""
    return "".join(piece.text for piece in part.pieces if not _looks_thought(piece))


def _looks_thought(piece: Piece) -> bool:
    return piece.pointer.endswith(_REASONING_NAMES) or piece.text.startswith("<redacted_thinking ")


def _is_reasoning_item(part: Part) -> bool:
    return part.pieces[0].text == "\n<reasoning>\n"


def _moved_up(old: Sequence[Part], new: Sequence[Part]) -> bool:
    """Whether what is still there of earlier messages stands further up: some before it are gone.

    Messages that occur once in both tell the shift; among nothing but repetitions, an alignment a little further down
    does. Linear: a history may hold thousands of equal messages."""
    was, now = _places(old), _places(new)
    for text, place in reversed(was.items()):
        if place is not None and (there := now.get(text)) is not None:
            return there < place
    start = [part.text for part in new[:_ALIGNED]]
    for shift in range(1, min(len(old), _FURTHEST_SHIFT)):
        window = [part.text for part in old[shift : shift + _ALIGNED]]
        if window and window == start[: len(window)]:
            return True
    return len(new) < len(old)


_ALIGNED = 4
_FURTHEST_SHIFT = 64


def _places(parts: Sequence[Part]) -> dict[str, int | None]:
    """Where each text stands; None for one that stands in several places."""
    places: dict[str, int | None] = {}
    for index, part in enumerate(parts):
        places[part.text] = None if part.text in places else index
    return places


def _same_arguments(before: Prompt, after: Prompt, one: Piece, other: Piece) -> bool:
    if not (one.pointer.endswith(("/arguments", "/input")) and other.pointer.endswith(("/arguments", "/input"))):
        return False
    left, right = (
        _parsed(resolve_pointer(prompt.body, piece.pointer)) for prompt, piece in ((before, one), (after, other))
    )
    return left is not None and left == right and type(left) is type(right)


def _parsed(arguments: JsonValue) -> JsonValue:
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed: JsonValue = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return parsed


_MEDIA = ("image", "input_image", "file", "input_file", "document", "audio", "input_audio", "video", "input_video")


def _is_media(prompt: Prompt, piece: Piece) -> bool:
    block = resolve_pointer(prompt.body, piece.pointer)
    kind = block.get("type") if isinstance(block, dict) else None
    return isinstance(kind, str) and kind.removesuffix("_url") in _MEDIA


# --- text ------------------------------------------------------------------------------------------------------------


def _same_but_for_space(one: str, other: str) -> bool:
    return one.split() == other.split()


_CLOCK = re.compile(r"\b\d{1,2}:\d{2}(?::\d{2})?\b")
_NUMBER = re.compile(r"\d[\d,.]*")
_WINDOW_CHARS = 400


def _detail(one: str, other: str) -> Detail | None:
    """What kind of volatile text two texts part in, if it is one."""
    at = common_chars(one, other)
    lines = [_line_at(text, at) for text in (other, one)]
    for line, spot in lines:
        found = next((found for found in scan(line) if found.start <= spot <= found.end), None)
        if found is not None:
            return found.kind
    if all(_stands_under_git(text, at) for text in (one, other)):
        return VolatileKind.GIT
    # a bare clock or number says little by itself: only where both have one it is what changed
    for pattern, kind in ((_CLOCK, VolatileKind.TIMESTAMP), (_NUMBER, VolatileKind.COUNTER)):
        if all(any(match.start() <= spot <= match.end() for match in pattern.finditer(line)) for line, spot in lines):
            return kind
    return None


_GIT_LIST = re.compile(r"(?i)[ \t]*(?:git ?status|status|on branch|recent commits|changes)\b")
_GIT_LIST_CHARS = 4_096


def _stands_under_git(text: str, at: int) -> bool:
    """Whether a character stands in a list that git printed: changed files, commits."""
    before = text[max(0, at - _GIT_LIST_CHARS) : at]
    paragraph = before[before.rfind("\n\n") + 2 if "\n\n" in before else 0 :]
    heading = any(_GIT_LIST.match(line) for line in paragraph.split("\n")[:-1])
    return heading and re.search(r"(?i)\bgit|branch|commits", before) is not None


def _line_at(text: str, at: int) -> tuple[str, int]:
    """The line around a character, at most 400 characters to either side, and where in it the character is."""
    start = max(text.rfind("\n", 0, at) + 1, at - _WINDOW_CHARS)
    end = text.find("\n", at)
    return text[start : min(len(text) if end < 0 else end, at + _WINDOW_CHARS)], at - start
