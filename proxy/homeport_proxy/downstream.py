"""The client's side of an answer: head and body bytes written straight to its transport, framed for its HTTP version.

aiohttp parses requests and owns the connection; only the writing of an answer is ours. What :func:`written` gives
overrides ``prepare``, ``write_eof`` and ``keep_alive`` of ``StreamResponse``, so that aiohttp treats an answer that is
already on its way as finished. That is no documented use: aiohttp's minor version is pinned, and tests hold it.
"""

from __future__ import annotations

from functools import lru_cache
from http import HTTPStatus

from aiohttp import HttpVersion10, web
from aiohttp.abc import AbstractStreamWriter


class Downstream:
    """Writes one answer. Nothing here waits: when :meth:`write` says so, :meth:`drained` tells when to go on."""

    __slots__ = (
        "_chunked",
        "_head",
        "_protocol",
        "_request",
        "_transport",
        "body_bytes",
        "bodyless",
        "ended",
        "keep_alive",
        "started",
        "status",
    )

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._protocol = request.protocol
        self._transport = request.transport
        self._chunked = False
        self._head = b""
        self.keep_alive = request.keep_alive
        self.bodyless = request.method == "HEAD"
        self.started = False
        self.ended = False
        self.status = 0
        self.body_bytes = 0

    @property
    def gone(self) -> bool:
        """The client's connection is closed or closing."""
        return self._transport is None or self._transport.is_closing()

    async def drained(self) -> None:
        """Wait until the client has read enough. Raises ConnectionError when it is gone."""
        await self._request.writer.drain()

    def start(self, status: int, reason: str, lines: bytes, length: int | None) -> None:
        """Fix the head; it leaves with the first body bytes. ``lines``: its headers; ``length`` None: as long as it
        gets."""
        request = self._request
        old = request.version <= HttpVersion10
        bodyless = self.bodyless or status in (204, 304)
        self.bodyless = bodyless
        framing = b""
        if length is not None:
            if status != 204:
                framing = b"content-length: %d\r\n" % length
        elif not bodyless:
            if old:
                self.keep_alive = False
            else:
                self._chunked = True
                framing = b"transfer-encoding: chunked\r\n"
        if not self.keep_alive:
            framing += b"connection: close\r\n"
        elif old:
            framing += b"connection: keep-alive\r\n"
        self._head = b"%s%s%s\r\n" % (_first_line(old, status, reason), lines, framing)
        self.started = True
        self.status = status

    def write(self, data: bytes) -> bool:
        """Body bytes, sent at once. True: the client reads more slowly than we write."""
        if not data or self.bodyless or self._transport is None or self._transport.is_closing():
            return False
        self.body_bytes += len(data)
        if self._chunked:
            data = b"%s%x\r\n%s\r\n" % (self._head, len(data), data)
        elif self._head:
            data = self._head + data
        self._head = b""
        self._transport.write(data)
        return self._protocol.writing_paused

    def end(self) -> None:
        """The body is complete."""
        if self.ended:
            return
        self.ended = True
        last = self._head + (b"0\r\n\r\n" if self._chunked else b"")
        self._head = b""
        if last and not self.gone and self._transport is not None:
            self._transport.write(last)

    def break_off(self) -> None:
        """The body will not be completed and the client must see that: the connection ends in the middle of it."""
        self.ended = True
        self.keep_alive = False
        if self._transport is not None and not self._transport.is_closing():
            if self._head:
                self._transport.write(self._head)
                self._head = b""
            self._transport.close()

    def whole(self, status: int, lines: bytes, body: bytes) -> None:
        """A complete answer in one write."""
        self.start(status, "", lines, len(body))
        self.write(body)
        self.end()


@lru_cache(maxsize=256)
def _first_line(old: bool, status: int, reason: str) -> bytes:
    if not reason:
        try:
            reason = HTTPStatus(status).phrase
        except ValueError:
            reason = "Unknown" if status != 529 else "Overloaded"
    return b"HTTP/1.%d %d %s\r\n" % (0 if old else 1, status, reason.encode("latin-1"))


def written(downstream: Downstream) -> web.StreamResponse:
    """What tells aiohttp that an answer has been written, or that it will not be; see the module's docstring."""
    return _KEEPS_OPEN if downstream.keep_alive and downstream.ended else _CLOSES


class _Written(web.StreamResponse):
    """Holds nothing of any answer, so that two serve for all."""

    def __init__(self, keep_alive: bool) -> None:
        super().__init__()
        self._keeps = keep_alive

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Nothing to prepare: the head is out."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing to end: the body is complete or the connection closed."""

    @property
    def keep_alive(self) -> bool:
        """Whether the connection takes another request."""
        return self._keeps


_KEEPS_OPEN, _CLOSES = _Written(True), _Written(False)
