"""KV events of engines, subscribed to and handed to the routers' exact index.

``kv_events: auto`` asks vLLM's ``/kv_event_sources``, which gives the publisher's settings by data-parallel rank
(``{"0": {"endpoint", "replay_endpoint", "topic", ...}}``, vLLM 0.32); an engine that has none is simply not followed,
and the approximate index serves it. One that does not answer is asked again. One that names an address where nobody
publishes is told of: vLLM binds only a wildcard's port (``tcp://*:5557``) or a local socket, and to any other address
it connects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

from homeport.fingerprint import JsonValue
from homeport_engines.vllm.events import KvEventSubscriber
from homeport_engines.vllm.kv import KvBatch
from homeport_proxy.config import Backend, KvEventSource, is_loopback
from homeport_proxy.fleet import Member
from homeport_proxy.probe import ProbeError, Prober
from homeport_proxy.splice import document_of

log = logging.getLogger(__name__)

SILENT_S = 10.0
"""How long a publisher may be unreachable before it is told of; an engine that starts binds its socket early."""
ASK_AGAIN_S = 5.0
"""How soon an engine is asked again for its sources after it did not answer."""


class Follower(Protocol):
    """A router as events need it."""

    def kv_events(self, place: str, batch: KvBatch) -> int | None: ...

    def kv_replayed(self, place: str, batches: Sequence[KvBatch]) -> int | None: ...

    def kv_connected(self, place: str) -> None: ...

    def kv_follow(self, place: str, on: bool = True) -> None: ...


@dataclass(frozen=True, slots=True)
class Source:
    """Where one rank publishes."""

    rank: int
    pub: str
    replay: str | None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class _Followed:
    source: Source
    member: Member
    router: Follower
    task: asyncio.Task[None]


class KvFeed:
    """Subscriptions by place. ``follow`` may be called again and again; it changes only what changed."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._following: dict[str, _Followed] = {}
        self._asked: dict[str, object] = {}
        self._asking: set[asyncio.Task[None]] = set()

    @property
    def asking(self) -> int:
        """Backends that have not yet told where they publish."""
        return len(self._asking)

    def backend_is_up(self, member: Member, router: Follower, *, again: bool) -> None:
        """A backend answers: find its sources and follow them; ``again``: ask also when nothing of it changed."""
        subject = (tuple(member.place_names()), member.backend.kv_events)
        if not again and self._asked.get(member.name) == subject:
            return
        self._asked[member.name] = subject
        if member.backend.kv_events == "none" or member.backend.engine != "vllm":
            self.forget(member.name)
            self._asked[member.name] = subject
            return
        task = asyncio.get_running_loop().create_task(self._begin(member, router, subject))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    def forget(self, backend: str) -> None:
        """A backend left: follow it no more."""
        self._asked.pop(backend, None)
        for place in [name for name in self._following if name.partition("/")[0] == backend]:
            gone = self._following.pop(place)
            gone.task.cancel()
            gone.member.notes.pop(_subject(place), None)
            gone.router.kv_follow(place, on=False)

    def keep_only(self, backends: Mapping[str, Member]) -> None:
        """Follow nothing but these."""
        for backend in {place.partition("/")[0] for place in self._following} - backends.keys():
            self.forget(backend)

    async def stop(self) -> None:
        """End every subscription."""
        tasks = [followed.task for followed in self._following.values()] + list(self._asking)
        self._following.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin(self, member: Member, router: Follower, subject: object) -> None:
        while (sources := await sources_of(member.backend, self._timeout_s)) is None:
            await asyncio.sleep(ASK_AGAIN_S)
            if self._asked.get(member.name) is not subject:
                return  # it left, or is asked anew
        places = member.place_names()
        for source in sources:
            place = places[source.rank] if 0 <= source.rank < len(places) else None
            known = self._following.get(place) if place is not None else None
            if place is None or (known is not None and known.source == source):
                continue
            if known is not None:
                known.task.cancel()
            task = asyncio.create_task(self._follow(member, place, source, router), name=f"kv events {place}")
            self._following[place] = _Followed(source, member, router, task)

    async def _follow(self, member: Member, place: str, source: Source, router: Follower) -> None:
        subject = _subject(place)

        def silent() -> None:
            member.notes[subject] = f"announces KV events at {source.pub}, but nobody publishes there"

        def connected() -> None:
            silence.cancel()
            member.notes.pop(subject, None)
            router.kv_connected(place)

        def replayed(batches: Sequence[KvBatch]) -> None:
            router.kv_replayed(place, batches)

        router.kv_follow(place)
        silence = asyncio.get_running_loop().call_later(SILENT_S, silent)
        try:
            await KvEventSubscriber(
                source.pub,
                source.replay,
                lambda batch: router.kv_events(place, batch),
                replayed,
                connected,
                topic=source.topic,
            ).run()
        except Exception:  # the approximate index goes on without it
            log.exception("KV events of %s are followed no more", place)
            router.kv_follow(place, on=False)
        finally:
            silence.cancel()


def _subject(place: str) -> str:
    return f"kv events of {place}"


async def sources_of(backend: Backend, timeout_s: float) -> list[Source] | None:
    """The backend's event sources, as configured or as the engine tells: empty when it publishes nothing, None when it
    did not answer."""
    host = urlsplit(backend.url).hostname or ""
    if isinstance(backend.kv_events, KvEventSource):
        count = backend.data_parallel if isinstance(backend.data_parallel, int) else 1
        given = backend.kv_events
        return [
            Source(rank, _plus(given.pub, rank), _plus(given.replay, rank) if given.replay else None)
            for rank in range(count)
        ]
    try:
        async with Prober(timeout_s) as prober:
            text = await prober.get(backend, "/kv_event_sources")
        by_rank = cast("dict[str, dict[str, JsonValue]]", document_of(text.encode()))
        return [
            Source(
                int(rank),
                _reachable(str(entry["endpoint"]), host),
                _reachable(str(entry["replay_endpoint"]), host) if entry.get("replay_endpoint") else None,
                str(entry.get("topic") or ""),
            )
            for rank, entry in by_rank.items()
        ]
    except ProbeError as error:
        unanswered = error.status is None or (error.status >= 500 and not error.no_such_page)
        return None if unanswered else []
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _reachable(endpoint: str, host: str) -> str:
    """An endpoint as it is reached from here: ``tcp://*:5557`` on the engine's own host; a socket of this machine."""
    if endpoint.startswith("ipc://") and is_loopback(host):
        return endpoint
    literal = f"[{host}]" if ":" in host else host
    for anywhere in ("*", "0.0.0.0", "[::]"):
        endpoint = endpoint.replace(f"//{anywhere}:", f"//{literal}:")
    if not endpoint.startswith("tcp://"):
        raise ValueError(f"{endpoint} cannot be reached from here")
    return endpoint


def _plus(endpoint: str, rank: int) -> str:
    """Rank i publishes i ports above rank 0."""
    base, colon, port = endpoint.rpartition(":")
    return f"{base}{colon}{int(port) + rank}" if port.isdigit() else endpoint
