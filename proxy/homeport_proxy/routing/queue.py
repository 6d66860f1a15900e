"""Late binding: requests held in a virtual queue per place, fair between tenants, then shortest prefill first.

The order inside a share is ``work - age_weight * age``. As ``age = now - since``, it is the order of
``work + age_weight * since``, which never changes: every queue is kept sorted by it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from operator import attrgetter

import msgspec

from homeport_proxy.routing.views import Decision, RoutingSettings, Ticket

_QUANTUM_S = 0.25
"""Prefill seconds by which shares may differ before a turn is due: inside it the shortest goes first."""

_MAX_USERS = 10_000


class Held(msgspec.Struct, eq=False):
    """A request in a queue: the decision it waits for, predicted prefill there (s, uncached tokens), since when, its
    sort key, and whether it stays at this place (a part of it was prefilled there) or is no more than the rest of one
    that is being prefilled there in part (``parked``)."""

    ticket: Ticket
    decision: Decision
    place: str
    work_s: float
    uncached_tokens: int
    since_s: float
    begun: bool = False
    parked: bool = False
    rank: float = 0.0
    out: bool = False


_rank = attrgetter("rank")


class Shares:
    """Weighted fair shares of predicted prefill seconds, between tenants and then between a tenant's users.

    Start-time fair queueing on two levels: whoever has received least per weight goes next; a newcomer starts at the
    level of those being served, so that idleness earns no credit.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, float] = {}
        self._users: dict[tuple[str, str], float] = {}
        self._floor = 0.0
        self._user_floor: dict[str, float] = {}

    def level(self, tenant: str, user: str) -> tuple[int, int]:
        """What the tenant and its user have received, in quanta; the lower goes first."""
        received = max(self._tenants.get(tenant, 0.0), self._floor)
        own = max(self._users.get((tenant, user), 0.0), self._user_floor.get(tenant, 0.0))
        return int(received / _QUANTUM_S), int(own / _QUANTUM_S)

    def charge(self, held: Held, work_s: float) -> None:
        """``held`` or a part of it goes to its engine: its tenant and user have received so much prefill."""
        request = held.ticket.request
        received = max(self._tenants.get(request.tenant, 0.0), self._floor)
        self._floor = received
        self._tenants[request.tenant] = received + work_s / max(request.tenant_weight, 1e-6)
        key = (request.tenant, request.user)
        own = max(self._users.get(key, 0.0), self._user_floor.get(request.tenant, 0.0))
        self._user_floor[request.tenant] = own
        if len(self._users) < _MAX_USERS or key in self._users:
            self._users[key] = own + work_s

    def settle(self) -> None:
        """Nobody waits: forget the past."""
        self._tenants.clear()
        self._users.clear()
        self._user_floor.clear()
        self._floor = 0.0


class Queue:
    """The requests held for one place: by share, and all together (with the rests of those that are being prefilled in
    part) in the order of their ``ranks``, with their predicted prefill (``works``, s)."""

    __slots__ = ("by_share", "oldest", "ranks", "works")

    def __init__(self) -> None:
        self.by_share: dict[tuple[str, str], list[Held]] = {}
        self.ranks: list[float] = []
        self.works: list[float] = []
        self.oldest: list[tuple[float, int, Held]] = []

    def add(self, held: Held) -> None:
        if not held.parked:
            request = held.ticket.request
            insort(self.by_share.setdefault((request.tenant, request.user), []), held, key=_rank)
            heappush(self.oldest, (held.since_s, id(held), held))
        position = bisect_right(self.ranks, held.rank)
        self.ranks.insert(position, held.rank)
        self.works.insert(position, held.work_s)

    def remove(self, held: Held) -> None:
        if not held.parked:
            request = held.ticket.request
            share = self.by_share[(request.tenant, request.user)]
            position = bisect_left(share, held.rank, key=_rank)
            while share[position] is not held:
                position += 1
            del share[position]
            if not share:
                del self.by_share[(request.tenant, request.user)]
        position = bisect_left(self.ranks, held.rank)
        while self.works[position] != held.work_s:
            position += 1
        del self.ranks[position], self.works[position]
        held.out = True

    def longest_waiting(self) -> Held:
        while self.oldest[0][2].out:
            heappop(self.oldest)
        return self.oldest[0][2]


