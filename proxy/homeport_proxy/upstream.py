"""Connections to engines: an own pooled HTTP/1.1 client that hands bytes over as they arrive, without a task per chunk.

A :class:`Receiver` gets the response in callbacks from ``data_received``. A pooled connection is dropped after
``IDLE_S`` seconds, below the 5 s after which uvicorn closes its side, so a request rarely meets a closed socket; when
it does, and nothing came back, the request is sent once more on a fresh connection.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from homeport_proxy.attention import within

IDLE_S = 4.0
MAX_HEAD_BYTES = 1024 * 1024
RawHeaders = Sequence[tuple[bytes, bytes]]


class UpstreamError(Exception):
    """The engine's side failed. ``sent``: the request left for the engine; ``answered``: some of its answer came."""

    def __init__(self, message: str, *, sent: bool, answered: bool, timed_out: bool = False) -> None:
        super().__init__(message)
        self.sent = sent
        self.answered = answered
        self.timed_out = timed_out


class Head(msgspec.Struct):
    """The start of an engine's answer; header names in lower case, in the order they came. ``fields``: the same by
    name, the first of each."""

    status: int
    reason: str
    headers: RawHeaders
    fields: Mapping[bytes, bytes]

    def get(self, name: bytes) -> bytes | None:
        """The first header of that (lower-case) name."""
        return self.fields.get(name)


class Receiver(Protocol):
    """Who takes an answer. Callbacks run inside the event loop's read event and must not block or raise."""

    def on_head(self, head: Head, flow: Flow) -> None: ...

    def on_data(self, data: bytes) -> None:
        """Body bytes, transfer coding removed."""

    def on_end(self) -> None:
        """The answer is complete."""

    def on_fault(self, fault: UpstreamError) -> None:
        """The answer will not be completed."""


