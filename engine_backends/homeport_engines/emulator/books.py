"""True books: what an emulated engine did, countable by tests and served as metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["running", "stop", "length", "tool_calls", "abort", "error", "refused"]

_FAST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_SLOW = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_STEP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)


class Histogram:
    """Counts of seconds by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class Counters:
    """One rank's counters since its start, under the meaning vLLM gives them. Tokens unless said otherwise."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    by_source: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: Counter[int] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    transfers: int = 0
    transferred_tokens: int = 0
    failed_transfers: int = 0
    expired_leases: int = 0
    late_notifications: int = 0
    first_token_s: Histogram = field(default_factory=lambda: Histogram(_FAST))
    inter_token_s: Histogram = field(default_factory=lambda: Histogram(_STEP))
    queue_s: Histogram = field(default_factory=lambda: Histogram(_SLOW))
    whole_s: Histogram = field(default_factory=lambda: Histogram(_SLOW))
    transfer_s: Histogram = field(default_factory=lambda: Histogram(_FAST))


@dataclass(slots=True)
class Record:
    """One generation request as the engine saw it. ``cached_tokens`` and ``prompt_tokens`` are the engine's own
    truth; ``computed_tokens`` is the prompt work really done here, again after a preemption."""

    request_id: str
    api: str
    rank: int
    leg: Literal["whole", "prefill", "decode"]
    prompt_tokens: int
    cached_tokens: int = 0
    transferred_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    outcome: Outcome = "running"
    adapter: str | None = None
    session: str | None = None
    stale: bool = False
    arrived_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(slots=True)
class Books:
    """The engine's books since it was created; a restart does not clear them.

    ``read_after_lease``: transfers that read blocks which the lease no longer protected (the answer is then wrong on
    purpose). ``reused_params``: transfers with parameters that had been used before. ``deaths``: requests that would
    have killed a real engine process. ``orphans``: leases that ended by expiry, no decode engine ever came.
    """

    requests: deque[Record] = field(default_factory=lambda: deque(maxlen=10_000))
    seen: Counter[str] = field(default_factory=Counter)
    """HTTP requests by path, before faults and checks."""
    connections: int = 0
    started: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    generated_tokens: int = 0
    read_after_lease: int = 0
    reused_params: int = 0
    orphans: int = 0
    deaths: int = 0
    restarts: int = 0
    faults_done: Counter[str] = field(default_factory=Counter)

    @property
    def running(self) -> int:
        """Generation requests that have not ended."""
        return self.started - self.finished - self.aborted - self.failed

    def by_id(self, part: str) -> list[Record]:
        """Records whose engine request id contains ``part`` (an ``X-Request-Id`` becomes part of the id)."""
        return [record for record in self.requests if part in record.request_id]
