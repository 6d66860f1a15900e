"""The client's side of an answer: head and body bytes written straight to its transport, framed for its HTTP version.

aiohttp parses requests and owns the connection; only the writing of an answer is ours. :class:`RawResponse` overrides
``prepare``, ``write_eof`` and ``keep_alive`` of ``StreamResponse``, so that aiohttp treats an answer that is already
on its way as finished. That is no documented use: aiohttp's minor version is pinned, and tests hold it.
"""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import HttpVersion10, web
from aiohttp.abc import AbstractStreamWriter

from homeport_proxy.upstream import RawHeaders


class Downstream:
    """Writes one answer. Nothing here waits: after :attr:`paused` turns true, :meth:`drained` says when to go on."""

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

    @property
    def paused(self) -> bool:
        """The client reads more slowly than we write."""
        return self._protocol.writing_paused

    async def drained(self) -> None:
        """Wait until the client has read enough. Raises ConnectionError when it is gone."""
        await self._request.writer.drain()

    def start(self, status: int, reason: str, headers: RawHeaders, length: int | None) -> None:
        """Fix the head; it leaves with the first body bytes. ``length`` None: as long as it gets."""
        request = self._request
        old = request.version <= HttpVersion10
        bodyless = self.bodyless or status in (204, 304)
        self.bodyless = bodyless
        lines = [b"HTTP/1.%d %d %s\r\n" % (0 if old else 1, status, (reason or _phrase(status)).encode("latin-1"))]
        lines += [b"%s: %s\r\n" % (name, value) for name, value in headers]
        if length is not None:
            if status != 204:
                lines.append(b"content-length: %d\r\n" % length)
        elif not bodyless:
            if old:
                self.keep_alive = False
            else:
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        elif old:
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)
        self.started = True
        self.status = status

    def write(self, data: bytes) -> None:
        """Body bytes, sent at once."""
        if not data or self.bodyless or self._transport is None or self._transport.is_closing():
            return
        self.body_bytes += len(data)
        if self._chunked:
            data = b"%s%x\r\n%s\r\n" % (self._head, len(data), data)
        elif self._head:
            data = self._head + data
        self._head = b""
        self._transport.write(data)

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

    def whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """A complete answer in one write."""
        self.start(status, "", headers, len(body))
        self.write(body)
        self.end()


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown" if status != 529 else "Overloaded"


class RawResponse(web.StreamResponse):
    """Tells aiohttp that an answer has been written; see the module's docstring."""

    def __init__(self, downstream: Downstream) -> None:
        super().__init__(status=downstream.status or 499)
        self._downstream = downstream

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Nothing to prepare: the head is out."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing to end: the body is complete or the connection closed."""

    @property
    def keep_alive(self) -> bool:
        """Whether the connection takes another request."""
        return self._downstream.keep_alive and self._downstream.ended
