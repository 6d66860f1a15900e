"""What one request holds while it is in the router's hands, and how each part is let go exactly once."""

from __future__ import annotations

import msgspec

from homeport_proxy.routing.bursts import Burst
from homeport_proxy.routing.causes import PromptTrace, Sight
from homeport_proxy.routing.cost import tiered_prefill_s
from homeport_proxy.routing.index import Index
from homeport_proxy.routing.place import Place
from homeport_proxy.routing.queue import Held
from homeport_proxy.routing.sessions import Session
from homeport_proxy.routing.views import RequestView


class Flight(msgspec.Struct, eq=False):
    """A queue slot, then prefill load at one place and decode load at one place. Tokens and seconds."""

    key: int
    request: RequestView
    session: Session
    previous_use_s: float
    held: Held | None = None
    host: Place | None = None
    prefiller: Place | None = None
    prefilling: bool = False
    decoding: bool = False
    uncached: int = 0
    cached: int = 0
    found: int = 0
    """What it was expected to find before any part of it was computed, by confidence."""
    found_raw: int = 0
    """The same by the index alone."""
    part: Flight | None = None
    """The part of its prompt that is being prefilled by itself."""
    kept: Flight | None = None
    """The last part that was, while what its engine's events say of it may still be on the way."""
    parts: int = 0
    """How many were."""
    whole: bool = False
    """A part of it could not be prefilled: it goes as it is."""
    context: int = 0
    burst: Burst | None = None
    handed_over_s: float | None = None
    sight: Sight | None = None
    trace: PromptTrace | None = None

    def foresee(self, worker: Place, index: Index) -> None:
        """What it will find at ``worker``, before any part of it is computed there."""
        self.prefiller = worker
        self.found_raw = index.cached_tokens(worker.spec.name, self.request)
        self.found = int(self.found_raw * worker.confidence.of(self.request.api))

    def begin_prefill(self, worker: Place, index: Index, now_s: float) -> int:
        """Prefill load at ``worker``; returns the cached tokens expected there (discounted by confidence), without its
        own parts."""
        request, name = self.request, worker.spec.name
        if self.parts and self.prefiller is worker:
            self.cached = int(index.cached_tokens(name, request) * worker.confidence.of(request.api))
        else:
            self.foresee(worker, index)
            self.cached = self.found
        self.uncached = request.prompt_tokens - self.cached
        work_s = tiered_prefill_s(worker.rates, request.prompt_tokens, self.cached, index.host_tokens(name, request))
        worker.load.begin_prefill(self.key, work_s, self.uncached, now_s)
        self.prefilling = True
        index.sent(name, request, self.key)
        self.let_go(index)
        return self.found

    def keep(self, part: Flight, worker: Place, index: Index) -> None:
        """A part was prefilled at ``worker``: it lies there, until what follows is sent and says so itself."""
        self.let_go(index)
        self.kept = part
        index.sent(worker.spec.name, part.request, part.key)

    def let_go(self, index: Index) -> None:
        """From here on the index says what became of its parts."""
        if self.kept is not None and self.kept.prefiller is not None:
            index.settled(self.kept.prefiller.spec.name, self.kept.key)
        self.kept = None

    def end_prefill(self, index: Index, now_s: float, *, ran: bool) -> None:
        """The prefill answered (``ran``) or was called off."""
        if self.prefilling and self.prefiller is not None:
            self.prefilling = False
            self.burst = self.prefiller.load.end_prefill(self.key, self.uncached, now_s, ran=ran)
            if self.burst is not None:
                self.burst.parts[self.key] = (self.uncached, self.cached)
            index.settled(self.prefiller.spec.name, self.key)

    def begin_decode(self, host: Place, index: Index) -> None:
        """Decode load at ``host``, for the whole context that will be."""
        self.host = host
        self.context = self.request.prompt_tokens + self.request.expected_output_tokens
        host.load.begin_decode(self.context)
        self.decoding = True

    def release(self, index: Index, now_s: float) -> None:
        """Let go of all engine load still held."""
        if self.part is not None:
            self.part.end_prefill(index, now_s, ran=False)
            self.part = None
        self.let_go(index)
        self.end_prefill(index, now_s, ran=False)
        if self.decoding and self.host is not None:
            self.decoding = False
            self.host.load.end_decode(self.context)
