"""What routing sees and says: plain values, no I/O, no clock. All times in seconds, all sizes in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Literal

import msgspec

Role = Literal["prefill", "decode", "mixed"]
State = Literal["up", "down", "draining", "drained", "unknown"]
"""``drained``: past its drain's deadline, where not even sessions that are active may stay."""
USABLE: tuple[State, ...] = ("up", "unknown")
"""Where new sessions may go; nobody has heard yet of an unknown one, and it may well answer."""
Kind = Literal["main", "side", "subagent"]


class Word(StrEnum):
    """The decision in one word, as in ``x-homeport-decision``."""

    PLACED = "placed"
    HOME = "home"
    SPILL = "spill"
    MOVED = "moved"
    FAILOVER = "failover"
    PEER = "peer"


@dataclass(frozen=True, slots=True)
class Rates:
    """An engine's speed. Prefill of ``u`` uncached after ``c`` cached tokens takes
    ``t0_s + u / tokens_per_s * (1 + (c + u / 2) / attention_tokens)``; a decode step of n sequences with k context
    tokens in all takes ``step_s + n * per_sequence_s + k * per_context_token_s``."""

    t0_s: float = 0.02
    tokens_per_s: float = 16_000.0
    attention_tokens: float = 53_000.0
    step_s: float = 0.03
    per_sequence_s: float = 1e-4
    per_context_token_s: float = 1.2e-8
    transfer_tokens_per_s: float = 400_000.0
    load_tokens_per_s: float = 100_000.0
    """From a host or store tier into the device."""
    rtt_s: float = 0.0


class PrefixKeys(msgspec.Struct, frozen=True):
    """A prompt's prefix as index keys.

    ``text_blocks``: chained digests of the canonical text, one per ``text_block_chars`` characters (the last, partial
    block left out). ``token_blocks``: the engine's own block hashes by block size in tokens, where known.
    """

    text_blocks: Sequence[int] = ()
    text_block_chars: int = 512
    token_blocks: Mapping[int, Sequence[int]] = {}


NO_PREFIX = PrefixKeys()


class RequestView(msgspec.Struct, frozen=True):
    """One request as the policy sees it. ``session`` is an opaque digest and never empty."""

    request_id: str
    api: str
    model: str
    session: str
    prompt_tokens: int
    """As the engine will count them, or an estimate (``prompt_estimated``)."""
    prefix: PrefixKeys = NO_PREFIX
    tenant: str = ""
    tenant_weight: float = 1.0
    user: str = ""
    parent: str | None = None
    kind: Kind = "main"
    final: bool = False
    expected_output_tokens: int = 256
    adapter: str | None = None
    cache_scope: str = ""
    """Requests of different scopes share no cache (a tenant's salt); empty: the whole fleet's."""
    rtt_s: Mapping[str, float] = {}
    """Extra round trip by backend, for a request that came in far from it (seconds)."""
    prompt_estimated: bool = False
    """``prompt_tokens`` was guessed from the size of the body; what the session's last answer reported is better."""
    split_refused: str | None = None
    """Why prefill and decode must stay on one engine (from the capability table); None when they may part."""
    session_requests: float = 1.0
    """How many requests a session brings here on the average: what its first one commits a place to."""
    homed: bool = False
    """Whether its session has a home, be it among the places or not."""
    sliceable: bool = False
    """Whether the caller can have the first so many tokens of the prompt prefilled by themselves."""


@dataclass(frozen=True, slots=True)
class PlaceSpec:
    """A place a request can run: a backend, or one data-parallel rank of it (``d0/dp3``)."""

    name: str
    backend: str
    role: Role
    models: frozenset[str]
    pool: str = "default"
    kv_transfer: str = "none"
    rank: int | None = None
    rates: Rates = field(default_factory=Rates)
    capacity: float = 1.0
    kv_capacity_tokens: int | None = None
    max_model_len: int | None = None
    adapters: frozenset[str] | None = None
    """Adapters served; None: unknown, so any may be tried."""


class Cost(msgspec.Struct, frozen=True, array_like=True):
    """What a place would cost this request, in seconds, by part; ``total_s`` is what the policy compares."""

    total_s: float
    wait_s: float = 0.0
    prefill_s: float = 0.0
    shadow_s: float = 0.0
    load_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    rtt_s: float = 0.0
    cached_tokens: int | None = None


