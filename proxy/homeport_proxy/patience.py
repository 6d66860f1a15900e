"""Deadlines of one leg: to the first token, then between bytes. One timer, moved on instead of set anew per byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from homeport_proxy.relay import Relay
from homeport_proxy.upstream import Connection

ANSWER_S = 3600.0
"""The longest wait for an answer that is not streamed, whatever the engine's health says."""
CLIENT_STALL_S = 600.0
"""How long a client may leave its answer unread."""


class Patience:
    """Fails ``connection`` when its engine is silent for too long.

    Before the first token: after ``first_token_s``, if ``overdue()`` then says so, else asked again after the
    shorter of the two times. After it: when nothing came for ``idle_s``; time in which the client holds the engine
    back does not count.
    """

    def __init__(
        self,
        connection: Connection,
        first_token_s: float,
        overdue: Callable[[], bool],
        *,
        idle_s: float | None = None,
        relay: Relay | None = None,
    ) -> None:
        self._connection = connection
        self._overdue = overdue
        self._first_token_s = first_token_s
        self._idle_s = idle_s
        self._relay = relay
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._stalled_since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(self._next_s(), self._check)

    def stop(self) -> None:
        """The leg is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _next_s(self) -> float:
        return self._first_token_s if self._idle_s is None else min(self._first_token_s, self._idle_s)

    def _check(self) -> None:
        now_s = self._loop.time()
        due_s = self._due_s(now_s)
        if due_s is None:
            self._timer = None
            return
        self._timer = self._loop.call_at(max(due_s, now_s + 0.001), self._check)

    def _due_s(self, now_s: float) -> float | None:
        """When to look again; None after giving up."""
        relay, idle_s = self._relay, self._idle_s
        if relay is not None and relay.token_seen and idle_s is not None:
            due_s, why = self._between_bytes(now_s, idle_s, relay)
        else:
            due_s, why = self._before_token(now_s)
        if due_s is None:
            self._connection.fail(why, timed_out=True)
        return due_s

    def _between_bytes(self, now_s: float, idle_s: float, relay: Relay) -> tuple[float | None, str]:
        if relay.waiting_for_client:
            self._stalled_since_s = self._stalled_since_s or now_s
            stalled = now_s - self._stalled_since_s >= CLIENT_STALL_S
            return None if stalled else now_s + idle_s, "the client left its answer unread"
        self._stalled_since_s = None
        due_s = self._connection.last_byte_s + idle_s
        return due_s if due_s > now_s else None, f"no byte for {idle_s:g} s"

    def _before_token(self, now_s: float) -> tuple[float | None, str]:
        waited_s = now_s - self._started_s
        if waited_s < self._first_token_s:
            return self._started_s + self._first_token_s, ""
        if self._overdue() or waited_s >= ANSWER_S:
            return None, f"no token within {waited_s:.1f} s"
        return now_s + self._next_s(), ""