class Flow(Protocol):
    """The engine's end of an answer: hold it back, let it go on, or hang up."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Origin:
    """Where connections go; ``prefix`` is the path part of the configured URL, in front of every request's path."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    host_header: bytes
    prefix: str = ""

    @staticmethod
    def parse(url: str, context: ssl.SSLContext | bool = True) -> Origin:
        """From ``http(s)://host[:port][/prefix]``; ``context`` True means the system's certificate authorities."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        host = parts.hostname or ""
        tls = None
        if secure:
            tls = context if isinstance(context, ssl.SSLContext) else ssl.create_default_context()
        literal = f"[{host}]" if ":" in host else host
        default = port == (443 if secure else 80)
        return Origin(host, port, tls, (literal if default else f"{literal}:{port}").encode(), parts.path.rstrip("/"))


class Connection(asyncio.Protocol):
    """One connection; carries one request at a time. ``last_byte_s`` is when the engine was last heard."""

    def __init__(self, pool: Pool, loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self._loop = loop
        self._receiver: Receiver | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._head_only = False
        self._paused = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._reason = b""
        self._head_bytes = 0
        self._answered = False
        self._headed = False
        self._until_close = False
        self._reusable = False
        self.served = 0
        self.idle_since_s = 0.0
        self.last_byte_s = 0.0
        self.closed = False
        self.transport: asyncio.Transport | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._receiver is None:
            self.abort()  # an engine that speaks unasked is not in step with us
            return
        self._answered = True
        self.last_byte_s = self._loop.time()
        try:
            self._parser.feed_data(data)
            if not self._headed:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self._fail("the head of the engine's answer does not end")
            if self._pieces:
                self._deliver()
        except httptools.HttpParserUpgrade:
            self._fail("the engine switched protocols")
        except (httptools.HttpParserError, httptools.HttpParserCallbackError) as error:
            self._fail(f"the engine's answer is not HTTP: {error}")

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._pool.forget(self)
        if self._receiver is None:
            return
        if self._headed and self._until_close and exc is None:
            self._finish()
        else:
            self._fail(f"the engine closed the connection ({type(exc).__name__ if exc else 'end of stream'})")

    # httptools callbacks

    def on_status(self, status: bytes) -> None:
        self._reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._headed:
            return  # a trailer: nobody here has asked for any
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        assert self._receiver is not None
        status = self._parser.get_status_code()
        if status < 200:
            return
        self._headed = True
        fields = dict(reversed(self._headers))
        bodyless = self._head_only or status in (204, 304)
        self._until_close = not bodyless and b"content-length" not in fields and b"transfer-encoding" not in fields
        self._receiver.on_head(Head(status, self._reason.decode("latin-1"), self._headers, fields), self)
        if self._head_only:
            self._finish()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)  # chunks that came in one read go on in one write

    def _deliver(self) -> None:
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._receiver is not None:
            self._receiver.on_data(data)

    def on_message_complete(self) -> None:
        if self._pieces:
            self._deliver()
        if not self._headed:
            self._headers, self._reason = [], b""  # an interim answer (100, 103)
            return
        self._reusable = (
            self._parser is not None
            and not self._head_only
            and self._parser.should_keep_alive()
            and not self._until_close
        )
        self._finish()

    # Flow

    def pause(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    # use by the pool and by legs

    def send(self, head: bytes, body: bytes, receiver: Receiver, *, head_only: bool = False) -> None:
        """Write one request; its answer goes to ``receiver``."""
        assert self.transport is not None
        self._receiver = receiver
        self._parser = httptools.HttpResponseParser(self)
        self._head_only = head_only
        self._headers, self._reason, self._pieces = [], b"", []
        self._head_bytes = 0
        self._answered = self._headed = self._until_close = self._reusable = False
        self.served += 1
        self.last_byte_s = self._loop.time()
        if len(body) < 65_536:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)

    def take_over(self, receiver: Receiver) -> None:
        """Let another receiver hear the rest of the answer."""
        self._receiver = receiver

    def abort(self) -> None:
        """Close at once; the engine sees the client leave. The receiver hears nothing more."""
        self._receiver = None
        self.closed = True
        if self.transport is not None:
            self.transport.abort()
        self._pool.forget(self)

    def fail(self, message: str, *, timed_out: bool = False) -> None:
        """Give up on the answer under way and tell the receiver why."""
        self._fail(message, timed_out=timed_out)

    def _fail(self, message: str, *, timed_out: bool = False) -> None:
        receiver, answered = self._receiver, self._answered
        self.abort()
        if receiver is not None:
            receiver.on_fault(UpstreamError(message, sent=True, answered=answered, timed_out=timed_out))

    def _finish(self) -> None:
        receiver, self._receiver = self._receiver, None
        if self._reusable and not self.closed:
            self.resume()
            self._pool.release(self)
        else:
            self.abort()
        if receiver is not None:
            receiver.on_end()


class Pool:
    """Connections to one origin. Idle ones are reused newest first and dropped after ``IDLE_S``."""

    def __init__(self, origin: Origin, *, connect_s: float = 5.0) -> None:
        self.origin = origin
        self.connect_s = connect_s
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self.retired = False

    @property
    def open_count(self) -> int:
        """Connections that exist, idle or busy."""
        return len(self._open)

    @property
    def busy_count(self) -> int:
        """Connections with a request under way."""
        return len(self._open) - len(self._idle)

    async def acquire(self, *, fresh: bool = False) -> Connection:
        """A connection to write to. Raises :class:`UpstreamError` (``sent`` False) when none can be made."""
        now_s = asyncio.get_running_loop().time()
        while self._idle and not fresh:
            connection = self._idle.pop()
            if now_s - connection.idle_since_s < IDLE_S and not connection.closed:
                return connection
            connection.abort()
        return await self._connect()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        origin = self.origin
        try:
            async with within(self.connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self, loop), origin.host, origin.port, ssl=origin.tls
                )
        except TimeoutError:
            raise UpstreamError(
                f"no connection to {origin.host}:{origin.port} within {self.connect_s:g} s",
                sent=False,
                answered=False,
                timed_out=True,
            ) from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise UpstreamError(
                f"cannot connect to {origin.host}:{origin.port}: {reason}", sent=False, answered=False
            ) from None
        self._open.add(connection)
        return connection

    def release(self, connection: Connection) -> None:
        """Take a connection back whose answer is complete."""
        if self.retired:
            connection.abort()
            return
        connection.idle_since_s = connection.last_byte_s
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(IDLE_S, self._sweep)

    def forget(self, connection: Connection) -> None:
        """A connection is gone."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _sweep(self) -> None:
        self._sweeper = None
        loop = asyncio.get_running_loop()
        while self._idle and loop.time() - self._idle[0].idle_since_s >= IDLE_S:
            self._idle[0].abort()
        if self._idle:
            self._sweeper = loop.call_at(self._idle[0].idle_since_s + IDLE_S, self._sweep)

    def retire(self) -> None:
        """Take no more requests: idle connections close now, busy ones after their answer."""
        self.retired = True
        for connection in list(self._idle):
            connection.abort()

    def close(self) -> None:
        """Close every connection, busy ones included."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in list(self._open):
            connection.fail("the proxy is closing its connections")


class Collector:
    """A receiver that keeps the whole answer, up to ``cap_bytes``."""

    def __init__(self, cap_bytes: int = 64 * 1024 * 1024) -> None:
        self._cap_bytes = cap_bytes
        self._parts: list[bytes] = []
        self._size = 0
        self._head: Head | None = None
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fault: UpstreamError | None = None
        self.headed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_head(self, head: Head, flow: Flow) -> None:
        self._head = head
        if not self.headed.done():
            self.headed.set_result(None)

    def on_data(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= self._cap_bytes:
            self._parts.append(data)
        elif self._fault is None:
            self._fault = UpstreamError(f"answer longer than {self._cap_bytes} bytes", sent=True, answered=True)

    def on_end(self) -> None:
        self._finish()

    def on_fault(self, fault: UpstreamError) -> None:
        self._fault = self._fault or fault
        self._finish()

    def _finish(self) -> None:
        for future in (self._done, self.headed):
            if not future.done():
                future.set_result(None)

    async def finished(self) -> tuple[Head, bytes]:
        """The answer. Raises :class:`UpstreamError` when it did not come whole."""
        await asyncio.shield(self._done)
        if self._fault is not None:
            raise self._fault
        assert self._head is not None
        return self._head, b"".join(self._parts)
