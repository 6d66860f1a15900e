"""The approximate index: what was sent to a place and should still lie there, given the engine's real capacity."""

from __future__ import annotations

from homeport_proxy.routing.index.lru import BYTES_PER_BLOCK, PrefixLru
from homeport_proxy.routing.index.residency import NOWHERE, Residency
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
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._all = 0
        self._holders: dict[int, int] = {}

    def set_budget(self, budget_bytes: int) -> None:
        """Take a new bound; what is above it goes at once."""
        self._budget_blocks = max(1, budget_bytes // BYTES_PER_BLOCK)
        self._shrink()

    def set_place(self, place: str, kv_tokens: int | None) -> None:
        """A place joined, or its capacity (tokens) became known."""
        self._kv_tokens[place] = kv_tokens or self._default_kv_tokens
        if place not in self._blocks:
            self._blocks[place] = PrefixLru(1)
            self._blocks[place].gone = []
            bit = self._bits[place] = ~self._all & (self._all + 1)  # the lowest bit that is free
            self._all |= bit
            self._names[bit] = place
            self._tokens_per_block[place] = 0.0

    def drop_place(self, place: str) -> None:
        """A place left for good."""
        if place not in self._blocks:
            return
        self.forget(place)
        del self._blocks[place], self._kv_tokens[place], self._tokens_per_block[place]
        bit = self._bits.pop(place)
        self._all ^= bit
        del self._names[bit]

    def forget(self, place: str) -> None:
        """A place lost its cache (restart)."""
        held = self._blocks[place]
        self._total -= held.shrink(0)
        held.clear()
        self._settle_gone(place, held)

    def cached_tokens(self, place: str, request: RequestView) -> int:
        """Tokens of the prompt expected at ``place``; the last token is always computed."""
        keys = request.prefix.text_blocks
        if not keys:
            return 0
        depth = self._blocks[place].match(keys)
        return min(int(depth * tokens_per_text_block(request)), max(0, request.prompt_tokens - 1)) if depth else 0

    def cached_by_place(self, request: RequestView) -> Residency:
        """Tokens of the prompt expected at every place.

        A place that holds a block of a chain holds all before it, so that the places' depths are found by halving
        between positions where the sets of holders differ.
        """
        keys, holders = request.prefix.text_blocks, self._holders
        first = holders.get(keys[0], 0) if keys else 0
        if not first:
            return NOWHERE
        depths: list[tuple[int, int]] = []
        spans = [(0, first, len(keys) - 1, holders.get(keys[-1], 0))]
        while spans:
            low, at_low, high, at_high = spans.pop()
            if at_low == at_high:
                continue
            if high - low == 1:
                depths.append((low + 1, at_low & ~at_high))
                continue
            middle = (low + high) // 2
            at_middle = holders.get(keys[middle], 0)
            spans.append((low, at_low, middle, at_middle))
            spans.append((middle, at_middle, high, at_high))
        depths.append((len(keys), holders.get(keys[-1], 0)))
        per_block, most = tokens_per_text_block(request), max(0, request.prompt_tokens - 1)
        found: dict[str, int] = {}
        names = self._names
        common = 0
        if first == self._all:
            common = min(depths)[0]
        for depth, mask in depths:
            if depth == common:
                continue
            tokens = min(int(depth * per_block), most)
            while mask:
                bit = mask & -mask
                found[names[bit]] = tokens
                mask ^= bit
        return Residency(min(int(common * per_block), most), found)

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
        fresh_blocks = held.add(keys)
        self._total += fresh_blocks
        bit, holders = self._bits[place], self._holders
        for position in range(len(keys) - fresh_blocks, len(keys)):
            others = holders.get(keys[position])
            if others is None:  # nobody holds it, nor anything after it
                holders.update(dict.fromkeys(keys[position:], bit))
                break
            holders[keys[position]] = others | bit

    def settled(self, place: str) -> None:
        """A prompt sent there was prefilled or called off: only now is room made for it, off the path of a decision."""
        held = self._blocks.get(place)
        if held is None:
            return
        self._total -= held.shrink(held.capacity_blocks)
        self._settle_gone(place, held)
        if self._total > self._budget_blocks:
            self._shrink()

    def _shrink(self) -> None:
        # the budget is global: the place that holds most gives first
        spare = max(1, self._budget_blocks // 16)
        while self._total > self._budget_blocks:
            place, held = max(self._blocks.items(), key=lambda item: len(item[1]))
            self._total -= held.shrink(max(0, len(held) - spare))
            self._settle_gone(place, held)

    def _settle_gone(self, place: str, held: PrefixLru) -> None:
        """Evicted blocks have one holder less."""
        keep, holders = ~self._bits[place], self._holders
        for key in held.gone or ():
            left = holders.get(key, 0) & keep
            if left:
                holders[key] = left
            else:
                holders.pop(key, None)
        held.gone = []

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
