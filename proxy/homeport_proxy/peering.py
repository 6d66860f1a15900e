"""A request served by another region's proxy: the client's own bytes, one hop, the peer's answer as it comes."""

from __future__ import annotations

from homeport_proxy import headers as header_rules
from homeport_proxy.downstream import Downstream
from homeport_proxy.errors import upstream_timeout
from homeport_proxy.exchange import Exchange, LegRecord, State
from homeport_proxy.handoff import Desk
from homeport_proxy.ids import mint
from homeport_proxy.job import Job
from homeport_proxy.patience import Patience
from homeport_proxy.peers import Peer, Regions
from homeport_proxy.relay import Plan, Relay
from homeport_proxy.upstream import Head, UpstreamError


async def answer(desk: Desk, regions: Regions, exchange: Exchange, job: Job, down: Downstream, peer: Peer) -> bool:
    """Bring the client the peer's answer. False: the peer did not answer, serve it here.

    The peer's proxy does all that an engine needs, retries included, and keeps the books of the tokens.
    """
    exchange.peer_region = True
    engine = desk.engines.peer(peer.name, peer.region)
    for fresh in (False, True):
        record = LegRecord(peer.name, "serve", exchange.request_id)
        exchange.legs.append(record)

        def answer_headers(head: Head, stream: bool) -> bytes:
            added = header_rules.of_exchange(exchange)
            return header_rules.to_client(head, added, stream=stream, from_peer=True)

        relay = Relay(exchange, record, down, Plan(job.api, answer_headers))
        try:
            engine.pool.connect_s = desk.timeouts().connect_s
            connection = await engine.pool.acquire(fresh=fresh)
        except UpstreamError as fault:
            record.error = str(fault)
            regions.failed(peer, refused=not fault.timed_out)
            exchange.region_reason = f"{peer.name} cannot be reached"
            return False
        record.state = State.SENT
        message = job.for_peer(engine, f"{exchange.request_id[:96]}.{mint(32)}", exchange.hops + 1)
        timeouts = desk.timeouts()
        patience = Patience(
            desk.watch,
            connection,
            timeouts.first_token_s,
            lambda: peer.up is False,
            idle_s=timeouts.idle_s,
            relay=relay,
        )
        try:
            connection.send(*message, relay, head_only=job.method == "HEAD")
            result = await relay.finished()
        finally:
            patience.stop()
            if not relay.done:
                connection.abort()
        if not isinstance(result, UpstreamError) or down.started:
            return True
        if not fresh and connection.served > 1 and not result.answered and not result.timed_out:
            continue
        regions.failed(peer, refused=False)
        if result.timed_out:
            raise upstream_timeout(f"Region {peer.name} gave no answer in time: {result}.")
        # reset before the client's first byte: like an engine that resets, it is tried elsewhere
        exchange.region_reason = f"{peer.name} failed"
        return False
    raise AssertionError("unreachable")
