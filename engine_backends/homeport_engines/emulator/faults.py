"""Faults on command: which request is hurt, in which phase, and how."""

from __future__ import annotations

import asyncio
import fnmatch
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

from aiohttp import web

from homeport.fingerprint import JsonValue

Kind = Literal[
    "reset", "hang", "slow", "status", "half_frame", "close", "content_length", "garbage", "metrics_missing", "silent"
]
Phase = Literal["before_headers", "after_headers", "mid_stream"]
FAULT_PATHS = "/v1/*"


@dataclass(slots=True)
class Fault:
    """One fault.

    ``kind``: ``reset`` (TCP RST), ``hang`` (nothing more comes until the client leaves or the fault is lifted),
    ``slow`` (``delay_s`` before the phase, in mid-stream before every frame), ``status`` (answers ``status``),
    ``half_frame`` (half of a frame, then the connection ends), ``close`` (ends cleanly too early), ``content_length``
    (promises more bytes than come), ``garbage`` (bytes that are no HTTP, or no JSON once headers are out),
    ``metrics_missing`` (404, or without the families named in ``names``), ``silent`` (the request is computed, the
    answer never leaves).

    It hits matching requests from the ``nth`` on (counted since it was added), ``times`` of them; ``times`` None is
    all. ``path`` is a glob. ``after_frames`` counts the frames (or, unstreamed, sixteenths of the body) that still go
    out in mid-stream.
    """

    kind: Kind
    phase: Phase = "before_headers"
    path: str = FAULT_PATHS
    nth: int = 1
    times: int | None = 1
    status: int = 500
    retry_after_s: float | None = None
    message: str = "fault on command"
    delay_s: float = 0.0
    after_frames: int = 2
    names: tuple[str, ...] = ()
    seen: int = 0
    done: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind: {self.kind!r} is none of {', '.join(get_args(Kind))}")
        if self.phase not in get_args(Phase):
            raise ValueError(f"phase: {self.phase!r} is none of {', '.join(get_args(Phase))}")
        if self.kind == "metrics_missing" and self.path == FAULT_PATHS:
            self.path = "/metrics"

    @classmethod
    def parse(cls, data: Mapping[str, JsonValue]) -> Fault:
        """Read one fault from JSON. Raises ValueError naming what is wrong."""
        known = {item.name for item in fields(cls)} - {"seen", "done"}
        unknown = set(data) - known
        if unknown:
            raise ValueError(f"unknown members: {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")
        values = dict(data)
        names = values.pop("names", [])
        if "kind" not in values:
            raise ValueError("kind: required")
        if not isinstance(names, list):
            raise ValueError("names: a list is required")
        return cls(**values, names=tuple(str(name) for name in names))  # type: ignore[arg-type]


class Faults:
    """The faults of one emulator, in the order they were added; the first that matches a request hits it."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._lifted = asyncio.Event()

    def add(self, fault: Fault) -> Fault:
        """Arm a fault."""
        self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Lift every fault; what hangs goes on."""
        self._faults.clear()
        self._lifted.set()
        self._lifted = asyncio.Event()

    def armed(self) -> list[Fault]:
        """The faults as they stand."""
        return list(self._faults)

    def pick(self, path: str) -> Fault | None:
        """The fault that hits this request, if any."""
        for fault in self._faults:
            if not fnmatch.fnmatchcase(path, fault.path):
                continue
            fault.seen += 1
            if fault.seen < fault.nth or (fault.times is not None and fault.done >= fault.times):
                continue
            fault.done += 1
            return fault
        return None

    async def lifted(self, fault: Fault) -> None:
        """Wait until the faults are cleared; at once when this one has been already."""
        if any(armed is fault for armed in self._faults):
            await self._lifted.wait()


def reset(request: web.Request) -> None:
    """End the connection with a TCP reset."""
    transport = request.transport
    if transport is None:
        return
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
