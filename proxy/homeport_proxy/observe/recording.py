"""Requests written as JSON lines for ``homeport explain``, as ``record`` in the configuration asks."""

from __future__ import annotations

from typing import cast

from homeport.fingerprint import JsonValue
from homeport.record import Record as Line
from homeport.record import RecordWriter
from homeport.usage import Usage
from homeport_proxy.config import ConfigError, Record
from homeport_proxy.exchange import GENERATING, Exchange
from homeport_proxy.headers import by_name, of_exchange
from homeport_proxy.observe.writer import BackgroundWriter

MAX_PENDING = 256


class Recorder:
    """Records generating requests. Raises ConfigError when the file cannot be written."""

    def __init__(self, settings: Record) -> None:
        self._writer: BackgroundWriter[Line] | None = None
        if settings.file is not None:
            try:
                file = RecordWriter(settings.file, text=settings.text)
            except OSError as error:
                raise ConfigError([f"record.file: cannot write {settings.file}: {error.strerror or error}"]) from None
            self._writer = BackgroundWriter("record", file.write, file.close, max_pending=MAX_PENDING)

    def __call__(self, exchange: Exchange) -> None:
        """Record one finished request."""
        if self._writer is not None and exchange.api in GENERATING and exchange.document is not None:
            self._writer.put(line_of(exchange))

    def degraded(self) -> list[str]:
        """Faults of the file, one sentence each."""
        return self._writer.degraded("record") if self._writer else []

    def close(self) -> None:
        """Write what waits and close the file. Blocks."""
        if self._writer is not None:
            self._writer.close()


def line_of(exchange: Exchange) -> Line:
    """One exchange as a recorded request; the writer leaves keys and, unless asked, text out."""
    usage = Usage(
        input_tokens=exchange.usage.prompt_tokens,
        cached_tokens=exchange.usage.cached_tokens,
        output_tokens=exchange.usage.output_tokens,
    )
    first_s = exchange.first_token_s
    return Line(
        body=dict(exchange.members),
        ts=exchange.arrived_unix_s,
        session=exchange.session or None,
        parent=exchange.identity.parent if exchange.identity else None,
        url=exchange.path,
        headers=dict(exchange.headers),
        status=exchange.status,
        response_headers=by_name(of_exchange(exchange)),
        usage=cast("dict[str, JsonValue]", usage.to_dict()) if usage.reported else None,
        ttft_s=None if first_s is None else first_s - exchange.arrived_s,
        model=exchange.model,
        elapsed_s=None if exchange.ended_s is None else exchange.ended_s - exchange.arrived_s,
    )
