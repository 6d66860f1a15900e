"""KV events over ZMQ as vLLM publishes them: PUB for the stream, ROUTER for replays, one pair of ports per rank."""

from __future__ import annotations

import asyncio
import time
from collections import deque

import msgspec
import zmq
import zmq.asyncio

from homeport.fingerprint import JsonValue
from homeport_engines.emulator.scheduler import Event
from homeport_engines.emulator.settings import EventEncoding
from homeport_engines.vllm.kv import EVENT_FIELDS

_END = (-1).to_bytes(8, "big", signed=True)
_encode = msgspec.msgpack.Encoder().encode


def encode_batch(events: list[Event], rank: int, encoding: EventEncoding) -> bytes:
    """``[ts, [events], rank]``; events are maps with ``type``, or (older vLLM) arrays with the tag first."""
    shaped = events if encoding == "map" else [_as_array(event) for event in events]
    return _encode([time.time(), shaped, rank])


def _as_array(event: Event) -> list[JsonValue]:
    tag = str(event["type"])
    return [tag, *(event.get(name) for name in EVENT_FIELDS[tag])]


class EventPublisher:
    """One rank's event stream. The sequence begins at 0 and begins again with :meth:`restart`."""

    def __init__(self, rank: int, topic: str, encoding: EventEncoding, buffer: int) -> None:
        self._rank = rank
        self._topic = topic.encode()
        self._encoding: EventEncoding = encoding
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._next = 0
        self._context = zmq.asyncio.Context()
        self._pub: zmq.Socket[bytes] | None = None
        self._replay: zmq.asyncio.Socket | None = None
        self._server: asyncio.Task[None] | None = None
        self.drop_next = 0
        """How many coming batches are lost on the way (their numbers are used up, replay still has them)."""
        self.endpoint = ""
        self.replay_endpoint = ""

    async def start(self, host: str, port: int, replay_port: int) -> None:
        """Bind both sockets; port 0 takes a free one."""
        self._pub = zmq.Socket(self._context, zmq.PUB)
        self._pub.set_hwm(100_000)
        self._replay = self._context.socket(zmq.ROUTER)
        self.endpoint = self._bind(self._pub, host, port)
        self.replay_endpoint = self._bind(self._replay, host, replay_port)
        self._server = asyncio.ensure_future(self._serve(self._replay))

    @staticmethod
    def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> str:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"tcp://{host}:{port or '*'}")
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        return (bound if isinstance(bound, bytes) else b"").rstrip(b"\0").decode()

    async def stop(self) -> None:
        """Close both sockets."""
        if self._server is not None:
            self._server.cancel()
            await asyncio.gather(self._server, return_exceptions=True)
        for socket in (self._pub, self._replay):
            if socket is not None:
                socket.close(0)
        self._context.term()

    def publish(self, events: list[Event]) -> None:
        """Send one batch."""
        payload = encode_batch(events, self._rank, self._encoding)
        number, self._next = self._next, self._next + 1
        self._buffer.append((number, payload))
        if self.drop_next:
            self.drop_next -= 1
            return
        if self._pub is not None:
            self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    def restart(self) -> None:
        """Begin again at 0 with nothing to replay, as a new process does."""
        self._buffer.clear()
        self._next = 0

    async def _serve(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3:
                continue
            client, _, start = frames
            first = int.from_bytes(start, "big")
            for number, payload in list(self._buffer):
                if number >= first:
                    await socket.send_multipart([client, b"", self._topic, number.to_bytes(8, "big"), payload])
            await socket.send_multipart([client, b"", self._topic, _END, b""])
