"""One request on its way through the proxy: what each step found, and nothing else.

Steps fill it in one direction (identify, admit, locate, place, hand off, relay, account); no step reaches back.
All times are seconds of the event loop's monotonic clock unless a name says otherwise.

What is made once a request is a ``msgspec.Struct``: a frozen dataclass of seven fields takes ten times as long to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

import msgspec

from homeport.fingerprint import JsonValue
from homeport_proxy.routing.views import NO_PREFIX, Decision, Kind, PrefixKeys

if TYPE_CHECKING:
    from multidict import CIMultiDictProxy

    from homeport_proxy.document import Document
    from homeport_proxy.routing.views import Outcome, Ticket

ApiName = Literal[
    "chat", "completions", "responses", "messages", "count_tokens", "embeddings", "tokenize", "models", "other"
]
"""The client APIs by name; the first four generate text."""

GENERATING: frozenset[str] = frozenset({"chat", "completions", "responses", "messages"})


class State(IntEnum):
    """How far one leg to one engine has come; decides what may still be retried."""

    NOT_SENT = 0
    SENT = 1
    HEADERS = 2
    FIRST_TOKEN = 3
    HANDED_OFF = 4
    DONE = 5


LegPart = Literal["prefill", "slice", "serve"]


class LegRecord(msgspec.Struct):
    """One request to one engine: a prefill leg, a slice (the head of the prompt, prefilled by itself), or the leg that
    answers the client."""

    place: str
    part: LegPart
    engine_request_id: str
    state: State = State.NOT_SENT
    status: int | None = None
    error: str | None = None
    started_s: float = 0.0
    headers_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    held_s: float = 0.0
    """Seconds in the queue after this slice; counted in ``queued_s`` as well."""
    told: bool = False
    """Whether health has heard how it ended."""


class Identity(msgspec.Struct, frozen=True):
    """Who is speaking. ``session`` is the opaque digest of the key (never empty for generating APIs).

    ``source`` says which rule found the key (a header's name, ``metadata.user_id``, ``prompt_cache_key``,
    ``conversation``...), ``parent`` is the parent session's digest when the client hinted at one.
    """

    session: str
    source: str
    kind: Kind = "main"
    parent: str | None = None
    final: bool = False


class Caller(msgspec.Struct, frozen=True):
    """The tenant behind a request, as far as the data plane needs it; ``name`` is empty when the proxy is open."""

    name: str = ""
    weight: float = 1.0
    cache_salt: str | None = None
    """Replaces the client's ``cache_salt``; None with tenants means: remove it (one scope for the whole fleet)."""
    user: str = ""


ANYBODY = Caller()


class TokenUsage(msgspec.Struct):
    """Tokens of one exchange as the client was told; None is "not reported", never zero."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


class Exchange(msgspec.Struct):
    """What is known of one request. Fields below a comment are filled by the step it names."""

    request_id: str
    api: ApiName
    method: str
    path: str
    query: str
    headers: CIMultiDictProxy[str]
    peer: str | None
    arrived_s: float
    arrived_unix_s: float

    # server: the body as the client sent it, and its decoded top level where a step needs it
    body: bytes = b""
    document: Document | None = None
    model: str = ""
    stream: bool = False

    # identify
    caller: Caller = ANYBODY
    identity: Identity | None = None
    prefix: PrefixKeys = NO_PREFIX
    prompt_tokens_estimate: int = 0
    prompt_tokens_counted: int | None = None
    """The prompt as an engine counted it before the answer began (its tokens, or a prefill leg's usage)."""

    # locate
    region: str = ""
    region_reason: str | None = None
    home_region_down: bool = False
    peer_region: bool = False
    hops: int = 0

    # place
    ticket: Ticket | None = None
    decision: Decision | None = None
    cache: str | None = None
    """Whether the session's prefix was resident when the request came, as ``x-homeport-cache`` says it."""
    queued_s: float = 0.0
    decide_s: float = 0.0
    """Seconds spent in late binding, between slices as well, and seconds the decision itself took."""
    slices: int = 0
    """Parts of the prompt that were prefilled before the request itself was sent."""
    found_tokens: dict[str, int | None] | None = None
    """What the first of them found cached, by place: later ones, and the request itself, find what these computed.
    None where that cannot be known."""

    # hand off, relay
    legs: list[LegRecord] = []
    retries: int = 0
    prefill_s: float | None = None
    prefill_skipped: str | None = None
    kv_transfer: Literal["ok", "failed", "none"] = "none"
    status: int | None = None
    error: str | None = None
    """Our error code when the answer was ours (``no_backend``...), or ``client_closed`` when the client left."""
    headers_sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    chunks: int = 0
    """Stream chunks relayed after the first token; each gap between them goes to ``account.gap`` as it happens."""
    response_bytes: int = 0
    response_id: str | None = None
    """The id of a Responses answer, by which later requests name it."""

    # account
    usage: TokenUsage = msgspec.field(default_factory=TokenUsage)
    outcome: Outcome | None = None

    @property
    def members(self) -> Mapping[str, JsonValue]:
        """The body's members by name; none when it is no JSON object."""
        return {} if self.document is None else self.document

    @property
    def tenant(self) -> str:
        """The tenant's name, empty when the proxy is open."""
        return self.caller.name

    @property
    def session(self) -> str:
        """The session's opaque digest, empty for requests that have none (embeddings, models...)."""
        return self.identity.session if self.identity else ""

    @property
    def serving(self) -> LegRecord | None:
        """The leg that answered, or tried last to answer, the client."""
        for leg in reversed(self.legs):  # no generator: asked several times a request
            if leg.part == "serve":
                return leg
        return None

    @property
    def held_s(self) -> float:
        """Seconds in the queue before anything was sent."""
        if self.found_tokens is None:
            return self.queued_s
        return max(0.0, self.queued_s - sum([leg.held_s for leg in self.legs]))

    @property
    def expected_cached_tokens(self) -> int | None:
        """What the decision expected to be cached. It may come from an estimate of the prompt, so it is never told as
        more than the prompt, once that is known."""
        expected = self.decision.expected_cached_tokens if self.decision else None
        prompt = self.usage.prompt_tokens or self.prompt_tokens_counted
        return expected if expected is None or prompt is None else min(expected, prompt)

    @property
    def prefilled_by(self) -> str | None:
        """The separate prefill engine whose KV was used, if any."""
        for leg in reversed(self.legs):
            if leg.part == "prefill":
                return leg.place if leg.state >= State.HANDED_OFF else None
        return None

    @property
    def ok(self) -> bool:
        """True when the client got a whole, successful answer."""
        return self.error is None and self.status is not None and self.status < 400
