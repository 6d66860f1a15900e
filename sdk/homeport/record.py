"""Recorded requests: JSON lines that ``homeport explain`` reads, with their text or without it.

One line is ``{"ts", "session", "parent", "url", "headers", "body", "status", "response_headers", "usage", "ttft_s"}``;
only ``body`` is required. ``ts`` is the request's start in Unix seconds, ``usage`` the provider's report as it came or
:meth:`Usage.to_dict`. Two more are written where they are known: ``model`` (a model's name is no text, and is longer
than 24 characters often enough), ``elapsed_s`` (the whole answer, in seconds).
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from homeport.fingerprint import JsonValue
from homeport.redaction import is_redacted, local_key, redact
from homeport.usage import Usage


class RecordError(ValueError):
    """A line that is no recorded request; the message names the line and what is wrong with it."""


_SECRET_HEADERS = frozenset(
    {
        "authorization", "proxy-authorization", "cookie", "set-cookie", "x-api-key", "api-key", "x-goog-api-key",
        "x-amz-security-token", "x-auth-token",
    }
)  # fmt: skip
_SECRET_WORDS = ("token", "secret", "api-key", "apikey", "password", "credential")
_COUNTING_WORDS = ("prompt-tokens", "cached-tokens", "ratelimit")


def without_secrets(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers with lower-case names, without those that carry keys, tokens or cookies."""
    lower = {name.lower(): value for name, value in headers.items()}
    return {name: value for name, value in lower.items() if not _is_secret(name)}


def _is_secret(name: str) -> bool:
    if any(word in name for word in _COUNTING_WORDS):
        return False
    return name in _SECRET_HEADERS or any(word in name for word in _SECRET_WORDS)


@dataclass(frozen=True, slots=True)
class Record:
    """One recorded request; times in seconds, ``ts`` since the Unix epoch, None: not known."""

    body: Mapping[str, JsonValue]
    ts: float | None = None
    session: str | None = None
    parent: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int | None = None
    response_headers: Mapping[str, str] = field(default_factory=dict)
    usage: Mapping[str, JsonValue] | None = None
    ttft_s: float | None = None
    model: str | None = None
    elapsed_s: float | None = None
    diagnostics: Mapping[str, JsonValue] | None = None
    """The vendor's own word on a cache miss, as it came."""

    @property
    def request_body(self) -> Mapping[str, JsonValue]:
        """The body with the model's name put back where redaction took it."""
        if self.model is not None and is_redacted(self.body.get("model")):
            return {**self.body, "model": self.model}
        return self.body

    def parsed_usage(self) -> Usage | None:
        """The usage; None when none was recorded."""
        if self.usage is None:
            return None
        usage = Usage.parse(self.usage, headers=self.response_headers)
        return usage if usage.reported else None


# --- reading ---------------------------------------------------------------------------------------------------------


def read(lines: Iterable[str], *, name: str = "input") -> Iterator[Record]:
    """The recorded requests in ``lines``; empty ones are passed over, unknown members too.

    Raises :class:`RecordError` for a line that is none, with ``name`` and the line's number. A last line that breaks
    off (its writer was stopped) is passed over."""
    pending: tuple[int, str] | None = None
    for number, line in enumerate(lines, 1):
        if pending is not None:
            yield _record(*pending, name)
        pending = (number, line) if line.strip() else None
    if pending is not None and (pending[1].endswith("\n") or _is_json(pending[1])):
        yield _record(*pending, name)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _record(number: int, line: str, name: str) -> Record:
    where = f"{name}, line {number}"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where} is not JSON ({error}); expected one recorded request per line") from None
    if not isinstance(value, dict) or not isinstance(value.get("body"), dict):
        raise RecordError(f"{where} is no recorded request: it needs a JSON object with an object `body`")
    return Record(
        body=value["body"],
        ts=_number(value, "ts", where),
        session=_text(value, "session", where),
        parent=_text(value, "parent", where),
        url=_text(value, "url", where),
        headers=_headers(value, "headers", where),
        status=_whole(value, "status", where),
        response_headers=_headers(value, "response_headers", where),
        usage=_mapping(value, "usage", where),
        ttft_s=_number(value, "ttft_s", where),
        model=_text(value, "model", where),
        elapsed_s=_number(value, "elapsed_s", where),
        diagnostics=_mapping(value, "diagnostics", where),
    )


