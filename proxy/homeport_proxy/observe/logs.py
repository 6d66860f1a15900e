"""The log: JSON or plain lines on stderr, one per finished request, never with prompt text, keys or headers."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import TextIO

import msgspec

from homeport_proxy.config import Log
from homeport_proxy.exchange import Exchange
from homeport_proxy.observe.summary import word_of


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
    """One line per finished request at level info, gathered until ``flush``."""

    def __init__(self, settings: Log, stream: TextIO | None = None) -> None:
        self._json = settings.format == "json"
        self._on = settings.level in ("debug", "info")
        self._stream = stream or sys.stderr
        self._lines: list[bytes] = []

    def __call__(self, exchange: Exchange, causes: Mapping[str, int]) -> None:
        """Note one request."""
        if self._on:
            self._lines.append(_as_json(exchange, causes) if self._json else _as_text(exchange))

    def flush(self) -> None:
        """Write what was gathered; a closed stream loses it silently, like any log."""
        lines, self._lines = self._lines, []
        if lines:
            try:
                self._stream.write(b"".join(lines).decode())
                self._stream.flush()
            except (OSError, ValueError):
                self._on = False


def _as_json(exchange: Exchange, causes: Mapping[str, int]) -> bytes:
    usage, serving, identity = exchange.usage, exchange.serving, exchange.identity
    line = {
        "ts": exchange.arrived_unix_s,
        "level": "info",
        "logger": "homeport.request",
        "request_id": exchange.request_id,
        "api": exchange.api,
        "model": exchange.model,
        "tenant": exchange.tenant or None,
        "session": exchange.session or None,
        "kind": identity.kind if identity else None,
        "region": exchange.region or None,
        "backend": serving.place if serving else None,
        "prefill_backend": exchange.prefilled_by,
        "decision": word_of(exchange),
        "status": exchange.status,
        "error": exchange.error,
        "retries": exchange.retries,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "miss_causes": causes,
        "queue_s": exchange.queued_s,
        "first_token_s": _since(exchange, exchange.first_token_s),
        "total_s": _since(exchange, exchange.ended_s),
    }
    return msgspec.json.encode(line) + b"\n"


def _as_text(exchange: Exchange) -> bytes:
    usage, serving = exchange.usage, exchange.serving
    place = serving.place if serving else "-"
    if exchange.prefilled_by:
        place = f"{exchange.prefilled_by}>{place}"
    first_s = _since(exchange, exchange.first_token_s)
    first = "-" if first_s is None else f"{first_s * 1000:.0f}ms"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(exchange.arrived_unix_s))
    counts = f"{_shown(usage.prompt_tokens)}/{_shown(usage.cached_tokens)}/{_shown(usage.output_tokens)}"
    error = f" {exchange.error}" if exchange.error else ""
    return (
        f"{when} {exchange.status or 0} {exchange.api} {exchange.model} {word_of(exchange) or '-'} {place} "
        f"tokens {counts} first {first} {exchange.request_id}{error}\n"
    ).encode()


def _since(exchange: Exchange, at_s: float | None) -> float | None:
    return None if at_s is None else round(at_s - exchange.arrived_s, 6)


def _shown(count: int | None) -> str:
    return "?" if count is None else str(count)
