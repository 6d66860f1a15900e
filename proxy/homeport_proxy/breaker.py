"""When one leg to one engine must not be tried: outcome classes and a breaker with timed, half-open recovery. Pure.

Back-pressure is not failure: a 4xx is a success (the engine answered), 429 and 503 are neutral. A breaker opens after
``failures_to_open`` failures in a row, rests for a time that doubles with every reopening, and then lets one request
through at a time until one succeeds. The rest ends on time whether or not anyone asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Result(StrEnum):
    """How one leg to an engine ended, as health sees it."""

    SUCCESS = "success"
    NEUTRAL = "neutral"
    FAILURE = "failure"
    REFUSED = "refused"


def classify(status: int) -> Result:
    """The class of an HTTP status: 4xx success, 429 and 503 neutral, other 5xx failure."""
    if status in (429, 503):
        return Result.NEUTRAL
    return Result.FAILURE if status >= 500 else Result.SUCCESS


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """``failures_to_open`` in a row open it; it rests ``rest_s``, doubled per reopening up to ``max_rest_s``."""

    failures_to_open: int = 5
    rest_s: float = 1.0
    max_rest_s: float = 30.0


class Breaker:
    """One leg's breaker. Times are seconds of any clock that the caller passes in."""

    __slots__ = ("_failures", "_openings", "_settings", "_trials", "open_until_s")

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self._settings = settings or BreakerSettings()
        self._failures = 0
        self._openings = 0
        self._trials = 0
        self.open_until_s: float | None = None
        """End of the rest; set until a trial succeeds. None: closed."""

    def allows(self, now_s: float) -> bool:
        """Whether a request may be sent now: closed, or rested and no trial under way."""
        return self.open_until_s is None or (now_s >= self.open_until_s and self._trials == 0)

    def half_open(self, now_s: float) -> bool:
        """Rested, waiting for a trial or for its outcome."""
        return self.open_until_s is not None and now_s >= self.open_until_s

    def sent(self, now_s: float) -> None:
        """A request was sent; counts as the trial when half-open."""
        if self.half_open(now_s):
            self._trials += 1

    def ended(self, result: Result, now_s: float) -> None:
        """A request ended. Neutral outcomes free the trial and decide nothing."""
        if result is Result.SUCCESS and self.open_until_s is None:  # nearly always
            self._failures = self._openings = self._trials = 0
            return
        was_trial = self.half_open(now_s) and self._trials > 0
        if was_trial:
            self._trials -= 1
        if result is Result.SUCCESS:
            # a request sent before the breaker opened may still succeed: that proves the leg works
            self._failures = self._openings = self._trials = 0
            self.open_until_s = None
        elif result is not Result.NEUTRAL:
            self._failures += 1
            if was_trial or (self.open_until_s is None and self._failures >= self._settings.failures_to_open):
                self._open(now_s)

    def _open(self, now_s: float) -> None:
        rest_s = min(self._settings.rest_s * 2**self._openings, self._settings.max_rest_s)
        self._openings = min(self._openings + 1, 16)
        self._failures = self._trials = 0
        self.open_until_s = now_s + rest_s
