"""Who is speaking: the session key of a request, its parent, and whether it is a side request.

The first of these names the session: a session header, ``metadata.session_id``, Claude Code's ``metadata.user_id``;
then keys that often stand for many conversations (``prompt_cache_key``, ``conversation``, ``user``), which count only
while one conversation uses them; then the conversation itself, found again by the longest known chain of its messages.
Keys are namespaced by tenant and model and leave this module only as digests.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from homeport import fingerprint
from homeport.fingerprint import Api, JsonValue
from homeport_proxy.bounded import Bounded
from homeport_proxy.document import Document
from homeport_proxy.exchange import GENERATING, Exchange, Identity
from homeport_proxy.marks import Marks
from homeport_proxy.routing.views import Kind
from homeport_proxy.splice import document_of

PARENT_HEADERS = (
    "x-parent-session-affinity",
    "x-parent-session-id",
    "x-codex-parent-thread-id",
    "x-dynamo-parent-session-id",
)
SHARED_KEYS = ("prompt_cache_key", "promptCacheKey", "conversation", "user")
"""Body members that are often one value for many conversations."""

_CLAUDE_USER = re.compile(r"user_[0-9a-fA-F]+_account_.*_session_([0-9A-Za-z-]+)")
_KINDS: Mapping[str, Kind] = {"main": "main", "side": "side", "subagent": "subagent"}
_LINKS = 8
"""Points of conversations remembered per session."""


@dataclass(slots=True)
class _Link:
    """One point of a known conversation: its session, whether a request ended here, whether one went on from here."""

    session: bytes
    tip: bool = False
    continued: bool = False


@dataclass(slots=True)
class _Shape:
    """What a session's requests looked like: system prompts of those with tools, and of those without."""

    with_tools: set[bytes] = field(default_factory=set)
    without: set[bytes] = field(default_factory=set)


class _Found(msgspec.Struct, frozen=True):
    """A key as found: where, its bytes within the namespace, and its parent's."""

    source: str
    key: bytes
    parent: bytes | None = None
    kind: Kind = "main"


class Look(msgspec.Struct, frozen=True):
    """What identity needs of a request: names, digests and flags, none of its text.

    ``named``: the key it gives itself; else ``shared``, a name that may stand for many conversations, and ``mark``, the
    conversation's own digests (None when it cannot be read); ``body`` stands for it when there is nothing else.
    """

    namespace: bytes
    named: _Found | None
    shared: tuple[str, str] | None
    mark: fingerprint.Identity | None
    body: bytes
    parent: bytes | None
    kind: Kind | None
    tools: bool
    system: bytes
    final: bool


class Identities:
    """Finds session keys; remembers conversations for as many sessions as ``max_sessions`` allows."""

    def __init__(self, max_sessions: int = 100_000) -> None:
        self._links: Bounded[bytes, _Link] = Bounded(max_sessions * _LINKS)
        self._shared: Bounded[bytes, bytes] = Bounded(max_sessions)
        self._shapes: Bounded[bytes, _Shape] = Bounded(max_sessions)

    def reconfigure(self, max_sessions: int) -> None:
        """Take a reloaded file's bound."""
        self._links.limit(max_sessions * _LINKS)
        self._shared.limit(max_sessions)
        self._shapes.limit(max_sessions)

    @property
    def remembered(self) -> int:
        """Entries held, over all tables."""
        return len(self._links) + len(self._shared) + len(self._shapes)

    def resolve(self, seen: Look) -> Identity:
        """The identity of a request by what :func:`look` saw of it, and by what is remembered of others."""
        found = seen.named or self._shared_or_inferred(seen)
        key = seen.namespace + found.key
        parent_key = seen.parent if seen.parent is not None else found.parent
        parent = seen.namespace + parent_key if parent_key else None
        return Identity(
            session=digest(key),
            source=found.source,
            kind=self._kind(seen, found, key),
            parent=digest(parent) if parent is not None and parent != key else None,
            final=seen.final,
        )

    # keys that many conversations may share, and none at all

    def _shared_or_inferred(self, seen: Look) -> _Found:
        shared, mark, namespace = seen.shared, seen.mark, seen.namespace
        if mark is None:
            return _Found(shared[0], _utf8(shared[1])) if shared else _Found("request", seen.body)
        if shared is None:
            key, parent = self._conversation(namespace, mark, mark.head)
            return _Found("conversation", b"\0conversation\0" + key, b"\0conversation\0" + parent if parent else None)
        name, value = shared
        scope = namespace + b"\0shared\0" + _utf8(value) + b"\0"
        first = self._shared.get(scope)
        key, parent = self._conversation(scope, mark, mark.head)
        if first is None:
            self._shared.put(scope, key)
            first = key
        # the first conversation keeps the bare key; any other one is told apart by its head
        own = _utf8(value) if key == first else _utf8(value) + b"\0head\0" + key
        return _Found(name, own, _utf8(value) if parent == first and key != first else None)

    def _conversation(self, scope: bytes, mark: fingerprint.Identity, head: bytes) -> tuple[bytes, bytes | None]:
        """The conversation that this request continues, and the one it branched off, if it did.

        A request that goes on from where another request ended, after a third one already did so differently, is a
        branch of its own: parallel runs from one prompt are separate sessions.
        """
        link, new = self._longest(scope, mark.chain)
        parent: bytes | None = None
        if link is None:
            session = head
        elif not new or not (link.tip and link.continued):
            session = link.session
        else:
            session, parent = new[0], link.session
        if link is not None and new:
            link.continued = True
        for place in new:
            link = _Link(session)
            self._links.put(place, link)
        if link is not None:
            link.tip = True
        return session, parent

    def _longest(self, scope: bytes, chain: Sequence[bytes]) -> tuple[_Link | None, list[bytes]]:
        """The furthest point of the chain that is known, and the places of those after it."""
        new: list[bytes] = []
        link: _Link | None = None
        for mark in reversed(chain):
            place = _short(scope + mark)
            if (link := self._links.get(place)) is not None:
                break
            new.append(place)
        return link, new[::-1]

    # side requests

    def _kind(self, seen: Look, found: _Found, key: bytes) -> Kind:
        given = seen.kind
        if given is not None and given != "main":
            return given
        shape = self._shapes.get(_short(key))
        if shape is None:
            shape = _Shape()
            self._shapes.put(_short(key), shape)
        mains = shape.with_tools or shape.without
        by_key = found.source != "conversation"
        if (
            given is None
            and by_key
            and not seen.tools
            and mains
            and seen.system not in mains
            and (shape.with_tools or any(mains))
        ):
            return "side"
        systems = shape.with_tools if seen.tools else shape.without
        if len(systems) < 16:
            systems.add(seen.system)
        return given or ("subagent" if seen.parent is not None else found.kind)


