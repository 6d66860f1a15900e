"""What this process knows of its sessions: stabiliser state, the last request, the books. One object, bounded.

Per session it holds the last request body (for the explainer) and its text (the next request repeats most of it), about
200 bytes per message and a few hundred bytes per tool; bodies and texts are bounded to 64 MiB in all (a body counts by
its JSON), sessions to 4,096, the longest unused going first. The books are in the ledger.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakSet

from homeport.breaks import CacheBreak
from homeport.conversations import Conversations
from homeport.explain import explain
from homeport.failures import failed
from homeport.fingerprint import Api, Identity, Incremental, JsonValue
from homeport.ledger import Ledger
from homeport.moments import is_free
from homeport.prices import PriceBook
from homeport.report import SessionReport, SessionTally
from homeport.session import Session, affinity_id, current
from homeport.spans import Document
from homeport.stabilise import State
from homeport.templates import family_of
from homeport.tokens import calibration
from homeport.usage import Usage
from homeport.worker import Worker

MAX_SESSIONS = 4_096
MAX_BODY_BYTES = 64 * 1024 * 1024

Body = Mapping[str, JsonValue]


@dataclass(slots=True)
class Remembered:
    """One session between its requests."""

    session: Session
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a request is planned."""
    books_lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while its books are written; never together with the other."""
    state: State = field(default_factory=State)
    body: Body | None = None
    document: Document | None = None
    """The body as it came, before anything was changed: the next request repeats most of it."""
    body_bytes: int = 0
    answered_at: float | None = None
    """When the last answer was complete, in Unix seconds."""
    keep_s: float | None = None
    """How long the prompt stays warm after an answer, as the proxy said last; None: nobody said."""
    under_way: WeakSet[object] = field(default_factory=WeakSet)
    """Its requests that are not answered in full; one that fails goes by itself."""
    prompt: Incremental = field(default_factory=lambda: Incremental(frozen=True))
    """Its prompt's segments as of the last answer, digests only."""
    tally: SessionTally = field(init=False)
    input_tokens: int | None = None
    """The size of its prompt as of the last answer."""
    shares_parent_head: bool | None = None
    """Decided at the first request of a sub-agent, then kept."""

    def __post_init__(self) -> None:
        self.tally = SessionTally(self.session.id)

    @property
    def is_free(self) -> bool:
        """Whether a change of the prompt would cost nothing now."""
        return not self.under_way and is_free(self.answered_at, self.keep_s, now_s())


@dataclass(frozen=True, slots=True)
class Observation:
    """One answered request, for the books. Times in seconds; ``since_last_s``: from the answer before to this
    request. ``request_id``: the server's, where it gave one."""

    session: Session
    api: Api
    url: str
    body: Body
    previous: Body | None
    usage: Usage
    status: int
    started_at: float
    elapsed_s: float
    ttft_s: float | None = None
    since_last_s: float | None = None
    response_headers: Mapping[str, str] = field(default_factory=dict)
    diagnostics: Mapping[str, JsonValue] | None = None
    request_id: str | None = None
    request_headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Proxy:
    """A Homeport proxy that served a session: its root URL, its own digest of the session, and the headers that let
    this client in (kept in memory only, never shown)."""

    root: str
    digest: str
    key_headers: Mapping[str, str] = field(default_factory=dict, repr=False)


class Unnamed(NamedTuple):
    """A request whose session nobody named, and who it was found to be."""

    document: Document
    identity: Identity


