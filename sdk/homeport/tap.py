"""Reads an answer's usage while its bytes pass by, and takes out the usage frame that only Homeport asked for.

Bytes pass on at once. Only while a frame must be hidden is an unfinished frame held back until its end is there. Every
part is guarded: a fault in reading never touches the bytes, a fault in hiding lets them pass.
"""

from __future__ import annotations

import importlib
import json
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from homeport.call import Call, answered, finished, unanswered
from homeport.failures import failed
from homeport.fingerprint import JsonValue
from homeport.sse import Frames, data_of
from homeport.usage import UsageMeter

MAX_ANSWER_BYTES = 8 * 1024 * 1024
"""A non-streamed answer longer than this passes, but its usage is not read."""


class _Inflater(Protocol):
    def decompress(self, data: bytes, /) -> bytes: ...


Decode: TypeAlias = Callable[[bytes], bytes]


def _as_it_is(data: bytes) -> bytes:
    return data


def decoder_for(encoding: str) -> Decode:
    """A decoder for a content encoding. Raises LookupError that names what to install for one that cannot be read."""
    make = _DECODERS.get(encoding)
    if make is None:
        raise LookupError(f"the answer is encoded as {encoding!r}, which Homeport cannot read: its usage is not known")
    return make()


def _inflater(bits: int) -> Decode:
    inner: _Inflater = zlib.decompressobj(bits)
    return inner.decompress


def _brotli() -> Decode:
    for name, method in (("brotlicffi", "decompress"), ("brotli", "process")):
        try:
            decoder = importlib.import_module(name).Decompressor()
        except ImportError:
            continue
        found: Decode = getattr(decoder, method)
        return found
    raise LookupError("the answer is encoded as 'br': its usage is read once brotli is there (pip install brotli)")


def _zstd() -> Decode:
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        raise LookupError(
            "the answer is encoded as 'zstd': its usage is read once zstandard is there (pip install zstandard)"
        ) from None
    found: Decode = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress
    return found


# a client asks for br and zstd only where it can decode them itself, so the library is nearly always there
_DECODERS: dict[str, Callable[[], Decode]] = {
    "": lambda: _as_it_is,
    "identity": lambda: _as_it_is,
    "gzip": lambda: _inflater(zlib.MAX_WBITS | 16),
    "x-gzip": lambda: _inflater(zlib.MAX_WBITS | 16),
    "deflate": lambda: _inflater(zlib.MAX_WBITS),
    "br": _brotli,
    "zstd": _zstd,
}


class Tap:
    """Sits in one answer's byte stream: made before the request is sent, :meth:`begin` with the answer's head,
    :meth:`feed` every chunk, :meth:`end` at its end, :meth:`close` once after.

    Without a head (a fault on the way to it) it still takes out the usage frame that was asked for."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._status = 200
        self._headers: Mapping[str, str] = {}
        self._streams = call.hides_usage
        self._decode: Decode = _as_it_is
        self._meter = UsageMeter()
        self._diagnostics: Mapping[str, JsonValue] | None = None
        self._frames = Frames()
        self._answer: list[bytes] | None = []
        self._answer_bytes = 0
        self._ttft_s: float | None = None
        self._closed = False
        self.hides = call.hides_usage
        """Whether chunks come out other than they went in: decoded, and without the usage frame."""
        self._reads = True
        self._frames_whole = True
        """Whether frames can still be told apart, so that one of them can be taken out."""

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """The answer's head has come; header names in lower case."""
        try:
            answered(self._call, headers)
        except Exception as error:
            failed("books", error)
        if status >= 400:
            self.fail()  # refused: nothing to read, and nobody reads it through this
            return
        streams = "text/event-stream" in headers.get("content-type", "")
        meter = UsageMeter(headers=headers)
        try:
            decode, reads = decoder_for(headers.get("content-encoding", "").strip().lower()), True
        except LookupError as error:
            failed("encoding", error)
            decode, reads = _as_it_is, False
        self._status, self._headers, self._meter = status, headers, meter
        self._streams, self._decode, self._reads = streams, decode, reads
        self.hides = self._call.hides_usage and streams and reads

    def fail(self) -> None:
        """No answer came, or a refusal."""
        try:
            unanswered(self._call)
        except Exception as error:
            failed("books", error)

    def feed(self, chunk: bytes) -> bytes:
        """The bytes to pass on for a chunk."""
        if self.hides:
            return self._feed_hiding(chunk)
        if self._reads:
            try:
                self._read(self._decode(chunk))
            except Exception as error:
                self._reads = False
                failed("stream", error)
        return chunk

    def end(self) -> bytes:
        """The bytes still held when the stream ends."""
        if not self.hides or not self._frames_whole:
            return b""
        self._frames_whole = False
        return self._frames.held

    def close(self) -> None:
        """The answer is over, complete or not."""
        if self._closed:
            return
        self._closed = True
        try:
            if not self._streams and self._answer:
                self._take(json.loads(b"".join(self._answer)))
        except ValueError:
            pass  # not JSON: nothing to read
        except Exception as error:
            failed("stream", error)
        try:
            finished(self._call, self._status, self._headers, self._meter, self._ttft_s, self._diagnostics)
        except Exception as error:
            failed("books", error)

    def _feed_hiding(self, chunk: bytes) -> bytes:
        try:
            data = self._decode(chunk)
        except Exception as error:
            failed("hide", error)
            return chunk
        if not self._frames_whole:
            return data
        try:
            frames = self._frames.feed(data)
        except Exception as error:
            failed("hide", error)
            self._frames_whole = False
            return self._frames.held + data
        passed: list[bytes] = []
        for frame in frames:
            usage_only = False
            try:
                usage_only = b'"usage"' in frame and is_usage_frame(frame)
            except Exception as error:
                failed("hide", error)
            try:
                self._see(frame)
            except Exception as error:
                failed("stream", error)
            if not usage_only:
                passed.append(frame)
        return b"".join(passed)

    def _read(self, data: bytes) -> None:
        if self._streams:
            for frame in self._frames.feed(data):
                self._see(frame)
        elif self._answer is not None:
            self._answer_bytes += len(data)
            if self._answer_bytes > MAX_ANSWER_BYTES:
                self._answer = None
            else:
                self._answer.append(data)

    def _see(self, frame: bytes) -> None:
        # most frames are a few tokens of text: only those that can matter are parsed
        if self._ttft_s is None and (b'"delta"' in frame or b".delta" in frame or b'"text"' in frame):
            self._ttft_s = time.perf_counter() - self._call.started
        if b'"usage' in frame or b"diagnostics" in frame or b"Usage" in frame:
            data = data_of(frame)
            if data[:1] == b"{":
                self._take(json.loads(data))

    def _take(self, event: JsonValue) -> None:
        if not isinstance(event, dict):
            return
        self._meter.feed(event)
        for holder in (event, event.get("message"), event.get("response")):
            if isinstance(holder, dict):
                for name in ("diagnostics", "prompt_cache_diagnostics"):
                    found = holder.get(name)
                    if isinstance(found, dict):
                        self._diagnostics = found


def is_usage_frame(frame: bytes) -> bool:
    """Whether a chat or completions frame is the extra one that ``include_usage`` brings: usage and no choices."""
    data = data_of(frame)
    if data[:1] != b"{":
        return False
    event = json.loads(data)
    return isinstance(event, dict) and event.get("choices") == [] and isinstance(event.get("usage"), dict)
