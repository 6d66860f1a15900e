"""Bytes from an engine to the client: as they come, framed by frames, changed only where they must be.

A :class:`Relay` is the receiver of one answer. It decides from the head what kind of answer it is: a stream of SSE
frames, a JSON document that is read whole (its first byte is its last), raw bytes, or a refusal that another engine
may still better. Nothing reaches the client before the first body byte, so until then the request may be tried
elsewhere. A frame is held only until it is complete, so a dying engine never leaves half a frame with the client.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto

import msgspec

from homeport.fingerprint import JsonValue
from homeport_proxy.api.base import ClientApi, frame_parts, holds_internal, is_internal, parse, without_internal
from homeport_proxy.downstream import Downstream
from homeport_proxy.errors import ProxyError, stream_frame, upstream_error, upstream_timeout
from homeport_proxy.exchange import Exchange, LegRecord, State, TokenUsage
from homeport_proxy.splice import edit, edit_at
from homeport_proxy.sse import Framer, with_data
from homeport_proxy.upstream import Flow, Head, UpstreamError

DOCUMENT_CAP_BYTES = 64 * 1024 * 1024
REFUSAL_CAP_BYTES = 1024 * 1024


class Mode(Enum):
    """What kind of answer this is."""

    UNKNOWN = auto()
    STREAM = auto()
    DOCUMENT = auto()
    RAW = auto()
    REFUSAL = auto()


class Refused(msgspec.Struct):
    """An answer that was kept back: another engine may do better; else it is passed on as it is."""

    head: Head
    body: bytes


class Plan(msgspec.Struct):
    """How one answer is relayed.

    ``headers(head, stream)`` gives the client's header lines when the answer starts; ``refusals`` are the statuses that
    are kept back; ``cached`` is asked for the prefill engine's cached tokens when ``fix_usage`` is set, once ``ready``
    says that they are known (until then the answer waits here, see :meth:`Relay.release`);
    ``hide_usage`` takes out the usage chunk that the client did not ask for.
    """

    api: ClientApi
    headers: Callable[[Head, bool], bytes]
    refusals: Collection[int] = ()
    fix_usage: bool = False
    cached: Callable[[], int | None] = lambda: None
    ready: Callable[[], bool] = lambda: True
    hide_usage: bool = False
    on_first_token: Callable[[], None] = lambda: None
    on_gap: Callable[[float], None] | None = None
    on_params: Callable[[Mapping[str, JsonValue]], None] | None = None
    """Hears the hand-off parameters that an answer carries, before they are taken out of it."""


class Relay:
    """Receives one engine's answer for one client. Its end is in :attr:`result`, awaited by :meth:`finished`."""

    result: Refused | UpstreamError | None = None
    done = False
    _wake: asyncio.Future[None] | None = None
    _flow: Flow | None = None
    _held = False
    _mode = Mode.UNKNOWN
    _head: Head | None = None
    _size = 0
    _framer: Framer
    _inflate: zlib._Decompress | None = None
    _last = b""
    _last_s = 0.0
    _flows = False
    """After the first token, with no frame unfinished: whole frames may pass as they come."""
    _failed = False
    _ended_early = False

    def __init__(self, exchange: Exchange, leg: LegRecord, downstream: Downstream, plan: Plan) -> None:
        self._exchange = exchange
        self._leg = leg
        self._down = downstream
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._early: list[bytes] = []
        self.usage = TokenUsage()

    @property
    def token_seen(self) -> bool:
        """Whether generated output has come."""
        return self._leg.state >= State.FIRST_TOKEN

    @property
    def whole(self) -> bool:
        """Whether the client has its whole answer, though the engine may not have closed it yet."""
        if self.done:
            return self.result is None
        return self._mode is Mode.STREAM and not self._failed and self._shows_end(self._last)

    @property
    def is_stream(self) -> bool:
        """Whether the engine answers with SSE."""
        return self._mode is Mode.STREAM

    @property
    def waiting_for_client(self) -> bool:
        """Whether the engine is held because the client reads slowly."""
        return self._held

    # Receiver

    def on_head(self, head: Head, flow: Flow) -> None:
        self._head, self._flow = head, flow
        leg = self._leg
        leg.status, leg.state, leg.headers_s = head.status, State.HEADERS, self._loop.time()
        kind = (head.get(b"content-type") or b"").lower()
        coding = (head.get(b"content-encoding") or b"").lower()
        if coding in (b"gzip", b"deflate", b"x-gzip"):
            # asked for identity and got this: read it here, else neither usage nor frames could be seen
            self._inflate = zlib.decompressobj(wbits=47)
            head.headers = [pair for pair in head.headers if pair[0] != b"content-encoding"]
        plain = not coding or self._inflate is not None
        if head.status in self._plan.refusals:
            self._mode = Mode.REFUSAL
        elif plain and kind.startswith(b"text/event-stream") and not self._down.bodyless:
            self._mode = Mode.STREAM
            self._framer = Framer()
        elif plain and b"json" in kind and not self._down.bodyless and self._plan.api.name != "other":
            self._mode = Mode.DOCUMENT
        else:
            self._mode = Mode.RAW

    def on_data(self, data: bytes) -> None:
        if self._flows and data.endswith(b"\n\n") and not _marked(data):
            self._count_chunk()
            self._last = data
            if self._down.write(data) and not self._held:
                self._hold()
            return
        if self._inflate is not None:
            try:
                data = self._inflate.decompress(data)
            except zlib.error:
                self.on_fault(UpstreamError("the engine's compressed answer is damaged", sent=True, answered=True))
                return
        if not data or self.done:
            return
        if not self.token_seen and not self._plan.api.generates:
            self._leg.state = State.FIRST_TOKEN  # no tokens to wait for: from here on only silence counts
            self._plan.on_first_token()
        if self._mode is Mode.STREAM:
            if self._plan.fix_usage and self._must_wait():
                self._early.append(data)
                return
            self._on_stream(data)
        elif self._mode is Mode.RAW:
            if not self._down.started:
                self._start(self._declared_length())
            self._write(data)
        else:
            self._collect(data)

    def on_end(self) -> None:
        if self.done:
            return
        if self._must_wait() and self._mode is not Mode.REFUSAL:
            self._ended_early = True
            return
        if self._mode is Mode.REFUSAL:
            assert self._head is not None
            self._settle(Refused(self._head, b"".join(self._parts)))
            return
        if self._mode is Mode.DOCUMENT:
            self._send_document()
        elif self._mode is Mode.STREAM:
            if self._truncated():
                self.on_fault(UpstreamError("the engine's stream ended without its end", sent=True, answered=True))
                return
            self._write(self._framer.flush())
        if not self._down.started:
            self._start(0)
        self._down.end()
        self._leg.state = State.DONE
        self._settle(None)

    def on_fault(self, fault: UpstreamError) -> None:
        if self.done:
            return
        self._leg.error = str(fault)
        if self._down.started:
            self._break(fault)
        self._settle(fault)

    @property
    def has_answer(self) -> bool:
        """Whether the engine has sent any part of its answer's body."""
        return bool(self._early or self._parts) or self._ended_early or self._down.started

    def release(self) -> None:
        """The prefill engine's figures are known, or will never be: what waited for them goes on."""
        early, self._early = self._early, []
        if early and not self.done:
            self._on_stream(b"".join(early))
        if self._ended_early:
            self._ended_early = False
            self.on_end()

    def _must_wait(self) -> bool:
        return self._plan.fix_usage and not self._plan.ready()

    # the end

    async def finished(self) -> Refused | UpstreamError | None:
        """Wait for the end; None when the client has a whole answer. Holds the engine while the client is slow.

        A client that hangs up on the last frame of its answer (Codex does) has been served: that cancellation ends
        here.
        """
        while not self.done:
            self._wake = self._loop.create_future()
            try:
                await self._wake
            except asyncio.CancelledError:
                if not self.whole:
                    raise
                self._hung_up()
            if self._held and not self.done:
                await self._down.drained()
                self._held = False
                if self._flow is not None:
                    self._flow.resume()
        return self.result

    def _hung_up(self) -> None:
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
        if self.done:
            return
        if self._flow is not None:
            self._flow.abort()
        self._leg.state = State.DONE
        self._settle(None)

    def _settle(self, result: Refused | UpstreamError | None) -> None:
        self.done = True
        self._flows = False
        self.result = result
        self._leg.ended_s = self._loop.time()
        self._rouse()

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _break(self, fault: UpstreamError) -> None:
        """The engine failed after the client got something."""
        if self._mode is not Mode.STREAM:
            self._down.break_off()
            return
        error = broken_stream(fault)
        self._exchange.error = error.code
        half = b"\n\n" if self._framer.oversized else b""
        self._framer.flush()
        number = parse(frame_parts(self._last)[1]).get("sequence_number")
        following = number + 1 if isinstance(number, int) else 0
        self._down.write(half + stream_frame(error, self._plan.api.name, self._exchange.request_id, following))
        self._down.end()

    def _read_usage(self, document: bytes) -> bool:
        """Take the counts of a document or frame; a stream's are cumulative. False when it has none."""
        try:
            found = self._plan.api.read_usage(document)
        except (ValueError, TypeError, AttributeError, KeyError):
            return False  # not the shape this API promises
        if found is None:
            return False
        usage = self.usage
        usage.prompt_tokens = _larger(usage.prompt_tokens, found.prompt_tokens)
        usage.output_tokens = _larger(usage.output_tokens, found.output_tokens)
        if found.cached_tokens is not None:
            usage.cached_tokens = found.cached_tokens
        return True

    def _learn_id(self, document: bytes) -> None:
        """A Responses answer may be named by later requests."""
        if self._plan.api.name == "responses":
            fields = parse(document)
            response = fields.get("response") or fields
            found = response.get("id") if isinstance(response, dict) else None
            if isinstance(found, str):
                self._exchange.response_id = found

    # streams

    def _on_stream(self, data: bytes) -> None:
        if self._leg.state >= State.FIRST_TOKEN:
            self._count_chunk()
        pieces = self._framer.feed(data)
        out = b"".join([self._frame(piece) if is_frame else piece for piece, is_frame in pieces])
        if out and not self._down.started:
            self._start(None)
        if out:
            self._write(out)
        whole = not self._framer.pending and not self._framer.oversized
        self._flows = whole and self._inflate is None and self._leg.state >= State.FIRST_TOKEN

    def _count_chunk(self) -> None:
        now_s = self._loop.time()
        exchange = self._exchange
        exchange.chunks += 1
        if self._plan.on_gap is not None:
            self._plan.on_gap(now_s - self._last_s)
        self._last_s = exchange.last_token_s = now_s

    def _frame(self, frame: bytes) -> bytes:
        self._last = frame
        if self.token_seen and not _marked(frame):
            return frame
        event, data = frame_parts(frame)
        try:
            if b'"error"' in data and self._plan.api.fails(event, data):
                self._fail_inside()
            elif not self.token_seen and not self._failed and data and self._plan.api.has_token(event, data):
                self._first_token()
            fixed = self._fix(data)
        except (ValueError, TypeError, AttributeError, KeyError):
            return frame  # not the shape this API promises: nothing of ours to change in it
        if fixed is None:
            return b""
        return frame if fixed is data else with_data(frame, fixed)

    def _fix(self, data: bytes) -> bytes | None:
        """One frame's data as the client gets it; None when the frame is not for it."""
        plan = self._plan
        fixed = data
        if b'"usage"' in data:
            self._learn_id(data)
            if plan.fix_usage:
                fixed = plan.api.fix_usage(fixed, plan.cached())
            reported = self._read_usage(fixed)
            if plan.hide_usage:
                if reported and not parse(fixed).get("choices"):
                    return None
                fixed = edit(fixed, {}, ("usage",))
        if holds_internal(fixed):
            self._hear_params(fixed)
            fixed = _strip(fixed)
        return fixed

    def _hear_params(self, document: bytes) -> None:
        if self._plan.on_params is None:
            return
        fields = parse(document)
        inner = fields.get("response")
        params = (inner if isinstance(inner, dict) else fields).get("kv_transfer_params")
        if isinstance(params, dict):
            self._plan.on_params(params)

    def _fail_inside(self) -> None:
        """The engine reports in its stream that it failed: the client reads it as it stands, the books as a failure."""
        self._failed = True
        self._leg.error = "the engine reported an error in its stream"
        self._exchange.error = "upstream_error"

    def _first_token(self) -> None:
        now_s = self._loop.time()
        self._leg.state = State.FIRST_TOKEN
        self._leg.first_token_s = self._exchange.first_token_s = self._exchange.last_token_s = self._last_s = now_s
        self._plan.on_first_token()

    def _truncated(self) -> bool:
        """A stream that only its closed connection ended must show its own end; others say so by their framing."""
        head = self._head
        if head is None or self._failed or head.get(b"content-length") or head.get(b"transfer-encoding"):
            return False
        return self._plan.api.generates and not self._shows_end(self._last + self._framer.flush() + b"\n\n")

    def _shows_end(self, data: bytes) -> bool:
        frames = Framer().feed(data)
        return any(self._plan.api.ends(*frame_parts(frame)) for frame, _ in frames)

    # documents

    def _collect(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._mode is Mode.REFUSAL and self._size > REFUSAL_CAP_BYTES:
            self._parts = [b"".join(self._parts)[:REFUSAL_CAP_BYTES]]
        elif self._mode is Mode.DOCUMENT and self._size > DOCUMENT_CAP_BYTES:
            self._mode = Mode.RAW
            self._start(self._declared_length())
            self._write(b"".join(self._parts))
            self._parts = []

    def _send_document(self) -> None:
        head = self._head
        assert head is not None
        body = b"".join(self._parts)
        if head.status < 400:
            if self._plan.api.generates:
                # its first byte is its last: the earliest that anybody can see of its first token
                self._leg.first_token_s = self._exchange.first_token_s = self._loop.time()
            try:
                if self._plan.fix_usage:
                    body = self._plan.api.fix_usage(body, self._plan.cached())
                if holds_internal(body):
                    self._hear_params(body)
                    body = _strip(body)
            except (ValueError, TypeError, AttributeError, KeyError):
                pass  # not the shape this API promises: it passes as it is
            self._read_usage(body)
            self._learn_id(body)
        self._start(len(body))
        self._write(body)

    def _declared_length(self) -> int | None:
        length = self._head.get(b"content-length") if self._head is not None else None
        return int(length) if length is not None and length.isdigit() and self._inflate is None else None

    # writing

    def _start(self, length: int | None) -> None:
        head = self._head
        assert head is not None
        self._exchange.status = head.status
        self._exchange.usage = self.usage
        self._exchange.headers_sent_s = self._loop.time()
        lines = self._plan.headers(head, self._mode is Mode.STREAM)
        if self._down.bodyless and length == 0:
            length = self._declared_length()
        self._down.start(head.status, head.reason, lines, length)

    def _write(self, data: bytes) -> None:
        if self._down.write(data) and not self._held:
            self._hold()

    def _hold(self) -> None:
        """The client reads more slowly than the engine writes: let the engine wait."""
        self._held = True
        if self._flow is not None:
            self._flow.pause()
        self._rouse()


def _strip(document: bytes) -> bytes:
    """Without the engines' own members, at the top and inside ``response`` or ``message``."""
    document = without_internal(document)
    if not holds_internal(document):
        return document
    for part in ("response", "message"):
        inner = parse(document).get(part)
        if isinstance(inner, dict):
            document = edit_at(document, (part,), {}, [name for name in inner if is_internal(name)])
    return document


def _marked(data: bytes) -> bool:
    """Whether frames may hold something that must change: a quick look, written out because every chunk gets it."""
    return b'"usage"' in data or b"_params" in data or b"bootstrap_" in data or b'"error"' in data


def _larger(known: int | None, found: int | None) -> int | None:
    return found if known is None else known if found is None else max(known, found)


def broken_stream(fault: UpstreamError) -> ProxyError:
    """What a client is told when its stream breaks in the middle."""
    if fault.timed_out:
        return upstream_timeout(f"The engine fell silent: {fault}.")
    return upstream_error(f"The stream broke: {fault}. What came so far is all there is.", may_be_generating=False)
