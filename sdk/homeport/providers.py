"""What each provider wants to hear to keep a conversation at one machine, by host.

A header, a body member, both, or nothing. A host that refuses unknown members never gets one; an unknown host (one's
own engine or proxy) gets ``x-session-affinity``, which every HTTP server ignores that does not know it. Sources: the
vendors' documentation and SDKs; rows that rest on a support answer or on reports of users say so in ``note``.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from homeport.fingerprint import Api

AFFINITY_HEADER = "x-session-affinity"
PARENT_HEADER = "x-parent-session-affinity"

CALLER_HEADERS = frozenset(
    {
        AFFINITY_HEADER, "x-session-id", "x-claude-code-session-id", "session-id", "session_id", "x-opencode-session",
        "x-grok-conv-id", "x-affinity", "x-smg-routing-key", "x-dynamo-session-id", "x-vertex-ai-session-id",
    }
)  # fmt: skip
"""Headers by which a caller names his session himself; then nothing is added."""

CALLER_KEYS = ("prompt_cache_key", "promptCacheKey", "session_id")
"""Body members by which a caller names his cache key himself."""


@dataclass(frozen=True, slots=True)
class Provider:
    """One provider's conventions.

    ``hosts``: exact names, or suffixes that begin with a dot. ``headers`` and ``body_keys``: where the affinity id
    goes; ``chat_only_headers`` and ``responses_keys``: for one API alone. ``uuid_ids``: ids must look like UUIDs.
    ``asks_usage``: whether ``stream_options.include_usage`` may be added to a chat stream. ``own``: one's own engine or
    proxy, which may be told of parents and kinds. ``min_prefix_tokens``: shorter prompts are never cached (None: not
    published). ``ttl_s``: how long an unused entry lives at least (None: no promise).
    """

    name: str
    hosts: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    body_keys: tuple[str, ...] = ()
    chat_only_headers: tuple[str, ...] = ()
    responses_keys: tuple[str, ...] = ()
    path: str = ""
    """Only for URLs whose path contains this."""
    uuid_ids: bool = False
    asks_usage: bool = True
    own: bool = False
    min_prefix_tokens: int | None = None
    ttl_s: float | None = None
    note: str = ""

    def headers_for(self, api: Api) -> tuple[str, ...]:
        """The headers that carry the affinity id for a request of that API."""
        return self.headers + (self.chat_only_headers if api == "chat" else ())

    def keys_for(self, api: Api) -> tuple[str, ...]:
        """The body members that carry the cache key for a request of that API."""
        if api == "messages":
            return ()  # Anthropic's shape has no such member anywhere, and refuses unknown ones
        return self.body_keys + (self.responses_keys if api == "responses" else ())


_CACHE_KEY = ("prompt_cache_key",)

PROVIDERS: tuple[Provider, ...] = (
    Provider("openai", ("api.openai.com", ".api.openai.com"), body_keys=_CACHE_KEY, min_prefix_tokens=1024, ttl_s=300),
    Provider(
        "chatgpt",
        ("chatgpt.com", ".chatgpt.com"),
        headers=("session-id", "session_id", "thread-id"),
        body_keys=_CACHE_KEY,
        uuid_ids=True,
        min_prefix_tokens=1024,
        note="routes by headers, the body key alone is not enough (reports)",
    ),
    Provider(
        "azure",
        (".openai.azure.com", ".services.ai.azure.com", ".cognitiveservices.azure.com"),
        body_keys=_CACHE_KEY,
        path="/openai/v1",
        min_prefix_tokens=1024,
        note="dated api-version paths refuse members they do not know",
    ),
    Provider(
        "azure-dated",
        (".openai.azure.com", ".services.ai.azure.com", ".cognitiveservices.azure.com"),
        asks_usage=False,
        note="older api-versions refuse members they do not know, stream_options among them",
    ),
    Provider("anthropic", ("api.anthropic.com", ".anthropic.com"), min_prefix_tokens=1024, ttl_s=300),
    Provider("bedrock", (".amazonaws.com",), min_prefix_tokens=1024, ttl_s=300),
    Provider(
        "vertex",
        ("aiplatform.googleapis.com", "-aiplatform.googleapis.com"),
        headers=("x-vertex-ai-session-id",),
        note="reported by users",
    ),
    Provider("gemini", ("generativelanguage.googleapis.com",), min_prefix_tokens=1024),
    Provider("deepseek", ("api.deepseek.com", ".deepseek.com"), note="caches by content"),
    Provider("moonshot", ("api.moonshot.ai", "api.moonshot.cn", "api.kimi.com"), body_keys=_CACHE_KEY),
    Provider(
        "zhipu", ("api.z.ai", "open.bigmodel.cn"), headers=("x-session-id",), note="header advised by vendor support"
    ),
    Provider("minimax", (".minimax.io", ".minimaxi.com", ".minimax.chat"), min_prefix_tokens=512),
    Provider("dashscope", ("dashscope.aliyuncs.com", ".aliyuncs.com"), min_prefix_tokens=256, ttl_s=300),
    Provider(
        "mistral",
        ("api.mistral.ai", ".mistral.ai"),
        headers=("x-affinity",),
        body_keys=_CACHE_KEY,
        asks_usage=False,
        note="sends usage in every stream and refuses members it does not know",
    ),
    Provider(
        "xai", ("api.x.ai", ".api.x.ai"), chat_only_headers=("x-grok-conv-id",), responses_keys=_CACHE_KEY
    ),
    Provider("groq", ("api.groq.com",), ttl_s=7200),
    Provider(
        "fireworks", ("api.fireworks.ai", ".fireworks.ai"), headers=(AFFINITY_HEADER,), body_keys=_CACHE_KEY
    ),
    Provider("deepinfra", ("api.deepinfra.com", ".deepinfra.com"), headers=(AFFINITY_HEADER,), note="user reports"),
    Provider("together", ("api.together.xyz", "api.together.ai")),
    Provider("cloudflare", ("api.cloudflare.com", "gateway.ai.cloudflare.com"), headers=(AFFINITY_HEADER,)),
    Provider("openrouter", ("openrouter.ai", ".openrouter.ai"), headers=("x-session-id",)),
    Provider("cerebras", ("api.cerebras.ai",), body_keys=_CACHE_KEY, ttl_s=300),
    Provider("vercel", ("ai-gateway.vercel.sh",)),
    Provider("opencode", ("opencode.ai", ".opencode.ai"), headers=("x-opencode-session",)),
)  # fmt: skip
"""The table; the first row that fits a URL holds."""

OWN = Provider("own", headers=(AFFINITY_HEADER,), own=True)
"""An unknown host: one's own engine, gateway or proxy."""

_lock = threading.Lock()
_registered: list[Provider] = []


def register(provider: Provider) -> None:
    """Add a row before the table's, for a gateway with its own convention (for example ``x-smg-routing-key``)."""
    with _lock:
        _registered.insert(0, provider)


def provider_for(url: str) -> Provider:
    """The conventions of the host that ``url`` names; :data:`OWN` for a host that is not in the table."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower().rstrip(".")
    for provider in (*_registered, *PROVIDERS):
        if provider.path in parts.path and any(_fits(host, pattern) for pattern in provider.hosts):
            return provider
    return OWN


def _fits(host: str, pattern: str) -> bool:
    return host.endswith(pattern) if pattern[:1] in ".-" else host == pattern


def names_session(headers: Mapping[str, str]) -> bool:
    """Whether the caller named his session by a header (names in lower case)."""
    return any(name in CALLER_HEADERS for name in headers)
