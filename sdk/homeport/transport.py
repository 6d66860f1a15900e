"""The one place that touches httpx and httpx2: wraps a client's transport, sync or async, and never fails a request.

A transport of ours holds the one it wraps. Whatever goes wrong inside Homeport is counted
(:func:`homeport.failures`) and the caller's own request and the server's own bytes go through as they are.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypedDict, TypeVar, cast

from homeport.call import Mode, Settings, Wire, plan
from homeport.failures import failed
from homeport.profiles import named
from homeport.session import Session
from homeport.session import session as as_session
from homeport.stabilise import ToolOrder
from homeport.tap import Tap

if TYPE_CHECKING:
    from collections.abc import MutableMapping

ClientT = TypeVar("ClientT")


# --- the shapes of httpx and httpx2 that are used --------------------------------------------------------------------


class _Request(Protocol):
    method: str
    url: object
    headers: MutableMapping[str, str]
    extensions: MutableMapping[str, object]

    def __init__(
        self,
        method: str,
        url: object,
        *,
        headers: MutableMapping[str, str],
        content: bytes,
        extensions: MutableMapping[str, object],
    ) -> None: ...

    @property
    def content(self) -> bytes: ...


class _ByteStream(Protocol):
    def __iter__(self) -> Iterator[bytes]: ...

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def close(self) -> None: ...

    async def aclose(self) -> None: ...


class _Response(Protocol):
    status_code: int
    headers: MutableMapping[str, str]
    stream: _ByteStream
    extensions: MutableMapping[str, object]
    is_stream_consumed: bool

    def __init__(
        self,
        status_code: int,
        *,
        headers: MutableMapping[str, str],
        stream: _ByteStream,
        extensions: MutableMapping[str, object],
    ) -> None: ...

    @property
    def content(self) -> bytes: ...


class _Transport(Protocol):
    def handle_request(self, request: _Request) -> _Response: ...

    async def handle_async_request(self, request: _Request) -> _Response: ...

    def close(self) -> None: ...

    async def aclose(self) -> None: ...


class _Client(Protocol):
    _transport: _Transport
    _mounts: MutableMapping[object, _Transport | None]


# --- the mixin: everything that does not depend on sync or async ------------------------------------------------------


class _Wrapped:
    """A transport of Homeport around another one."""

    homeport_settings: Settings
    homeport_inner: _Transport

    def _outgoing(self, request: _Request) -> tuple[_Request, Tap | None]:
        """The request to send, and what reads its answer: made before it is sent, so that nothing is asked for that
        could not be taken out again."""
        try:
            content = _content(request)
            if content is None:
                return request, None
            headers = {name.lower(): value for name, value in request.headers.items()}
            planned = plan(Wire(request.method, str(request.url), headers, content), self.homeport_settings)
            if planned is None:
                return request, None
            sent, call = planned
            tap = Tap(call)
            if not sent.headers and sent.content is content:
                return request, tap
            return _rebuilt(request, sent.headers, sent.content), tap
        except Exception as error:
            failed("request", error)
            return request, None

    def _incoming(self, tap: Tap, response: _Response) -> _Response:
        try:
            response = _begun(tap, response, type(self).homeport_module)
        except Exception as error:
            failed("response", error)
        if response.status_code < 400:
            if tap.hides:
                for name in ("content-encoding", "content-length"):
                    response.headers.pop(name, None)
            response.stream = cast("_ByteStream", type(self).homeport_stream(response.stream, tap))
        return response

    homeport_module: ModuleType
    homeport_stream: type[_SyncStream] | type[_AsyncStream]

    def __getattr__(self, name: str) -> object:
        if name.startswith("homeport_"):
            raise AttributeError(name)
        return getattr(self.homeport_inner, name)


class _SyncMixin(_Wrapped):
    def handle_request(self, request: _Request) -> _Response:
        outgoing, tap = self._outgoing(request)
        try:
            response = self.homeport_inner.handle_request(outgoing)
        except Exception:
            if tap is not None:
                tap.fail()
            raise
        return response if tap is None else self._incoming(tap, response)

    def close(self) -> None:
        self.homeport_inner.close()


class _AsyncMixin(_Wrapped):
    async def handle_async_request(self, request: _Request) -> _Response:
        outgoing, tap = self._outgoing(request)
        try:
            response = await self.homeport_inner.handle_async_request(outgoing)
        except Exception:
            if tap is not None:
                tap.fail()
            raise
        return response if tap is None else self._incoming(tap, response)

    async def aclose(self) -> None:
        await self.homeport_inner.aclose()


def _content(request: _Request) -> bytes | None:
    """The body when it is in memory; None for one that is streamed."""
    try:
        return request.content
    except Exception:  # each httpx has its own RequestNotRead
        return None


def _rebuilt(request: _Request, headers: Mapping[str, str], content: bytes) -> _Request:
    """The request with other headers and content; the caller's own object stays as it was."""
    merged = type(request.headers)(request.headers)  # type: ignore[call-arg]
    merged.update(headers)
    if "transfer-encoding" not in merged:
        merged["content-length"] = str(len(content))
    return type(request)(request.method, request.url, headers=merged, content=content, extensions=request.extensions)


