"""A request as segments in the order the model sees them, each with a chained digest and a size.

The rendering is a neutral stand-in for a chat template: the text a template would render, in the order of the model's
template family, with short frames in between. What no template renders is left out (``cache_control``, item ids,
``status``), a string and the same text as a list of parts are the same, and what the model generated (assistant text,
reasoning, argument strings) stands in it verbatim.

Segment digests are SHA-256, cut to 16 bytes, from the standard library, so that they are the same in every process and
installation and may be stored and sent. The block digests of :func:`text_blocks` are XXH3: they live in a router's
index only, which installs ``xxhash``, and are asked for on every request.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import takewhile
from typing import Literal, NamedTuple, TypeAlias

from pydantic_core import to_json

from homeport.templates import FAMILIES, Family, family_of

Api = Literal["chat", "completions", "responses", "messages"]
"""The client APIs whose prompts Homeport reads."""

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"

_xxh3: Callable[[bytes], bytes] | None
try:
    from xxhash import xxh3_128_digest as _xxh3
except ImportError:  # pragma: no cover - depends on the installation
    _xxh3 = None

DIGEST_BYTES = 16
_START = bytes(DIGEST_BYTES)
_HEAD_KINDS = frozenset({"tool", "system", "params"})


class Piece(NamedTuple):
    """A run of prompt text: what it is (``tool``, ``system``, ``message:<role>``, ``params``, ``prompt``), the JSON
    pointer of the body member it comes from, and the text."""

    kind: str
    pointer: str
    text: str


class Segment(NamedTuple):
    """One tool, system text or message of a prompt.

    ``digest`` is chained: it covers everything up to and including this segment. ``size`` is the rendered text in
    UTF-8 bytes.
    """

    kind: str
    pointer: str
    digest: bytes
    size: int


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells conversations apart when no id is given; tool-call ids do not count.

    ``head``: tools, system text and the first message. ``chain``: one chained digest per message, without tools,
    parameters and system text at the head, so that a conversation is found again whose system text or tools changed.
    """

    head: bytes
    chain: tuple[bytes, ...]
    messages: tuple[JsonValue, ...] = field(default=(), compare=False, repr=False)
    """The messages of the chain, for :func:`identity` of the next request."""


_Runs: TypeAlias = "list[tuple[str, str]]"
"""(pointer below the part's own, text) in order: whole pointers are put together only where somebody reads them."""

_Source: TypeAlias = "tuple[str, str, JsonValue, Callable[[JsonValue, bool], _Runs]]"
"""A part of the body that becomes one segment, not yet rendered: kind, pointer, value, and what renders it. Plain
tuples: a long history has hundreds, on every request."""


def resolve(family: str, api: Api, body: Mapping[str, JsonValue]) -> Family:
    """The family of that name; ``default`` asks the body's model name."""
    if family != "default":
        return FAMILIES[family]
    model = body.get("model")
    return family_of(model if isinstance(model, str) else "", api)


def render(api: Api, body: Mapping[str, JsonValue], family: str = "default", *, ids: bool = True) -> Iterator[Piece]:
    """The canonical prompt text, in the order the model sees it. ``ids``: with tool-call ids."""
    for kind, pointer, value, runs in _sources(api, body, resolve(family, api, body)):
        for below, text in runs(value, ids):
            yield Piece(kind, pointer + below, text)


def segments(api: Api, body: Mapping[str, JsonValue], family: str = "default", *, ids: bool = True) -> list[Segment]:
    """The prompt's segments with chained digests. ``ids=False`` leaves tool-call ids out, as identity wants it."""
    found: list[Segment] = []
    digest = _START
    for source in _sources(api, body, resolve(family, api, body)):
        found.append(_segment(source, _text(source, ids), digest))
        digest = found[-1].digest
    return found


def text_blocks(api: Api, body: Mapping[str, JsonValue], block_chars: int = 512, family: str = "default") -> list[int]:
    """Chained 64-bit digests, one per ``block_chars`` characters of the canonical text (the last, partial block left
    out), of what an engine renders: see :func:`as_engines_read`; tool-call ids only where the family is known to render
    them. Needs ``xxhash`` (extra ``proxy``)."""
    body = as_engines_read(api, body)
    layout = resolve(family, api, body)
    ids = layout.renders_call_ids is True
    text = "".join([_text(source, ids) for source in _sources(api, body, layout)])
    return chain_blocks(text, block_chars, 0)


