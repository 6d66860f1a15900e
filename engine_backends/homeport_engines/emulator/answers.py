"""What an emulated engine says. It computes no text: it says what a script tells it, what a schema demands, or words
that follow from the prompt alone, so that the same prompt gives the same answer on every engine, split or not."""

from __future__ import annotations

import codecs
import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

import yaml

from homeport.fingerprint import JsonValue
from homeport_engines.emulator.prompt import (
    CALL_END,
    CALL_MIDDLE,
    CALL_START,
    THINK_END,
    THINK_START,
    Conversation,
    ToolCall,
)
from homeport_engines.emulator.schema import text_for
from homeport_engines.emulator.tokenizer import END, PIECE_BYTES, tokenize

DeltaKind = Literal["reasoning", "content", "tool_name", "tool_arguments"]
_TEXT = (
    "harbour the tide a ship of quay and rope to anchor in sail with deck for keel at bow on mast by stern "
    "from hull over wind under chart near buoy past light along pier into crane off cargo up berth down pilot "
    "out port is was"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Delta:
    """A visible piece of an answer; ``index`` numbers the tool call it belongs to."""

    kind: DeltaKind
    text: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Script:
    """One scripted answer."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def parse(cls, value: JsonValue) -> Script:
        """Read ``{"text", "reasoning", "tool_calls": [{"name", "arguments"}]}``; a plain string is its text.

        Raises ValueError naming what is wrong.
        """
        if isinstance(value, str):
            return cls(value)
        if not isinstance(value, dict):
            raise ValueError("an answer is a string or an object with text, reasoning, tool_calls")
        calls = value.get("tool_calls") or []
        if not isinstance(calls, list):
            raise ValueError("tool_calls: a list is required")
        return cls(str(value.get("text") or ""), str(value.get("reasoning") or ""), tuple(_call(c) for c in calls))


def _call(value: JsonValue) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("tool_calls: every call needs a name")
    arguments = value.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(str(value["name"]), text)


@dataclass(frozen=True, slots=True)
class Rule:
    """Answers for the conversations it matches: by text in the last message, and by a tool that must be offered.

    Of several answers the k-th is given to the k-th turn (counted by assistant messages in the prompt), so a
    sequence depends on the prompt alone and both engines of a split say the same; after its end the rule is silent.
    """

    answers: tuple[Script, ...]
    contains: str | None = None
    tool: str | None = None

    def match(self, talk: Conversation) -> Script | None:
        """The answer for this conversation, or None."""
        last = talk.messages[-1].text if talk.messages else ""
        if self.contains is not None and self.contains not in last:
            return None
        if self.tool is not None and all(tool.name != self.tool for tool in talk.tools):
            return None
        if len(self.answers) == 1:
            return self.answers[0]
        return self.answers[talk.turn] if talk.turn < len(self.answers) else None


def load_rules(path: Path) -> tuple[Rule, ...]:
    """Read a script file (YAML or JSON): a list of ``{contains?, tool?, answer | sequence}``.

    Raises ValueError or OSError saying what is wrong.
    """
    return parse_rules(yaml.safe_load(path.read_text(encoding="utf-8")))


def parse_rules(data: JsonValue) -> tuple[Rule, ...]:
    """The same from data."""
    if not isinstance(data, list):
        raise ValueError("a script is a list of rules")
    return tuple(_rule(item, index) for index, item in enumerate(data))


def _rule(item: JsonValue, index: int) -> Rule:
    if not isinstance(item, dict) or ("answer" in item) == ("sequence" in item):
        raise ValueError(f"rule {index}: exactly one of answer and sequence is required")
    sequence = item.get("sequence", [item.get("answer")])
    if not isinstance(sequence, list) or not sequence:
        raise ValueError(f"rule {index}: sequence must be a list of answers")
    contains, tool = item.get("contains"), item.get("tool")
    return Rule(
        tuple(Script.parse(answer) for answer in sequence),
        str(contains) if contains is not None else None,
        str(tool) if tool is not None else None,
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks of its answer."""

    limit: int
    least: int = 0
    ignore_end: bool = False
    stop: tuple[str, ...] = ()
    forced_tool: str | None = None
    tool_required: bool = False
    schema: JsonValue = None
    script: Script | None = None


@dataclass(slots=True)
class Answer:
    """The tokens an engine will generate. ``deltas`` gives, once and in order, what each shows to the client.

    ``finish`` is why it ends: ``stop``, ``tool_calls`` or ``length``; ``stop_reason`` the stop string met, if any.
    """

    tokens: array[int]
    deltas: Iterator[tuple[Delta, ...]]
    finish: str
    stop_reason: str | None = None
    call_ids: list[str] = field(default_factory=list)


def answer(seed: bytes, wanted: Wanted, talk: Conversation | None, rules: Sequence[Rule], typical: int) -> Answer:
    """The answer to a prompt. ``seed`` is a digest of all it depends on; ``typical`` tokens is the usual length."""
    number = int.from_bytes(seed[:8], "big")
    script = wanted.script or (_scripted(talk, rules) if talk else None) or _structured(wanted, talk, number)
    if script is None:
        words = wanted.limit if wanted.ignore_end else min(wanted.limit, max(wanted.least, 1 + number % (2 * typical)))
        script = Script(free_text(seed, words))
    return _cut(script, wanted, seed)


def _scripted(talk: Conversation, rules: Sequence[Rule]) -> Script | None:
    return next((script for rule in rules if (script := rule.match(talk)) is not None), None)


def _structured(wanted: Wanted, talk: Conversation | None, number: int) -> Script | None:
    tools = talk.tools if talk else ()
    if wanted.forced_tool is not None:
        tools = tuple(tool for tool in tools if tool.name == wanted.forced_tool)
    if tools and (wanted.tool_required or wanted.forced_tool is not None):
        tool = tools[number % len(tools)]
        return Script(tool_calls=(ToolCall(tool.name, text_for(tool.parameters, number % 7)),))
    return Script(text_for(wanted.schema, number % 7)) if wanted.schema is not None else None


def free_text(seed: bytes, tokens: int) -> str:
    """Words that follow from ``seed``, exactly ``tokens`` tokens long; a longer text begins with a shorter one."""
    need, parts, size, counter = tokens * PIECE_BYTES, [], 0, 0
    while size < need:
        for byte in hashlib.blake2b(seed + counter.to_bytes(4, "big")).digest():
            parts.append(_WORDS[byte % len(_WORDS)] + " ")
            size += len(parts[-1])
        counter += 1
    return "".join(parts)[:need]


def _cut(script: Script, wanted: Wanted, seed: bytes) -> Answer:
    parts = list(_parts(script))
    tokens = tokenize("".join(part.text for part in parts))
    deltas = _spread(parts)
    finish = "tool_calls" if script.tool_calls else "stop"
    stop_reason = None
    if wanted.stop:
        tokens, deltas, stop_reason = _stop(tokens, list(deltas), wanted)
    if stop_reason is None and not wanted.ignore_end:
        tokens.append(END)
        deltas = chain(deltas, [()])
    if len(tokens) > wanted.limit or (wanted.ignore_end and stop_reason is None):
        finish, stop_reason = "length", None
        del tokens[wanted.limit :]
    ids = [
        "chatcmpl-tool-" + hashlib.blake2b(seed + bytes([index & 255]), digest_size=16).hexdigest()
        for index in range(len(script.tool_calls))
    ]
    return Answer(tokens, deltas, finish, stop_reason, ids)


def _stop(
    tokens: array[int], deltas: list[tuple[Delta, ...]], wanted: Wanted
) -> tuple[array[int], Iterator[tuple[Delta, ...]], str | None]:
    """End the visible text before the first stop string that comes after the least number of tokens."""
    text = ""
    for count, group in enumerate(deltas, 1):
        before = len(text)
        text += "".join(delta.text for delta in group if delta.kind == "content")
        for word in wanted.stop:
            at = text.find(word)
            if at < 0 or count < wanted.least:
                continue
            # text already shown stays shown (a real engine holds such a tail back): cut the current piece only
            last = tuple(Delta("content", text[before : max(at, before)]) for _ in range(at > before))
            return tokens[:count], iter([*deltas[: count - 1], last]), word
    return tokens, iter(deltas), None


@dataclass(frozen=True, slots=True)
class _Part:
    kind: DeltaKind | None
    text: str
    index: int = 0


def _parts(script: Script) -> Iterator[_Part]:
    if script.reasoning:
        yield _Part(None, THINK_START)
        yield _Part("reasoning", script.reasoning)
        yield _Part(None, THINK_END)
    if script.text:
        yield _Part("content", script.text)
    for index, call in enumerate(script.tool_calls):
        yield _Part(None, CALL_START, index)
        yield _Part("tool_name", call.name, index)
        yield _Part(None, CALL_MIDDLE, index)
        yield _Part("tool_arguments", call.arguments, index)
        yield _Part(None, CALL_END, index)


def _spread(parts: Sequence[_Part]) -> Iterator[tuple[Delta, ...]]:
    """What each token shows: characters appear once their last byte is there, a tool's name as a whole."""
    data = "".join(part.text for part in parts).encode("utf-8", "surrogatepass")
    decode = codecs.getincrementaldecoder("utf-8")("surrogatepass").decode
    queue = iter(parts)
    part, used = next(queue, None), 0
    for start in range(0, len(data), PIECE_BYTES):
        room = len(decode(data[start : start + PIECE_BYTES]))
        shown: list[Delta] = []
        while part is not None and (room or used == len(part.text)):
            taken = part.text[used : used + room]
            used += len(taken)
            room -= len(taken)
            if part.kind == "tool_name":
                if used == len(part.text):
                    shown.append(Delta("tool_name", part.text, part.index))
            elif part.kind is not None and taken:
                shown.append(Delta(part.kind, taken, part.index))
            if used < len(part.text):
                break
            part, used = next(queue, None), 0
        yield tuple(shown)


def seed_of(tokens: Sequence[int] | array[int], *more: str) -> bytes:
    """A digest of a prompt and whatever else the answer may depend on."""
    digest = hashlib.blake2b(digest_size=32)
    digest.update(tokens.tobytes() if isinstance(tokens, array) else array("I", tokens).tobytes())
    for text in more:
        digest.update(b"\0" + text.encode("utf-8", "surrogatepass"))
    return digest.digest()


def json_object(body: Mapping[str, JsonValue], name: str) -> Mapping[str, JsonValue]:
    """A member that must be an object when present; empty when absent. Raises ValueError naming it."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{name}: an object is required")
    return value
