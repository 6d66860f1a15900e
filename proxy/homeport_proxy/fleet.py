"""The backends in use: what the file and discovery list, what probing learned of each, and their places for routing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from homeport_engines.base import EngineStats
from homeport_engines.registry import transfer_of
from homeport_proxy.breaker import Breaker
from homeport_proxy.config import Backend, Config
from homeport_proxy.routing.views import PlaceSpec


@dataclass(slots=True, eq=False)
class Member:
    """One backend. None means not known (yet); ``notes`` holds what does not work as configured, by subject."""

    region: str
    backend: Backend
    models: frozenset[str] | None = None
    max_model_len: int | None = None
    ranks: tuple[int, ...] | None = None
    stats: dict[int, EngineStats] = field(default_factory=dict)
    prefill_leg: Breaker = field(default_factory=Breaker)
    serve_leg: Breaker = field(default_factory=Breaker)
    probed: bool = False
    refused: bool = False
    failed_probes: int = 0
    last_success_s: float | None = None
    recovered_s: float | None = None
    cool_until_s: float | None = None
    draining_until_s: float | None = None
    carry: bool = False
    """While it drains: its sessions' KV is fetched from it as they move."""
    fault: str | None = None
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.backend.name

    def place_names(self) -> list[str]:
        """Its places: itself, or one per data-parallel rank (``d0/dp3``)."""
        ranks = self.ranks or ()
        return [f"{self.name}/dp{rank}" for rank in ranks] if len(ranks) > 1 else [self.name]


def connector(backend: Backend) -> str:
    """The name of the choreography that hands its KV over, ``none`` when there is none."""
    transfer = transfer_of(backend.engine, backend.kv_transfer, backend.kv_store)
    return "none" if transfer is None else transfer.name


class _Offer(NamedTuple):
    """What all members together offer, made once per change of the fleet because every request asks for it."""

    models: list[str]
    names: frozenset[str]
    served: frozenset[str]
    unsaid: bool
    """Some member has not said yet what it serves."""
    longest: Mapping[str, int]
    prefill: Mapping[str, Backend]
    """By region, the first backend that only prefills."""