def _number(value: dict[str, JsonValue], name: str, where: str) -> float | None:
    found = value.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise RecordError(f"{where}: `{name}` must be a number, not {found!r}")
    return float(found)


def _whole(value: dict[str, JsonValue], name: str, where: str) -> int | None:
    found = _number(value, name, where)
    return None if found is None else int(found)


def _text(value: dict[str, JsonValue], name: str, where: str) -> str | None:
    found = value.get(name)
    if found is not None and not isinstance(found, str):
        raise RecordError(f"{where}: `{name}` must be text, not {found!r}")
    return found


def _mapping(value: dict[str, JsonValue], name: str, where: str) -> dict[str, JsonValue] | None:
    found = value.get(name)
    if found is not None and not isinstance(found, dict):
        raise RecordError(f"{where}: `{name}` must be an object, not {found!r}")
    return found


def _headers(value: dict[str, JsonValue], name: str, where: str) -> dict[str, str]:
    return {key.lower(): str(member) for key, member in (_mapping(value, name, where) or {}).items()}


# --- writing ---------------------------------------------------------------------------------------------------------


def to_line(record: Record, key: bytes | None = None) -> str:
    """One record as a line of JSON, without its end. With ``key`` the body's text is left out, digests in its place."""
    body = dict(record.body)
    model = body.get("model")
    members: dict[str, JsonValue] = {
        "ts": record.ts,
        "session": record.session,
        "parent": record.parent,
        "url": record.url,
        "headers": dict(without_secrets(record.headers)),
        "body": body if key is None else redact(body, key),
        "status": record.status,
        "response_headers": dict(without_secrets(record.response_headers)),
        "usage": None if record.usage is None else dict(record.usage),
        "ttft_s": record.ttft_s,
        "model": record.model or (model if isinstance(model, str) else None),
    }
    for name, extra in (("elapsed_s", record.elapsed_s), ("diagnostics", record.diagnostics)):
        if extra is not None:
            members[name] = dict(extra) if isinstance(extra, Mapping) else extra
    line = json.dumps(members, ensure_ascii=False, separators=(",", ":"))
    # half a surrogate pair, which models do produce, has no UTF-8 form
    return line if line.isascii() or _is_unicode(line) else json.dumps(members, separators=(",", ":"))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class RecordWriter:
    """Appends records to a file that is readable by its owner alone; several processes may write to one file.

    ``text`` False (the default) leaves the bodies' text out, see :mod:`homeport.redaction`. ``key``: the redaction key,
    default: this machine's. ``max_bytes``: when the file is larger, it is put aside as ``<name>.1`` (the one put aside
    before goes) and a new one begun. :meth:`write` costs a serialisation and an append: not for an event loop."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        text: bool = False,
        key: bytes | None = None,
        max_bytes: int = 1024 * 1024 * 1024,
    ) -> None:
        self.path = Path(path)
        self._key = None if text else (key or local_key())
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = self._open()

    def write(self, record: Record) -> None:
        """Append one record. Raises OSError when the disk does not take it, ValueError when the writer is closed."""
        line = to_line(record, self._key).encode() + b"\n"
        with self._lock:
            if self._descriptor is None:
                raise ValueError("the record writer is closed")
            if self._replaced_or_full(self._descriptor):
                os.close(self._descriptor)
                self._descriptor = self._open()
            # one write call a line, in append mode: lines of several processes do not mix
            os.write(self._descriptor, line)

    def close(self) -> None:
        """Close the file; harmless when closed already."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        return os.open(self.path, flags, stat.S_IRUSR | stat.S_IWUSR)

    def _replaced_or_full(self, descriptor: int) -> bool:
        """Whether to open the file anew: another process put it aside, or it is full and is put aside now."""
        ours = os.fstat(descriptor)
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return True
        if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            return True
        if there.st_size < self._max_bytes:
            return False
        os.replace(self.path, self.path.with_name(self.path.name + ".1"))
        return True