def _begun(tap: Tap, response: _Response, module: ModuleType) -> _Response:
    """The response as it will be read; its head is told to the tap."""
    if response.status_code < 400:
        response = _unread(response, module)
    tap.begin(response.status_code, {name.lower(): value for name, value in response.headers.items()})
    return response


def _unread(response: _Response, module: ModuleType) -> _Response:
    """The response as it comes from a server: one that is read already (a test's, a cache's) is made again."""
    if not response.is_stream_consumed:
        return response
    headers, stream = type(response.headers)(response.headers), response.stream  # type: ignore[call-arg]
    if not isinstance(stream, module.ByteStream):  # one that can be read only once, and was decoded then
        stream = module.ByteStream(response.content)
        for name in ("content-encoding", "content-length"):
            headers.pop(name, None)
    return type(response)(response.status_code, headers=headers, stream=stream, extensions=response.extensions)


def _passed(tap: Tap, chunk: bytes) -> bytes:
    try:
        return tap.feed(chunk)
    except Exception as error:
        failed("stream", error)
        return chunk


def _rest(tap: Tap) -> bytes:
    try:
        return tap.end()
    except Exception as error:
        failed("stream", error)
        return b""


def _closed(tap: Tap) -> None:
    try:
        tap.close()
    except Exception as error:
        failed("books", error)


class _SyncStream:
    def __init__(self, stream: _ByteStream, tap: Tap) -> None:
        self._stream, self._tap = stream, tap

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            if passed := _passed(self._tap, chunk):
                yield passed
        if rest := _rest(self._tap):
            yield rest
        _closed(self._tap)

    def close(self) -> None:
        _closed(self._tap)
        self._stream.close()


class _AsyncStream:
    def __init__(self, stream: _ByteStream, tap: Tap) -> None:
        self._stream, self._tap = stream, tap

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            if passed := _passed(self._tap, chunk):
                yield passed
        if rest := _rest(self._tap):
            yield rest
        _closed(self._tap)

    async def aclose(self) -> None:
        _closed(self._tap)
        await self._stream.aclose()


@lru_cache(maxsize=8)
def _stream_class(module: ModuleType, is_async: bool) -> type[_SyncStream] | type[_AsyncStream]:
    mixin: type = _AsyncStream if is_async else _SyncStream
    base = module.AsyncByteStream if is_async else module.SyncByteStream
    return cast("type[_SyncStream] | type[_AsyncStream]", type(f"Homeport{base.__name__}", (mixin, base), {}))


@lru_cache(maxsize=8)
def _transport_class(module: ModuleType, is_async: bool) -> type[_Wrapped]:
    mixin: type = _AsyncMixin if is_async else _SyncMixin
    base = module.AsyncBaseTransport if is_async else module.BaseTransport
    names = {"homeport_module": module, "homeport_stream": _stream_class(module, is_async)}
    return cast("type[_Wrapped]", type(f"Homeport{base.__name__}", (mixin, base), names))


def _wrap(inner: object, module: ModuleType, is_async: bool, settings: Settings) -> _Wrapped:
    if isinstance(inner, _Wrapped):
        inner.homeport_settings = settings  # attached again: the newest settings hold
        return inner
    wrapped = _transport_class(module, is_async)()
    wrapped.homeport_settings = settings
    wrapped.homeport_inner = cast("_Transport", inner)
    return wrapped


# --- for users -------------------------------------------------------------------------------------------------------


Who: TypeAlias = "str | Session | Callable[[], Session | None]"
"""A session: its id, itself, or a function that is asked at each request."""


def _settings(mode: Mode, session: Who | None, profile: str | None, tool_order: ToolOrder, namespace: str) -> Settings:
    if mode not in ("observe", "hint", "stabilise"):
        raise ValueError(f"mode must be observe, hint or stabilise, not {mode!r}")
    if tool_order not in ("sorted", "caller"):
        raise ValueError(f"tool_order must be sorted or caller, not {tool_order!r}")
    if profile is not None:
        named(profile)  # an unknown name fails here and not on the first request
    if isinstance(session, str):
        session = as_session(session, namespace=namespace)
    return Settings(mode, session, profile, tool_order, namespace)


