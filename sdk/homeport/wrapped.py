"""The report after a wrapped harness: its sessions, where they were served, what was cached and what was not. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from homeport.fingerprint import JsonValue
from homeport.words import plural

FIRST_SIGHT = frozenset({"new", "fresh", "first", "tail"})
"""Causes that are no loss: nobody could have had these tokens in a cache."""

_DECISIONS = {
    "home": "at home",
    "spill": "away while home was busy",
    "moved": "at a new home",
    "failover": "home was down",
}
_CAUSES = {
    "caller": "the prompt was changed ahead of them",
    "template": "the prompt's last block, or rendered differently by the model's template",
    "routed_elsewhere": "they lay at another engine",
    "evicted": "the engine had dropped them",
    "expired": "the pause was too long",
    "cold_backend": "the engine had just started",
    "unknown": "cause not known",
}
"""The proxy's words (its counters, ``--json``) as one would say them."""


@dataclass(slots=True)
class SessionLine:
    """One session's requests. Token sums are over the requests that reported them; None when none did."""

    session: str
    requests: int = 0
    side_requests: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    backends: dict[str, int] = field(default_factory=dict)
    decisions: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)

    def add(self, record: Mapping[str, JsonValue]) -> None:
        """Count one request as the proxy remembers it."""
        if record.get("kind") == "side":
            self.side_requests += 1
            return
        self.requests += 1
        _count(self.backends, record.get("backend"))
        _count(self.decisions, record.get("decision"))
        tokens = record.get("tokens")
        prompt, cached = (tokens.get("prompt"), tokens.get("cached")) if isinstance(tokens, dict) else (None, None)
        if isinstance(prompt, int) and isinstance(cached, int):
            self.prompt_tokens = (self.prompt_tokens or 0) + prompt
            self.cached_tokens = (self.cached_tokens or 0) + cached
        causes = record.get("miss_causes")
        for cause, count in causes.items() if isinstance(causes, dict) else ():
            if cause not in FIRST_SIGHT and isinstance(count, int):
                self.lost[cause] = self.lost.get(cause, 0) + count

    @property
    def cached_share(self) -> float | None:
        """Cached tokens over prompt tokens; None when not reported."""
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens

    def to_dict(self) -> dict[str, JsonValue]:
        """The fields as JSON values."""
        return {
            "session": self.session,
            "requests": self.requests,
            "side_requests": self.side_requests,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "cached_share": self.cached_share,
            "backends": dict(self.backends),
            "decisions": dict(self.decisions),
            "lost_tokens": dict(self.lost),
        }

    def __str__(self) -> str:
        how = ", ".join(f"{count} {_DECISIONS.get(word, word)}" for word, count in self.decisions.items())
        requests = _requests(self.requests, self.side_requests) + self._where() + (f" ({how})" if how else "")
        lines = [f"  {self.session[:16]}  {requests}  {self._cached()}"]
        lines += [
            f"      computed again: {count:,} {plural('token', count)} ({_CAUSES.get(cause, cause)})"
            for cause, count in sorted(self.lost.items(), key=lambda one: -one[1])
        ]
        return "\n".join(lines)

    def _where(self) -> str:
        """The engines that served it, with counts where there are several."""
        if len(self.backends) == 1:
            return f" on {next(iter(self.backends))}"
        return "".join(f", {count} on {name}" for name, count in sorted(self.backends.items()))

    def _cached(self) -> str:
        share = self.cached_share
        if share is None or self.prompt_tokens is None:
            return "cached: not reported"
        return f"{self.cached_tokens:,} of {self.prompt_tokens:,} prompt tokens cached ({share:.1%})"


@dataclass(frozen=True, slots=True)
class WrapReport:
    """All sessions that the proxy served while the harness ran, the one that spoke first first."""

    sessions: tuple[SessionLine, ...]

    def to_dict(self) -> dict[str, JsonValue]:
        """The report as JSON values."""
        return {"sessions": [line.to_dict() for line in self.sessions]}

    def __str__(self) -> str:
        if not self.sessions:
            return "homeport: no request reached the proxy while the command ran"
        count = len(self.sessions)
        return "\n".join([f"homeport: {count} {plural('session', count)}", *map(str, self.sessions)])


def report_of(records: Iterable[Mapping[str, JsonValue]], began_s: float) -> WrapReport:
    """Sum up the proxy's decision records (newest first) that arrived at or after ``began_s`` (Unix time)."""
    lines: dict[str, SessionLine] = {}
    for record in reversed(list(records)):
        ts, session = record.get("ts"), record.get("session")
        if isinstance(ts, int | float) and ts >= began_s and isinstance(session, str):
            lines.setdefault(session, SessionLine(session)).add(record)
    return WrapReport(tuple(lines.values()))


def _count(counts: dict[str, int], name: JsonValue) -> None:
    if isinstance(name, str):
        counts[name] = counts.get(name, 0) + 1


def _requests(main: int, side: int) -> str:
    text = f"{main} {plural('request', main)}"
    return f"{text} and {side} on the side" if side else text
