"""What each place holds of a prompt: exact from an engine's KV events, approximate from what was sent there."""

from __future__ import annotations

from typing import Protocol

from homeport_proxy.routing.views import RequestView


class Index(Protocol):
    """What the router asks of a prefix index; places are known by name, sizes are tokens."""

    def set_place(self, place: str, kv_tokens: int | None) -> None: ...
    def drop_place(self, place: str) -> None: ...
    def forget(self, place: str) -> None: ...
    def cached_tokens(self, place: str, request: RequestView) -> int: ...
    def sent(self, place: str, request: RequestView) -> None: ...

    @property
    def bytes(self) -> int: ...
