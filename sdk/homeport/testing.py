"""A pytest fixture that fails a test when an agent's prompts are not append-only.

In ``conftest.py``: ``pytest_plugins = ["homeport.testing"]``. In a test::

    def test_agent(append_only):
        client = append_only.attach(OpenAI(...))
        run_agent(client)

The prompts are compared as the model would see them: tools, system text and messages, not the JSON around them.
Requests of sub-agents belong under sessions of their own (``with homeport.session(...)``); the rest counts as one
agent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import pytest

from homeport.explain import explain
from homeport.fingerprint import Segment, segments
from homeport.runtime import Observation, drain, runtime
from homeport.session import Session
from homeport.transport import attach

if TYPE_CHECKING:
    from homeport.breaks import CacheBreak
    from homeport.call import Mode

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Broken:
    """A prompt that does not continue the one before: which request of its session (from 1), and where they part."""

    session: str
    request: int
    pointer: str
    cause: CacheBreak | None

    def __str__(self) -> str:
        why = f"{self.cause.reason.value} at {self.cause.pointer}: {self.cause.hint}" if self.cause else self.pointer
        return f"request {self.request} of session {self.session!r} does not continue the one before: {why}"


class PromptWatch:
    """Watches the requests of attached clients."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chains: dict[str, list[list[Segment]]] = {}
        self._bodies: dict[str, Observation] = {}
        self._clients = 0
        self.broken: list[Broken] = []
        """Every request so far that did not continue its session's prompt."""

    def attach(self, client: T, *, mode: Mode = "observe") -> T:
        """Attach a client and watch it; without an open session all its requests count as one agent."""
        self._clients += 1
        return attach(client, mode=mode, session=Session(f"append-only-{self._clients}", namespace="homeport.testing"))

    def check(self) -> None:
        """Raise AssertionError that names every request which broke the prompt."""
        drain()
        if self.broken:
            raise AssertionError("prompts are not append-only:\n" + "\n".join(map(str, self.broken)))

    def watch(self, observation: Observation) -> None:
        """Take one request."""
        if observation.session.kind == "side":
            return
        chain = segments(observation.api, observation.body)
        name = observation.session.id
        with self._lock:
            before = self._chains.setdefault(name, [])
            last = before[-1] if before else []
            place = next((i for i, one in enumerate(last) if i >= len(chain) or chain[i].digest != one.digest), None)
            # the same request again is a retry or a new run of the agent, not a change of its prompt
            if place is not None and not any(_same(chain, one) for one in before):
                pointer = chain[place].pointer if place < len(chain) else last[place].pointer
                found = explain(self._bodies[name].body, observation.body)
                self.broken.append(Broken(name, len(before) + 1, pointer, found[0] if found else None))
            before.append(chain)
            self._bodies[name] = observation


def _same(one: list[Segment], other: list[Segment]) -> bool:
    return len(one) == len(other) and all(a.digest == b.digest for a, b in zip(one, other, strict=True))


@pytest.fixture
def append_only() -> Iterator[PromptWatch]:
    """Watch the prompts of attached clients; the test fails at its end when one was not append-only."""
    watch = PromptWatch()
    watchers = runtime().watchers
    watchers.append(watch.watch)
    try:
        yield watch
    finally:
        drain()
        watchers.remove(watch.watch)
    watch.check()
