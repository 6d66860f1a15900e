"""The decision log: records that replay to the same decision, as JSON lines; and policies that decide on paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from homeport_proxy.routing.decide import decide
from homeport_proxy.routing.policies import POLICIES
from homeport_proxy.routing.views import (
    NO_PREFIX,
    Decision,
    DecisionRecord,
    NoPlaceError,
    PlaceView,
    RequestView,
    RoutingSettings,
    ShadowReport,
)


def recorded(
    request: RequestView,
    places: Sequence[PlaceView],
    now_s: float,
    seed: int,
    settings: RoutingSettings,
    decision: Decision,
    refused: tuple[str, ...],
    homeless: bool,
    shadows: Mapping[str, str],
) -> DecisionRecord:
    """One decision as a record; the places are copied, prefix keys are left out."""
    return DecisionRecord(
        ts_s=now_s,
        seed=seed,
        request=replace(request, prefix=NO_PREFIX),
        places=tuple(place.copy() for place in places),
        settings=settings,
        decision=decision,
        refused=refused,
        homeless=homeless,
        shadows=shadows,
    )


def dump(record: DecisionRecord) -> bytes:
    """A record as one JSON line."""
    return msgspec.json.encode(record) + b"\n"


class DecisionLogError(ValueError):
    """A decision log that cannot be read; the text names line and field."""


def parse(lines: Iterable[bytes]) -> Iterable[DecisionRecord]:
    """Records of a decision log. Raises :class:`DecisionLogError`."""
    decoder = msgspec.json.Decoder(DecisionRecord)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise DecisionLogError(f"line {number}: {error}") from error


def replay(record: DecisionRecord) -> Decision | None:
    """Decide a record again; None when no place can be found now."""
    try:
        return decide(
            record.request,
            record.places,
            record.ts_s,
            record.seed,
            record.settings,
            None,
            record.refused,
            record.homeless,
        )
    except NoPlaceError:
        return None


def same(record: DecisionRecord, again: Decision | None) -> bool:
    """Whether a replayed decision is the recorded one: places, word and home (costs follow from the same numbers)."""
    first = record.decision
    return again is not None and (first.place, first.prefill_place, first.word, first.home) == (
        again.place,
        again.prefill_place,
        again.word,
        again.home,
    )


class Shadows:
    """Policies that decide on paper, priced by the cost policy's own predictions."""

    def __init__(self, names: Sequence[str]) -> None:
        unknown = [name for name in names if name not in POLICIES]
        if unknown:
            raise ValueError(f"shadow: unknown policy {unknown[0]!r}; choose from {', '.join(POLICIES)}")
        self._names = tuple(names)
        self._decisions = 0
        self._agreed = dict.fromkeys(names, 0)
        self._saved_s: dict[str, float | None] = dict.fromkeys(names)

    def decide(
        self,
        request: RequestView,
        places: Sequence[PlaceView],
        now_s: float,
        seed: int,
        settings: RoutingSettings,
        decision: Decision,
    ) -> dict[str, str]:
        """What each shadow policy would have chosen."""
        if not self._names:
            return {}
        self._decisions += 1
        chosen = {}
        for name in self._names:
            policy = POLICIES[name]
            on_paper = decide(request, places, now_s, seed, settings, policy)
            chosen[name] = on_paper.place
            self._agreed[name] += on_paper.place == decision.place
            prices = decision.costs or on_paper.costs
            if decision.place in prices and on_paper.place in prices:
                saved_s = prices[decision.place].total_s - prices[on_paper.place].total_s
                self._saved_s[name] = (self._saved_s[name] or 0.0) + saved_s
        return chosen

    def report(self) -> dict[str, ShadowReport]:
        """Agreement and predicted gain per shadow policy."""
        return {name: ShadowReport(self._decisions, self._agreed[name], self._saved_s[name]) for name in self._names}
