"""Questions and messages between the parent and a worker over a local socket.

Both ends are the same program of the same user, on a socket in a folder that only that user can enter: values travel
pickled. Messages keep their order; answers come when they are ready.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import struct
from collections.abc import Awaitable, Callable
from typing import Any

log = logging.getLogger(__name__)

_HEAD = struct.Struct("!I")
_ASK, _TELL, _ANSWER, _FAULT, _CANCEL = range(5)
Handler = Callable[[str, tuple[Any, ...]], "Awaitable[Any] | None"]
"""Takes a method's name and arguments. What it returns is awaited for a question, and ignored for a message."""


class LinkLostError(ConnectionError):
    """The other end is gone."""


class Link:
    """One end. ``run`` it in a task; it ends when the other end is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler) -> None:
        self._reader = reader
        self._writer = writer
        self._handler = handler
        self._next = 0
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._out: list[bytes] = []

    async def ask(self, method: str, *arguments: Any) -> Any:
        """The other end's answer; raises what it raised, or :class:`LinkLostError`. Cancelling cancels it there."""
        if self._writer.is_closing():
            raise LinkLostError("the other process is gone")
        self._next = number = self._next + 1
        future = self._open[number] = asyncio.get_running_loop().create_future()
        self._send((_ASK, number, method, arguments))
        try:
            return await future
        except asyncio.CancelledError:
            self._send((_CANCEL, number, "", ()))
            raise
        finally:
            self._open.pop(number, None)

    def tell(self, method: str, *arguments: Any) -> None:
        """A message without an answer; lost when the other end is gone."""
        self._send((_TELL, 0, method, arguments))

    async def run(self) -> None:
        """Take what comes until the other end is gone."""
        try:
            while True:
                size = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))[0]
                self._take(*pickle.loads(await self._reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writer.close()
            for future in self._open.values():
                if not future.done():
                    future.set_exception(LinkLostError("the other process is gone"))
            for task in list(self._answering.values()):
                task.cancel()

    def close(self) -> None:
        """Hang up, after what was sent."""
        self._flush()
        self._writer.close()

    def _take(self, kind: int, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        if kind == _ASK:
            task = asyncio.get_running_loop().create_task(self._answer(number, method, arguments))
            self._answering[number] = task
            task.add_done_callback(lambda _: self._answering.pop(number, None))
        elif kind == _TELL:
            try:
                self._handler(method, arguments)
            except Exception:  # one message at fault must not cut the line for all others
                log.exception("message %s between proxy processes failed", method)
        elif kind == _CANCEL:
            if (answering := self._answering.get(number)) is not None:
                answering.cancel()
        elif (future := self._open.get(number)) is not None and not future.done():
            if kind == _ANSWER:
                future.set_result(arguments[0])
            else:
                future.set_exception(arguments[0])

    async def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            result = self._handler(method, arguments)
            value = await result if result is not None else None
            message: tuple[int, int, str, tuple[Any, ...]] = (_ANSWER, number, "", (value,))
        except Exception as error:
            message = (_FAULT, number, "", (error,))
        self._send(message)

    def _send(self, message: tuple[int, int, str, tuple[Any, ...]]) -> None:
        if self._writer.is_closing():
            return
        data = pickle.dumps(message, protocol=5)
        if not self._out:
            # what one turn of the event loop has to say goes out in one write
            asyncio.get_running_loop().call_soon(self._flush)
        self._out += (_HEAD.pack(len(data)), data)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out and not self._writer.is_closing():
            self._writer.write(b"".join(out))
