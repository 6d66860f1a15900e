"""Small fleets and requests for the routing tests; sizes in tokens, times in seconds."""

from __future__ import annotations

from homeport_proxy.routing.router import Router
from homeport_proxy.routing.views import (
    DecisionRecord,
    Outcome,
    PlaceSpec,
    PrefixKeys,
    RequestView,
    Role,
    RoutingSettings,
    Ticket,
)

BLOCK_TOKENS = 128


def spec(name: str, role: Role = "mixed", **more: object) -> PlaceSpec:
    """A place of a backend of its own, serving model ``m``."""
    values: dict[str, object] = {"backend": name, "models": frozenset({"m"}), "kv_capacity_tokens": 500_000}
    if role != "mixed":
        values["kv_transfer"] = "nixl"
    values.update(more)
    return PlaceSpec(name=name, role=role, **values)  # type: ignore[arg-type]


def chain(name: object, blocks: int) -> list[int]:
    """Block keys of a conversation: the first blocks of a longer chain are those of a shorter one."""
    return [abs(hash((str(name), index))) for index in range(blocks)]


_count = 0


def request(session: str, blocks: int = 10, **more: object) -> RequestView:
    """A prompt of ``blocks`` blocks that continues the session's earlier ones."""
    global _count
    _count += 1
    values: dict[str, object] = {
        "request_id": f"r{_count}",
        "api": "chat",
        "model": "m",
        "session": session,
        "prompt_tokens": blocks * BLOCK_TOKENS,
        "prefix": PrefixKeys(chain(session, blocks)),
    }
    values.update(more)
    return RequestView(**values)  # type: ignore[arg-type]


class Fleet:
    """A router with its clock: ``ask`` plays one whole request in virtual time."""

    def __init__(self, *specs: PlaceSpec, settings: RoutingSettings | None = None, seed: int = 0) -> None:
        self.records: list[DecisionRecord] = []
        self.router = Router(settings or RoutingSettings(), seed=seed, log=self.records.append)
        self.router.set_places(specs)
        for one in specs:
            self.router.set_state(one.backend, "up", 0.0)
        self.now_s = 0.0

    def start(self, one: RequestView) -> Ticket:
        """Arrive and be decided at once."""
        ticket = self.router.arrive(one, self.now_s)
        assert ticket in self.router.due(self.now_s)
        return ticket

    def end(self, ticket: Ticket, *, cached: int | None = 0, ok: bool = True, output: int = 50) -> Outcome:
        """First token 0.2 s on, end 1 s after that."""
        self.now_s += 0.2
        self.router.first_token(ticket, self.now_s)
        self.now_s += 1.0
        return self.router.finished(
            ticket,
            self.now_s,
            prompt_tokens=ticket.request.prompt_tokens,
            cached_tokens=cached,
            output_tokens=output,
            ok=ok,
        )

    def ask(self, one: RequestView, *, cached: int | None = None) -> Ticket:
        """One request from arrival to end; it reports as cached what was expected unless told otherwise."""
        ticket = self.start(one)
        assert ticket.decision is not None
        expected = ticket.decision.expected_cached_tokens or 0
        self.end(ticket, cached=expected if cached is None else cached)
        self.now_s += 2.0
        return ticket

    def empty(self) -> bool:
        """No load is held anywhere."""
        status = self.router.status(self.now_s)
        return status.queued == 0 and all(
            (place.requests, place.prefill_tokens, place.decode_tokens) == (0, 0, 0) for place in status.places.values()
        )
