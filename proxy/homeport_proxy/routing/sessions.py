"""The session book: homes, use, think time, expiry; bounded in number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from homeport_proxy.routing.causes import PromptTrace

_THINK_SHARE = 0.3
_THINK_MULTIPLE = 20.0
_SHORTEST_TTL_S = 300.0
_FORGET = 0.99
"""Of the mean of requests per session at every new one: about the last hundred sessions count."""
_MOST_REQUESTS = 50
"""Of one session that count in that mean."""


@dataclass(slots=True, eq=False)
class Session:
    """What the router remembers of one session; tokens and seconds."""

    name: str
    born_s: float
    home: str | None = None
    last_place: str | None = None
    requests: int = 0
    open_requests: int = 0
    prompt_tokens: int = 0
    context_tokens: int = 0
    trace: PromptTrace | None = None
    halves: Mapping[int, int] = field(default_factory=dict)
    """By block size in tokens, the engine's name of the block in the middle of the last prompt, where it is known."""
    last_used_s: float = 0.0
    think_s: float | None = None
    dearer_times: int = 0
    moves: int = 0
    ended: bool = False
    unseen: bool = False
    """Another proxy sent it to its home; nothing of it has gone there from here yet."""
    homeless: bool = False
    """Its home left the fleet for good."""


class SessionTable:
    """Sessions by digest, least recently used first; an open request keeps its session."""

    def __init__(self, idle_ttl_s: float, max_sessions: int) -> None:
        self._idle_ttl_s = idle_ttl_s
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self.at_home: dict[str, int] = {}
        self.context_tokens = 0
        self._recent_starts = self._recent_requests = 0.0

    def reconfigure(self, idle_ttl_s: float, max_sessions: int) -> None:
        """Take new bounds; sessions above them go as new ones come."""
        self._idle_ttl_s = idle_ttl_s
        self._max_sessions = max_sessions

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, name: str) -> Session | None:
        """The session, or None when unknown."""
        return self._sessions.get(name)

    def known_or_new(self, name: str, now_s: float) -> Session:
        """The session a request belongs to; a new one is kept by ``used`` only."""
        return self._sessions.get(name) or Session(name, now_s, last_used_s=now_s)

    def used(self, session: Session, now_s: float) -> None:
        """A main request of the session begins: learn its think time, renew it."""
        if session.requests and not session.open_requests:
            gap_s = max(0.0, now_s - session.last_used_s)
            known_s = session.think_s
            session.think_s = gap_s if known_s is None else known_s + _THINK_SHARE * (gap_s - known_s)
        if not session.requests:
            self._recent_starts = _FORGET * self._recent_starts + 1.0
            self._recent_requests *= _FORGET
        if session.requests < _MOST_REQUESTS:
            self._recent_requests += 1.0
        session.requests += 1
        session.last_used_s = now_s
        if session.name in self._sessions:
            self._sessions.move_to_end(session.name)
        else:
            self._expire(now_s)
            self._sessions[session.name] = session

    @property
    def mean_requests(self) -> float:
        """How many requests a session has brought, of late (what those that still run will bring left out); of one
        session 50 count at most."""
        return self._recent_requests / self._recent_starts if self._recent_starts else 1.0

    def keep(self, name: str, now_s: float) -> Session:
        """The session, remembered from now on although no request of it was seen here."""
        session = self._sessions.get(name)
        if session is None:
            self._expire(now_s)
            session = self._sessions[name] = Session(name, now_s, last_used_s=now_s)
        return session

    def settle(self, session: Session, home: str | None) -> None:
        """The session's home is ``home`` from now on."""
        if session.home == home or self._sessions.get(session.name) is not session:
            return
        if session.home is not None:
            self._count(session.home, -1)
        if home is not None:
            self._count(home, 1)
        session.home = home
        session.dearer_times = 0

    def finish(self, name: str) -> bool:
        """The session ended: forget it once its open requests are done; False when unknown."""
        session = self._sessions.get(name)
        if session is None:
            return False
        session.ended = True
        if not session.open_requests:
            self._drop(session)
        return True

    def release(self, session: Session, now_s: float, *, renew: bool = True) -> None:
        """One of its requests is done; ``renew``: it counts as a use."""
        session.open_requests -= 1
        if renew:
            session.last_used_s = max(session.last_used_s, now_s)
        if session.open_requests <= 0 and session.ended and self._sessions.get(session.name) is session:
            self._drop(session)

    def ttl_s(self, session: Session) -> float:
        """Seconds of idleness after which the session is taken to be over: many of its own think times."""
        if session.think_s is None:
            return self._idle_ttl_s
        return min(self._idle_ttl_s, max(_SHORTEST_TTL_S, _THINK_MULTIPLE * session.think_s))

    def expire(self, now_s: float) -> int:
        """Drop what is over; returns how many sessions went. Cheap: looks at the least recently used ones only."""
        before = len(self._sessions)
        self._expire(now_s)
        return before - len(self._sessions)

    def _expire(self, now_s: float) -> None:
        for _ in range(4):
            session = next(iter(self._sessions.values()), None)
            if session is None:
                return
            over = now_s - session.last_used_s > self.ttl_s(session)
            if not over and len(self._sessions) < self._max_sessions:
                return
            if session.open_requests:
                self._sessions.move_to_end(session.name)
                continue
            self._drop(session)

    def grew(self, session: Session, prompt_tokens: int, context_tokens: int) -> None:
        """An answer ended: the session's prompt and its context with the answer, tokens."""
        session.prompt_tokens = prompt_tokens
        if self._sessions.get(session.name) is session:
            self.context_tokens += context_tokens - session.context_tokens
        session.context_tokens = context_tokens

    def _drop(self, session: Session) -> None:
        del self._sessions[session.name]
        self.context_tokens -= session.context_tokens
        if session.home is not None:
            self._count(session.home, -1)

    def _count(self, place: str, by: int) -> None:
        left = self.at_home.get(place, 0) + by
        if left > 0:
            self.at_home[place] = left
        else:
            self.at_home.pop(place, None)
