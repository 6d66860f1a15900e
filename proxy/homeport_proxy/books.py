"""What has one answer over all of a proxy's workers: who is speaking, which region, who holds a stored response."""

from __future__ import annotations

from typing import Protocol

from homeport_proxy.exchange import Exchange, Identity
from homeport_proxy.identity import Identities, Look
from homeport_proxy.peers import Located, Regions
from homeport_proxy.stored import StoredResponses


class Books(Protocol):
    """The memory that a request's steps share with other requests, in this process or in the workers' parent."""

    async def identify(self, seen: Look) -> Identity:
        """Who is speaking."""

    async def locate(self, exchange: Exchange) -> Located | None:
        """Where this request is served; None when no region it may use is usable."""

    async def holder(self, tenant: str, response_id: str) -> str | None:
        """The place that holds a stored response; None when it is not known."""

    def stored(self, tenant: str, response_id: str, place: str) -> None:
        """A place stored a response."""


class LocalBooks:
    """The books in this process."""

    def __init__(self, identities: Identities, regions: Regions) -> None:
        self.identities = identities
        self.regions = regions
        self.responses = StoredResponses()

    async def identify(self, seen: Look) -> Identity:
        return self.identities.resolve(seen)

    async def locate(self, exchange: Exchange) -> Located | None:
        return self.regions.locate(exchange)

    async def holder(self, tenant: str, response_id: str) -> str | None:
        return self.responses.holder(tenant, response_id)

    def stored(self, tenant: str, response_id: str, place: str) -> None:
        self.responses.put(tenant, response_id, place)
