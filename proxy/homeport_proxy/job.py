"""A client's request in wire terms: its bytes, the edits every engine's copy needs, and what one leg sends."""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from homeport_engines.base import BodyEdits, Leg
from homeport_proxy.api.base import ClientApi
from homeport_proxy.engines import Engine
from homeport_proxy.headers import request_head, to_engine
from homeport_proxy.splice import edit
from homeport_proxy.upstream import RawHeaders


class Job(msgspec.Struct):
    """What is to be sent. ``put`` and ``drop`` are edits for every engine; ``raws`` the body's top-level members,
    None when the body is not JSON and travels as it is."""

    api: ClientApi
    method: str
    target: str
    headers: RawHeaders
    body: bytes
    raws: Mapping[str, msgspec.Raw] | None = None
    put: dict[str, object] = {}
    drop: set[str] = set()
    stream: bool = False
    hide_usage: bool = False
    drop_credentials: bool = False
    hop_by_hop: Set[bytes] = frozenset()
    """Names of headers that the client's ``Connection`` keeps from travelling."""

    def for_engine(self, engine: Engine, leg: Leg, request_id: str) -> tuple[bytes, bytes]:
        """Head and body of this job as one engine gets it."""
        put = dict(engine.put)
        put.update(leg.headers)
        put["x-request-id"] = request_id
        if engine.rank is not None:
            put["x-data-parallel-rank"] = str(engine.rank)
        body = self.body_with(leg.edits)
        drop_credentials = self.drop_credentials or engine.own_key
        lines = to_engine(self.headers, put, drop_credentials=drop_credentials, hop_by_hop=self.hop_by_hop)
        origin = engine.pool.origin
        return request_head(self.method, origin.prefix + self.target, origin.host_header, lines, len(body)), body

    def for_peer(self, engine: Engine, request_id: str, hops: int) -> tuple[bytes, bytes]:
        """Head and body for another region's proxy: the client's own bytes; the peer does what an engine needs."""
        put = {**engine.put, "x-request-id": request_id, "x-homeport-hops": str(hops)}
        lines = to_engine(
            self.headers, put, drop_credentials=engine.own_key, hop_by_hop=self.hop_by_hop, hops_to_peer=True
        )
        origin, body = engine.pool.origin, self.body
        return request_head(self.method, origin.prefix + self.target, origin.host_header, lines, len(body)), body

    def body_with(self, edits: BodyEdits) -> bytes:
        """The body as every engine gets it, with one leg's own edits."""
        if self.raws is None:
            return self.body
        drop = self.drop | edits.drop
        put = {key: value for key, value in self.put.items() if key not in drop}
        put.update(edits.set)
        if not put and not drop:
            return self.body
        return edit(self.body, put, drop - edits.set.keys(), self.raws)