class Runtime:
    """The sessions and books of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: OrderedDict[tuple[str, str], Remembered] = OrderedDict()
        self._body_bytes = 0
        self.conversations = Conversations()
        self.unnamed: Unnamed | None = None
        """The last request of a session that nobody named: most often the next one goes on from it."""
        self._proxies: OrderedDict[tuple[str, str], Proxy] = OrderedDict()
        self._ledger: Ledger | None = None
        self.watchers: list[Callable[[Observation], None]] = []
        """Called with every observation; for tests (:mod:`homeport.testing`)."""

    @property
    def ledger(self) -> Ledger:
        """The ledger; one in memory until :func:`configure` names another."""
        with self._lock:
            if self._ledger is None:
                self._ledger = Ledger(prices=PriceBook())
            return self._ledger

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        with self._lock:
            self._ledger = ledger

    def remembered(self, session: Session) -> Remembered:
        """The session's memory; a new one when it is not known."""
        key = (session.namespace, session.id)
        with self._lock:
            found = self._sessions.get(key)
            if found is None:
                found = self._sessions[key] = Remembered(session)
            self._sessions.move_to_end(key)
            while len(self._sessions) > MAX_SESSIONS:
                _, oldest = self._sessions.popitem(last=False)
                self._body_bytes -= oldest.body_bytes
            return found

    def find(self, session_id: str, namespace: str = "") -> Remembered | None:
        """The memory of a session if it is known."""
        with self._lock:
            return self._sessions.get((namespace, session_id))

    def keep_body(self, memory: Remembered, body: Body, document: Document, size_bytes: int) -> Body | None:
        """Keep a session's request body, ``size_bytes`` of JSON, with its text, and give the one before; forgets the
        longest unused bodies when full."""
        size_bytes += document.text_bytes
        with self._lock:
            before, memory.body, memory.document = memory.body, body, document
            self._body_bytes += size_bytes - memory.body_bytes
            memory.body_bytes = size_bytes
            if self._body_bytes > MAX_BODY_BYTES:
                self._make_room(memory)
            return before

    def _make_room(self, newest: Remembered) -> None:
        for other in self._sessions.values():
            if other is not newest:
                self._body_bytes -= other.body_bytes
                other.body, other.document, other.body_bytes = None, None, 0
                other.prompt.let_go()
            if self._body_bytes <= MAX_BODY_BYTES:
                return

    def forget(self, session_id: str, namespace: str = "") -> Remembered | None:
        """Drop a session's memory; its lines in the ledger stay."""
        with self._lock:
            found = self._sessions.pop((namespace, session_id), None)
            if found is not None:
                self._body_bytes -= found.body_bytes
            return found

    def note_proxy(self, affinity: str, proxy: Proxy) -> None:
        """A Homeport proxy answered for a session."""
        with self._lock:
            self._proxies[affinity, proxy.root] = proxy
            self._proxies.move_to_end((affinity, proxy.root))
            while len(self._proxies) > MAX_SESSIONS:
                self._proxies.popitem(last=False)

    def proxies_of(self, affinity: str) -> list[Proxy]:
        """Every proxy that served the session."""
        with self._lock:
            return [proxy for (whose, _), proxy in self._proxies.items() if whose == affinity]


_runtime = Runtime()


def runtime() -> Runtime:
    """This process's runtime."""
    return _runtime


def configure(*, ledger: Ledger | None = None) -> None:
    """Set where the books of this process are kept (default: a ledger in memory with public prices)."""
    if ledger is not None:
        _runtime.ledger = ledger


_books = Worker("homeport-books")


def observe(observation: Observation, memory: Remembered) -> None:
    """Enter one answered request into the books, with the cause when cached tokens were lost; soon, and in order."""
    runtime = _runtime
    _books.do(lambda: _enter(runtime, observation, memory))


def observe_failure(memory: Remembered) -> None:
    """Count one request that got no answer, or was refused; soon, and in order."""

    def count() -> None:
        with memory.books_lock:
            memory.tally.failed_requests += 1

    _books.do(count)


def drain(timeout_s: float = 30.0) -> None:
    """Wait until every answer so far is in the books."""
    _books.drain(timeout_s)


def _enter(runtime: Runtime, observation: Observation, memory: Remembered) -> None:
    for watcher in list(runtime.watchers):
        watcher(observation)
    with memory.books_lock:
        continues = _calibrate(observation, memory)
    breaks = _breaks(runtime, observation, memory, continues)
    model = observation.body.get("model")
    entry = runtime.ledger.record(
        observation.usage,
        model=model if isinstance(model, str) else "",
        session=observation.session.id,
        tenant=observation.session.namespace,
        backend=observation.response_headers.get("x-homeport-backend", ""),
        request_id=observation.request_id,
        ts=observation.started_at,
        cause=breaks[0].reason.value if breaks else None,
        lost_tokens=breaks[0].lost_tokens if breaks else None,
        url=observation.url,
    )
    with memory.books_lock:
        memory.tally.add(entry, breaks)
        memory.input_tokens = observation.usage.input_tokens


