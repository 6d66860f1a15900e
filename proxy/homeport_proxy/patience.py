"""Deadlines of one leg: to the first token, then between bytes. One alarm serves all legs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from homeport_proxy.attention import Alarm, given_back
from homeport_proxy.relay import Relay
from homeport_proxy.upstream import Connection

ANSWER_S = 3600.0
"""The longest wait for an answer that is not streamed, whatever the engine's health says."""
CLIENT_STALL_S = 600.0
"""How long a client may leave its answer unread."""
LOOK_EVERY_S = 0.05
"""The shortest time between two looks at all that wait: as late as a deadline may be noticed."""


class Watch:
    """All who wait for an engine now. Their one alarm is set to the earliest deadline; setting and ending a timer for
    each leg took 3 % of a short request's time."""

    def __init__(self) -> None:
        self._due_s: dict[Patience, float] = {}
        self._look_s = math.inf
        self._alarm = Alarm(self._look)

    def begin(self, patience: Patience, due_s: float) -> None:
        """Ask it when ``due_s`` has come."""
        self._due_s[patience] = due_s
        if due_s < self._look_s:
            self._look_s = due_s
            self._alarm.set(due_s)

    def end(self, patience: Patience) -> None:
        """Its leg is over."""
        self._due_s.pop(patience, None)

    def _look(self, now_s: float, lost_s: float) -> float:
        if not lost_s and now_s < self._look_s and self._due_s:
            return self._look_s
        self._look_s = math.inf  # whatever happens below, the next leg sets the alarm
        if lost_s:
            for patience, due_s in self._due_s.items():
                self._due_s[patience] = given_back(due_s, now_s, lost_s)
                patience.excuse(now_s, lost_s)
        else:
            self._ask(now_s)
        self._look_s = max(min(self._due_s.values()), now_s + LOOK_EVERY_S) if self._due_s else math.inf
        return self._look_s

    def _ask(self, now_s: float) -> None:
        for patience in [one for one, due_s in self._due_s.items() if due_s <= now_s]:
            due_s = patience.ask(now_s)
            if patience not in self._due_s:
                continue  # ended by what it did
            if due_s is None:
                del self._due_s[patience]
            else:
                self._due_s[patience] = due_s


class Patience:
    """Fails ``connection`` when its engine is silent for too long.

    Before the first token: after ``first_token_s``, if ``overdue()`` then says so, else asked again after the
    shorter of the two times. After it: when nothing came for ``idle_s``; time in which the client holds the engine
    back does not count. Neither does time in which this process did not run.
    """

    def __init__(
        self,
        watch: Watch,
        connection: Connection,
        first_token_s: float,
        overdue: Callable[[], bool],
        *,
        idle_s: float | None = None,
        relay: Relay | None = None,
    ) -> None:
        self._watch = watch
        self._connection = connection
        self._overdue = overdue
        self._first_token_s = first_token_s
        self._idle_s = idle_s
        self._relay = relay
        self._started_s = self._heard_s = asyncio.get_running_loop().time()
        self._stalled_since_s: float | None = None
        watch.begin(self, self._started_s + self._next_s())

    def stop(self) -> None:
        """The leg is over."""
        self._watch.end(self)

    def _next_s(self) -> float:
        return self._first_token_s if self._idle_s is None else min(self._first_token_s, self._idle_s)

    def excuse(self, now_s: float, lost_s: float) -> None:
        """For so long nobody here could hear the engine."""
        self._started_s = min(now_s, self._started_s + lost_s)
        self._heard_s = min(now_s, max(self._heard_s, self._connection.last_byte_s) + lost_s)

    def ask(self, now_s: float) -> float | None:
        """When to ask again; None after giving up."""
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
        due_s = max(self._connection.last_byte_s, self._heard_s) + idle_s
        return due_s if due_s > now_s else None, f"no byte for {idle_s:g} s"

    def _before_token(self, now_s: float) -> tuple[float | None, str]:
        waited_s = now_s - self._started_s
        if waited_s < self._first_token_s:
            return self._started_s + self._first_token_s, ""
        if self._overdue() or waited_s >= ANSWER_S:
            return None, f"no token within {waited_s:.1f} s"
        return now_s + self._next_s(), ""