class Options(TypedDict, total=False):
    """The options of :func:`attach`, for functions that pass them on."""

    mode: Mode
    session: Who | None
    profile: str | None
    tool_order: ToolOrder
    namespace: str


def attach(
    client: ClientT,
    *,
    mode: Mode = "stabilise",
    session: Who | None = None,
    profile: str | None = None,
    tool_order: ToolOrder = "sorted",
    namespace: str = "",
) -> ClientT:
    """Wrap the transport of a client (openai, anthropic, httpx, httpx2, or an SDK built on them) and return it.

    ``mode``: ``observe`` only measures, bytes stay as they are; ``hint`` adds session headers, cache keys and
    ``stream_options.include_usage``; ``stabilise`` also freezes tool order and definitions and declared volatile text.
    ``session``: for requests around which no block is open (plain threads): an id, a session, or a function that is
    asked at each request.
    ``profile``: a harness by name; default: recognised for certain or none. ``tool_order``: ``caller`` keeps the
    caller's order on first sight. ``namespace``: keeps ids of different users apart.

    Raises TypeError when no httpx client is found in ``client``; afterwards nothing in Homeport fails a request.
    """
    settings = _settings(mode, session, profile, tool_order, namespace)
    found = list(_http_clients(client))
    if not found:
        raise TypeError(
            f"attach() finds no httpx or httpx2 client in {type(client).__name__}; attach the client it wraps, or "
            "build its HTTP client with transport=homeport.transport()"
        )
    for http, module, is_async in found:
        http._transport = cast("_Transport", _wrap(http._transport, module, is_async, settings))
        for pattern, mounted in list(http._mounts.items()):
            if mounted is not None:
                http._mounts[pattern] = cast("_Transport", _wrap(mounted, module, is_async, settings))
    return client


def transport(
    inner: object = None,
    *,
    mode: Mode = "stabilise",
    session: Who | None = None,
    profile: str | None = None,
    tool_order: ToolOrder = "sorted",
    namespace: str = "",
) -> object:
    """A sync transport around ``inner`` (default: a new ``HTTPTransport``), for ``httpx2.Client(transport=...)`` or
    ``httpx.Client(transport=...)``; options as for :func:`attach`."""
    module = _module_of(inner)
    given = module.HTTPTransport() if inner is None else inner
    return _wrap(given, module, False, _settings(mode, session, profile, tool_order, namespace))


def async_transport(
    inner: object = None,
    *,
    mode: Mode = "stabilise",
    session: Who | None = None,
    profile: str | None = None,
    tool_order: ToolOrder = "sorted",
    namespace: str = "",
) -> object:
    """As :func:`transport`, for async clients."""
    module = _module_of(inner)
    given = module.AsyncHTTPTransport() if inner is None else inner
    return _wrap(given, module, True, _settings(mode, session, profile, tool_order, namespace))


# --- finding the HTTP client ------------------------------------------------------------------------------------------

# beside what is called a client: where SDKs keep what keeps their HTTP client
_PLACES = frozenset({"sdk_configuration"})
_MAX_DEPTH = 4


def _http_clients(client: object) -> Iterator[tuple[_Client, ModuleType, bool]]:
    seen: set[int] = set()
    level = [client]
    for _ in range(_MAX_DEPTH):
        following: list[object] = []
        for thing in level:
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            known = _known(thing)
            if known is not None:
                yield cast("_Client", thing), *known
                continue
            # only what lies in the object: a property might build things
            members: Mapping[str, object] = getattr(thing, "__dict__", {})
            following += [value for name, value in members.items() if "client" in name or name in _PLACES]
        level = following


def _known(thing: object) -> tuple[ModuleType, bool] | None:
    for module in _loaded():
        if isinstance(thing, module.Client):
            return module, False
        if isinstance(thing, module.AsyncClient):
            return module, True
    return None


def _loaded() -> list[ModuleType]:
    return [sys.modules[name] for name in ("httpx2", "httpx") if name in sys.modules]


def _module_of(inner: object) -> ModuleType:
    """httpx or httpx2, by what ``inner`` derives from; else the one that is there, httpx2 first."""
    for module in _loaded():
        if isinstance(inner, (module.BaseTransport, module.AsyncBaseTransport)):
            return module
    for name in ("httpx2", "httpx"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise ImportError("Homeport's transports need httpx2 or httpx; install one with: pip install httpx2")