class Decision(msgspec.Struct, frozen=True):
    """Where a request runs and why. ``expected_cached_tokens`` is None only when no index exists."""

    place: str
    word: Word
    reason: str
    prefill_place: str | None = None
    expected_cached_tokens: int | None = None
    prefill_cached_tokens: int | None = None
    home: str | None = None
    """The session's home after this decision (unchanged by a spill or a side request)."""
    costs: Mapping[str, Cost] = {}


PolicyName = Literal["cost", "session", "prefix", "least-tokens", "round-robin"]


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """Every knob of the router; the defaults are the ones the benchmark reports.

    ``k0``, ``k1``: shadow price of recomputed seconds, ``k0 + k1 * rho / (1 - rho)`` with the cluster's load rho.
    ``tau_first_s``, ``tau_later_s``: seconds charged per unit of a place's own offered load, for a session's first
    request and for later ones; ``tau_more_s``: more for the first one, per further request that sessions bring on the
    average (of one session 50 count at most).
    ``decode_weight``: seconds to the first token that one second of slower decoding is worth. ``hold_below_s``: late
    binding sends the next request to a place once it has at most this much prefill left. ``step_tokens``: uncached
    tokens that an engine computes in one step; so many may be outstanding at a place whatever they are predicted to
    take. ``age_weight``: seconds of predicted prefill that one second of waiting buys.
    ``starve_after_s``: a request held longer goes next, whatever its length. ``slice_s``: a prefill that takes more
    than half as long again is sent in parts of about so long (see ``slices``); 0: never.
    """

    policy: PolicyName = "cost"
    shadow: tuple[str, ...] = ()
    load_bound: float = 1.25
    k0: float = 1.0
    k1: float = 0.5
    tau_first_s: float = 2.0
    tau_later_s: float = 1.0
    tau_more_s: float = 0.3
    decode_weight: float = 0.1
    load_window_s: float = 60.0
    late_binding: bool = True
    hold_below_s: float = 0.1
    step_tokens: int = 2048
    age_weight: float = 0.3
    starve_after_s: float = 120.0
    slice_s: float = 1.0
    min_uncached_tokens: int = 256
    queue_scale_per_s: float = 4.0
    home_margin_s: float = 0.1
    move_margin_s: float = 1.0
    move_after: int = 3
    gone_after_s: float = 15.0
    drain_idle_s: float = 60.0
    """A session stays at a draining home until it was idle for this long."""
    idle_ttl_s: float = 3600.0
    max_sessions: int = 100_000
    index_bytes: int = 256 * 1024 * 1024
    default_kv_tokens: int = 500_000
    overload_context: float | None = None
    """Hold new sessions while live context exceeds this multiple of all KV capacity; None: never."""


@dataclass(slots=True)
class PlaceView:
    """One place as a decision sees it: a snapshot, read and never written by a policy.

    ``rtt_s``: round trip from where this request came in. ``wait_s``: predicted prefill left on the engine.
    ``queued_works_s``: predicted prefill of the requests held for it, in the order of ``queued_ranks``
    (``work + age_weight * since``). ``rho``: offered prefill work per second, averaged over the load window.
    ``cached_tokens``: what the index expects the engine to find of this very prompt; None when it knows nothing.
    ``down_s`` counts since the place went down.
    """

    name: str
    backend: str
    role: Role
    pool: str = "default"
    rates: Rates = field(default_factory=Rates)
    learned: bool = False
    """Whether the speed of its prefill was learned from requests, here or at a place of its role."""
    state: State = "up"
    cooling: bool = False
    kv_transfer: bool = False
    kv_capacity_tokens: int | None = None
    rtt_s: float = 0.0
    wait_s: float = 0.0
    queued_ranks: Sequence[float] = ()
    queued_works_s: Sequence[float] = ()
    rho: float = 0.0
    requests: int = 0
    waiting: int = 0
    """Requests sent whose first token has not come."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    tokens_per_step: float = 1.0
    cached_tokens: int | None = None
    host_tokens: int = 0
    """Tokens after the cached ones that lie in a tier of the engine to be loaded from (host memory, a store)."""
    confidence: float = 1.0
    home: bool = False
    bound: bool = False
    """The home of a session that is active: it may finish there while the place drains."""
    unseen: bool = False
    """The session's home by the word of another proxy: what lies there of it is not known here."""
    rewritten: bool = False
    """The home of a session whose prompt no longer continues its last one (compaction, a changed head)."""
    parent: bool = False
    """The parent session's home."""
    dearer_times: int = 0
    down_s: float = 0.0

    @property
    def expected_cached_tokens(self) -> int:
        """Index figure discounted by the index's confidence; 0 when unknown."""
        return int((self.cached_tokens or 0) * self.confidence)

    def nothing_to_lose(self, other: PlaceView, prompt_tokens: int) -> bool:
        """Whether a session leaves this home for ``other`` for free: its prefix is gone from here, or it begins anew,
        and ``other`` holds as much of the prompt (to a twentieth). False while no index knows."""
        slack = prompt_tokens // 20
        return self.begins_anew(prompt_tokens) and self.resident_tokens <= other.resident_tokens + slack

    @property
    def resident_tokens(self) -> int:
        """Tokens of the prompt that need not be computed here: cached ones and those to be loaded from a tier."""
        return (self.cached_tokens or 0) + self.host_tokens

    def begins_anew(self, prompt_tokens: int) -> bool:
        """Whether hardly anything that the session has at this home is of use for its next prompt. False while no index
        knows."""
        if self.cached_tokens is None or self.unseen:
            return False
        return self.rewritten or self.resident_tokens <= prompt_tokens // 20

    def copy(self) -> PlaceView:
        """A snapshot that later changes do not reach."""
        view = PlaceView(*[getattr(self, name) for name in _PLACE_FIELDS])
        view.queued_ranks, view.queued_works_s = tuple(self.queued_ranks), tuple(self.queued_works_s)
        return view


