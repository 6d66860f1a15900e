"""An index that looks into the simulated engines' caches: exact and without delay (the bound, and `index: exact`)."""

from __future__ import annotations

from collections.abc import Mapping

from homeport_proxy.routing.index.residency import Residency
from homeport_proxy.routing.views import IndexState, RequestView
from homeport_proxy.simulate.engine import SimEngine


class OracleIndex:
    """The router's index interface over engine caches themselves."""

    def __init__(self, engines: Mapping[str, SimEngine], block_tokens: int) -> None:
        self._engines = engines
        self._block_tokens = block_tokens

    def set_place(self, place: str, kv_tokens: int | None) -> None:
        """Capacity is the engine's own."""

    def drop_place(self, place: str) -> None:
        """Nothing is kept here."""

    def forget(self, place: str) -> None:
        """Nothing is kept here."""

    def suspect(self, place: str) -> None:
        """Nothing is kept here."""

    def cached_tokens(self, place: str, request: RequestView) -> int:
        """Tokens of the prompt that lie in the engine's cache now."""
        depth = self._engines[place].cache.match(request.prefix.text_blocks)
        return min(depth * self._block_tokens, max(0, request.prompt_tokens - 1))

    def cached_by_place(self, request: RequestView) -> Residency:
        """The same for every engine."""
        return Residency(0, {place: self.cached_tokens(place, request) for place in self._engines})

    def lost(self, place: str, blocks: Mapping[int, int]) -> bool:
        return False

    def host_tokens(self, place: str, request: RequestView) -> int:
        """The simulated engines have one tier."""
        return 0

    def sent(self, place: str, request: RequestView, key: int) -> None:
        """The engine will see for itself."""

    def settled(self, place: str, key: int) -> None:
        """The engine has seen for itself."""

    def state(self, place: str) -> IndexState:
        """Exact by construction."""
        return "exact"

    @property
    def bytes(self) -> int:
        """No memory of its own."""
        return 0
