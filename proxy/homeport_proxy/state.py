"""What several proxies share: homes of sessions, drains, tenants' use, load. In Redis, or with nobody.

Redis is asked briefly and never waited for twice: when it does not answer, the proxy goes on alone, says so, and looks
for it again every second. Alone, new sessions go where a hash sends them, so that proxies that cannot talk still agree.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

from homeport_proxy.config import without_password
from homeport_proxy.limits import CONCURRENCY_RETRY_S, Limits, LocalLimits, Refusal, TenantLimit

if TYPE_CHECKING:
    import redis.asyncio as redis_client

log = logging.getLogger(__name__)

SYNC_S = 0.25
"""Load, use and drains are exchanged this often."""
LIVE_S = 3.0
"""A proxy that was not heard of for this long counts no more."""
ANSWER_S = 1.0
"""Patience with one answer; a busy event loop must not pass for a Redis that is gone."""
RETRY_S = 1.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Load:
    """In flight at one place."""

    requests: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(
            self.requests + other.requests,
            self.prefill_tokens + other.prefill_tokens,
            self.decode_tokens + other.decode_tokens,
        )


class Drain(NamedTuple):
    """A drained backend or region: its deadline in Unix seconds, and whether sessions take their KV along."""

    until_unix_s: float
    carry: bool = False


class Shared(Protocol):
    """What the control plane offers to what is shared: its own load and drains, and ears for the others'."""

    def own_load(self) -> Mapping[str, Load]: ...

    def foreign_load(self, load: Mapping[str, Load]) -> None: ...

    def own_drains(self) -> Mapping[str, Drain]:
        """Drained backends and regions by name."""

    def follow_drains(self, drains: Mapping[str, Drain]) -> None: ...


class State(Protocol):
    """Shared state as placement and admission use it. ``shared``: there may be other proxies; ``alone``: there are,
    but they cannot be heard."""

    shared: bool
    limits: Limits

    @property
    def alone(self) -> bool: ...

    async def start(self, control: Shared) -> None: ...

    async def stop(self) -> None: ...

    def degraded(self) -> list[str]: ...

    async def home_of(self, session: str) -> str | None: ...

    async def settled(self, session: str, home: str, known: str | None, ttl_s: float) -> None: ...

    def ended(self, session: str) -> None: ...

    def drains_changed(self) -> None: ...


