"""Every provider's usage report as one :class:`Usage`: the only place where token counts are normalised.

Two ways of counting exist. *Inclusive* (OpenAI, Gemini, DeepSeek, engines): the input count contains what was read from
the cache. *Additive* (Anthropic, Bedrock): it excludes what was read and what was written. Frameworks that have already
converted (LangChain, the AI SDK, pydantic-ai, LiteLLM) have shapes of their own and are never converted again. What is
not reported is None, never 0.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Counting = Literal["inclusive", "additive"]
"""Whether a report's input count contains the cached tokens (inclusive) or excludes them (additive)."""

_Path: TypeAlias = tuple[str, ...]
_Raw: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request used, in tokens; None: the provider did not report it.

    ``input_tokens`` is the whole prompt, with what was read from the cache (``cached_tokens``) and what was written to
    it (``cache_write_tokens``). ``cache_write_ttl_tokens`` splits the writes by lifetime (``5m``, ``1h``, ``30m``,
    ``12h``) where the provider prices them apart. ``service_tier`` is the tier the provider says it billed.
    """

    input_tokens: int | None = None
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    output_tokens: int | None = None
    cache_write_ttl_tokens: Mapping[str, int] = field(default_factory=dict)
    service_tier: str | None = None

    @classmethod
    def parse(
        cls,
        response: object,
        *,
        headers: Mapping[str, str] | None = None,
        counting: Counting | None = None,
        absent_is_zero: bool = False,
    ) -> Usage:
        """Read the usage of a response: any provider's object or dict, its last stream event, or a bare usage dict.

        ``headers``: response headers, for providers that report there (Fireworks); the body wins.
        ``counting``: how the input was counted, for a caller who knows who normalised before; default: by shape.
        ``absent_is_zero``: the server is known to leave the cached count out when it is 0 (SGLang with
        ``--enable-cache-report``). Never raises; what cannot be read is not reported.
        """
        meter = UsageMeter(headers=headers, counting=counting, absent_is_zero=absent_is_zero)
        meter.feed(response)
        return meter.usage

    @property
    def reported(self) -> bool:
        """Whether the provider reported any count at all."""
        counts = (self.input_tokens, self.cached_tokens, self.cache_write_tokens, self.output_tokens)
        return any(count is not None for count in counts)

    @property
    def fresh_tokens(self) -> int | None:
        """Input tokens neither read from nor written to a cache; None while the cached count is not reported."""
        if self.input_tokens is None or self.cached_tokens is None:
            return None
        return max(0, self.input_tokens - self.cached_tokens - (self.cache_write_tokens or 0))

    @property
    def cached_share(self) -> float | None:
        """Cached / input tokens, 0 to 1; None when either is not reported or there was no input."""
        if not self.input_tokens or self.cached_tokens is None:
            return None
        return self.cached_tokens / self.input_tokens

    def to_dict(self) -> dict[str, int | str | dict[str, int] | None]:
        """The fields by name, as :meth:`parse` reads them back; the optional ones only when there is something."""
        counts: dict[str, int | str | dict[str, int] | None] = {
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "cache_write_tokens": self.cache_write_tokens,
            "output_tokens": self.output_tokens,
        }
        if self.cache_write_ttl_tokens:
            counts["cache_write_ttl_tokens"] = dict(self.cache_write_ttl_tokens)
        if self.service_tier is not None:
            counts["service_tier"] = self.service_tier
        return counts


class UsageMeter:
    """The usage of one answer, fed event by event as a stream comes in; :attr:`usage` may be read at any time.

    A later report replaces an earlier one field by field: engines send usage with the finish chunk and again, complete,
    in a last chunk without choices; Anthropic sends the input with ``message_start`` and cumulative counts with
    ``message_delta``.
    """

    __slots__ = ("_absent_is_zero", "_counting", "_headers", "_raw", "_tier")

    def __init__(
        self,
        *,
        headers: Mapping[str, str] | None = None,
        counting: Counting | None = None,
        absent_is_zero: bool = False,
    ) -> None:
        self._headers = headers
        self._counting = counting
        self._absent_is_zero = absent_is_zero
        self._raw: _Raw = {}
        self._tier: str | None = None

    def feed(self, event: object) -> bool:
        """Take one event: the data of an SSE event (text or bytes, with or without ``data:``), a JSON payload's dict,
        or an SDK's object. Returns whether it carried usage. Never raises: what cannot be read is passed over."""
        node = _loads(event) if isinstance(event, (str, bytes, bytearray, memoryview)) else event
        if node is None or isinstance(node, (int, float, bool, list, tuple)):
            return False
        found = _find(node)
        if not found:
            return False
        self._raw.update((key, value) for key, value in found.items() if value is not None)
        tier = _text(found.get("service_tier")) or _text(_member(_member(node, "response") or node, "service_tier"))
        self._tier = tier or self._tier
        return True

    @property
    def usage(self) -> Usage:
        """What has been reported so far."""
        usage = _normalise(self._raw, self._counting)
        if self._headers:
            usage = _with_headers(usage, self._headers)
        if self._absent_is_zero and usage.cached_tokens is None and usage.input_tokens is not None:
            usage = dataclasses.replace(usage, cached_tokens=0)
        return dataclasses.replace(usage, service_tier=self._tier) if self._tier else usage


