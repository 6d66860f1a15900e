"""Who is speaking: session ids, parents, and the session that is open in this task."""

from __future__ import annotations

import json
import uuid
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from homeport.fingerprint import Api
from homeport.providers import OWN, PARENT_HEADER, provider_for

if TYPE_CHECKING:
    from homeport.report import SessionReport

Kind = Literal["main", "side", "subagent"]


def affinity_id(namespace: str, conversation: str) -> str:
    """The id that travels for a conversation: a pure digest of (namespace, id), ASCII, 35 characters.

    The same in every process and on every machine; the id itself cannot be read from it.
    """
    return "hp-" + _digest(namespace, conversation).hex()


def affinity_uuid(namespace: str, conversation: str) -> str:
    """:func:`affinity_id` in the form of a UUID (version 8: custom), for hosts that want one."""
    raw = bytearray(_digest(namespace, conversation))
    raw[6] = raw[6] & 0x0F | 0x80
    raw[8] = raw[8] & 0x3F | 0x80
    return str(uuid.UUID(bytes=bytes(raw)))


def _digest(namespace: str, conversation: str) -> bytes:
    # JSON keeps ("a", "bc") and ("ab", "c") apart and is defined for every str, lone surrogates included
    text = json.dumps([namespace, conversation])
    return blake2b(text.encode("ascii"), digest_size=16, person=b"homeport").digest()


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation by name. ``with`` opens it for this task and the tasks it starts; leaving does not end it.

    ``parent``: the id of the session that started this one as a sub-agent. ``kind``: ``side`` for requests beside the
    conversation (titles, summaries).
    """

    id: str
    parent: str | None = None
    namespace: str = ""
    kind: Kind = "main"

    @property
    def affinity(self) -> str:
        """The id that travels."""
        return affinity_id(self.namespace, self.id)

    def headers(self, url: str | None = None, api: Api = "chat") -> dict[str, str]:
        """Headers to pass by hand. ``url``: the server's base URL, whose convention is followed; default: one's own
        proxy or engine."""
        provider = OWN if url is None else provider_for(url)
        make = affinity_uuid if provider.uuid_ids else affinity_id
        headers = {name: make(self.namespace, self.id) for name in provider.headers_for(api)}
        if provider.own:
            if self.parent is not None:
                headers[PARENT_HEADER] = affinity_id(self.namespace, self.parent)
            if self.kind != "main":
                headers["x-homeport-kind"] = self.kind
        return headers

    def extra_body(self, url: str | None = None, api: Api = "chat") -> dict[str, str]:
        """Body members to pass by hand: the cache key, which a sub-agent shares with its parent. With ``url`` only what
        that server takes."""
        names = ("prompt_cache_key",) if url is None else provider_for(url).keys_for(api)
        return {name: affinity_id(self.namespace, self.parent or self.id) for name in names}

    def report(self) -> SessionReport:
        """What this session used, saved and lost so far."""
        from homeport.runtime import report

        return report(self.id, namespace=self.namespace)

    def free_moment(self) -> bool:
        """Whether this session's prompt may change now at no cost (see :func:`homeport.free_moment`)."""
        from homeport.runtime import free_moment

        return free_moment(self)

    def __enter__(self) -> Session:
        _open.set((*_open.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # by value, not by token: a block may be left in another context than it was entered (async generators)
        stack = list(_open.get())
        if self in stack:
            stack.reverse()
            stack.remove(self)
            stack.reverse()
            _open.set(tuple(stack))


_open: ContextVar[tuple[Session, ...]] = ContextVar("homeport_session", default=())


def session(
    session_id: str | Session,
    *,
    parent: str | Session | None = None,
    namespace: str = "",
    kind: Kind | None = None,
) -> Session:
    """Name a conversation: ``with homeport.session("task-42"): ...``.

    ``session_id`` is yours and never travels; ids are unique within a ``namespace``. ``parent``: the session that this
    one is a sub-agent of.
    """
    if isinstance(session_id, Session):
        return session_id
    if not session_id or not isinstance(session_id, str):
        raise ValueError("session id must be a string that is not empty, for example a task's or a chat's own id")
    parent_id = parent.id if isinstance(parent, Session) else parent
    if parent_id == session_id:
        raise ValueError(f"session {session_id!r} cannot be its own parent; give the sub-agent an id of its own")
    return Session(session_id, parent_id, namespace, kind or ("subagent" if parent_id is not None else "main"))


def current() -> Session | None:
    """The session that is open in this task, the innermost; None when there is none."""
    stack = _open.get()
    return stack[-1] if stack else None
