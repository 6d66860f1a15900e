"""Headers by deny-list, both ways, and the ones that Homeport adds to an answer; sent as lines made in one pass."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from functools import lru_cache

from homeport_proxy.exchange import Exchange
from homeport_proxy.upstream import Head, RawHeaders

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# the proxy speaks for itself in these: framing, the address, one body already read and decompressed, ids per attempt
_REQUEST_DENY = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"content-encoding",
    b"expect",
    b"accept-encoding",
    b"x-request-id",
    b"x-data-parallel-rank",
    b"http2-settings",
}
_RESPONSE_DENY = HOP_BY_HOP | {b"content-length", b"x-request-id", b"request-id", b"server-timing"}
CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def usable_request_id(given: str) -> bool:
    """Whether a client's ``x-request-id`` may be kept: short, plain, and without the ``___`` that some connectors
    parse out of an id."""
    return _REQUEST_ID.fullmatch(given) is not None and "___" not in given


def to_engine(
    client: RawHeaders, put: Mapping[str, str], *, drop_credentials: bool, hops_to_peer: bool = False
) -> bytes:
    """The client's headers as an engine gets them: all but the denied, then ``put`` (which replaces).

    ``hops_to_peer`` keeps ``x-homeport-*`` of clients' own vocabulary (kind, final): a peer proxy understands them.
    """
    deny = _denied(tuple(put), drop_credentials)
    lowered = [name.lower() for name, _ in client]
    if b"connection" in lowered:
        deny |= _named_in_connection(client)
    lines = [
        b"%s: %s\r\n" % pair
        for pair, lower in zip(client, lowered, strict=True)
        if lower not in deny
        and (not lower.startswith(b"x-homeport-") or (hops_to_peer and lower != b"x-homeport-hops"))
    ]
    lines.append(lines_of(put, "strict"))
    return b"".join(lines)


def lines_of(headers: Mapping[str, str], errors: str = "replace") -> bytes:
    """Headers as bytes; what Latin-1 cannot say becomes a question mark, or raises with ``errors`` "strict"."""
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode("latin-1", errors)


@lru_cache(maxsize=256)
def _denied(replaced: tuple[str, ...], credentials: bool) -> frozenset[bytes]:
    denied = _REQUEST_DENY | {name.lower().encode() for name in replaced}
    return denied | CREDENTIALS if credentials else denied


def _named_in_connection(headers: RawHeaders) -> set[bytes]:
    named: set[bytes] = set()
    for name, value in headers:
        if name.lower() == b"connection":
            named |= {part.strip().lower() for part in value.split(b",")}
    return named


def request_head(method: str, target: str, host: bytes, lines: bytes, length: int) -> bytes:
    """A request's first line and headers as bytes; ``length`` is the body's (left out for a body-less GET)."""
    if length or method not in ("GET", "HEAD", "DELETE", "OPTIONS"):
        lines = b"%scontent-length: %d\r\n" % (lines, length)
    first = f"{method} {target} HTTP/1.1\r\nhost: ".encode()
    return b"%s%s\r\n%saccept-encoding: identity\r\n\r\n" % (first, host, lines)


def to_client(head: Head, added: Mapping[str, str], *, stream: bool, from_peer: bool = False) -> bytes:
    """An engine's headers as the client gets them, then ours. A peer proxy's ``x-homeport-*`` stay unless we say it."""
    deny: Set[bytes] = _RESPONSE_DENY
    if b"connection" in head.fields:
        deny |= _named_in_connection(head.headers)
    if from_peer:
        deny |= {name.encode() for name in added}
    lines = [
        b"%s: %s\r\n" % pair
        for pair in head.headers
        if pair[0] not in deny and (from_peer or not pair[0].startswith(b"x-homeport-"))
    ]
    if stream:
        # without these a reverse proxy in front may hold the stream back
        if b"cache-control" not in head.fields:
            lines.append(b"cache-control: no-cache\r\n")
        if b"x-accel-buffering" not in head.fields:
            lines.append(b"x-accel-buffering: no\r\n")
    lines.append(lines_of(added))
    return b"".join(lines)


def of_exchange(exchange: Exchange) -> dict[str, str]:
    """What Homeport tells about an answer; figures that are not known are left out."""
    added = {"x-homeport-request-id": exchange.request_id, "x-request-id": exchange.request_id}
    if exchange.api in ("messages", "count_tokens"):
        added["request-id"] = exchange.request_id
    if exchange.session:
        added["x-homeport-session"] = exchange.session
    if exchange.peer_region:
        added["x-homeport-decision"] = "peer"
        added["x-homeport-reason"] = exchange.region_reason or f"served in region {exchange.region}"
        added["server-timing"] = server_timing(exchange)
        return added
    if exchange.region:
        added["x-homeport-region"] = exchange.region
    serving = exchange.serving
    if serving is not None:
        added["x-homeport-backend"] = serving.place
    prefill = exchange.prefilled_by
    if prefill is not None:
        added["x-homeport-prefill-backend"] = prefill
    decision = exchange.decision
    if decision is not None:
        added["x-homeport-decision"] = decision.word
        where = exchange.region_reason
        added["x-homeport-reason"] = _plain(f"{where}; {decision.reason}" if where else decision.reason)
        if (expected := exchange.expected_cached_tokens) is not None:
            added["x-homeport-expected-cached-tokens"] = str(expected)
    if exchange.cache is not None:
        added["x-homeport-cache"] = exchange.cache
    added["server-timing"] = server_timing(exchange)
    return added


def server_timing(exchange: Exchange) -> str:
    """Queue, decide, prefill leg and first token in milliseconds, those that have happened."""
    parts = [f"queue;dur={exchange.queued_s * 1e3:.1f}", f"decide;dur={exchange.decide_s * 1e3:.2f}"]
    if exchange.prefill_s is not None:
        parts.append(f"prefill;dur={exchange.prefill_s * 1e3:.1f}")
    serving = exchange.serving
    if exchange.first_token_s is not None and serving is not None and serving.first_token_s is not None:
        parts.append(f"first-token;dur={(exchange.first_token_s - exchange.arrived_s) * 1e3:.1f}")
    return ", ".join(parts)


def _plain(text: str) -> str:
    return text.replace("\r", " ").replace("\n", " ")
