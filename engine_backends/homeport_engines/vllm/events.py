"""A subscriber to one engine's KV events: hands batches on, fetches what was missed. The prefix index's only I/O.

The replay endpoint answers a DEALER's ``[b"", start]`` with ``[b"", topic, seq, payload]`` frames and ends with
sequence -1; it keeps the last 10,000 batches. ZMQ reconnects by itself; a restarted engine shows by its sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import cast

import zmq
import zmq.asyncio

from homeport_engines.vllm.kv import EventFormatError, KvBatch, decode_batch

_END_OF_REPLAY = -1

OnBatch = Callable[[KvBatch], "int | None"]
"""Takes a live batch; returns the sequence to replay from when batches are missing, else None."""

OnReplay = Callable[[Sequence[KvBatch]], None]
"""Takes the answer to a replay request (empty: nothing came)."""


class KvEventSubscriber:
    """Follows one publisher: ``run`` until cancelled, reconnecting by itself (ZMQ does).

    Keeps no state of the cache: every batch goes to ``on_batch``; what is missing is fetched and goes to ``on_replay``.
    ``on_connect`` comes before the first batch of every connection: another process may answer under the same address
    and its sequence may happen to go on where the old one's ended, so that nothing heard before counts.
    A batch that cannot be read is counted in ``bad_batches`` and skipped (it shows as a gap).
    """

    def __init__(
        self,
        pub: str,
        replay: str | None,
        on_batch: OnBatch,
        on_replay: OnReplay,
        on_connect: Callable[[], None],
        *,
        topic: str = "",
        replay_timeout_s: float = 5.0,
    ) -> None:
        self._pub = pub
        self._replay = replay
        self._on_batch = on_batch
        self._on_replay = on_replay
        self._on_connect = on_connect
        self._topic = topic
        self._replay_timeout_s = replay_timeout_s
        self.bad_batches = 0

    async def run(self) -> None:
        """Subscribe and hand on; returns only by cancellation."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 100_000)
            socket.subscribe(self._topic)
            monitor = socket.get_monitor_socket(zmq.EVENT_CONNECTED)
            poller = zmq.asyncio.Poller()
            poller.register(monitor, zmq.POLLIN)
            poller.register(socket, zmq.POLLIN)
            socket.connect(self._pub)
            while True:
                ready = dict(await poller.poll())
                if monitor in ready:
                    await monitor.recv_multipart()
                    self._on_connect()
                    await self._fetch(context, 0)
                elif socket in ready:
                    await self._take(context, await socket.recv_multipart())
        finally:
            socket.disable_monitor()
            socket.close()
            context.destroy(linger=0)

    async def _take(self, context: zmq.asyncio.Context, frames: Sequence[bytes]) -> None:
        batch = self._parsed(frames)
        missing = self._on_batch(batch) if batch is not None else None
        if missing is not None:
            await self._fetch(context, missing)

    async def _fetch(self, context: zmq.asyncio.Context, start: int) -> None:
        if self._replay is None:
            self._on_replay([])
            return
        batches: list[KvBatch] = []
        socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._replay)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._replay_timeout_s):
                    await cast("Awaitable[object]", socket.send_multipart([b"", start.to_bytes(8, "big")]))
                    while True:
                        frames = await socket.recv_multipart()
                        batch = self._parsed(frames[1:] if frames and frames[0] == b"" else frames)
                        if batch is None:
                            break
                        batches.append(batch)
        finally:
            socket.close()
        self._on_replay(batches)

    def _parsed(self, frames: Sequence[bytes]) -> KvBatch | None:
        """A batch, or None at the end of a replay and for what cannot be read."""
        if len(frames) < 3:
            return None
        seq = int.from_bytes(frames[-2], "big", signed=True)
        if seq == _END_OF_REPLAY:
            return None
        try:
            return decode_batch(seq, frames[-1])
        except EventFormatError:
            self.bad_batches += 1
            return None