class VirtualQueues:
    """All held requests, by the place whose prefill they wait for.

    A request that is held alone mostly goes at once: it is kept beside the queues (``_lone``) and joins its own only
    when somebody else comes or somebody looks. ``changed`` is told the place whose queue is another now.
    """

    def __init__(self, settings: RoutingSettings, changed: Callable[[str], None]) -> None:
        self.settings = settings
        self._changed = changed
        self._queues: dict[str, Queue] = {}
        self._shares = Shares()
        self._count = 0
        self._lone: Held | None = None

    def __len__(self) -> int:
        return self._count

    def joined(self) -> Mapping[str, Queue]:
        """The queues by place, with everybody in them; not to be changed."""
        if self._lone is not None:
            lone, self._lone = self._lone, None
            self._join(lone)
        return self._queues

    def waiting(self) -> Sequence[str]:
        """Places that something waits for."""
        if self._lone is not None:
            return [self._lone.place]
        return [name for name, queue in self._queues.items() if queue.by_share]

    def count(self, place: str) -> int:
        """How many requests are held for ``place``."""
        queue = self.joined().get(place)
        return sum(map(len, queue.by_share.values())) if queue is not None else 0

    def at(self, place: str) -> Iterator[Held]:
        """The requests held for ``place``, without those that leave while one goes through them."""
        queue = self.joined().get(place)
        return _still_held([held for share in queue.by_share.values() for held in share] if queue is not None else [])

    def push(self, held: Held, *, parked: bool = False) -> None:
        """Hold a request. ``parked``: what is left of one while a part of it is prefilled; it is not served, but others
        that come after it wait for it as well."""
        held.rank = held.work_s + self.settings.age_weight * held.since_s
        held.out, held.parked = False, parked
        if not parked:
            self._count += 1
            if self._count == 1:
                self._lone = held
                return
        self.joined()
        self._join(held)

    def remove(self, held: Held) -> None:
        """Take a request out without serving it."""
        if held is self._lone:
            self._lone, held.out = None, True
            self._count -= 1
            return
        queue = self._queues.get(held.place)
        if queue is None or held.out:
            return
        queue.remove(held)
        self._changed(held.place)
        self._count -= not held.parked
        if not queue.ranks:
            del self._queues[held.place]
        if not self._count:
            self._shares.settle()

    def take(self, held: Held, work_s: float) -> None:
        """Serve a request, or a part of ``work_s`` of it: its tenant is charged."""
        if self._count > 1:  # shares are forgotten when nobody waits
            self._shares.charge(held, work_s)
        self.remove(held)

    def first(self, place: str, now_s: float) -> Held | None:
        """Who goes next at ``place``: the starved, else the fair share's turn, inside it the shortest prefill."""
        if self._lone is not None:
            return self._lone if self._lone.place == place else None
        queue = self._queues.get(place)
        if queue is None or not queue.by_share:
            return None
        oldest = queue.longest_waiting()
        if now_s - oldest.since_s > self.settings.starve_after_s:
            return oldest
        if len(queue.by_share) == 1:
            return next(iter(queue.by_share.values()))[0]
        level = self._shares.level
        return min(
            ((level(*share), waiting[0].rank, waiting[0]) for share, waiting in queue.by_share.items()),
            key=lambda entry: entry[:2],
        )[2]

    def held_s(self, place: str) -> float:
        """Predicted prefill (s) of all that is held for ``place``."""
        queue = self.joined().get(place)
        return sum(queue.works) if queue is not None else 0.0

    def ahead_s(self, held: Held) -> float:
        """Predicted prefill (s) of those that go before ``held`` at its place."""
        queue = self.joined()[held.place]
        return sum(queue.works[: bisect_left(queue.ranks, held.rank)])

    def movable(self, each: int = 4) -> Iterator[Held]:
        """Of every share in every queue, the first few and the last few: who may gain by going elsewhere. Without those
        that leave while one goes through them."""
        shares = [share for queue in self.joined().values() for share in queue.by_share.values()]
        few = [share[:each] + share[-each:] if len(share) > 2 * each else share for share in shares]
        return _still_held([held for share in few for held in share])

    def _join(self, held: Held) -> None:
        queue = self._queues.get(held.place)
        if queue is None:
            queue = self._queues[held.place] = Queue()
        queue.add(held)
        self._changed(held.place)


def _still_held(seen: Sequence[Held]) -> Iterator[Held]:
    return (held for held in seen if not held.out)


NOBODY: tuple[Sequence[float], Sequence[float]] = ((), ())
"""Ranks and works where nothing is held."""
