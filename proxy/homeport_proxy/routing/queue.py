"""Late binding: requests held in a virtual queue per place, fair between tenants, then shortest prefill first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from homeport_proxy.routing.views import Decision, RoutingSettings, Ticket


class Held:
    """A request in a queue: the decision it waits for, predicted prefill there (s), and since when."""

    __slots__ = ("decision", "place", "since_s", "ticket", "work_s")

    def __init__(self, ticket: Ticket, decision: Decision, place: str, work_s: float, since_s: float) -> None:
        self.ticket = ticket
        self.decision = decision
        self.place = place
        self.work_s = work_s
        self.since_s = since_s


class Shares:
    """Weighted fair shares of predicted prefill seconds, between tenants and then between a tenant's users.

    Start-time fair queueing on two levels: whoever has received least per weight goes next; a newcomer starts at the
    level of those now waiting, so that idleness earns no credit.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, float] = {}
        self._users: dict[tuple[str, str], float] = {}
        self._floor = 0.0

    def order(self, held: Held) -> tuple[float, float]:
        """Sort key of a held request: (its tenant's level, its user's level)."""
        request = held.ticket.request
        tenant = max(self._tenants.get(request.tenant, 0.0), self._floor)
        return tenant, self._users.get((request.tenant, request.user), 0.0)

    def charge(self, held: Held) -> None:
        """``held`` goes to its engine: its tenant and user have received its prefill seconds."""
        request = held.ticket.request
        level = max(self._tenants.get(request.tenant, 0.0), self._floor)
        self._floor = level
        self._tenants[request.tenant] = level + held.work_s / max(request.tenant_weight, 1e-6)
        key = (request.tenant, request.user)
        self._users[key] = self._users.get(key, 0.0) + held.work_s

    def settle(self) -> None:
        """Nobody waits: forget the past."""
        self._tenants.clear()
        self._users.clear()
        self._floor = 0.0


class VirtualQueues:
    """All held requests, by the place whose prefill they wait for."""

    def __init__(self, settings: RoutingSettings) -> None:
        self._settings = settings
        self._queues: dict[str, list[Held]] = {}
        self._shares = Shares()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def waiting(self) -> Iterable[str]:
        """Places that something waits for."""
        return self._queues.keys()

    def at(self, place: str) -> list[Held]:
        """The requests held for ``place`` (unordered)."""
        return self._queues.get(place, [])

    def work(self, place: str) -> tuple[tuple[float, float], ...]:
        """(predicted prefill s, since) of the requests held for ``place``."""
        held = self._queues.get(place)
        return tuple((entry.work_s, entry.since_s) for entry in held) if held else ()

    def push(self, held: Held) -> None:
        """Hold a request."""
        self._queues.setdefault(held.place, []).append(held)
        self._count += 1

    def remove(self, held: Held) -> None:
        """Take a request out without serving it."""
        queue = self._queues.get(held.place)
        if queue is None or held not in queue:
            return
        queue.remove(held)
        self._count -= 1
        if not queue:
            del self._queues[held.place]
        if not self._count:
            self._shares.settle()

    def take(self, held: Held) -> None:
        """Serve a request: its tenant is charged."""
        self._shares.charge(held)
        self.remove(held)

    def first(self, place: str, now_s: float) -> Held | None:
        """Who goes next at ``place``: the starved, else the fair share's turn, inside it the shortest prefill."""
        queue = self._queues.get(place)
        if not queue:
            return None
        if len(queue) == 1:
            return queue[0]
        oldest = min(queue, key=lambda held: held.since_s)
        if now_s - oldest.since_s > self._settings.starve_after_s:
            return oldest
        weight = self._settings.age_weight
        order = self._shares.order
        return min(queue, key=lambda held: (*order(held), held.work_s - weight * (now_s - held.since_s)))

    def ahead_s(self, held: Held, now_s: float) -> float:
        """Predicted prefill (s) of those that go before ``held`` at its place."""
        weight = self._settings.age_weight
        own = held.work_s - weight * (now_s - held.since_s)
        return sum(
            other.work_s
            for other in self._queues[held.place]
            if other is not held and other.work_s - weight * (now_s - other.since_s) <= own
        )

    def all(self) -> Iterator[Held]:
        """Every held request."""
        for queue in list(self._queues.values()):
            yield from list(queue)
