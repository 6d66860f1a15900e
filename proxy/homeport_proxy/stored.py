"""Which backend holds a stored response: requests that name one must go there."""

from __future__ import annotations

import re

from homeport_proxy.bounded import Bounded
from homeport_proxy.exchange import Exchange

_RESPONSE_PATH = re.compile(r"^/v1/responses/([^/]+)(?:/.*)?$")
KEPT = 100_000


class StoredResponses:
    """Response ids and the places that answered them, the most recent :data:`KEPT`; apart for each tenant."""

    def __init__(self, kept: int = KEPT) -> None:
        self._places: Bounded[bytes, str] = Bounded(kept)

    def put(self, tenant: str, response_id: str, place: str) -> None:
        """Remember who stored a response."""
        self._places.put(_key(tenant, response_id), place)

    def holder(self, tenant: str, response_id: str) -> str | None:
        """The place that holds it; None when it is not known."""
        return self._places.get(_key(tenant, response_id))


def named(exchange: Exchange) -> str | None:
    """The stored response that a request names, by path or by ``previous_response_id``."""
    if exchange.api not in ("responses", "other"):
        return None
    match = _RESPONSE_PATH.match(exchange.path)
    if match is not None:
        return match.group(1)
    if exchange.api == "other" or exchange.document is None:
        return None
    previous = exchange.document.get("previous_response_id")
    return previous if isinstance(previous, str) and previous else None


def _key(tenant: str, response_id: str) -> bytes:
    return f"{tenant}\0{response_id}".encode("utf-8", "surrogatepass")