_PLACE_FIELDS = tuple(item.name for item in fields(PlaceView))


class NoPlaceError(Exception):
    """No place can take the request; the text says why and what would help."""


class Ticket(msgspec.Struct, eq=False):
    """One request in the router's hands, from ``arrive`` to ``finished`` or ``cancel``.

    ``decision`` is None while the request is held; ``refused`` says why no place could be found after holding.
    ``part_tokens``: only so many tokens from the start of its prompt are to be prefilled now, at ``decision.place``,
    and told by ``sliced``; then it is held again.
    """

    request: RequestView
    arrived_s: float
    decision: Decision | None = None
    refused: str | None = None
    part_tokens: int | None = None
    decided_s: float | None = None
    first_token_s: float | None = None
    attempts: tuple[str, ...] = ()
    closed: bool = False
    held_reason: str = ""
    """Why it waits longer than a place needs: the overload guard."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of a request's prompt: cached tokens and every uncached one booked to one cause.

    ``causes`` sums with ``cached_tokens`` to ``prompt_tokens``; None figures were not reported.
    """

    prompt_tokens: int | None
    cached_tokens: int | None
    causes: Mapping[str, int] = {}
    expected_cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One decision with all that it was made from; replaying it gives the same decision.

    ``request`` carries no prefix keys (the places' ``cached_tokens`` say what they meant). ``refused``: places that
    failed this request before.
    ``homeless``: the session's home left the fleet.
    """

    ts_s: float
    seed: int
    request: RequestView
    places: tuple[PlaceView, ...]
    settings: RoutingSettings
    decision: Decision
    refused: tuple[str, ...] = ()
    homeless: bool = False
    shadows: Mapping[str, str] = field(default_factory=dict)
    """What each shadow policy would have chosen."""


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """What a policy that decides on paper would have done: its agreement, and the predicted seconds it would have
    saved (negative: cost) by the cost policy's own prices; None when those were not computed."""

    decisions: int
    agreed: int
    saved_s: float | None


class SessionView(msgspec.Struct, frozen=True):
    """A session as the router knows it. ``keep_s``: how long its prefix is expected to stay resident; None: cold."""

    session: str
    home: str | None
    requests: int
    open_requests: int
    context_tokens: int
    last_used_s: float
    moves: int
    warm: bool
    keep_s: float | None


IndexState = Literal["exact", "approximate", "degraded", "none"]


@dataclass(frozen=True, slots=True)
class PlaceStatus:
    """One place at a glance; None is unknown, never zero."""

    name: str
    backend: str
    role: Role
    state: State
    requests: int
    queued: int
    prefill_tokens: int
    decode_tokens: int
    sessions: int
    hit_ratio: float | None
    index: IndexState
    confidence: float
    rates: Rates
    spec_acceptance: float | None = None


@dataclass(frozen=True, slots=True)
class RouterStatus:
    """The router at a glance; ``degraded`` lists what does not work as configured, in words."""

    places: Mapping[str, PlaceStatus]
    sessions: int
    queued: int
    index_bytes: int
    degraded: tuple[str, ...] = ()
    wanted: Mapping[str, str] = field(default_factory=dict)
    """Advice by pool: which role is short."""
    shadows: Mapping[str, ShadowReport] = field(default_factory=dict)
