"""Server-sent events by bytes: whole frames out of a byte stream, however the bytes arrive."""

from __future__ import annotations

import re

_BLANK = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n|\r\n\n")
_MAX_HELD_BYTES = 1 << 20


class Frames:
    """Cuts a byte stream into frames, blank line included. What :meth:`feed` and :meth:`rest` give, joined, is exactly
    what was fed. Only an unfinished frame is held, and at most 1 MiB of it."""

    def __init__(self) -> None:
        self.held = b""
        """The unfinished frame."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The frames that are complete now."""
        data = self.held + chunk if self.held else chunk
        frames: list[bytes] = []
        start = 0
        for match in _BLANK.finditer(data):
            frames.append(data[start : match.end()])
            start = match.end()
        self.held = data[start:] if start else data
        if len(self.held) > _MAX_HELD_BYTES:
            frames.append(self.rest())
        return frames

    def rest(self) -> bytes:
        """The unfinished frame; nothing is held afterwards."""
        held, self.held = self.held, b""
        return held


def data_of(frame: bytes) -> bytes:
    """The ``data`` of a frame, its lines joined by a newline; empty when there is none."""
    lines = (line[5:] for line in re.split(rb"\r\n|\n|\r", frame) if line.startswith(b"data:"))
    return b"\n".join(line[1:] if line[:1] == b" " else line for line in lines)