def look(exchange: Exchange, body: Document, headers: Sequence[str], marks: Marks) -> Look:
    """What identity needs of a request; ``headers`` are those that name sessions, in order, ``marks`` reads what the
    conversation's text says."""
    namespace = f"{exchange.caller.name}\0{exchange.model}\0".encode()
    named = _named(exchange, body, headers)
    shared: tuple[str, str] | None = None
    mark: fingerprint.Identity | None = None
    if named is None:
        shared = next(((name, value) for name in SHARED_KEYS if (value := _shared_value(body.get(name)))), None)
        mark = _mark(exchange, body, marks)
    hinted = first_header(exchange.headers, PARENT_HEADERS)
    return Look(
        namespace=namespace,
        named=named,
        shared=shared,
        mark=mark,
        body=_short(exchange.body) if named is None and mark is None and shared is None else b"",
        parent=_utf8(hinted[1]) if hinted is not None else None,
        kind=_KINDS.get(exchange.headers.get("x-homeport-kind", "").lower()),
        tools=body.holds("tools"),
        system=marks.system(namespace + named.key if named is not None else None, exchange.api, body),
        final=exchange.headers.get("x-homeport-final") == "1",
    )


def _mark(exchange: Exchange, body: Mapping[str, JsonValue], marks: Marks) -> fingerprint.Identity | None:
    if exchange.api not in GENERATING:
        return None
    try:
        return marks.of(cast("Api", exchange.api), body)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None  # not the shape this API promises: the engine will say so


def _named(exchange: Exchange, body: Mapping[str, JsonValue], names: Sequence[str]) -> _Found | None:
    """The key a request gives itself, by header or metadata; a sub-agent's own id extends it."""
    headers = exchange.headers
    given = first_header(headers, names) or _in_metadata(body.get("metadata"))
    if given is None:
        return None
    source, value = given
    agent = headers.get("x-claude-code-agent-id")
    thread = headers.get("thread-id")
    if not agent and thread and thread != headers.get("session-id") and "session-id" in headers:
        agent = thread
    key = _utf8(value)
    return _Found(source, key) if not agent else _Found(source, key + b"\0agent\0" + _utf8(agent), key, "subagent")


def digest(key: bytes) -> str:
    """The opaque name of a session key: 32 hexadecimal digits."""
    return hashlib.blake2b(key, person=b"homeport-session", digest_size=16).hexdigest()


def _short(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def first_header(headers: Mapping[str, str], names: Sequence[str]) -> tuple[str, str] | None:
    """The first of these headers that says something, with its name."""
    for name in names:
        value = headers.get(name)
        if value and value.strip():
            return name, value.strip()
    return None


def _in_metadata(metadata: JsonValue) -> tuple[str, str] | None:
    if not isinstance(metadata, dict):
        return None
    session = metadata.get("session_id")
    if isinstance(session, str) and session:
        return "metadata.session_id", session
    user = metadata.get("user_id")
    session = _claude_session(user) if isinstance(user, str) else None
    return ("metadata.user_id", session) if session else None


def _claude_session(user_id: str) -> str | None:
    """The session in Claude Code's ``metadata.user_id``: ``user_<hex>_account_<id>_session_<uuid>``, or a JSON string
    with ``session_id``."""
    match = _CLAUDE_USER.fullmatch(user_id)
    if match is not None:
        return match.group(1)
    if user_id.lstrip().startswith("{"):
        try:
            session = document_of(user_id.encode()).get("session_id")
        except ValueError:
            return None
        return session if isinstance(session, str) and session else None
    return None


def _shared_value(value: JsonValue) -> str | None:
    if isinstance(value, dict):
        value = value.get("id")  # Responses: conversation may be an object
    return value if isinstance(value, str) and value else None
