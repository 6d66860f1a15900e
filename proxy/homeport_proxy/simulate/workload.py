"""A workload: conversations of requests with their prefix blocks, closed loop (think times) or open loop (arrivals)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Call:
    """One request of a trace. ``keys``: chained digests of its full blocks. ``wait_s``: closed loop, client delay
    after the lane's previous answer; open loop, absolute arrival (s)."""

    prompt_tokens: int
    output_tokens: int
    keys: Sequence[int]
    wait_s: float


@dataclass(slots=True, eq=False)
class Lane:
    """A line of requests, each after the answer to the one before. ``after``: the call of the session's main lane
    after whose answer (plus the first call's ``wait_s``) the lane starts; None: with the session."""

    name: str
    calls: list[Call] = field(default_factory=list)
    after: int | None = None


@dataclass(slots=True, eq=False)
class Conversation:
    """One session: its main lane first, then its sub-agents'."""

    name: str
    lanes: list[Lane]


@dataclass(slots=True, eq=False)
class Workload:
    """A parsed trace. ``closed``: conversations are started by the simulator; else calls carry their arrival."""

    conversations: list[Conversation]
    closed: bool
    block_tokens: int
    left_out: int = 0
    """Requests of the file that are no traffic: they were answered with an error."""

    @property
    def calls(self) -> int:
        """Requests in all."""
        return sum(len(lane.calls) for conversation in self.conversations for lane in conversation.lanes)
