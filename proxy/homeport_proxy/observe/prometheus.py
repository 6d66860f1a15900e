"""Counters, gauges and histograms in Prometheus' text format, at the cost of a dictionary update.

Written by hand: a request touches about a dozen series, and that must cost a few microseconds (`bench/bookkeeping.py`
compares with prometheus_client).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

LabelValues = tuple[str, ...]
Sample = tuple[LabelValues, float]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metric(Protocol):
    """One metric family that can write itself."""

    name: str

    def lines(self) -> Iterator[str]:
        """Its lines of the exposition, HELP and TYPE first."""


class Counter:
    """A count that only grows, by label values in the order of ``labels``."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self._text = text
        self._labels = tuple(labels)
        self.values: dict[LabelValues, float] = {}

    def add(self, amount: float = 1, labels: LabelValues = ()) -> None:
        """Count ``amount`` more."""
        self.values[labels] = self.values.get(labels, 0) + amount

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self._text, "counter")
        for labels, value in self.values.items():
            yield f"{self.name}{_braces(self._labels, labels)} {_number(value)}"
        if not self._labels and not self.values:
            yield f"{self.name} 0"


class Gauge:
    """A value that is asked for when metrics are read; a sample that is not known is left out."""

    def __init__(
        self, name: str, text: str, collect: Callable[[], Iterable[Sample]], labels: Sequence[str] = ()
    ) -> None:
        self.name = name
        self._text = text
        self._collect = collect
        self._labels = tuple(labels)

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self._text, "gauge")
        for labels, value in self._collect():
            yield f"{self.name}{_braces(self._labels, labels)} {_number(value)}"


class Histogram:
    """Observations in buckets by upper bound (inclusive), without labels."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self._text = text
        self._bounds = tuple(bounds)
        self.counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def merge(self, counts: Sequence[int], total: float) -> None:
        """Add another process's observations."""
        for index, count in enumerate(counts):
            self.counts[index] += count
        self.sum += total

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self._text, "histogram")
        seen = 0
        for bound, count in zip((*self._bounds, math.inf), self.counts, strict=True):
            seen += count
            yield f'{self.name}_bucket{{le="{_number(bound)}"}} {seen}'
        yield f"{self.name}_sum {_number(self.sum)}"
        yield f"{self.name}_count {seen}"


class Registry:
    """Metrics in the order they are shown."""

    def __init__(self) -> None:
        self.metrics: list[Metric] = []

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """A new counter."""
        metric = Counter(name, text, labels)
        self.metrics.append(metric)
        return metric

    def gauge(self, name: str, text: str, collect: Callable[[], Iterable[Sample]], labels: Sequence[str] = ()) -> Gauge:
        """A new gauge."""
        metric = Gauge(name, text, collect, labels)
        self.metrics.append(metric)
        return metric

    def histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        """A new histogram."""
        metric = Histogram(name, text, bounds)
        self.metrics.append(metric)
        return metric

    def render(self) -> str:
        """The whole exposition."""
        return "".join(f"{line}\n" for metric in self.metrics for line in metric.lines())


def _head(name: str, text: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _braces(names: Sequence[str], values: Sequence[str]) -> str:
    if not names:
        return ""
    inside = ",".join(f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))
    return f"{{{inside}}}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return repr(float(value))
