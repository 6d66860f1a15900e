"""Asking one engine how it is: alive, which models, what its telemetry says. One connection per question."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import cast

import aiohttp

from homeport.fingerprint import JsonValue
from homeport_engines.registry import kind
from homeport_proxy.attention import within
from homeport_proxy.config import Backend, ClientTls, ConfigError, Keyed
from homeport_proxy.splice import document_of

MAX_ANSWER_BYTES = 8 * 1024 * 1024


class Alive(StrEnum):
    """What a liveness question found."""

    YES = "yes"
    NO = "no"
    REFUSED = "refused"


class ProbeError(Exception):
    """A question without a usable answer; the text says what came instead. ``refused``: nobody listens there."""

    def __init__(self, message: str, *, refused: bool = False, status: int | None = None) -> None:
        super().__init__(message)
        self.refused = refused
        self.status = status

    @property
    def no_such_page(self) -> bool:
        """Whether the server has nothing at that path; a key it asks for is another matter."""
        return self.status in (404, 405, 410, 501)


@dataclass(frozen=True, slots=True)
class Served:
    """What ``/v1/models`` tells: names (adapters included), and the longest context where the engine says it."""

    models: frozenset[str]
    max_model_len: int | None


def client_tls(tls: ClientTls | None) -> ssl.SSLContext | bool:
    """The TLS context for an engine or peer; True means the system's authorities. Raises ConfigError."""
    if tls is None:
        return True
    try:
        context = ssl.create_default_context(cafile=str(tls.ca) if tls.ca else None)
        if tls.cert is not None:
            context.load_cert_chain(str(tls.cert), str(tls.key) if tls.key else None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError([f"tls: cannot be loaded: {error}"]) from None
    if not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def request_headers(holder: Keyed, headers: Mapping[str, str]) -> dict[str, str]:
    """The configured headers with the key as a bearer token."""
    key = holder.key()
    return dict(headers) if key is None else {**headers, "authorization": f"Bearer {key}"}


_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"})
"""What OpenSSL calls an answer in plain text; which one depends on its version and on the answer."""


def reason_of(error: OSError) -> str:
    """Why a connection failed, in the system's words and without the address."""
    if isinstance(error, ssl.SSLError):  # its errno is OpenSSL's own, not the system's
        if error.reason in _NO_TLS:
            return "the port speaks no TLS; write http:// in the url"
        return f"TLS: {(error.reason or str(error)).replace('_', ' ').lower()}"
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)


class Prober:
    """Questions to engines, each bounded by ``timeout_s`` and :data:`MAX_ANSWER_BYTES`."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._tls: dict[str, ssl.SSLContext | bool] = {}

    async def __aenter__(self) -> Prober:
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def alive(self, backend: Backend) -> tuple[Alive, str | None]:
        """Whether the engine answers, and what came instead. A 4xx does (the server is there), a 5xx does not."""
        try:
            await self.get(backend, kind(backend.engine).health_path)
        except ProbeError as error:
            if error.status is not None and error.status < 500:
                return Alive.YES, None
            return (Alive.REFUSED if error.refused else Alive.NO), str(error)
        return Alive.YES, None

    async def served(self, backend: Backend) -> Served:
        """The models of the engine. Raises :class:`ProbeError`."""
        text = await self.get(backend, "/v1/models")
        try:
            entries = cast("list[dict[str, JsonValue]]", document_of(text.encode())["data"])
            names = frozenset(str(entry["id"]) for entry in entries)
            lengths = [entry.get("max_model_len") for entry in entries]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ProbeError("/v1/models is not a list of models") from None
        return Served(names, max((n for n in lengths if isinstance(n, int)), default=None))

    async def get(self, backend: Backend, path: str) -> str:
        """The body of a 200 answer. Raises :class:`ProbeError` for anything else."""
        assert self._session is not None, "used outside its context"
        try:
            tls = self._context(backend)
            async with (
                within(self.timeout_s),
                self._session.get(
                    backend.url + path,
                    headers=request_headers(backend, backend.headers),
                    ssl=tls,
                    allow_redirects=False,
                ) as answer,
            ):
                body = await answer.content.read(MAX_ANSWER_BYTES)
                while not answer.content.at_eof() and len(body) < MAX_ANSWER_BYTES:
                    body += await answer.content.read(MAX_ANSWER_BYTES - len(body))
                if answer.status != 200:
                    raise ProbeError(f"{path} answers {answer.status}", status=answer.status)
                return body.decode(errors="replace")
        except ConfigError as error:
            raise ProbeError(str(error)) from None
        except TimeoutError:
            raise ProbeError(f"{path} does not answer within {self.timeout_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            what = "refuses connections" if refused else f"cannot be reached: {reason_of(error.os_error)}"
            raise ProbeError(what, refused=refused) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ProbeError(f"{path} failed: {type(error).__name__}: {error}") from None

    def _context(self, backend: Backend) -> ssl.SSLContext | bool:
        key = repr(backend.tls)
        if key not in self._tls:
            self._tls[key] = client_tls(backend.tls)
        return self._tls[key]