class Alone:
    """One proxy by itself: nothing is shared, nothing can be gone."""

    shared = False
    alone = False

    def __init__(self, limits: LocalLimits) -> None:
        self.limits: Limits = limits

    async def start(self, control: Shared) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Nothing to stop."""

    def degraded(self) -> list[str]:
        """Nothing can be wrong."""
        return []

    async def home_of(self, session: str) -> str | None:
        """No other proxy knows one."""
        return None

    async def settled(self, session: str, home: str, known: str | None, ttl_s: float) -> None:
        """Nobody to tell."""

    def ended(self, session: str) -> None:
        """Nobody to tell."""

    def drains_changed(self) -> None:
        """Nobody to tell."""


class RedisState:
    """Shared through Redis. ``url`` may hold a password and is never shown."""

    shared = True

    def __init__(self, url: str, prefix: str, local: LocalLimits) -> None:
        # here, because its import takes longer than all of ours and most proxies are alone
        import redis.asyncio as redis_client
        from redis.exceptions import RedisError

        # one hash tag, so that scripts over several keys also work on a cluster
        self._key = f"{{{prefix}}}:"
        self._shown = without_password(url)
        self._redis: redis_client.Redis = redis_client.from_url(
            url, decode_responses=True, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S, retry=None
        )
        self._gone: tuple[type[Exception], ...] = (RedisError, OSError, TimeoutError)
        self._unusable: tuple[type[Exception], ...] = (*self._gone, ValueError)
        self._me = secrets.token_hex(8)
        self._local = local
        self._fault: str | None = None
        self._control: Shared | None = None
        self._task: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[object]] = set()
        self._drains_dirty = False
        self._counted: set[str] = set()
        self._stopping = False
        self.limits: Limits = RedisLimits(self, local)

    @property
    def alone(self) -> bool:
        """Redis does not answer: every proxy decides by itself."""
        return self._fault is not None

    def degraded(self) -> list[str]:
        """Says so when Redis is gone."""
        if self._fault is None:
            return []
        text = "pins, drains, limits and load are this proxy's own, new sessions are placed by hash"
        return [f"state: {self._shown} does not answer ({self._fault}); {text}"]

    async def start(self, control: Shared) -> None:
        """Exchange once, then go on until ``stop``."""
        self._control = control
        await self._sync()
        self._task = asyncio.create_task(self._run(), name="shared state")

    async def stop(self) -> None:
        """Take this proxy's load and use out again."""
        self._stopping = True
        pending = {*self._sending, *([self._task] if self._task else [])}
        while pending:
            # again and again: a client library may take one cancellation for a fault of the connection
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=0.5)
        if not self.alone:
            await self.call(lambda r: self._leave(r))
        await self._redis.aclose()

    # pins

    async def home_of(self, session: str) -> str | None:
        """The session's home as any proxy last settled it; None when unknown or alone."""
        return await self.call(lambda r: cast("Awaitable[str | None]", r.get(f"{self._key}pin:{session}")))

    async def settled(self, session: str, home: str, known: str | None, ttl_s: float) -> None:
        """Tell everybody the session's home; ``known`` is what they were known to think before.

        A change is waited for, so that the session's next request finds it wherever it arrives. Of two proxies that
        settle one new session at once, the first stands.
        """
        key, ttl = f"{self._key}pin:{session}", max(1, round(ttl_s))
        if home == known:
            self.send(lambda r: r.expire(key, ttl))
        else:
            await self.call(lambda r: r.set(key, home, ex=ttl, nx=known is None))

    def ended(self, session: str) -> None:
        """The session is over."""
        self.send(lambda r: r.delete(f"{self._key}pin:{session}"))

    def drains_changed(self) -> None:
        """Own drains changed: they go out with the next exchange, which begins now."""
        self._drains_dirty = True
        self._spawn(self._sync())

    # asking

    async def call(self, ask: Callable[[redis_client.Redis], Awaitable[_T]]) -> _T | None:
        """The answer, or None when Redis is gone or goes now."""
        if self.alone:
            return None
        try:
            async with asyncio.timeout(1.5 * ANSWER_S):
                return await ask(self._redis)
        except self._gone as error:
            self._lost(error)
            return None

    def send(self, ask: Callable[[redis_client.Redis], Awaitable[object]]) -> None:
        """Tell without waiting."""
        if not self.alone:
            self._spawn(self.call(ask))

    def _spawn(self, work: Coroutine[object, object, object]) -> None:
        task: asyncio.Task[object] = asyncio.get_running_loop().create_task(work)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def _lost(self, error: Exception) -> None:
        if self._fault is None:
            log.warning("%s does not answer; going on alone", self._shown)
        self._fault = str(error) or type(error).__name__
        self._fault = self._fault.splitlines()[0][:200]
        if self._control is not None:
            self._control.foreign_load({})

    # exchanging

    async def _run(self) -> None:
        while not self._stopping:
            await asyncio.sleep(RETRY_S if self.alone else SYNC_S)
            try:
                await self._sync()
            except Exception:  # the exchange must go on whatever one round meets
                log.exception("exchanging state failed inside the proxy")

    async def _sync(self) -> None:
        control = self._control
        if control is None:
            return
        returning = self.alone
        try:
            async with asyncio.timeout(2 * ANSWER_S):
                others, drains = await self._exchange(control, publish_drains=returning or self._drains_dirty)
        except self._unusable as error:
            self._lost(error)
            return
        if returning:
            log.warning("%s answers again", self._shown)
            self._fault = None
        control.foreign_load(others)
        if not self._drains_dirty:
            control.follow_drains(drains)

    async def _exchange(self, control: Shared, *, publish_drains: bool) -> tuple[dict[str, Load], dict[str, Drain]]:
        load = {name: [own.requests, own.prefill_tokens, own.decode_tokens] for name, own in control.own_load().items()}
        now_s = time.time()
        pipe = self._redis.pipeline(transaction=False)
        pipe.set(f"{self._key}load:{self._me}", json.dumps(load), px=int(LIVE_S * 1000))
        pipe.zadd(f"{self._key}proxies", {self._me: now_s})
        pipe.zremrangebyscore(f"{self._key}proxies", 0, now_s - 10 * LIVE_S)
        self._counted |= self._local.open_requests.keys()
        for tenant in list(self._counted):
            count = self._local.open_requests.get(tenant, 0)
            if count:
                pipe.hset(f"{self._key}open:{tenant}", self._me, str(count))
            else:
                pipe.hdel(f"{self._key}open:{tenant}", self._me)
                self._counted.discard(tenant)
        if publish_drains:
            self._drains_dirty = False
            drains = control.own_drains()
            pipe.delete(f"{self._key}drains")
            if drains:
                pipe.hset(f"{self._key}drains", mapping={name: json.dumps(drain) for name, drain in drains.items()})
        await pipe.execute()
        names = await self._redis.zrangebyscore(f"{self._key}proxies", now_s - LIVE_S, "+inf")
        keys = [f"{self._key}load:{name!s}" for name in names if name != self._me]
        answers = await self._redis.mget(keys) if keys else []
        found = await cast("Awaitable[dict[str, str]]", self._redis.hgetall(f"{self._key}drains"))
        total: dict[str, Load] = {}
        for text in answers:
            for place, counts in (json.loads(text) if text else {}).items():
                total[place] = total.get(place, Load()) + Load(*counts)
        return total, {name: Drain(*json.loads(text)) for name, text in found.items()}

    async def _leave(self, client: redis_client.Redis) -> None:
        await client.delete(f"{self._key}load:{self._me}")
        await client.zrem(f"{self._key}proxies", self._me)

    @property
    def key(self) -> str:
        """What every key begins with."""
        return self._key

    @property
    def me(self) -> str:
        """This proxy's name among the others."""
        return self._me


