"""One request on its way: what is sent instead of it, and what is remembered for the answer. Knows no HTTP library."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from homeport import profiles
from homeport.fingerprint import Api, JsonValue, Segment, identity, segments
from homeport.moments import keep_of
from homeport.providers import CALLER_HEADERS, CALLER_KEYS, PARENT_HEADER, Provider, names_session, provider_for
from homeport.runtime import Observation, Proxy, Remembered, Unnamed, now_s, observe, observe_failure, runtime
from homeport.session import Session, affinity_id, affinity_uuid, current
from homeport.spans import Document
from homeport.stabilise import Body, ToolOrder, stabilise
from homeport.trace import span_now, usage_attributes
from homeport.usage import UsageMeter
from homeport.volatile import Declared, declared, mask

Mode = Literal["observe", "hint", "stabilise"]

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Larger requests pass unread."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a client was attached."""

    mode: Mode = "stabilise"
    session: Session | Callable[[], Session | None] | None = None
    profile: str | None = None
    tool_order: ToolOrder = "sorted"
    namespace: str = ""


class Wire(NamedTuple):
    """A request as any HTTP client would give it; header names in lower case."""

    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes


class Sent(NamedTuple):
    """What to send instead: headers to set, and the body, the same object when nothing changed."""

    headers: dict[str, str]
    content: bytes


@dataclass(slots=True, weakref_slot=True, eq=False)
class Call:
    """A request under way."""

    api: Api
    url: str
    session: Session
    memory: Remembered
    document: Document
    body: Body
    size_bytes: int
    hides_usage: bool = False
    started_at: float = field(default_factory=now_s)
    started: float = field(default_factory=time.perf_counter)
    request_headers: Mapping[str, str] = field(default_factory=dict)
    span: object = None


_APIS: tuple[tuple[str, Api], ...] = (
    ("/chat/completions", "chat"),
    ("/completions", "completions"),
    ("/responses", "responses"),
    ("/messages", "messages"),
)


# a request to a model has one of these; another service's path with the same ending has none
_OURS = frozenset({"model", "messages", "prompt", "input", "instructions", "previous_response_id", "conversation"})


def api_of(url: str) -> Api | None:
    """The API that a URL calls; None for anything Homeport has no part in."""
    path = urlsplit(url).path.rstrip("/")
    return next((api for ending, api in _APIS if path.endswith(ending)), None)


def plan(wire: Wire, settings: Settings) -> tuple[Sent, Call] | None:
    """What to send instead of a request; None when it is not one of ours and goes as it is."""
    api = api_of(wire.url)
    if api is None or wire.method != "POST" or not wire.content or len(wire.content) > MAX_BODY_BYTES:
        return None
    if wire.headers.get("content-encoding", "identity") != "identity":
        return None
    session = _named_session(wire.headers, settings)
    memory = runtime().remembered(session) if session is not None else None
    last = runtime().unnamed
    before = memory.document if memory is not None else last.document if last else None
    try:
        document = Document(wire.content.decode("utf-8"), before)
    except ValueError:
        return None  # not JSON, or not an object: the server will say so
    if _OURS.isdisjoint(document.body):
        return None
    provider = provider_for(wire.url)
    if session is None or memory is None:
        found = identity(api, document.body, mask=mask, tools=False, after=last.identity if last else None)
        runtime().unnamed = Unnamed(document, found)
        session = Session(runtime().conversations.of(found), namespace=settings.namespace)
        memory = runtime().remembered(session)
    size = len(wire.content)
    call = Call(api, wire.url, session, memory, document, document.body, size, request_headers=wire.headers)
    call.span = span_now()
    headers, members = ({}, {}) if settings.mode == "observe" else _changed(call, settings, provider)
    memory.under_way.add(call)
    if not members:
        return Sent(headers, wire.content), call
    call.body = {**document.body, **members}
    return Sent(headers, document.with_members(members).encode("utf-8", "surrogatepass")), call