# --- reading objects of any kind ------------------------------------------------------------------------------------


def _loads(data: str | bytes | bytearray | memoryview) -> object:
    text = data if isinstance(data, str) else bytes(data).decode("utf-8", "replace")
    if not _WORTH_PARSING.search(text):
        return None
    if not text.lstrip().startswith("{"):
        fields = (line.partition(":") for line in text.splitlines())
        text = "\n".join(value.removeprefix(" ") for name, _, value in fields if name == "data")
    try:
        parsed: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return parsed


# most events of a stream carry text or `"usage":null`; only the others are worth a JSON parse. Inside a JSON string the
# closing quote of a name would be escaped, so generated text cannot match.
_WORTH_PARSING = re.compile(
    r'"(?:usage|usageMetadata|usage_metadata|timings|\w*_tokens|\w*(?:TokenCount|Tokens)|prompt_eval_count)"\s*:\s*[^n\s]'
)


def _member(node: object, name: str) -> object:
    """``node[name]`` of a mapping or ``node.name`` of an object; None when there is none."""
    if isinstance(node, Mapping):
        return node.get(name)
    if node is None or isinstance(node, (str, bytes, int, float, list, tuple)):
        return None
    try:
        value = getattr(node, name, None)
    except Exception:  # a foreign object's property may raise anything; it then has nothing to say
        return None
    return None if callable(value) else value


def _follow(node: object, path: _Path) -> object:
    for name in path:
        node = _member(node, name)
    return node


def _members(node: object) -> _Raw:
    """A mapping or a foreign object (pydantic, dataclass, protobuf wrapper, plain) as a shallow dict of its members."""
    if isinstance(node, Mapping):
        return {str(key): value for key, value in node.items()}
    if node is None or isinstance(node, (str, bytes, int, float, list, tuple)):
        return {}
    try:
        dump = getattr(node, "model_dump", None) or getattr(node, "to_dict", None)
        if callable(dump) and isinstance(dumped := dump(), Mapping):
            return {str(key): value for key, value in dumped.items()}
        if dataclasses.is_dataclass(node):
            return {entry.name: getattr(node, entry.name) for entry in dataclasses.fields(node)}
        return {key: value for key, value in vars(node).items() if not key.startswith("_")}
    except Exception:  # see _member: nothing readable is nothing reported
        return {}