def _calibrate(observation: Observation, memory: Remembered) -> bool:
    """Learn from a counted prompt; returns whether it continues the session's prompt before."""
    before = memory.prompt.last_digest
    parts = memory.prompt.segments(observation.api, observation.body)
    model = observation.body.get("model")
    if isinstance(model, str):
        calibration.learn(model, sum(part.size for part in parts), observation.usage.input_tokens)
    return before is not None and any(part.digest == before for part in parts)


_NO_BREAK_TOKENS = 1024


def _breaks(runtime: Runtime, observation: Observation, memory: Remembered, continues: bool) -> Sequence[CacheBreak]:
    cached = observation.usage.cached_tokens
    if continues and cached and memory.input_tokens is not None and observation.diagnostics is None:
        model = observation.body.get("model")
        family = family_of(model if isinstance(model, str) else "", observation.api)
        if memory.input_tokens - cached <= _NO_BREAK_TOKENS and family.reasoning != "dropped_at_user_turn":
            return ()  # the whole prompt before was read: nothing to explain, and explaining is the dear part
    try:
        return explain(
            observation.previous,
            observation.body,
            observation.usage,
            observation.diagnostics,
            response_headers=observation.response_headers,
            elapsed_s=observation.since_last_s,
            url=observation.url,
            prices=runtime.ledger.prices,
            at=observation.started_at,
        )
    except Exception as error:
        failed("explain", error)
        return ()


def report(session_id: str | Session, *, namespace: str = "") -> SessionReport:
    """What a session used, saved and lost, with the cause of each break; from the ledger when this process has
    forgotten the session or never knew it."""
    drain()
    name, space = _key(session_id, namespace)
    memory = _runtime.find(name, space)
    if memory is not None:
        with memory.books_lock:
            return memory.tally.report()
    return SessionReport.of(_runtime.ledger, name, tenant=space)


def _key(session_id: str | Session, namespace: str) -> tuple[str, str]:
    return (session_id.id, session_id.namespace) if isinstance(session_id, Session) else (session_id, namespace)


def free_moment(session_id: str | Session | None = None, *, namespace: str = "") -> bool:
    """Whether a session's prompt may change now at no cost: time to prune, compact, let late tools in.

    ``session_id``: default the session that is open here. True before its first answer, and once the cache behind a
    Homeport proxy is cold; otherwise, and where no proxy says how long it stays warm, False. A caller that breaks the
    prompt anyway (a compaction) has a free moment of his own. Raises ValueError when no session is given or open."""
    wanted = session_id if session_id is not None else current()
    if wanted is None:
        raise ValueError("no session is open here: pass the session whose prompt is to change")
    memory = _runtime.find(*_key(wanted, namespace))
    return memory is None or memory.is_free


def finish(session_id: str | Session, *, namespace: str = "", timeout_s: float = 2.0) -> None:
    """A conversation is over: its memory here is freed, and the Homeport proxies that served it may give its cache
    away. Leaving a ``with homeport.session(...)`` block does not do this. Never raises for a proxy that cannot be
    reached; waits at most ``timeout_s`` for each.
    """
    drain()
    name, space = _key(session_id, namespace)
    _runtime.forget(name, space)
    for proxy in _runtime.proxies_of(affinity_id(space, name)):
        try:
            _post(f"{proxy.root}/homeport/v1/sessions/{proxy.digest}/finish", proxy.key_headers, timeout_s)
        except Exception as error:
            failed("finish", error)


def _post(url: str, headers: Mapping[str, str], timeout_s: float) -> None:
    import urllib.request

    request = urllib.request.Request(url, data=b"", headers=dict(headers), method="POST")
    with urllib.request.urlopen(request, timeout=timeout_s):
        pass


def now_s() -> float:
    """Unix time in seconds."""
    return time.time()
