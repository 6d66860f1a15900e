"""Server-sent events by bytes: where one frame ends, and what it carries. No line is ever decoded to find that out."""

from __future__ import annotations

import re

_BLANK = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n|\r\n\n")
_LINE = re.compile(rb"\r\n|\n|\r")


class Framer:
    """Cuts a byte stream into whole frames, blank line included, however the bytes arrive.

    Joined together, what :meth:`feed` and :meth:`flush` give is always exactly what was fed. A frame longer than
    ``cap_bytes`` is given piecewise (``whole`` is False for its pieces), so memory stays bounded.
    """

    __slots__ = ("_searched", "cap_bytes", "oversized", "pending")

    def __init__(self, cap_bytes: int = 1 << 20) -> None:
        self._searched = 0
        self.cap_bytes = cap_bytes
        self.oversized = False
        self.pending = b""
        """An unfinished frame, held back."""

    def feed(self, data: bytes) -> list[tuple[bytes, bool]]:
        """The frames that are complete now, each with whether it is a whole frame."""
        buffer = self.pending + data if self.pending else data
        frames: list[tuple[bytes, bool]] = []
        start = 0
        search = self._searched
        while (match := _BLANK.search(buffer, search)) is not None:
            end = match.end()
            frames.append((buffer[start:end], not self.oversized))
            self.oversized = False
            start = search = end
        rest = buffer[start:] if start else buffer
        if len(rest) > self.cap_bytes:
            # a blank line may be split over two reads: the last bytes stay here
            frames.append((rest[:-3], False))
            rest = rest[-3:]
            self.oversized = True
        self.pending = rest
        self._searched = max(0, len(rest) - 3)
        return frames

    def flush(self) -> bytes:
        """The unfinished rest; the framer is empty afterwards."""
        rest, self.pending, self._searched = self.pending, b"", 0
        return rest


def data_of(frame: bytes) -> bytes:
    """The ``data:`` of one frame (several lines joined by a newline, as the standard says); empty without any."""
    lines = [_value(line) for line in _LINE.split(frame) if line.startswith(b"data")]
    return b"\n".join(line for line in lines if line is not None)


def event_of(frame: bytes) -> bytes:
    """The ``event:`` name of one frame; empty when it has none."""
    for line in _LINE.split(frame):
        if line.startswith(b"event"):
            return _value(line, b"event") or b""
    return b""


def _value(line: bytes, field: bytes = b"data") -> bytes | None:
    rest = line[len(field) :]
    if rest[:1] == b":":
        return rest[2:] if rest[1:2] == b" " else rest[1:]
    return b"" if not rest else None


def with_data(frame: bytes, data: bytes) -> bytes:
    """``frame`` with its data replaced by one line; every other line and the line ends stay."""
    out: list[bytes] = []
    done = False
    for line in frame.splitlines(keepends=True):
        if line.startswith((b"data:", b"data\n", b"data\r")):
            if not done:
                out.append(b"data: " + data + line[len(line.rstrip(b"\r\n")) :])
                done = True
        else:
            out.append(line)
    return b"".join(out)
