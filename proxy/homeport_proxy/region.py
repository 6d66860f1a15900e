"""Which region is a session's home: weighted rendezvous hashing with bounded loads. Pure.

Every region gets a score from the session and its own name and weight (``-weight / ln(u)`` with u uniform in (0, 1)
from a hash: Wang and Ravishankar's weighted rendezvous hashing); the highest usable one is home. Scores of different
regions are independent, so a region that goes away moves only its own sessions, one that joins takes only what it wins,
and every proxy gives the same answer. Bounded loads (Mirrokni, Thorup, Zadimoghaddam) count in-flight tokens: a region
above ``load_bound`` times its weighted share, and by more than one long prompt, takes no new session. (The original
rounds up to the next item; below an item's size the bound would only follow how old the loads are that one proxy knows
of another, and proxies would disagree about an idle fleet.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

SLACK_TOKENS = 16_384
"""How far above its share a region may be before it counts: one long prompt."""


@dataclass(frozen=True, slots=True)
class RegionView:
    """One region as the choice sees it. ``wait_s``: predicted wait for a prefill to start there; None: unknown."""

    name: str
    weight: float = 1.0
    usable: bool = True
    draining: bool = False
    local: bool = False
    rtt_s: float = 0.0
    inflight_tokens: int = 0
    wait_s: float | None = None


@dataclass(frozen=True, slots=True)
class RegionChoice:
    """Where to serve; ``reason`` says why not at ``home``. ``once``: this request only, the next one asks again."""

    region: str
    home: str
    reason: str = ""
    once: bool = False


def score(session: str, region: str, weight: float) -> float:
    """The region's rendezvous score for the session; the highest wins. Same on every machine."""
    digest = hashlib.blake2b(f"{region}\0{session}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "big") + 0.5) / 2.0**64
    return -weight / math.log(uniform)


def ranking(session: str, regions: Sequence[RegionView]) -> list[RegionView]:
    """Regions in the order of this session's preference."""
    return sorted(regions, key=lambda region: (-score(session, region.name, region.weight), region.name))


def choose(
    session: str,
    regions: Sequence[RegionView],
    *,
    allowed: Collection[str] | None = None,
    staying_at: str | None = None,
    new: bool = True,
    load_bound: float = 1.25,
    spill_margin_s: float = 1.0,
) -> RegionChoice | None:
    """Where this request is served; None when no allowed region is usable.

    ``allowed`` is a hard limit (tenant's and model's regions). ``staying_at``: where a displaced session goes on until
    it is idle. ``new``: nothing of the session is warm anywhere, so the load bound may place it elsewhere.
    """
    candidates = [region for region in regions if allowed is None or region.name in allowed]
    usable = [region for region in candidates if region.usable]
    open_ = [region for region in usable if not region.draining] or usable
    if not open_:
        return None
    home = ranking(session, candidates)[0]
    order = ranking(session, open_)
    stay = next((region for region in usable if region.name == staying_at), None)
    chosen = stay or order[0]
    reason = ""
    if chosen is not home:
        reason = f"region {home.name} is {'draining' if home.usable and home.draining else 'down'}"
        if stay is not None and home in open_:
            reason = f"stays in {chosen.name} until idle"
    if new and stay is None:
        bounded = _below_bound(order, load_bound)
        if bounded is not chosen:
            chosen, reason = bounded, f"region {chosen.name} holds more than its share of tokens"
    spill = _spill(chosen, open_, spill_margin_s)
    if spill is not None:
        reason = f"region {chosen.name} would wait {chosen.wait_s or 0.0:.1f} s"
        chosen = spill
    if chosen.name == home.name:
        return RegionChoice(chosen.name, home.name)
    return RegionChoice(chosen.name, home.name, reason, once=spill is not None)


def _below_bound(order: Sequence[RegionView], load_bound: float) -> RegionView:
    """The first region whose load is at most ``load_bound`` times its share; some region always is."""
    total = sum(region.inflight_tokens for region in order)
    weights = sum(region.weight for region in order)
    for region in order:
        if region.inflight_tokens <= load_bound * region.weight / weights * total + SLACK_TOKENS:
            return region
    return order[0]


def _spill(chosen: RegionView, usable: Sequence[RegionView], margin_s: float) -> RegionView | None:
    """The local region, when waiting elsewhere costs more than it by the round trip and the margin."""
    local = next((region for region in usable if region.local), None)
    if local is None or local.name == chosen.name or chosen.wait_s is None or local.wait_s is None:
        return None
    return local if chosen.wait_s > local.wait_s + chosen.rtt_s + margin_s else None
