"""Headers by deny-list, both ways, and the ones that Homeport adds to an answer; sent as lines made in one pass."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from functools import lru_cache

from multidict import MultiMapping

from homeport_proxy.exchange import Exchange, LegRecord
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
NAMES_KEPT = 500
LONGEST_NAME_KEPT = 100
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def usable_request_id(given: str) -> bool:
    """Whether a client's ``x-request-id`` may be kept: short, plain, and without the ``___`` that some connectors
    parse out of an id."""
    return _REQUEST_ID.fullmatch(given) is not None and "___" not in given


def to_engine(
    client: RawHeaders,
    put: Mapping[str, str],
    *,
    drop_credentials: bool,
    hop_by_hop: Set[bytes] = frozenset(),
    hops_to_peer: bool = False,
) -> bytes:
    """The client's headers as an engine gets them: all but the denied, then ``put`` (which replaces).

    ``hop_by_hop``: names of :func:`hop_by_hop`. ``hops_to_peer`` keeps ``x-homeport-*`` of clients' own vocabulary
    (kind, final): a peer proxy understands them.
    """
    passes = _passing(tuple(put), drop_credentials, hops_to_peer)
    if hop_by_hop:
        client = [pair for pair in client if pair[0].lower() not in hop_by_hop]
    lines = [b"%s: %s\r\n" % pair for pair in client if passes[pair[0]]]
    lines.append(lines_of(put, "strict"))
    return b"".join(lines)


def lines_of(headers: Mapping[str, str], errors: str = "replace") -> bytes:
    """Headers as bytes; what Latin-1 cannot say becomes a question mark, or raises with ``errors`` "strict"."""
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode("latin-1", errors)


class _Passing(dict[bytes, bool]):
    """Whether a client's header passes, by its name as it was written; learned as names come."""

    def __init__(self, denied: Set[bytes], hops_to_peer: bool) -> None:
        super().__init__()
        self._denied = denied
        self._hops_to_peer = hops_to_peer

    def __missing__(self, name: bytes) -> bool:
        lower = name.lower()
        ours = lower.startswith(b"x-homeport-") and not (self._hops_to_peer and lower != b"x-homeport-hops")
        passes = lower not in self._denied and not ours
        if len(self) < NAMES_KEPT and len(name) <= LONGEST_NAME_KEPT:
            self[name] = passes
        return passes


@lru_cache(maxsize=256)
def _passing(replaced: tuple[str, ...], credentials: bool, hops_to_peer: bool) -> _Passing:
    denied = _REQUEST_DENY | {name.lower().encode() for name in replaced}
    return _Passing(denied | CREDENTIALS if credentials else denied, hops_to_peer)


def hop_by_hop(headers: MultiMapping[str]) -> Set[bytes]:
    """The names that a client's ``Connection`` headers add to those that are hop-by-hop anyway."""
    if "connection" not in headers:
        return frozenset()
    return _names_in([value.encode("latin-1", "replace") for value in headers.getall("connection")]) - HOP_BY_HOP


def _names_in(values: Iterable[bytes]) -> set[bytes]:
    return {part.strip().lower() for value in values for part in value.split(b",")}


def request_head(method: str, target: str, host: bytes, lines: bytes, length: int) -> bytes:
    """A request's first line and headers as bytes; ``length`` is the body's (left out for a body-less GET)."""
    if length or method not in ("GET", "HEAD", "DELETE", "OPTIONS"):
        lines = b"%scontent-length: %d\r\n" % (lines, length)
    first = f"{method} {target} HTTP/1.1\r\nhost: ".encode()
    return b"%s%s\r\n%saccept-encoding: identity\r\n\r\n" % (first, host, lines)


def to_client(head: Head, added: str, *, stream: bool, from_peer: bool = False) -> bytes:
    """An engine's headers as the client gets them, then the lines of ours. A peer proxy's ``x-homeport-*`` stay unless
    we say it."""
    deny: Set[bytes] = _RESPONSE_DENY
    if b"connection" in head.fields:
        deny |= _names_in([value for name, value in head.headers if name == b"connection"])
    if from_peer:
        deny |= {name.encode() for name in by_name(added)}
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
    lines.append(added.encode("latin-1", "replace"))
    return b"".join(lines)


def of_exchange(exchange: Exchange) -> str:
    """What Homeport tells about an answer, as lines; figures that are not known are left out."""
    request_id = exchange.request_id
    lines = f"x-homeport-request-id: {request_id}\r\nx-request-id: {request_id}\r\n"
    if exchange.api in ("messages", "count_tokens"):
        lines += f"request-id: {request_id}\r\n"
    if session := exchange.session:
        lines += f"x-homeport-session: {session}\r\n"
    serving = exchange.serving
    timing = server_timing(exchange, serving)
    where = exchange.region_reason
    if exchange.peer_region:
        why = _plain(where or f"served in region {exchange.region}")
        return f"{lines}x-homeport-decision: peer\r\nx-homeport-reason: {why}\r\n{timing}"
    if exchange.region:
        lines += f"x-homeport-region: {exchange.region}\r\n"
    if serving is not None:
        lines += f"x-homeport-backend: {serving.place}\r\n"
    if (prefill := exchange.prefilled_by) is not None:
        lines += f"x-homeport-prefill-backend: {prefill}\r\n"
    decision = exchange.decision
    if decision is not None:
        why = _plain(f"{where}; {decision.reason}" if where else decision.reason)
        lines += f"x-homeport-decision: {decision.word.value}\r\nx-homeport-reason: {why}\r\n"
        if (expected := exchange.expected_cached_tokens) is not None:
            lines += f"x-homeport-expected-cached-tokens: {expected}\r\n"
    if exchange.cache is not None:
        lines += f"x-homeport-cache: {exchange.cache}\r\n"
    return lines + timing


def by_name(lines: str) -> dict[str, str]:
    """Header lines as a mapping."""
    pairs = (line.partition(": ") for line in lines.split("\r\n") if line)
    return {name: value for name, _, value in pairs}


def server_timing(exchange: Exchange, serving: LegRecord | None) -> str:
    """Queue, decide, prefill leg and first token in milliseconds, those that have happened, as a line."""
    line = f"server-timing: queue;dur={exchange.queued_s * 1e3:.1f}, decide;dur={exchange.decide_s * 1e3:.2f}"
    if exchange.prefill_s is not None:
        line += f", prefill;dur={exchange.prefill_s * 1e3:.1f}"
    if exchange.first_token_s is not None and serving is not None and serving.first_token_s is not None:
        line += f", first-token;dur={(exchange.first_token_s - exchange.arrived_s) * 1e3:.1f}"
    return line + "\r\n"


def _plain(text: str) -> str:
    return text.replace("\r", " ").replace("\n", " ")
