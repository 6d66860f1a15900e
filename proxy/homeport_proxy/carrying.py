"""`drain --carry`: a session that leaves a draining home takes its KV along, by the engines' own transfer.

The home is asked once more, as the prefill engine of the session's next request: it finds the prompt in its cache,
computes what is new, and hands all of it to the session's next home as it would any prefill.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from homeport_proxy.config import Backend
from homeport_proxy.fleet import Fleet
from homeport_proxy.lint import why_not_paired
from homeport_proxy.routing.views import Decision, SessionView, Word


def why_not(home: Backend, to: Backend) -> str | None:
    """Why a session's KV cannot go from its home to another backend; None when it can."""
    if home.role == "prefill":
        return f"{home.name} is a prefill backend: no session lives there"
    if home.role == "decode" and not home.kv_readback:
        return f"{home.name} is a decode backend without kv_readback: it takes KV and gives none"
    if to.role == "prefill":
        return f"{to.name} is a prefill backend: no session can move there"
    if to.pool != home.pool:
        return f"{to.name} is in another pool"
    return why_not_paired(home, to) or None


def carried(
    fleet: Fleet, decision: Decision, before: SessionView | None, refuses: Callable[[Backend], str | None]
) -> Decision:
    """The decision for a session's next request, its KV fetched from the home it leaves where that is asked for.

    ``refuses``: why a backend cannot hand over this request's prefill, None when it can."""
    home = fleet.member(before.home) if before is not None and before.home is not None else None
    if before is None or home is None or not home.carry or before.home == decision.place:
        return decision
    to = fleet.member(decision.place)
    if to is None or decision.word not in (Word.MOVED, Word.SPILL, Word.FAILOVER):
        return decision
    if why_not(home.backend, to.backend) is not None or refuses(home.backend) is not None:
        return decision
    reason = f"{decision.reason}; its KV comes from {before.home}"
    return replace(decision, prefill_place=before.home, prefill_cached_tokens=before.context_tokens, reason=reason)