def _count(value: object) -> int | None:
    """A token count: a non-negative whole number; anything else is not one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    whole = value == value and abs(value) < 1e15 and int(value) == value
    return int(value) if whole and value >= 0 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


# --- where a report lies --------------------------------------------------------------------------------------------

_PLACES: tuple[_Path, ...] = (
    ("response", "usage"),  # Responses: response.completed and its siblings
    ("message", "usage"),  # Anthropic: message_start
    ("x_groq", "usage"),  # Groq: last chunk of a stream
    ("usage",),
    ("metadata", "usage"),  # Bedrock ConverseStream
    ("usage_metadata",),  # Gemini's SDK, LangChain messages
    ("usageMetadata",),  # Gemini's REST
    ("response", "usageMetadata"),
    ("response_metadata", "token_usage"),  # LangChain, when the message itself has none
    ("amazon-bedrock-invocationMetrics",),  # Bedrock InvokeModelWithResponseStream
)


def _find(node: object) -> _Raw:
    """The raw members of the first usage report in ``node`` that holds a count."""
    timings = _members(_member(node, "timings"))
    extra: _Raw = {"timings": timings} if "cache_n" in timings or "prompt_n" in timings else {}
    for path in _PLACES:
        raw = _members(_follow(node, path))
        if _has_count(raw):
            return {**raw, **extra}
    raw = _members(node) if isinstance(node, Mapping) else {name: _member(node, name) for name in _TOP_LEVEL}
    return {**raw, **extra} if _has_count(raw) else extra


def _has_count(raw: _Raw) -> bool:
    return any(_count(_follow(raw, path)) is not None for path in _COUNTS)


# --- dialects: what the members mean --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Dialect:
    """One shape of usage report. ``marks``: a report that has one of these is of this shape. Of each list of paths the
    first that holds a count wins; in ``output`` and ``total`` the counts of a tuple of paths are added."""

    name: str
    marks: tuple[_Path, ...]
    counting: Counting
    total: tuple[tuple[_Path, ...], ...]
    output: tuple[tuple[_Path, ...], ...]
    cached: tuple[_Path, ...] = ()
    written: tuple[_Path, ...] = ()
    by_ttl: tuple[_Path, ...] = ()
    zero_is_unknown: bool = False
    """The reporter fills counts it never saw with 0."""


def _p(*dotted: str) -> tuple[_Path, ...]:
    return tuple(tuple(path.split(".")) for path in dotted)


def _sums(*dotted: str) -> tuple[tuple[_Path, ...], ...]:
    return tuple(_p(*terms.split("+")) for terms in dotted)


_DIALECTS: tuple[_Dialect, ...] = (
    _Dialect(  # OpenAI chat and everyone who speaks it, with each one's extras
        "chat",
        _p("prompt_tokens", "prompt_cache_hit_tokens", "completion_tokens"),
        "inclusive",
        _sums("prompt_tokens", "prompt_cache_hit_tokens+prompt_cache_miss_tokens"),
        _sums("completion_tokens"),
        cached=_p(
            "prompt_tokens_details.cached_tokens",
            "input_tokens_details.cached_tokens",
            "prompt_cache_hit_tokens",  # DeepSeek
            "cached_tokens",  # Moonshot, older
            "cached_prompt_text_tokens",  # xAI, native
            "cache_read_input_tokens",  # LiteLLM keeps Anthropic's name beside an inclusive prompt_tokens
        ),
        written=_p(
            "prompt_tokens_details.cache_write_tokens",
            "prompt_tokens_details.created_cache_tokens",  # vLLM
            "prompt_tokens_details.cache_creation_input_tokens",  # DashScope
            "prompt_tokens_details.cache_creation_tokens",  # LiteLLM
            "cache_write_tokens",
            "cache_creation_input_tokens",
        ),
        by_ttl=_p(
            "prompt_tokens_details.cache_write_tokens_details",
            "prompt_tokens_details.cache_creation",
            "prompt_tokens_details.cache_creation_token_details",
            "cache_creation",
        ),
    ),
    _Dialect(  # LangChain's UsageMetadata: already inclusive whatever the provider was
        "langchain",
        _p("input_token_details"),
        "inclusive",
        _sums("input_tokens"),
        _sums("output_tokens"),
        cached=_p("input_token_details.cache_read"),
        written=_p("input_token_details.cache_creation"),
        by_ttl=_p("input_token_details"),
    ),
    _Dialect(  # OpenAI Responses; DashScope's own API; the OpenAI Agents SDK
        "responses",
        _p("input_tokens_details", "prompt_tokens_details"),
        "inclusive",
        _sums("input_tokens"),
        _sums("output_tokens"),
        cached=_p("input_tokens_details.cached_tokens", "prompt_tokens_details.cached_tokens"),
        written=_p(
            "input_tokens_details.cache_write_tokens",
            "input_tokens_details.created_cache_tokens",
            "prompt_tokens_details.cache_creation_input_tokens",
        ),
        by_ttl=_p("input_tokens_details.cache_write_tokens_details", "prompt_tokens_details.cache_creation"),
    ),
    _Dialect(
        "anthropic",
        _p("cache_read_input_tokens", "cache_creation_input_tokens", "cache_creation"),
        "additive",
        _sums("input_tokens"),
        _sums("output_tokens"),
        cached=_p("cache_read_input_tokens"),
        written=_p("cache_creation_input_tokens"),
        by_ttl=_p("cache_creation"),
    ),
    _Dialect(  # pydantic-ai: inclusive, and 0 wherever it was told nothing
        "pydantic-ai",
        _p("cache_read_tokens"),
        "inclusive",
        _sums("input_tokens"),
        _sums("output_tokens"),
        cached=_p("cache_read_tokens"),
        written=_p("cache_write_tokens"),
        zero_is_unknown=True,
    ),
    _Dialect(  # ours
        "homeport",
        _p("cached_tokens", "input_tokens", "output_tokens"),
        "inclusive",
        _sums("input_tokens"),
        _sums("output_tokens"),
        cached=_p("cached_tokens"),
        written=_p("cache_write_tokens"),
        by_ttl=_p("cache_write_ttl_tokens"),
    ),
    _Dialect(  # AI SDK: inclusive since version 6
        "ai-sdk",
        _p("inputTokenDetails", "cachedInputTokens"),
        "inclusive",
        _sums("inputTokens"),
        _sums("outputTokens"),
        cached=_p("inputTokenDetails.cacheReadTokens", "cachedInputTokens"),
        written=_p("inputTokenDetails.cacheWriteTokens"),
    ),
    _Dialect(
        "bedrock-converse",
        _p("inputTokens", "cacheReadInputTokens", "outputTokens"),
        "additive",
        _sums("inputTokens"),
        _sums("outputTokens"),
        cached=_p("cacheReadInputTokens", "cacheReadInputTokenCount"),
        written=_p("cacheWriteInputTokens", "cacheWriteInputTokenCount"),
        by_ttl=_p("cacheDetails"),
    ),
    _Dialect(
        "bedrock-invoke",
        _p("inputTokenCount"),
        "additive",
        _sums("inputTokenCount"),
        _sums("outputTokenCount"),
        cached=_p("cacheReadInputTokenCount"),
        written=_p("cacheWriteInputTokenCount"),
    ),
    _Dialect(  # what the model thought is billed as output, but counted apart
        "gemini",
        _p("promptTokenCount", "prompt_token_count", "candidatesTokenCount", "candidates_token_count"),
        "inclusive",
        _sums("promptTokenCount", "prompt_token_count"),
        _sums("candidatesTokenCount+thoughtsTokenCount", "candidates_token_count+thoughts_token_count"),
        cached=_p("cachedContentTokenCount", "cached_content_token_count"),
    ),
    _Dialect(
        "ollama",
        _p("prompt_eval_count"),
        "inclusive",
        _sums("prompt_eval_count"),
        _sums("eval_count"),
        cached=_p("prompt_eval_cached_count"),
    ),
    _Dialect(  # llama.cpp: prompt_n is what was computed, cache_n what was reused
        "llama.cpp",
        _p("timings"),
        "additive",
        _sums("timings.prompt_n"),
        _sums("timings.predicted_n"),
        cached=_p("timings.cache_n"),
    ),
)

_COUNTS: tuple[_Path, ...] = tuple(
    path for dialect in _DIALECTS for terms in (*dialect.total, *dialect.output) for path in terms
)
_TOP_LEVEL = frozenset(
    path[0]
    for dialect in _DIALECTS
    for path in (
        *dialect.marks,
        *dialect.cached,
        *dialect.written,
        *dialect.by_ttl,
        *(path for terms in (*dialect.total, *dialect.output) for path in terms),
    )
)


def _normalise(raw: _Raw, counting: Counting | None) -> Usage:
    dialect = next((each for each in _DIALECTS if any(_has(raw, mark) for mark in each.marks)), None)
    if dialect is None:
        return Usage()
    cached = _first(raw, dialect.cached)
    if cached is None and dialect.name != "llama.cpp":
        cached = _first(raw, _p("timings.cache_n"))  # llama.cpp beside an OpenAI report without details
    by_ttl = _writes_by_ttl(raw, dialect.by_ttl)
    written = _first(raw, dialect.written)
    if written is None and by_ttl:
        written = sum(by_ttl.values())
    if dialect.zero_is_unknown:
        cached, written = cached or None, written or None
    total = _total(_first_sum(raw, dialect.total), cached, written, counting or dialect.counting)
    return Usage(total, cached, written, _output(raw, dialect), by_ttl)


def _output(raw: _Raw, dialect: _Dialect) -> int | None:
    """Output tokens; a report without them (embeddings) still says them as total - prompt."""
    output, total, prompt = (
        _first_sum(raw, dialect.output),
        _count(raw.get("total_tokens")),
        _count(raw.get("prompt_tokens")),
    )
    return total - prompt if output is None and total is not None and prompt is not None and total >= prompt else output


def _total(reported: int | None, cached: int | None, written: int | None, counting: Counting) -> int | None:
    """The whole prompt. More cached than there was input can only have been counted additively."""
    if reported is None or (counting == "inclusive" and (cached or 0) <= reported):
        return reported
    return reported + (cached or 0) + (written or 0)


def _has(raw: _Raw, mark: _Path) -> bool:
    return mark[0] in raw if len(mark) == 1 else _follow(raw, mark) is not None


def _first(raw: _Raw, paths: tuple[_Path, ...]) -> int | None:
    return next((count for path in paths if (count := _count(_follow(raw, path))) is not None), None)


def _first_sum(raw: _Raw, sums: tuple[tuple[_Path, ...], ...]) -> int | None:
    for terms in sums:
        counts = [count for path in terms if (count := _count(_follow(raw, path))) is not None]
        if counts:
            return sum(counts)
    return None


_TTL = re.compile(r"(?:^|_)(5m|30m|1h|12h)(?:_|$)")


def _writes_by_ttl(raw: _Raw, paths: tuple[_Path, ...]) -> dict[str, int]:
    """Cache writes by lifetime: ``ephemeral_5m_input_tokens`` and ``ttl_30m_tokens`` members, or Bedrock's list."""
    for path in paths:
        node = _follow(raw, path)
        if isinstance(node, (list, tuple)):
            pairs = [(_text(_member(entry, "ttl")) or "", _member(entry, "inputTokens")) for entry in node]
        else:
            pairs = list(_members(node).items())
        found: dict[str, int] = {}
        for name, value in pairs:
            match, count = _TTL.search(name), _count(value)
            if match and count:
                found[match[1]] = found.get(match[1], 0) + count
        if found:
            return found
    return {}


def _with_headers(usage: Usage, headers: Mapping[str, str]) -> Usage:
    """Fill what the body left open from response headers (Fireworks)."""
    lower: Callable[[str], str | None] = {name.lower(): value for name, value in headers.items()}.get
    total, cached = (lower(f"fireworks-{kind}prompt-tokens") for kind in ("", "cached-"))
    return dataclasses.replace(
        usage,
        input_tokens=_digits(total) if usage.input_tokens is None else usage.input_tokens,
        cached_tokens=_digits(cached) if usage.cached_tokens is None else usage.cached_tokens,
    )


def _digits(value: str | None) -> int | None:
    text = (value or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None
