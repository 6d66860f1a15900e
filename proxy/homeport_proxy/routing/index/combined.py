"""The production index: exact where an engine's events are whole and the prompt is in its tokens, else approximate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from homeport_engines.vllm.kv import KvBatch
from homeport_proxy.routing.index.approximate import ApproximateIndex
from homeport_proxy.routing.index.exact import ExactIndex
from homeport_proxy.routing.index.residency import Residency
from homeport_proxy.routing.views import IndexState, RequestView


class PrefixIndex:
    """Both indexes behind one interface; the approximate one is always kept, so that losing events loses nothing."""

    def __init__(self, budget_bytes: int, default_kv_tokens: int) -> None:
        self._approximate = ApproximateIndex(budget_bytes, default_kv_tokens)
        self._exact = ExactIndex()
        self._tokenised: set[str] = set()

    def set_budget(self, budget_bytes: int) -> None:
        """Take a new bound for the approximate index; what is above it goes at once."""
        self._approximate.set_budget(budget_bytes)

    def set_place(self, place: str, kv_tokens: int | None) -> None:
        """A place joined, or its capacity (tokens) became known."""
        self._approximate.set_place(place, kv_tokens)

    def drop_place(self, place: str) -> None:
        """A place left for good."""
        self._approximate.drop_place(place)
        self._exact.drop(place)
        self._tokenised.discard(place)

    def forget(self, place: str) -> None:
        """A place may have lost its cache."""
        self._approximate.forget(place)
        self._exact.forget(place)

    def suspect(self, place: str) -> None:
        """A place was away and may come back as another process: its events count from their start again."""
        self._exact.forget(place)

    def follow(self, place: str) -> None:
        """The place's KV events are subscribed to."""
        self._exact.follow(place)

    def unfollow(self, place: str) -> None:
        """The place's KV events are off."""
        self._exact.drop(place)

    def take(self, place: str, batch: KvBatch) -> int | None:
        """A live batch of KV events; returns the sequence to replay from when some are missing."""
        return self._exact.take(place, batch)

    def replayed(self, place: str, batches: Sequence[KvBatch]) -> int | None:
        """The answer to a replay request."""
        return self._exact.replayed(place, batches)

    def block_tokens(self, place: str) -> int | None:
        """The engine's block size in tokens as its events tell it: what to hash prompts with."""
        return self._exact.block_tokens(place)

    def cached_tokens(self, place: str, request: RequestView) -> int:
        """Tokens of the prompt that the engine should find on its device; the last one is always computed."""
        keys = self._keys(place, request)
        if keys is None:
            return self._approximate.cached_tokens(place, request)
        size = self._exact.block_tokens(place) or 0
        return min(self._exact.resident(place, keys).device_blocks * size, max(0, request.prompt_tokens - 1))

    def cached_by_place(self, request: RequestView) -> Residency:
        """The same for all places in one go."""
        found = self._approximate.cached_by_place(request)
        if not request.prefix.token_blocks:
            return found
        exact = {
            place: self.cached_tokens(place, request)
            for place in self._exact.places
            if self._keys(place, request) is not None
        }
        return Residency(found.mostly, {**found.other, **exact})

    def lost(self, place: str, blocks: Mapping[int, int]) -> bool:
        """Whether a block, named by block size in tokens, is known to lie at ``place`` no more."""
        block = blocks.get(self._exact.block_tokens(place) or 0)
        return block is not None and self._exact.lost(place, block)

    def host_tokens(self, place: str, request: RequestView) -> int:
        """Further tokens that lie in a tier to load from."""
        keys = self._keys(place, request)
        if keys is None:
            return 0
        found = self._exact.resident(place, keys)
        return (found.any_blocks - found.device_blocks) * (self._exact.block_tokens(place) or 0)

    def sent(self, place: str, request: RequestView, key: int) -> None:
        """The request's prompt goes to ``place``."""
        self._approximate.sent(place, request)
        if self._exact.state(place) is not None:
            keys = self._keys(place, request)
            if keys is None:
                self._tokenised.discard(place)
            else:
                self._tokenised.add(place)
                self._exact.sent(place, key, keys)

    def settled(self, place: str, key: int) -> None:
        """It was prefilled or called off."""
        self._approximate.settled(place)
        self._exact.settled(place, key)

    def state(self, place: str) -> IndexState:
        """``exact`` only while every event was applied and prompts come with the engine's own block hashes."""
        stream = self._exact.state(place)
        if stream is None:
            return "approximate"
        if stream in ("gap", "partial"):
            return "degraded"
        return "exact" if stream == "whole" and place in self._tokenised else "approximate"

    @property
    def bytes(self) -> int:
        """Estimated memory, bytes."""
        return self._approximate.bytes + self._exact.bytes

    def _keys(self, place: str, request: RequestView) -> Sequence[int] | None:
        if not request.prefix.token_blocks or self._exact.state(place) != "whole":
            return None
        size = self._exact.block_tokens(place)
        return None if size is None else request.prefix.token_blocks.get(size)
