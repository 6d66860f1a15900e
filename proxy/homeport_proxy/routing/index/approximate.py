"""The approximate index: what was sent to a place and should still lie there, given the engine's real capacity."""

from __future__ import annotations

from homeport_proxy.routing.index.lru import PrefixLru
from homeport_proxy.routing.index.residency import NOWHERE, Residency
from homeport_proxy.routing.index.tree import PrefixTree
from homeport_proxy.routing.views import RequestView


class ApproximateIndex:
    """Per place an LRU of canonical text blocks, all in one tree that stays within ``budget_bytes``.

    An engine's capacity counts tokens, text blocks count characters: the ratio is averaged over the requests seen
    at each place. A place that left the fleet holds nothing; requests that still run there may ask and tell of it.
    """

    def __init__(self, budget_bytes: int, default_kv_tokens: int) -> None:
        self._budget_bytes = budget_bytes
        self._default_kv_tokens = default_kv_tokens
        self._tree = PrefixTree()
        self._blocks: dict[str, PrefixLru] = {}
        self._kv_tokens: dict[str, int] = {}
        self._tokens_per_block: dict[str, float] = {}

    def set_budget(self, budget_bytes: int) -> None:
        """Take a new bound; what is above it goes at once."""
        self._budget_bytes = budget_bytes
        self._shrink()

    def set_place(self, place: str, kv_tokens: int | None) -> None:
        """A place joined, or its capacity (tokens) became known."""
        self._kv_tokens[place] = kv_tokens or self._default_kv_tokens
        if place not in self._blocks:
            self._blocks[place] = PrefixLru(1, self._tree, place)
            self._tokens_per_block[place] = 0.0
            self._tree.joined_or_left()

    def drop_place(self, place: str) -> None:
        """A place left for good."""
        if place not in self._blocks:
            return
        self.forget(place)
        del self._blocks[place], self._kv_tokens[place], self._tokens_per_block[place]
        self._tree.joined_or_left()

    def forget(self, place: str) -> None:
        """A place lost its cache (restart)."""
        if (held := self._blocks.get(place)) is not None:
            held.clear()

    def cached_tokens(self, place: str, request: RequestView) -> int:
        """Tokens of the prompt expected at ``place``; the last token is always computed."""
        keys, held = request.prefix.text_blocks, self._blocks.get(place)
        depth = held.match(keys) if keys and held is not None else 0
        return min(int(depth * tokens_per_text_block(request)), max(0, request.prompt_tokens - 1)) if depth else 0

    def cached_by_place(self, request: RequestView) -> Residency:
        """Tokens of the prompt expected at every place, by one walk down the tree."""
        keys = request.prefix.text_blocks
        if not keys:
            return NOWHERE
        mostly, depth = 0, 0
        reach: dict[str, int] = {}
        for run, common in self._tree.path(keys):
            holds, end = run.holds, depth + common
            if mostly == depth and 2 * len(holds) > len(self._blocks):
                mostly = end  # who holds less is told apart, and who does not follow any further
                for place, length in run.short(self._blocks.keys()).items():
                    if length < common and place not in reach:
                        reach[place] = depth + length
            else:
                for place, hold in holds.items():
                    reach[place] = end if hold.length >= common else depth + hold.length
            depth = end
        per_block, most = tokens_per_text_block(request), max(0, request.prompt_tokens - 1)
        tokens = {blocks: min(int(blocks * per_block), most) for blocks in {mostly, *reach.values()}}
        return Residency(tokens[mostly], {place: tokens[blocks] for place, blocks in reach.items()})

    def sent(self, place: str, request: RequestView) -> None:
        """The request's prompt goes to ``place`` and will lie there."""
        keys, held = request.prefix.text_blocks, self._blocks.get(place)
        if not keys or held is None:
            return
        fresh = tokens_per_text_block(request)
        known = self._tokens_per_block[place]
        self._tokens_per_block[place] = mean = known + 0.05 * (fresh - known) if known else fresh
        held.capacity_blocks = max(1, int(self._kv_tokens[place] / max(mean, 1e-6)))
        held.add(keys)

    def settled(self, place: str) -> None:
        """A prompt sent there was prefilled or called off: only now is room made for it, off the path of a decision."""
        held = self._blocks.get(place)
        if held is not None:
            held.shrink(held.capacity_blocks)
            self._shrink()

    def _shrink(self) -> None:
        # the budget is global: the place that holds most gives first
        while self.bytes > self._budget_bytes:
            held = max(self._blocks.values(), key=len)
            held.shrink(len(held) * 15 // 16)

    @property
    def blocks(self) -> int:
        """Blocks held, summed over the places."""
        return sum(len(held) for held in self._blocks.values())

    @property
    def bytes(self) -> int:
        """Estimated memory, bytes."""
        return self._tree.bytes


def tokens_per_text_block(request: RequestView) -> float:
    """Tokens one text block of this prompt stands for; half a block is taken as left out at the end."""
    return request.prompt_tokens / (len(request.prefix.text_blocks) + 0.5)
