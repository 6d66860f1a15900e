"""How much a tenant may use at once and per minute: counters that give at once or refuse, never wait. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """A tenant's limits; None is no limit. Tokens are prompt plus output."""

    max_concurrent: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Over a limit: which, and when to try again."""

    why: str
    retry_after_s: float


class Limits(Protocol):
    """Where use is counted: in this process, at the workers' parent, or in Redis for all proxies."""

    async def take(self, tenant: str, tokens: int, limit: TenantLimit) -> Refusal | None:
        """Count one more request of ``tokens``; None when it may go."""

    def give(self, tenant: str, tokens: int, limit: TenantLimit) -> None:
        """One request less; ``tokens`` is what it used beyond (or, negative, below) what was taken."""


CONCURRENCY_RETRY_S = 1.0


class Bucket:
    """Tokens per minute: fills evenly up to one minute's worth; a correction may take it below zero."""

    __slots__ = ("level", "per_minute", "updated_s")

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self.level = float(per_minute)
        self.updated_s = now_s

    def take(self, tokens: float, now_s: float) -> float | None:
        """Take ``tokens``; None when they were there, else the seconds until they will be.

        A request larger than a whole minute's worth goes when the bucket is full: else it could never go.
        """
        self.level = min(self.per_minute, self.level + (now_s - self.updated_s) * self.per_minute / 60.0)
        self.updated_s = now_s
        missing = min(tokens, self.per_minute) - self.level
        if missing > 1e-6:
            return missing * 60.0 / self.per_minute
        self.level -= tokens
        return None


class LocalLimits:
    """Limits counted in this process. A counter lives as long as requests are open: it never expires under them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[str, int] = {}
        self._buckets: dict[str, Bucket] = {}

    @property
    def open_requests(self) -> Mapping[str, int]:
        """Requests under way by tenant."""
        return self._open

    async def take(self, tenant: str, tokens: int, limit: TenantLimit) -> Refusal | None:
        return self.take_now(tenant, tokens, limit)

    def take_now(self, tenant: str, tokens: int, limit: TenantLimit) -> Refusal | None:
        """As ``take``, for callers without an event loop's patience."""
        under_way = self._open.get(tenant, 0)
        if limit.max_concurrent is not None and under_way >= limit.max_concurrent:
            return Refusal(f"{under_way} requests under way, the limit is {limit.max_concurrent}", CONCURRENCY_RETRY_S)
        if limit.tokens_per_minute is not None:
            wait_s = self._bucket(tenant, limit.tokens_per_minute).take(tokens, self._clock())
            if wait_s is not None:
                return Refusal(f"the limit of {limit.tokens_per_minute} tokens per minute is reached", wait_s)
        self._open[tenant] = under_way + 1
        return None

    def give(self, tenant: str, tokens: int, limit: TenantLimit) -> None:
        left = self._open.get(tenant, 0) - 1
        if left > 0:
            self._open[tenant] = left
        else:
            self._open.pop(tenant, None)
        if limit.tokens_per_minute is not None:
            self._bucket(tenant, limit.tokens_per_minute).level -= tokens

    def _bucket(self, tenant: str, per_minute: int) -> Bucket:
        bucket = self._buckets.get(tenant)
        if bucket is None or bucket.per_minute != per_minute:
            bucket = self._buckets[tenant] = Bucket(per_minute, self._clock())
        return bucket