_TAKE = """
local now = redis.call('TIME')
local t = now[1] + now[2] / 1000000
local me, tokens, most, rate = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local live, own = tonumber(ARGV[5]), tonumber(ARGV[6])
if most > 0 then
  local sum, entries = own - 1, redis.call('HGETALL', KEYS[1])
  for i = 1, #entries, 2 do
    local seen = redis.call('ZSCORE', KEYS[3], entries[i])
    if entries[i] ~= me then
      if seen and tonumber(seen) > t - live then sum = sum + tonumber(entries[i + 1])
      else redis.call('HDEL', KEYS[1], entries[i]) end
    end
  end
  if sum >= most then return {1, tostring(sum)} end
end
if rate > 0 then
  local held = redis.call('HMGET', KEYS[2], 'level', 'at')
  local level, at = tonumber(held[1]) or rate, tonumber(held[2]) or t
  level = math.min(rate, level + (t - at) * rate / 60)
  local missing = math.min(tokens, rate) - level
  if missing > 0.000001 then return {2, tostring(missing * 60 / rate)} end
  redis.call('HSET', KEYS[2], 'level', tostring(level - tokens), 'at', tostring(t))
  redis.call('EXPIRE', KEYS[2], 3600)
end
redis.call('HSET', KEYS[1], me, own)
return {0, '0'}
"""
_GIVE = """
local me, tokens, rate, own = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
if own > 0 then redis.call('HSET', KEYS[1], me, own) else redis.call('HDEL', KEYS[1], me) end
if rate > 0 and tokens ~= 0 then
  local level = tonumber(redis.call('HGET', KEYS[2], 'level')) or rate
  redis.call('HSET', KEYS[2], 'level', tostring(level - tokens))
end
return 0
"""


class RedisLimits:
    """Limits over all proxies. This proxy's own use is counted beside, and is what holds while Redis is gone."""

    def __init__(self, state: RedisState, local: LocalLimits) -> None:
        self._state = state
        self._local = local

    async def take(self, tenant: str, tokens: int, limit: TenantLimit) -> Refusal | None:
        refusal = self._local.take_now(tenant, tokens, limit)
        if refusal is not None or limit == TenantLimit():
            return refusal
        own = self._local.open_requests.get(tenant, 0)
        numbers = (tokens, limit.max_concurrent or 0, limit.tokens_per_minute or 0, LIVE_S, own)
        answer = await self._state.call(lambda r: self._run(r, _TAKE, tenant, numbers))
        if answer is None or int(answer[0]) == 0:
            return None
        self._local.give(tenant, -tokens, limit)
        if int(answer[0]) == 1:
            why = f"{answer[1]} requests under way over all proxies, the limit is {limit.max_concurrent}"
            return Refusal(why, CONCURRENCY_RETRY_S)
        return Refusal(f"the limit of {limit.tokens_per_minute} tokens per minute is reached", float(answer[1]))

    def give(self, tenant: str, tokens: int, limit: TenantLimit) -> None:
        self._local.give(tenant, tokens, limit)
        if limit != TenantLimit():
            # the count is read when it is sent: several of these may overtake each other
            rate = limit.tokens_per_minute or 0
            self._state.send(
                lambda r: self._run(r, _GIVE, tenant, (tokens, rate, self._local.open_requests.get(tenant, 0)))
            )

    async def _run(
        self, client: redis_client.Redis, script: str, tenant: str, numbers: Sequence[float]
    ) -> Sequence[str | int]:
        key = self._state.key
        keys = (f"{key}open:{tenant}", f"{key}tokens:{tenant}", f"{key}proxies")
        arguments = (self._state.me, *(str(number) for number in numbers))
        return cast("Sequence[str | int]", await cast("Awaitable[object]", client.eval(script, 3, *keys, *arguments)))
