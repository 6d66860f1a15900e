"""How answers leave: JSON, SSE frames, errors in vLLM's shapes, and the faults that hit them on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from aiohttp import web

from homeport.fingerprint import JsonValue
from homeport_engines.emulator.books import Books
from homeport_engines.emulator.faults import Fault, Faults, reset

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 429: "TooManyRequestsError", 501: "NotImplementedError"}
_GARBAGE = b"\x16\x03\x01\x02\x00garbage on the wire\r\n\r\n\x00\xff"


class ApiError(Exception):
    """An error answer in the shape of the API that was called."""

    def __init__(self, status: int, message: str, param: str | None = None, kind: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.kind = kind or _TYPES.get(status, "InternalServerError")

    def body(self, path: str) -> JsonValue:
        """The JSON body for a request to ``path``."""
        if path.startswith("/v1/messages"):
            return {"type": "error", "error": {"type": self.kind, "message": str(self)}}
        error: JsonValue = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return {"error": error}


def dump(value: JsonValue) -> bytes:
    """JSON as FastAPI writes it: compact, not escaped."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


class Wire:
    """Sends answers for one emulator and lets its faults hit them."""

    def __init__(self, faults: Faults, books: Books) -> None:
        self._faults = faults
        self._books = books

    async def strike_first(self, request: web.Request, fault: Fault) -> web.StreamResponse | None:
        """Do a fault that comes before the headers; None when the request then goes on."""
        self._books.faults_done[fault.kind] += 1
        if fault.phase != "before_headers" or fault.kind in ("silent", "content_length", "metrics_missing"):
            return None
        if fault.kind == "status":
            return self._status(request, fault)
        if fault.kind == "slow":
            await asyncio.sleep(fault.delay_s)
            return None
        if fault.kind == "hang":
            await self._faults.lifted(fault)
            return None
        return await self._cut(request, fault)

    def _status(self, request: web.Request, fault: Fault) -> web.Response:
        error = ApiError(fault.status, fault.message)
        response = web.Response(body=dump(error.body(request.path)), status=fault.status)
        response.content_type = "application/json"
        if fault.retry_after_s is not None:
            response.headers["retry-after"] = f"{fault.retry_after_s:g}"
        return response

    async def _cut(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        """End the connection the fault's way; never returns while the client stays."""
        transport = request.transport
        if transport is not None:
            if fault.kind == "garbage":
                transport.write(_GARBAGE)
            if fault.kind == "reset":
                reset(request)
            else:
                transport.close()
        await asyncio.Event().wait()  # the lost connection cancels this handler
        raise AssertionError("unreachable")

    async def reply(
        self, request: web.Request, value: JsonValue, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> web.StreamResponse:
        """Send a JSON answer."""
        body = dump(value)
        fault = request.get(FAULT)
        if fault is None or (fault.phase == "before_headers" and fault.kind not in ("silent", "content_length")):
            response = web.Response(body=body, status=status, headers=headers)
            response.content_type = "application/json"
            return response
        return await self._hurt(request, fault, body, headers or {})

    async def _hurt(
        self, request: web.Request, fault: Fault, body: bytes, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        if fault.kind == "silent":
            await self._faults.lifted(fault)
        response = web.StreamResponse(headers={**headers, "content-type": "application/json"})
        response.content_length = len(body) + (100 if fault.kind == "content_length" else 0)
        await response.prepare(request)
        sent = len(body) * min(fault.after_frames, 16) // 16 if fault.phase == "mid_stream" else 0
        if fault.kind in ("content_length", "silent"):
            sent = len(body)
        await response.write(body[:sent])
        await asyncio.sleep(0)
        if fault.kind == "hang":
            await self._faults.lifted(fault)
        elif fault.kind == "slow":
            await asyncio.sleep(fault.delay_s)
        elif fault.kind == "garbage":
            await response.write(b"\x00" * (len(body) - sent))
            return response
        elif fault.kind != "silent":
            return await self._cut(request, fault)
        await response.write(body[sent:])
        return response

    def stream(self, request: web.Request, headers: Mapping[str, str] | None = None) -> Stream:
        """Begin an SSE answer (nothing is sent before :meth:`Stream.open`)."""
        stream = Stream(self, self._faults, request, headers or {})
        request[STREAM] = stream
        return stream

    async def error(self, request: web.Request, error: ApiError) -> web.StreamResponse:
        """Send an error answer."""
        if error.status == 401:
            return await self.reply(request, {"error": "Unauthorized"}, status=401)
        return await self.reply(request, error.body(request.path), status=error.status)

    async def cut(self, request: web.Request, fault: Fault) -> None:
        """End a stream's connection the fault's way."""
        await self._cut(request, fault)


class Stream:
    """One SSE answer; frames may be hurt on their way."""

    def __init__(self, wire: Wire, faults: Faults, request: web.Request, headers: Mapping[str, str]) -> None:
        self._wire = wire
        self._faults = faults
        self._request = request
        self._fault = request.get(FAULT)
        self._frames = 0
        self.response = web.StreamResponse(headers={**headers, "content-type": "text/event-stream; charset=utf-8"})

    async def open(self) -> None:
        """Send the headers."""
        fault = self._fault
        if fault is not None and fault.kind == "silent":
            return
        if fault is not None and fault.kind == "content_length":
            self.response.content_length = 1 << 20
        await self.response.prepare(self._request)
        if fault is not None and fault.phase == "after_headers":
            await self._strike(fault, b"")

    async def frame(self, data: JsonValue | str, event: str | None = None) -> None:
        """Send one frame; text goes out as it is, anything else as JSON."""
        text = data.encode() if isinstance(data, str) else dump(data)
        raw = (f"event: {event}\n".encode() if event else b"") + b"data: " + text + b"\n\n"
        fault = self._fault
        if fault is not None and fault.kind == "silent":
            return
        if fault is not None and fault.phase == "mid_stream" and self._frames >= fault.after_frames:
            await self._strike(fault, raw)
        self._frames += 1
        await self.response.write(raw)

    async def close(self) -> web.StreamResponse:
        """End the stream."""
        fault = self._fault
        if fault is not None and fault.kind == "silent":
            await self._faults.lifted(fault)
            await self._wire.cut(self._request, fault)
        if fault is not None and fault.kind == "content_length":
            await self._wire.cut(self._request, fault)
        await self.response.write_eof()
        return self.response

    async def _strike(self, fault: Fault, raw: bytes) -> None:
        if fault.kind == "slow":
            await asyncio.sleep(fault.delay_s)
            return
        if fault.kind == "hang":
            await self._faults.lifted(fault)
            self._fault = None
            return
        if fault.kind in ("status", "content_length", "metrics_missing"):
            return
        if fault.kind == "garbage":
            await self.response.write(b"data: {not json\n\n\x00\xff\xfe: \n\n")
            self._fault = None
            return
        if fault.kind == "half_frame":
            await self.response.write(raw[: len(raw) // 2])
            await asyncio.sleep(0)
        if fault.kind == "close":
            await self.response.write_eof()
        await self._wire.cut(self._request, fault)


FAULT = web.RequestKey("fault", Fault)
"""The fault that hits a request."""
STREAM = web.RequestKey("stream", Stream)
"""A request's SSE answer, once there is one."""
