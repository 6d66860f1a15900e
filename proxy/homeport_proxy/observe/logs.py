"""The log: JSON or plain lines on stderr, one per finished request, never with prompt text, keys or headers."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

import msgspec

from homeport_proxy.account import Summary
from homeport_proxy.config import Log
from homeport_proxy.exchange import Exchange

FLUSH_EVERY_S = 0.5
FLUSH_AT_LINES = 200


class JsonLines(logging.Formatter):
    """Log records as JSON objects: ts, level, logger, message, and the traceback as text where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure(settings: Log, stream: TextIO | None = None) -> None:
    """Set up the process's logging as the file says."""
    handler = logging.StreamHandler(stream or sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if settings.format == "json" else plain)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())


class AccessLog:
    """One line per finished request at level info, gathered and written a few times a second."""

    def __init__(self, settings: Log, stream: TextIO | None = None) -> None:
        self._json = settings.format == "json"
        self._on = settings.level in ("debug", "info")
        self._stream = stream or sys.stderr
        self._lines: list[bytes] = []
        self._flushed_s = time.monotonic()

    def __call__(self, exchange: Exchange, summary: Summary) -> None:
        """Note one request."""
        if not self._on:
            return
        self._lines.append(_as_json(exchange, summary) if self._json else _as_text(exchange, summary))
        if len(self._lines) >= FLUSH_AT_LINES or time.monotonic() - self._flushed_s >= FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write what was gathered; a closed stream loses it silently, like any log."""
        lines, self._lines = self._lines, []
        self._flushed_s = time.monotonic()
        if lines:
            try:
                self._stream.write(b"".join(lines).decode())
                self._stream.flush()
            except (OSError, ValueError):
                self._on = False


def _as_json(exchange: Exchange, summary: Summary) -> bytes:
    line = {
        "ts": summary["ts"],
        "level": "info",
        "logger": "homeport.request",
        **{name: summary[name] for name in _FIELDS},
        "tokens": summary["tokens"],
        "miss_causes": summary["miss_causes"],
        "ms": summary["ms"],
    }
    return msgspec.json.encode(line) + b"\n"


_FIELDS = (
    "request_id",
    "api",
    "model",
    "tenant",
    "session",
    "kind",
    "region",
    "backend",
    "prefill_backend",
    "decision",
    "status",
    "error",
    "retries",
)


def _as_text(exchange: Exchange, summary: Summary) -> bytes:
    usage = exchange.usage
    place = summary["backend"] or "-"
    if summary["prefill_backend"]:
        place = f"{summary['prefill_backend']}>{place}"
    first = "-" if exchange.first_token_s is None else f"{(exchange.first_token_s - exchange.arrived_s) * 1000:.0f}ms"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(exchange.arrived_unix_s))
    counts = f"{_shown(usage.prompt_tokens)}/{_shown(usage.cached_tokens)}/{_shown(usage.output_tokens)}"
    return (
        f"{when} {exchange.status or 0} {exchange.api} {exchange.model} {summary['decision'] or '-'} {place} "
        f"tokens {counts} first {first} {exchange.request_id}{f' {exchange.error}' if exchange.error else ''}\n"
    ).encode()


def _shown(count: int | None) -> str:
    return "?" if count is None else str(count)
