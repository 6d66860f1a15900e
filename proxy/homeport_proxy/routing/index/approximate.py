"""The approximate index: what was sent to a place and should still lie there, given the engine's real capacity."""

from __future__ import annotations

from homeport_proxy.routing.index.lru import BYTES_PER_BLOCK, PrefixLru
from homeport_proxy.routing.views import RequestView


class ApproximateIndex:
    """Per place an LRU of canonical text blocks; all places together stay within ``budget_bytes``.

    An engine's capacity counts tokens, text blocks count characters: the ratio is averaged over the requests seen
    at each place.
    """

    def __init__(self, budget_bytes: int, default_kv_tokens: int) -> None:
        self._budget_blocks = max(1, budget_bytes // BYTES_PER_BLOCK)
        self._default_kv_tokens = default_kv_tokens
        self._blocks: dict[str, PrefixLru] = {}
        self._kv_tokens: dict[str, int] = {}
        self._tokens_per_block: dict[str, float] = {}
        self._total = 0

    def set_place(self, place: str, kv_tokens: int | None) -> None:
        """A place joined, or its capacity (tokens) became known."""
        self._kv_tokens[place] = kv_tokens or self._default_kv_tokens
        if place not in self._blocks:
            self._blocks[place] = PrefixLru(1)
            self._tokens_per_block[place] = 0.0

    def drop_place(self, place: str) -> None:
        """A place left for good."""
        held = self._blocks.pop(place, None)
        self._total -= len(held) if held else 0
        self._kv_tokens.pop(place, None)
        self._tokens_per_block.pop(place, None)

    def forget(self, place: str) -> None:
        """A place lost its cache (restart)."""
        held = self._blocks[place]
        self._total -= len(held)
        held.clear()

    def cached_tokens(self, place: str, request: RequestView) -> int:
        """Tokens of the prompt expected at ``place``; the last token is always computed."""
        keys = request.prefix.text_blocks
        if not keys:
            return 0
        depth = self._blocks[place].match(keys)
        return min(int(depth * tokens_per_text_block(request)), max(0, request.prompt_tokens - 1)) if depth else 0

    def sent(self, place: str, request: RequestView) -> None:
        """The request's prompt goes to ``place`` and will lie there."""
        keys = request.prefix.text_blocks
        if not keys:
            return
        held = self._blocks[place]
        fresh = tokens_per_text_block(request)
        known = self._tokens_per_block[place]
        self._tokens_per_block[place] = mean = known + 0.05 * (fresh - known) if known else fresh
        held.capacity_blocks = max(1, int(self._kv_tokens[place] / max(mean, 1e-6)))
        before = len(held)
        held.use(keys)
        self._total += len(held) - before
        if self._total > self._budget_blocks:
            self._shrink()

    def _shrink(self) -> None:
        # the budget is global: the place that holds most gives first
        spare = max(1, self._budget_blocks // 16)
        while self._total > self._budget_blocks:
            held = max(self._blocks.values(), key=len)
            self._total -= held.shrink(max(0, len(held) - spare))

    @property
    def blocks(self) -> int:
        """Blocks held over all places."""
        return self._total

    @property
    def bytes(self) -> int:
        """Estimated memory, bytes."""
        return self._total * BYTES_PER_BLOCK


def tokens_per_text_block(request: RequestView) -> float:
    """Tokens one text block of this prompt stands for; half a block is taken as left out at the end."""
    return request.prompt_tokens / (len(request.prefix.text_blocks) + 0.5)