def _changed(call: Call, settings: Settings, provider: Provider) -> tuple[dict[str, str], Body]:
    """The headers and the body members that the mode adds and stabilises."""
    api, body = call.api, call.body
    members: Body = {}
    if settings.mode == "stabilise":
        members |= _stable_members(body, call, settings)
    members |= _hints(api, body, call.memory, provider)
    headers = _headers(api, call.request_headers, call.session, provider)
    if _asks_usage(api, body, provider):
        options = body.get("stream_options")
        members["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        headers["accept-encoding"] = "identity"  # a frame can only be taken out of a stream that can be read
        call.hides_usage = True
    return headers, members


# --- whose request it is ---------------------------------------------------------------------------------------------


def _named_session(headers: Mapping[str, str], settings: Settings) -> Session | None:
    """The session that the program or the request names; None when nobody says."""
    fixed = settings.session
    opened = current() or (fixed if isinstance(fixed, Session) or fixed is None else fixed())
    if opened is not None:
        return opened
    own = next((headers[name] for name in sorted(CALLER_HEADERS & headers.keys()) if headers[name]), None)
    return None if own is None else Session(own, namespace=settings.namespace)


# --- what is changed -------------------------------------------------------------------------------------------------


def _stable_members(body: Body, call: Call, settings: Settings) -> Body:
    with call.memory.lock:
        state = call.memory.state
        if state.frozen and call.memory.is_free:
            state = replace(state, frozen={})  # the prompt is cold: a clock or a date may be of today again
        stable = stabilise(
            body,
            state,
            tool_order=settings.tool_order,
            mcp_tools=mcp_names(),
            rules=_rules(call, settings),
        )
        call.memory.state = stable.state
    return {name: value for name, value in stable.body.items() if value is not body.get(name)}


def mcp_names() -> Mapping[str, tuple[str, str]]:
    """Tool names that :func:`homeport.mcp.list_tools` gave out, with their origin."""
    from homeport.mcp_names import known_names

    return known_names()


def _rules(call: Call, settings: Settings) -> Sequence[Declared]:
    profile = profiles.named(settings.profile) if settings.profile else profiles.recognise(call.request_headers)
    host = (urlsplit(call.url).hostname or "").lower()
    return (*declared(), *(profile.rules_for(host) if profile else ()))


def _headers(api: Api, headers: Mapping[str, str], session: Session, provider: Provider) -> dict[str, str]:
    """Affinity headers, unless the caller named his session himself; each only where he has not set it."""
    if names_session(headers):
        return {}
    make = affinity_uuid if provider.uuid_ids else affinity_id
    wanted = {name: make(session.namespace, session.id) for name in provider.headers_for(api)}
    if provider.own:
        if session.parent is not None:
            wanted[PARENT_HEADER] = affinity_id(session.namespace, session.parent)
        if session.kind != "main":
            wanted["x-homeport-kind"] = session.kind
    return {name: value for name, value in wanted.items() if name not in headers}


def _hints(api: Api, body: Body, memory: Remembered, provider: Provider) -> Body:
    """The cache key where the provider takes one, unless the caller set his own."""
    keys = provider.keys_for(api)
    if not keys or any(key in body for key in CALLER_KEYS):
        return {}
    session = memory.session
    name = session.parent if session.parent is not None and _shares_head(api, body, memory) else session.id
    return {key: affinity_id(session.namespace, name) for key in keys}


_SHARED_HEAD_BYTES = 4096
"""About 1,024 tokens: the shortest prefix that hosted caches keep."""


def _shares_head(api: Api, body: Body, memory: Remembered) -> bool:
    """Whether a sub-agent begins as its parent does: then one cache key brings it to the parent's machine.

    Decided at its first request and kept. A parent that never spoke here counts as alike.
    """
    if memory.shares_parent_head is None:
        parent = runtime().find(memory.session.parent or "", memory.session.namespace)
        mine = _head(api, body)
        theirs = _head(api, parent.body) if parent is not None and parent.body is not None else ()
        size = 0
        for one, other in zip(mine, theirs, strict=False):
            if one.digest != other.digest:
                break
            size += one.size
        whole = sum(segment.size for segment in mine)
        memory.shares_parent_head = not theirs or size >= min(_SHARED_HEAD_BYTES, whole / 2)
    return memory.shares_parent_head


def _head(api: Api, body: Mapping[str, JsonValue]) -> tuple[Segment, ...]:
    return tuple(segment for segment in segments(api, body, ids=False) if segment.kind in ("tool", "system"))


def _asks_usage(api: Api, body: Body, provider: Provider) -> bool:
    """Whether usage must be asked for in the caller's stead: only these two APIs leave it out of a stream."""
    if api not in ("chat", "completions") or body.get("stream") is not True or not provider.asks_usage:
        return False
    options = body.get("stream_options")
    return not (isinstance(options, dict) and options.get("include_usage") is True)


# --- the answer ------------------------------------------------------------------------------------------------------


_KEY_HEADERS = ("authorization", "x-api-key")


def answered(call: Call, headers: Mapping[str, str]) -> None:
    """An answer's head has come."""
    call.memory.keep_s = keep_of(headers.get("x-homeport-cache"), call.memory.keep_s)
    digest = headers.get("x-homeport-session")
    if digest:
        parts = urlsplit(call.url)
        path = parts.path[: parts.path.rfind("/v1/")] if "/v1/" in parts.path else ""
        keys = {name: call.request_headers[name] for name in _KEY_HEADERS if name in call.request_headers}
        proxy = Proxy(f"{parts.scheme}://{parts.netloc}{path}", digest, keys)
        runtime().note_proxy(call.session.affinity, proxy)


def unanswered(call: Call) -> None:
    """There is no answer, or a refusal (HTTP 400 and above)."""
    call.memory.under_way.discard(call)
    observe_failure(call.memory)


def finished(
    call: Call,
    status: int,
    headers: Mapping[str, str],
    meter: UsageMeter,
    ttft_s: float | None,
    diagnostics: Mapping[str, JsonValue] | None,
) -> None:
    """An answer is complete, or its reader has left: into the books with it."""
    call.memory.under_way.discard(call)
    usage = meter.usage
    previous_at = call.memory.answered_at
    call.memory.answered_at = now_s()
    # a side request stands beside the conversation: it is compared with nothing, and nothing with it
    beside = call.session.kind == "side"
    previous = None if beside else runtime().keep_body(call.memory, call.body, call.document, call.size_bytes)
    usage_attributes(call.span, usage, call.session.affinity, headers)
    observe(
        Observation(
            session=call.session,
            api=call.api,
            url=call.url,
            body=call.body,
            previous=previous,
            usage=usage,
            status=status,
            started_at=call.started_at,
            elapsed_s=time.perf_counter() - call.started,
            ttft_s=ttft_s,
            since_last_s=None if previous_at is None else max(0.0, call.started_at - previous_at),
            response_headers=headers,
            diagnostics=diagnostics,
            request_id=headers.get("x-homeport-request-id") or headers.get("x-request-id"),
            request_headers=call.request_headers,
        ),
        call.memory,
    )