class Fleet:
    """Members by name. ``on_change`` is called with nothing to say but "ask for ``places`` again"; ``version`` is
    another one after every change."""

    def __init__(self, config: Config, on_change: Callable[[], None] = lambda: None) -> None:
        self.config = config
        self.on_change = on_change
        self._discovered: dict[tuple[str, int], list[Backend]] = {}
        self.members: dict[str, Member] = {}
        self.version = 0
        self._offered: _Offer | None = None
        self._rebuild()

    def reconfigure(self, config: Config) -> None:
        """Take a reloaded file; members that stay keep what is known of them."""
        self.config = config
        self._discovered = {
            (region, index): found
            for (region, index), found in self._discovered.items()
            if region in config.regions and index < len(config.regions[region].discovery)
        }
        self._rebuild()

    def discovered(self, region: str, index: int, backends: Sequence[Backend]) -> None:
        """What the region's discovery number ``index`` finds now, replacing what it found before."""
        before = self._discovered.get((region, index))
        self._discovered[region, index] = list(backends)
        if before != list(backends):
            self._rebuild()

    def member(self, place: str) -> Member | None:
        """The member behind a place (``d0`` or ``d0/dp3``)."""
        return self.members.get(place) or self.members.get(place.partition("/")[0])

    def place_names(self) -> list[str]:
        """Every place of every member."""
        return [place for member in self.members.values() for place in member.place_names()]

    def learned(self, member: Member, *, models: frozenset[str], max_len: int | None) -> None:
        """What the engine says it serves, and its longest context in tokens."""
        if (member.models, member.max_model_len) != (models, max_len):
            member.models, member.max_model_len = models, max_len
            self._changed()

    def measured(self, member: Member, stats: Mapping[int, EngineStats]) -> None:
        """One scrape of its telemetry by data-parallel rank."""
        member.stats = dict(stats)
        wanted = member.backend.data_parallel
        ranks = tuple(range(wanted)) if isinstance(wanted, int) else tuple(sorted(stats)) or None
        if ranks is not None and ranks != member.ranks:
            member.ranks = ranks
            self._changed()

    def touch(self) -> None:
        """Something outside the fleet's own knowledge changed what its places are worth."""
        self.on_change()

    def has_model(self, name: str) -> bool:
        """Whether ``models`` holds a name."""
        return name in self._offer().names

    def models(self) -> list[str]:
        """Every model name that can be asked for: those of the file, else those the engines serve."""
        return self._offer().models

    def may_serve(self, model: str) -> bool:
        """Whether some backend serves the model, or has not said yet what it serves."""
        offer = self._offer()
        return offer.unsaid or model in offer.served

    def max_model_len(self, model: str) -> int | None:
        """The longest context any backend offers for a model; None when no engine said."""
        return self._offer().longest.get(model)

    def prefill_in(self, region: str) -> Backend | None:
        """A backend of the region that only prefills, if it has any."""
        return self._offer().prefill.get(region)

    def take(self, config: Config, members: Mapping[str, Member]) -> None:
        """Everything as another process knows it."""
        self.config, self.members = config, dict(members)
        self._changed()

    def places(self, region: str) -> list[PlaceSpec]:
        """The region's places."""
        return [spec for member in self.members.values() if member.region == region for spec in self._specs(member)]

    def _specs(self, member: Member) -> Iterator[PlaceSpec]:
        backend = member.backend
        names = member.place_names()
        for index, name in enumerate(names):
            rank = (member.ranks or ())[index] if len(names) > 1 else None
            stats = member.stats.get(rank or 0)
            yield PlaceSpec(
                name=name,
                backend=backend.name,
                role=backend.role,
                models=self._models_of(member),
                pool=backend.pool,
                kv_transfer=connector(backend),
                rank=rank,
                capacity=backend.capacity or 1.0,
                kv_capacity_tokens=stats.kv_capacity_tokens if stats else None,
                max_model_len=member.max_model_len,
            )

    def _offer(self) -> _Offer:
        if self._offered is None:
            members = self.members.values()
            served = frozenset(name for member in members for name in member.models or ())
            models = [model.name for model in self.config.models] or sorted(served)
            longest: dict[str, int] = {}
            for member in members:
                for name in (member.models or ()) if member.max_model_len else ():
                    longest[name] = max(longest.get(name, 0), member.max_model_len or 0)
            prefill: dict[str, Backend] = {}
            for member in members:
                if member.backend.role == "prefill":
                    prefill.setdefault(member.region, member.backend)
            unsaid = not members or any(member.models is None for member in members)
            self._offered = _Offer(models, frozenset(models), served, unsaid, longest, prefill)
        return self._offered

    def _changed(self) -> None:
        self.version += 1
        self._offered = None
        self.on_change()

    def _models_of(self, member: Member) -> frozenset[str]:
        if member.models is not None:
            return member.models
        return frozenset(self.models())  # not asked yet: unknown counts as usable

    def _rebuild(self) -> None:
        listed: dict[str, tuple[str, Backend]] = {}
        for name, region in self.config.regions.items():
            found = [b for (where, _), each in sorted(self._discovered.items()) if where == name for b in each]
            for backend in (*region.backends, *found):
                listed.setdefault(backend.name, (name, backend))
        members: dict[str, Member] = {}
        for name, (where, backend) in listed.items():
            old = self.members.get(name)
            if old is not None and (old.region, old.backend.url) == (where, backend.url):
                old.backend = backend
                members[name] = old
            else:
                members[name] = Member(where, backend)
            if backend.models is not None:
                members[name].models = frozenset(backend.models)
            if isinstance(backend.data_parallel, int):
                members[name].ranks = tuple(range(backend.data_parallel))
        self.members = members
        self._changed()
