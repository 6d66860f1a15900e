"""A place's load: in-flight prefill and decode tokens, the prefill left on the engine, work offered lately."""

from __future__ import annotations

import math

from homeport_proxy.routing.bursts import Burst, Bursts
from homeport_proxy.routing.cost import LEAST_FIXED_S
from homeport_proxy.routing.views import PlaceView

_OVERRUN_FACTOR = 3.0
_OVERRUN_S = 1.0


class PlaceLoad:
    """Books of one place. Prefill is held from dispatch to first token, decode to the end; cached blocks are no load.

    The engine is taken to prefill in the order of dispatch, so the time left is the rest of the head plus the whole
    of what follows; a first token shows where it stands.
    """

    __slots__ = (
        "_bursts",
        "_decayed_s",
        "_fresh",
        "_fresh_since_s",
        "_head_since_s",
        "_offered_s",
        "_prefills",
        "_queued_s",
        "decode_tokens",
        "fixed_s",
        "fresh_tokens_per_s",
        "prefill_tokens",
        "requests",
        "weighed",
        "window_s",
    )

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self.requests = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self._prefills: dict[int, float] = {}
        self._bursts = Bursts()
        self._queued_s = 0.0
        self._head_since_s = 0.0
        self._offered_s = 0.0
        self._decayed_s = 0.0
        self.fixed_s = LEAST_FIXED_S
        """Of each prefill's predicted seconds the part that does not grow with the prompt."""
        self.weighed: set[PlaceLoad] = set()
        """Where to note that ``burden_s`` changed."""
        self._fresh = 0.0
        self._fresh_since_s = 0.0
        self.fresh_tokens_per_s = 0.0

    def begin_prefill(self, key: int, work_s: float, uncached_tokens: int, now_s: float) -> None:
        """``work_s`` of prefill was sent to the engine under ``key``."""
        if not self._prefills:
            self._head_since_s = now_s
            self._bursts.begin(now_s)
        self._prefills[key] = work_s
        self._queued_s += work_s
        self.prefill_tokens += uncached_tokens
        self._fresh += uncached_tokens
        if now_s - self._fresh_since_s > self.window_s:
            # the pace at which the engine's cache turns over, one window at a time
            pace = self._fresh / (now_s - self._fresh_since_s)
            known = self.fresh_tokens_per_s
            self.fresh_tokens_per_s = known + 0.5 * (pace - known) if known else pace
            self._fresh, self._fresh_since_s = 0.0, now_s
        self.weighed.add(self)

    def offer(self, work_s: float, now_s: float) -> None:
        """``work_s`` of prefill was assigned to this place (held or sent)."""
        self._offered_s = self._offered(now_s) + work_s
        self._decayed_s = now_s
        self.weighed.add(self)

    def end_prefill(self, key: int, uncached_tokens: int, now_s: float, *, ran: bool) -> Burst | None:
        """The prefill under ``key`` answered (``ran``) or was called off; returns what it was computed with."""
        at_head = next(iter(self._prefills), None) == key
        work_s = self._prefills.pop(key, None)
        if work_s is None:
            return None
        burst = self._bursts.end(work_s, at_head, now_s) if ran else None
        if at_head and not ran:
            self._bursts.begin(now_s)
        self.prefill_tokens -= uncached_tokens
        self._queued_s = self._queued_s - work_s if self._prefills else 0.0
        if ran or not self._prefills:
            self._head_since_s = now_s
        self.weighed.add(self)
        return burst

    def begin_decode(self, tokens: int) -> None:
        """A sequence of ``tokens`` context will live here."""
        self.requests += 1
        self.decode_tokens += tokens
        self.weighed.add(self)

    def end_decode(self, tokens: int) -> None:
        """The sequence is gone."""
        self.requests -= 1
        self.decode_tokens -= tokens
        self.weighed.add(self)

    def prefill_left_s(self, now_s: float) -> float:
        """Predicted seconds until the engine has finished what was sent.

        A head that runs longer than predicted counts as a quarter of the time it took so far, until it is so late
        that the prediction says nothing: then it counts as done, so that a silent engine cannot hold a queue forever.
        """
        if not self._prefills:
            return 0.0
        head_s = next(iter(self._prefills.values()))
        elapsed_s = now_s - self._head_since_s
        rest_s = max(self._queued_s - head_s, 0.0)
        if elapsed_s > _OVERRUN_FACTOR * head_s + _OVERRUN_S:
            late_s = elapsed_s - (_OVERRUN_FACTOR * head_s + _OVERRUN_S)
            return max(rest_s - late_s, 0.0)
        return max(head_s - elapsed_s, min(head_s, elapsed_s / 4)) + rest_s

    def backlog_s(self, now_s: float) -> float:
        """Like :meth:`prefill_left_s` without the fixed part of each prompt.

        What late binding goes by: engines batch short prompts, so that many of them in flight are no queue.
        """
        return max(self.prefill_left_s(now_s) - self.fixed_s * len(self._prefills), 0.0)

    def takes(self, uncached_tokens: int, below_s: float, step_tokens: int, now_s: float) -> bool:
        """Whether late binding may send one more: there is little prefill left, or it fits into one step of the engine
        together with what is outstanding (it then waits for no other, however slow the step)."""
        return self.prefill_tokens + uncached_tokens <= step_tokens or self.backlog_s(now_s) <= below_s

    def next_change_s(self, below_s: float, now_s: float) -> float:
        """When :meth:`backlog_s` is first at most ``below_s`` if no first token arrives."""
        left_s = self.prefill_left_s(now_s)
        below_s += self.fixed_s * len(self._prefills)
        if left_s <= below_s or not self._prefills:
            return now_s
        head_s = next(iter(self._prefills.values()))
        elapsed_s = now_s - self._head_since_s
        if elapsed_s < head_s and left_s - below_s <= head_s - elapsed_s and head_s / 4 <= below_s:
            return now_s + left_s - below_s
        given_up_s = self._head_since_s + _OVERRUN_FACTOR * head_s + _OVERRUN_S
        return max(given_up_s + max(self._queued_s - head_s - below_s, 0.0), now_s) + 1e-3

    def _offered(self, now_s: float) -> float:
        age_s = now_s - self._decayed_s
        return self._offered_s * math.exp(-age_s / self.window_s) if age_s > 0 else self._offered_s

    @property
    def burden_s(self) -> float:
        """A coarse measure to sort places by: prefill sent and offered lately, requests in flight (s)."""
        return self._queued_s + self._offered_s / self.window_s + 0.01 * self.requests

    def show(self, view: PlaceView, now_s: float) -> None:
        """Bring a view's figures of load up to ``now_s``."""
        waiting = len(self._prefills)
        view.waiting = waiting
        view.wait_s = self.prefill_left_s(now_s) if waiting else 0.0
        view.rho = self._offered(now_s) / self.window_s
        view.requests = self.requests
        view.prefill_tokens = self.prefill_tokens
        view.decode_tokens = self.decode_tokens

    @property
    def prefilling(self) -> bool:
        """Whether any prefill was sent that has not ended."""
        return bool(self._prefills)

    def rho(self, now_s: float) -> float:
        """Offered prefill seconds per second, averaged over about ``window_s``."""
        return self._offered(now_s) / self.window_s
