"""A quiet tenant's agents with and without a tenant that floods the fleet with short calls; virtual time."""

from __future__ import annotations

import heapq
from collections import deque
from random import Random

from homeport_proxy.routing.views import RoutingSettings, Ticket
from homeport_proxy.simulate.result import quantile
from routing.routing_kit import Fleet, request, spec

ENGINES = 4


def quiet_p90_s(*, flood: bool, settings: RoutingSettings) -> float:
    """TTFT p90 (s) of the quiet tenant: 40 prompts of 1,280 to 25,600 tokens in 40 s; the flood sends 1,500 short
    ones in the same time, more than the fleet can prefill beside the quiet tenant's."""
    rng = Random(5)
    fleet = Fleet(*[spec(f"d{n}") for n in range(ENGINES)], settings=settings)
    arrivals = [(rng.uniform(0, 40), "quiet", f"q{n}", rng.randint(10, 200)) for n in range(40)]
    if flood:
        arrivals += [(rng.uniform(0, 40), "flood", f"f{n}", 10) for n in range(1_500)]
    events = [(time_s, number, item) for number, (time_s, *item) in enumerate(sorted(arrivals))]
    heapq.heapify(events)
    number = len(events)
    waiting: dict[str, deque[Ticket]] = {f"d{n}": deque() for n in range(ENGINES)}
    running: dict[str, Ticket | None] = dict.fromkeys(waiting)
    ttft: list[float] = []

    def start(place: str, now_s: float) -> None:
        nonlocal number
        if running[place] is None and waiting[place]:
            ticket = running[place] = waiting[place].popleft()
            number += 1
            work_s = 0.02 + ticket.request.prompt_tokens / 16_000 * (1 + ticket.request.prompt_tokens / 106_000)
            heapq.heappush(events, (now_s + work_s, number, [place]))

    wake_s = float("inf")
    while events:
        now_s, _, item = heapq.heappop(events)
        if len(item) == 3:
            tenant, name, blocks = item
            fleet.router.arrive(request(name, blocks, tenant=tenant), now_s)
        elif item:
            place = item[0]
            ticket = running[place]
            running[place] = None
            assert ticket is not None
            fleet.router.first_token(ticket, now_s)
            fleet.router.cancel(ticket, now_s)
            if ticket.request.tenant == "quiet":
                ttft.append(now_s - ticket.arrived_s)
            start(place, now_s)
        for decided in fleet.router.due(now_s):
            assert decided.decision is not None
            waiting[decided.decision.place].append(decided)
            start(decided.decision.place, now_s)
        due_s = fleet.router.next_due_s(now_s)
        if due_s is not None and (due_s < wake_s or wake_s <= now_s):
            wake_s = max(due_s, now_s + 1e-3)
            number += 1
            heapq.heappush(events, (wake_s, number, []))
    result = quantile(sorted(ttft), 0.9)
    assert result is not None
    return result
