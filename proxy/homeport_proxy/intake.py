"""A client's body, read whole and bounded, with ``Expect: 100-continue`` answered."""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion10, web

from homeport_proxy.errors import ProxyError, invalid_request, request_too_large

IDLE_S = 60.0
"""How long a client may send nothing of its body before it is given up."""
DRAIN_BYTES = 16 * 1024 * 1024
DRAIN_S = 5.0


async def read_body(request: web.BaseRequest, limit_bytes: int) -> bytes:
    """The whole body. Raises ProxyError: 413 above the limit, after reading on for a bounded rest; 408 for a body that
    stops coming; 400, 417 or 501 for one that cannot be read.

    A client that writes its whole body before it reads would otherwise meet a closed connection instead of the 413.
    """
    expect = request.headers.get("expect", "").lower()
    declared = request.content_length
    if expect and expect != "100-continue":
        raise invalid_request(f"`Expect: {expect}` cannot be met; leave the header out", status=417)
    if not request.body_exists:
        return b""
    if request.headers.get("transfer-encoding", "chunked").lower() != "chunked":
        raise invalid_request("`Transfer-Encoding` may be chunked only.", status=501)
    if declared is not None and declared > limit_bytes:
        if not expect:
            await _drain(request)
        raise request_too_large(limit_bytes)
    if expect and request.version > HttpVersion10 and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if request.content.is_eof():  # short ones come with their head
        return _read_at_once(request, limit_bytes)
    try:
        async with asyncio.timeout(IDLE_S) as patience:
            return await _read(request, limit_bytes, patience)
    except TimeoutError:
        raise ProxyError(408, "invalid_request", f"Nothing of the body came for {IDLE_S:g} s.") from None


def _read_at_once(request: web.BaseRequest, limit_bytes: int) -> bytes:
    try:
        body = request.content.read_nowait()
    except web.RequestPayloadError as error:
        raise _unreadable(error) from None
    if len(body) > limit_bytes:
        raise request_too_large(limit_bytes)
    return body


async def _read(request: web.BaseRequest, limit_bytes: int, patience: asyncio.Timeout) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        while data := await request.content.readany():
            patience.reschedule(asyncio.get_running_loop().time() + IDLE_S)
            parts.append(data)
            size += len(data)
            if size > limit_bytes:
                parts.clear()
                await _drain(request)
                raise request_too_large(limit_bytes)
    except web.RequestPayloadError as error:
        raise _unreadable(error) from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _unreadable(error: web.RequestPayloadError) -> ProxyError:
    return invalid_request(f"The body cannot be read: {error}.")


async def _drain(request: web.BaseRequest) -> None:
    left = DRAIN_BYTES
    try:
        async with asyncio.timeout(DRAIN_S):
            while left > 0 and (data := await request.content.readany()):
                left -= len(data)
    except (TimeoutError, web.RequestPayloadError):
        return