_BILLING = "x-anthropic-billing-header"


def as_engines_read(api: Api, body: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """The body without Claude Code's billing block, which vLLM, SGLang and Ollama leave out of the prompt because it
    differs with every first message and sub-agent; the same object when it has none."""
    system = body.get("system") if api == "messages" else None
    if not isinstance(system, list):
        return body
    kept = [block for block in system if not _is_billing(block)]
    return body if len(kept) == len(system) else {**body, "system": kept}


def _is_billing(block: JsonValue) -> bool:
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith(_BILLING)


def identity(
    api: Api,
    body: Mapping[str, JsonValue],
    family: str = "default",
    *,
    mask: Callable[[str], str] | None = None,
    tools: bool = True,
    after: Identity | None = None,
) -> Identity:
    """The conversation's head and message chain. ``mask``: applied to system text, to take volatile text out.
    ``tools=False``: tools do not count for the head, so that a tool that comes late makes no new conversation.
    ``after``: of an earlier request; messages that are the very same objects there are not read again, so nobody may
    change them."""
    sources = _sources(api, body, resolve(family, api, body))
    messages = [source[2] for source in sources if source[0] not in _HEAD_KINDS]
    chain: list[bytes] = []
    if after is not None:
        pairs = zip(messages, after.messages, after.chain, strict=False)
        chain = [digest for _, _, digest in takewhile(lambda pair: pair[0] is pair[1], pairs)]
    known, place = len(chain), 0
    head = _START
    for source in sources:
        if source[0] not in _HEAD_KINDS:
            place += 1
            if place > known:
                chain.append(_digest((chain[-1] if chain else _START) + _encoded(_text(source, False))))
        elif place == 0 and (tools or source[0] != "tool"):
            # a block of tools that a family renders late belongs to no message
            text = _text(source, False)
            head = _digest(head + _encoded(mask(text) if mask is not None and source[0] == "system" else text))
    return Identity(_digest(head + chain[0]) if chain else head, tuple(chain), tuple(messages))


class Incremental:
    """:func:`segments` and :func:`text_blocks` over one conversation, where turn n costs only what is new.

    A part of the body that is the same as at the last call, key order and types included, is not rendered and hashed
    again. It keeps digests, no text: about 200 bytes per message, plus the text of less than one block per message
    while ``block_chars`` is set (:attr:`size_bytes`).

    ``frozen``: the caller never changes an object that he has passed. Then what comes again as the very same object is
    not even read again. The last body's parts are held for that, until :meth:`let_go`.
    """

    def __init__(
        self, family: str = "default", *, ids: bool = True, block_chars: int | None = None, frozen: bool = False
    ) -> None:
        self._family = family
        self._ids = ids
        self._block_chars = block_chars
        self._frozen = frozen
        self._known: list[_Known] = []
        self._held: list[JsonValue] = []
        self.read_bytes = 0
        """UTF-8 bytes of parts that the last call had to look at, rendered or not."""
        self.rendered_bytes = 0
        """UTF-8 bytes rendered by the last call: the new part."""

    @property
    def size_bytes(self) -> int:
        """Memory held, in bytes, roughly."""
        return sum(200 + len(known.rest) + 40 * len(known.blocks) for known in self._known)

    def let_go(self) -> None:
        """Hold no part of the last body any more; the next call compares by digest."""
        self._held = []

    @property
    def last_digest(self) -> bytes | None:
        """The digest of the whole prompt of the last call; None before the first."""
        return self._known[-1].segment.digest if self._known else None

    def segments(self, api: Api, body: Mapping[str, JsonValue]) -> list[Segment]:
        """As :func:`segments`."""
        self._follow(api, body)
        return [known.segment for known in self._known]

    def text_blocks(self, api: Api, body: Mapping[str, JsonValue]) -> list[int]:
        """As :func:`text_blocks` with this object's ``block_chars`` and ``ids``."""
        if self._block_chars is None:
            raise ValueError("text_blocks needs Incremental(block_chars=N)")
        self._follow(api, body)
        return [block for known in self._known for block in known.blocks]

    def _follow(self, api: Api, body: Mapping[str, JsonValue]) -> None:
        sources = _sources(api, body, resolve(self._family, api, body))
        self.rendered_bytes = self.read_bytes = 0
        held, self._held = self._held, []  # a fault below leaves nothing held
        same = 0
        while same < len(sources) and self._is_known(same, sources[same], held):
            same += 1
        del self._known[same:]
        for source in sources[same:]:
            self._append(source)
        if self._frozen:
            self._held = [source[2] for source in sources]

    def _is_known(self, index: int, source: _Source, held: list[JsonValue]) -> bool:
        if index >= len(self._known):
            return False
        known = self._known[index]
        if index < len(held) and held[index] is source[2] and source[:2] == known.segment[:2]:
            return True
        self.read_bytes += known.segment.size
        return known.key == _identity(source)

    def _append(self, source: _Source) -> None:
        last = self._known[-1] if self._known else None
        text = _text(source, self._ids)
        segment = _segment(source, text, last.segment.digest if last else _START)
        self.rendered_bytes += segment.size
        self.read_bytes += segment.size
        blocks: list[int] = []
        rest, chain = (last.rest, last.chain) if last else ("", 0)
        if self._block_chars is not None:
            rest += text
            blocks = chain_blocks(rest, self._block_chars, chain)
            chain = blocks[-1] if blocks else chain
            rest = rest[len(blocks) * self._block_chars :]
        self._known.append(_Known(_identity(source), segment, blocks, rest, chain))


class _Known(NamedTuple):
    key: bytes
    segment: Segment
    blocks: list[int]
    rest: str
    chain: int


def _identity(source: _Source) -> bytes:
    """A process-local key of a part of the body, strict about key order and types.

    ``marshal`` version 2 writes plain values without references, so equal values give equal bytes; a dict comparison
    would call two key orders the same, which a template does not.
    """
    return _local_digest(marshal.dumps(source[:3], 2))


def _local_digest(data: bytes) -> bytes:
    # these keys never leave the process: the faster digest will do where it is installed
    return _xxh3(data) if _xxh3 is not None else _digest(data)


def _segment(source: _Source, text: str, before: bytes) -> Segment:
    encoded = _encoded(text)
    # in one call: an update of more than 2 kB takes a lock of its own, which costs as much as the hashing
    return Segment(source[0], source[1], sha256(before + encoded).digest()[:DIGEST_BYTES], len(encoded))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _digest(data: bytes) -> bytes:
    return sha256(data).digest()[:DIGEST_BYTES]


def _text(source: _Source, ids: bool) -> str:
    value = source[2]
    if isinstance(value, dict) and source[3] is _message and _BARE.issuperset(value):
        content = value.get("content")
        if isinstance(content, str):  # most messages: a frame and a text, and nothing to put together
            return _frame(value, ids) + content
    runs = source[3](value, ids)
    return runs[0][1] if len(runs) == 1 else "".join([text for _, text in runs])


def chain_blocks(text: str, block_chars: int, chain: int = 0) -> list[int]:
    """Chained digests of ``text``'s whole blocks; ``chain`` is the digest of the block before. Needs ``xxhash``."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:  # pragma: no cover - depends on the installation
        raise ImportError("text_blocks needs xxhash; install it with: pip install 'homeport[proxy]'") from error
    blocks: list[int] = []
    for start in range(0, len(text) - block_chars + 1, block_chars):
        block = text[start : start + block_chars].encode("utf-8", "surrogatepass")
        chain = xxh3_64_intdigest(block, chain)
        blocks.append(chain)
    return blocks


# --- the order of a prompt -------------------------------------------------------------------------------------------


def _sources(api: Api, body: Mapping[str, JsonValue], layout: Family) -> list[_Source]:
    if api == "completions":
        return _prompt_sources(body)
    head, messages = _conversation(api, body)
    if layout.gathers_system:
        head += [("system", *source[1:]) for source in messages if source[0] == "message:system"]
        messages = [source for source in messages if source[0] != "message:system"]
    tools = _tool_sources(body, layout.sorts_tool_keys)
    params = _param_sources(body, layout)
    if layout.order == "tools_first":
        return tools + params + head + messages
    if layout.order == "system_first":
        return params + head + tools + messages
    users = [index for index, source in enumerate(messages) if source[0] == "message:user"]
    last = users[-1] if users else len(messages)
    return params + head + messages[:last] + tools + messages[last:]


def _conversation(api: Api, body: Mapping[str, JsonValue]) -> tuple[list[_Source], list[_Source]]:
    """System text at the head, and the messages after it."""
    head: list[_Source] = []
    if api == "messages":
        head = _system_sources(body.get("system"), "/system")
    elif api == "responses":
        head = _system_sources(body.get("instructions"), "/instructions")
    name = "input" if api == "responses" else "messages"
    history = body.get(name)
    if isinstance(history, str):
        return head, [("message:user", f"/{name}", history, _bare_user)]
    messages: list[_Source] = []
    for index, message in enumerate(_listed(history)):
        kind = _kind(message)
        pointer = f"/{name}/{index}"
        if kind == "message:system" and not messages:
            head.append(("system", pointer, message, _message))
        else:
            messages.append((kind, pointer, message, _message))
    return head, messages


_KINDS = {role: f"message:{role}" for role in ("user", "assistant", "tool", "system")} | {"developer": "message:system"}


def _kind(message: JsonValue) -> str:
    if isinstance(message, dict):
        role = message.get("role")
        if isinstance(role, str):
            return _KINDS.get(role) or f"message:{role}"
        kind = message.get("type")
        if isinstance(kind, str):
            return "message:tool" if kind.endswith(("_output", "_response")) else "message:assistant"
    return "message:user"


def _system_sources(system: JsonValue, pointer: str) -> list[_Source]:
    if isinstance(system, list):
        return [("system", f"{pointer}/{index}", block, _system) for index, block in enumerate(system)]
    return [("system", pointer, system, _system)] if system else []


def _tool_sources(body: Mapping[str, JsonValue], sort: bool) -> list[_Source]:
    runs = _sorted_tool if sort else _tool
    return [
        ("tool", f"/{name}/{index}", tool, runs)
        for name in ("tools", "functions")
        for index, tool in enumerate(_listed(body.get(name)))
    ]


def _listed(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []


# template arguments that only touch the tail of the prompt: the part before them stays the same
_TAIL_KWARGS = frozenset({"enable_thinking", "thinking", "add_generation_prompt"})


def _param_sources(body: Mapping[str, JsonValue], layout: Family) -> list[_Source]:
    """Parameters that are prompt text at the head: template arguments, and the effort where a family renders it."""
    found: list[_Source] = []
    kwargs = body.get("chat_template_kwargs")
    if isinstance(kwargs, dict) and (kept := {k: v for k, v in kwargs.items() if k not in _TAIL_KWARGS}):
        found.append(("params", "/chat_template_kwargs", ["chat_template_kwargs", kept], _param))
    if "chat_template" in body:
        found.append(("params", "/chat_template", ["chat_template", body["chat_template"]], _param))
    if layout.effort_in_head:
        reasoning = body.get("reasoning")
        nested = reasoning.get("effort") if isinstance(reasoning, dict) else None
        for pointer, effort in (("/reasoning_effort", body.get("reasoning_effort")), ("/reasoning/effort", nested)):
            if effort is not None:
                found.append(("params", pointer, [pointer[1:], effort], _param))
    return found


def _prompt_sources(body: Mapping[str, JsonValue]) -> list[_Source]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return [("prompt", f"/prompt/{index}", one, _prompt) for index, one in enumerate(prompt)]
    return [("prompt", "/prompt", prompt, _prompt)] if prompt else []


# --- the text of one part --------------------------------------------------------------------------------------------


_write = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode
_encode_sorted = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, separators=(",", ":"), sort_keys=True
).encode


def _encode(value: JsonValue) -> str:
    """A value as JSON, keys in their own order, by the writer that pydantic brings along: three times as fast as the
    standard library's, which takes the rest (half a surrogate pair, 255 levels)."""
    try:
        return to_json(value).decode()
    except ValueError:
        return _write(value)


_SCHEMA_NAMES = ("parameters", "input_schema", "inputSchema")
_NAMED = frozenset({"name", "description", "cache_control", "function", *_SCHEMA_NAMES})


def _prompt(value: JsonValue, ids: bool) -> _Runs:
    if isinstance(value, list):
        return [("", " ".join(map(str, value)))]
    return [("", value if isinstance(value, str) else _encode(value))]


def _param(value: JsonValue, ids: bool) -> _Runs:
    name, setting = value if isinstance(value, list) else ("", value)
    return [("", f"<param {name}>{_encode_sorted(setting)}\n")]


def _tool(value: JsonValue, ids: bool) -> _Runs:
    return [("", "\n<tool>" + _definition(value, _encode))]


def _sorted_tool(value: JsonValue, ids: bool) -> _Runs:
    return [("", "\n<tool>" + _definition(value, _encode_sorted))]


def _definition(tool: JsonValue, encode: Callable[[JsonValue], str]) -> str:
    """A definition as text: name, description, schema in its own key order, then the rest by key.

    Engines parse the outer object into a typed one, so its key order is no prompt text; the schema's is.
    """
    if not isinstance(tool, dict):
        return _encode(tool)
    function = tool.get("function")
    inner = function if isinstance(function, dict) else tool
    rest = {
        key: value
        for source in ((tool, inner) if inner is not tool else (tool,))
        for key, value in source.items()
        if key not in _NAMED and not (key == "type" and value in ("function", "custom"))
    }
    schema = next((inner[key] for key in _SCHEMA_NAMES if key in inner), None)
    text = encode({"name": inner.get("name"), "description": inner.get("description"), "parameters": schema})
    return f"{text[:-1]},{_encode_sorted(rest)}}}" if rest else text


def _system(value: JsonValue, ids: bool) -> _Runs:
    if isinstance(value, dict):
        return [("", "\n<system>\n"), *_block(value, "", ids)]
    return [("", f"\n<system>\n{value if isinstance(value, str) else _encode(value)}")]


def _bare_user(value: JsonValue, ids: bool) -> _Runs:
    return [("", f"\n<user>\n{value}")]


# members of a message or item that are handled by name, or that no template renders
_NOT_REST = frozenset(
    {
        "role", "content", "name", "tool_calls", "function_call", "tool_call_id", "reasoning_content", "reasoning",
        "refusal", "cache_control", "id", "status", "type", "call_id", "arguments", "input", "output", "summary",
        "encrypted_content", "phase", "prompt_cache_breakpoint", "reasoning_details", "provider_specific_fields",
        "annotations", "audio", "thinking_blocks", "prefix", "object",
    }
)  # fmt: skip


def _message(message: JsonValue, ids: bool) -> _Runs:
    if not isinstance(message, dict):
        return [("", f"\n<user>\n{message if isinstance(message, str) else _encode(message)}")]
    frame = ("", _frame(message, ids))
    if not _PLAIN.issuperset(message):
        return [frame, *_rich_message(message, ids)]
    content = message.get("content")
    if isinstance(content, str):
        runs = [frame, ("/content", content)]
    else:
        runs = [frame] if content is None else [frame, *_content(content, "/content", ids)]
    if "tool_calls" in message:
        runs += _calls(message, ids)
    return runs


# what nearly all messages have and no more; most have no calls either
_BARE = frozenset({"role", "content", "tool_call_id", "name", "cache_control"})
_PLAIN = _BARE | {"tool_calls"}


def _rich_message(message: dict[str, JsonValue], ids: bool) -> _Runs:
    """The text behind the frame of a message or item with members beyond the usual ones."""
    runs: _Runs = []
    for name in ("reasoning_content", "reasoning"):
        thought = message.get(name)
        if isinstance(thought, str) and thought:
            runs.append((f"/{name}", f"<think>{thought}</think>"))
            break
    if message.get("type") == "reasoning":
        runs += _reasoning_item(message, ids)
    elif (content := message.get("content")) is not None:
        runs += _content(content, "/content", ids)
    if isinstance(refusal := message.get("refusal"), str):
        runs.append(("/refusal", refusal))
    runs += _calls(message, ids)
    if isinstance(message.get("function_call"), dict):
        runs.append(_call(message["function_call"], "/function_call", ids))
    if "arguments" in message or message.get("type") == "custom_tool_call":
        runs.append(_call(message, "", ids))
    elif "output" in message:
        runs += _content(message["output"], "/output", ids)
    if not _NOT_REST.issuperset(message):
        rest = {name: value for name, value in message.items() if name not in _NOT_REST}
        runs.append(("", _encode_sorted(rest)))
    return runs


def _calls(message: dict[str, JsonValue], ids: bool) -> _Runs:
    calls = _listed(message.get("tool_calls"))
    return [_call(call, f"/tool_calls/{index}", ids) for index, call in enumerate(calls)]


def _frame(message: dict[str, JsonValue], ids: bool) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        frame = str(message.get("type"))
    else:
        name = message.get("name")
        frame = f"{role} {name}" if isinstance(name, str) else role
    if ids:
        number = message.get("tool_call_id")
        if number is None and "output" in message:
            number = message.get("call_id")
        if isinstance(number, str):
            return f"\n<{frame} {number}>\n"
    return f"\n<{frame}>\n"


def _reasoning_item(item: dict[str, JsonValue], ids: bool) -> _Runs:
    """A Responses reasoning item: what the model is given back is the encrypted content, else the text."""
    hidden = item.get("encrypted_content")
    if isinstance(hidden, str):
        return [("/encrypted_content", f"<think {_digest_text(hidden)}>")]
    return [run for name in ("content", "summary") if item.get(name) for run in _content(item[name], f"/{name}", ids)]


def _call(call: JsonValue, pointer: str, ids: bool) -> tuple[str, str]:
    if not isinstance(call, dict):
        return pointer, _encode(call)
    function = call.get("function")
    inner, inside = (function, f"{pointer}/function") if isinstance(function, dict) else (call, pointer)
    member = "arguments" if "arguments" in inner or "input" not in inner else "input"
    arguments = inner.get(member)
    text = arguments if isinstance(arguments, str) else _encode(arguments)
    number = call.get("call_id", call.get("id")) if ids else None
    label = f" {number}" if isinstance(number, str) else ""
    return f"{inside}/{member}", f"\n<call{label}>{inner.get('name')} {text}"


def _content(content: JsonValue, pointer: str, ids: bool) -> _Runs:
    if isinstance(content, str):
        return [(pointer, content)]
    if isinstance(content, list):
        return [run for index, block in enumerate(content) for run in _block(block, f"{pointer}/{index}", ids)]
    return [(pointer, _encode(content))]


_TEXT_BLOCKS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})
_UNSEEN = frozenset({"cache_control", "id", "status", "citations", "annotations", "prompt_cache_breakpoint"})


def _block(block: JsonValue, pointer: str, ids: bool) -> _Runs:
    if not isinstance(block, dict):
        return [(pointer, block if isinstance(block, str) else _encode(block))]
    kind = block.get("type")
    text = block.get("text")
    if isinstance(kind, str) and kind in _TEXT_BLOCKS and isinstance(text, str):
        return [(f"{pointer}/text", text)]
    if kind == "thinking":
        return [(f"{pointer}/thinking", f"<think>{block.get('thinking')}</think>")]
    if isinstance(kind, str) and kind.endswith("tool_use"):
        return [_call(block, pointer, ids)]
    if isinstance(kind, str) and kind.endswith("tool_result"):
        number = block.get("tool_use_id") if ids else None
        frame = f"\n<result{' error' if block.get('is_error') else ''}{f' {number}' if number else ''}>"
        return [(pointer, frame), *_content(block.get("content", ""), f"{pointer}/content", ids)]
    # pictures, sound, files and anything unknown: a digest, so that their encoding does not count as prompt text
    seen = {key: value for key, value in block.items() if key not in _UNSEEN}
    return [(pointer, f"<{kind} {_digest_text(_encode_sorted(seen))}>")]


def _digest_text(text: str) -> str:
    return _digest(_encoded(text)).hex()
