"""How each place is reached: its connections, the headers it wants, its address as other engines see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from homeport_engines.base import EngineAddress, KvTransfer
from homeport_engines.registry import transfer_of
from homeport_proxy.attention import within
from homeport_proxy.config import Backend, ClientTls, Keyed, Region
from homeport_proxy.fleet import Fleet, Member
from homeport_proxy.headers import request_head
from homeport_proxy.probe import client_tls, request_headers
from homeport_proxy.upstream import Collector, Origin, Pool, UpstreamError

MOONCAKE_BOOTSTRAP_PORT = 8998
"""vLLM's default ``VLLM_MOONCAKE_BOOTSTRAP_PORT``."""


class Engine(msgspec.Struct):
    """One place, ready to be called. ``put`` replaces headers of the same name; ``own_key`` keeps the client's away.
    ``aside``: connections for questions beside a request, which must not make the request's own look long in use."""

    place: str
    rank: int | None
    member: Member | None
    pool: Pool
    put: Mapping[str, str]
    own_key: bool
    aside: Pool
    transfer: KvTransfer | None = None


@dataclass(slots=True)
class _Reached:
    """Connections and headers of one configured address, kept while its settings stay the same."""

    pool: Pool
    aside: Pool
    put: Mapping[str, str]
    own_key: bool
    engine_ids: dict[int, str] = field(default_factory=dict)

    def retire(self) -> None:
        """No more requests; what runs may finish."""
        self.pool.retire()
        self.aside.retire()


def _engine(place: str, rank: int | None, member: Member | None, at: _Reached, transfer: KvTransfer | None) -> Engine:
    return Engine(place, rank, member, at.pool, at.put, at.own_key, at.aside, transfer)


class Engines:
    """Places by name. Pools are made on first use and closed when their backend is gone or changed."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._reached: dict[tuple[str, str], tuple[Keyed, _Reached]] = {}
        self._by_place: dict[str, tuple[Backend, Engine]] = {}

    def of(self, place: str) -> Engine:
        """The engine behind a place. Raises KeyError when the place is gone, ConfigError when its key is missing."""
        member = self._fleet.member(place)
        if member is None:
            raise KeyError(place)
        backend = member.backend
        known = self._by_place.get(place)
        if known is not None and known[0] is backend and known[1].member is member:
            return known[1]
        reached = self._reach("backend", backend.name, backend, backend.url, backend.headers, backend.tls)
        _, _, rank = place.partition("/dp")
        transfer = transfer_of(backend.engine, backend.kv_transfer, backend.kv_store)
        engine = _engine(place, int(rank) if rank else None, member, reached, transfer)
        self._by_place[place] = (backend, engine)
        return engine

    def peer(self, name: str, region: Region) -> Engine:
        """Another region's proxy."""
        assert region.proxy is not None, "a region with a proxy"
        reached = self._reach("region", name, region, region.proxy, region.headers, region.tls)
        return _engine(name, None, None, reached, None)

    async def address(self, engine: Engine) -> EngineAddress:
        """The engine as its peers see it; asks a Mooncake engine for its id once."""
        assert engine.member is not None, "an engine of ours"
        backend = engine.member.backend
        port = backend.bootstrap_port
        ids: Mapping[int, str] = {}
        if engine.transfer is not None and engine.transfer.name == "mooncake":
            port = port or MOONCAKE_BOOTSTRAP_PORT
            _, reached = self._reached["backend", backend.name]
            if not reached.engine_ids:
                reached.engine_ids = await _mooncake_ids(engine.pool, port)
            ids = reached.engine_ids
        return EngineAddress(engine.place, backend.url, engine.rank, port, ids)

    def forget_ids(self, engine: Engine) -> None:
        """The engine failed or restarted: ask for its id again before the next hand-off."""
        if engine.member is not None:
            entry = self._reached.get(("backend", engine.member.name))
            if entry is not None:
                entry[1].engine_ids = {}

    def pools(self) -> list[Pool]:
        """Every pool, for books and tests."""
        return [pool for _, reached in self._reached.values() for pool in (reached.pool, reached.aside)]

    def close(self) -> None:
        """Close all connections."""
        for pool in self.pools():
            pool.close()

    def _reach(
        self,
        kind: str,
        name: str,
        holder: Backend | Region,
        url: str,
        headers: Mapping[str, str],
        tls: ClientTls | None,
    ) -> _Reached:
        known = self._reached.get((kind, name))
        if known is not None:
            if known[0] is holder or known[0] == holder:
                return known[1]
            known[1].retire()
        self._forget_gone()
        put = request_headers(holder, headers)
        own_key = holder.key() is not None or any(h.lower() in ("authorization", "x-api-key") for h in headers)
        origin = Origin.parse(url, client_tls(tls))
        reached = _Reached(Pool(origin), Pool(origin), put, own_key)
        self._reached[kind, name] = (holder, reached)
        return reached

    def _forget_gone(self) -> None:
        """Close what is no longer configured or discovered."""
        for kind, name in list(self._reached):
            known = self._fleet.members if kind == "backend" else self._fleet.config.regions
            if name not in known:
                self._reached.pop((kind, name))[1].retire()
        for place in [place for place in self._by_place if self._fleet.member(place) is None]:
            del self._by_place[place]


async def _mooncake_ids(pool: Pool, port: int) -> dict[int, str]:
    """``GET /query`` of the bootstrap server: engine ids by data-parallel rank."""
    origin = Origin(pool.origin.host, port, None, f"{pool.origin.host}:{port}".encode())
    asking = Pool(origin, connect_s=pool.connect_s)
    answer = Collector()
    connection = await asking.acquire()
    try:
        connection.send(request_head("GET", "/query", origin.host_header, b"", 0), b"", answer)
        async with within(pool.connect_s):
            _, body = await answer.finished()
        entries = msgspec.json.decode(body, type=dict[int, dict[str, msgspec.Raw]])
        return {rank: msgspec.json.decode(entry["engine_id"], type=str) for rank, entry in entries.items()}
    except (msgspec.DecodeError, KeyError, TimeoutError, RecursionError) as error:
        raise UpstreamError(
            f"the Mooncake bootstrap server gave no engine id: {error}", sent=False, answered=True
        ) from None
    finally:
        asking.close()
