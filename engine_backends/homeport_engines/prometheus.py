"""A fast reader of the Prometheus text format (version 0.0.4) that looks at wanted samples only.

An engine's metrics run to thousands of lines, mostly histogram buckets, and are read every second per engine: the
reference parser takes tens of milliseconds for that, this one takes one or two.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite

_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
_PLAIN = {"n": "\n", '"': '"', "\\": "\\"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: a finite value with its labels."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(text: str, wanted: Container[str]) -> Iterator[Sample]:
    """The samples whose name is wanted; lines that are none, and values that are no numbers, are left out."""
    for line in text.splitlines():
        name, brace, rest = line.partition("{")
        if brace:
            if name not in wanted:
                continue
            labels_text, _, value_text = rest.rpartition("}")
        else:
            name, _, value_text = line.partition(" ")
            if name not in wanted:
                continue
            labels_text = ""
        value = _number(value_text)
        if value is not None:
            yield Sample(name, dict(_labels(labels_text)), value)


def _labels(text: str) -> Iterator[tuple[str, str]]:
    for name, value in _LABEL.findall(text):
        yield name, _ESCAPE.sub(lambda found: _PLAIN.get(found[1], found[0]), value) if "\\" in value else value


def _number(text: str) -> float | None:
    words = text.split()  # a timestamp may follow
    try:
        value = float(words[0])
    except (ValueError, IndexError):
        return None
    return value if isfinite(value) else None
