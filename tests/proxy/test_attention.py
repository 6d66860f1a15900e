"""A proxy whose own loop stood still blames nobody for it, and yet gives up whoever is silent."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import uvloop

from homeport_proxy.attention import within
from homeport_proxy.config import Backend
from homeport_proxy.patience import Patience, Watch
from homeport_proxy.probe import Alive, Prober
from homeport_proxy.upstream import Collector, Head, Origin, Pool, UpstreamError

LIMIT_S = 0.2
STILL_S = 0.6
REQUEST = b"GET /health HTTP/1.1\r\nhost: e\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Both loops: the one reads sockets before it looks at timers, the other after it."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


@contextmanager
def elsewhere(answer: bytes = ANSWER) -> Iterator[str]:
    """The URL of an engine outside this loop; it sends ``answer`` to whatever it is asked, half a limit later."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def serve() -> None:
            took, _ = listener.accept()
            with closing(took):
                while took.recv(65536):
                    time.sleep(LIMIT_S / 2)
                    took.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def stand_still() -> None:
    """Hold the loop up once, as a large body does: while it reads from its sockets."""
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()

    def hold_up() -> None:
        loop.remove_reader(ours)
        ours.close()
        time.sleep(STILL_S)

    loop.add_reader(ours, hold_up)
    theirs.close()


def test_a_connection_made_while_the_loop_stood_still_is_used(run: Run) -> None:
    async def connects() -> None:
        pool = Pool(Origin.parse(f"http://127.0.0.1:{port}"), connect_s=LIMIT_S)
        stand_still()
        assert not (await pool.acquire()).closed
        pool.close()

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        run(connects())


@pytest.mark.parametrize("begun", [False, True])
def test_an_answer_that_came_while_the_loop_stood_still_is_heard(run: Run, begun: bool) -> None:
    """Before the first token, and in the middle of a stream."""

    class Seen:
        token_seen, waiting_for_client = begun, False

    async def asks(url: str) -> tuple[Head, bytes]:
        pool, answer = Pool(Origin.parse(url)), Collector()
        connection = await pool.acquire()
        connection.send(REQUEST, b"", answer)
        relay: Any = Seen()
        patience = Patience(Watch(), connection, LIMIT_S, lambda: True, idle_s=LIMIT_S, relay=relay)
        stand_still()
        try:
            return await answer.finished()
        finally:
            patience.stop()
            pool.close()

    with elsewhere() as url:
        _, body = run(asks(url))
    assert body == b"ok"


def test_an_engine_is_not_down_for_our_own_standstill(run: Run) -> None:
    async def probes(url: str) -> Alive:
        async with Prober(LIMIT_S) as prober:
            stand_still()
            alive, _ = await prober.alive(Backend(name="e", url=url))
            return alive

    with elsewhere() as url:
        assert run(probes(url)) is Alive.YES


def test_silence_is_given_up_even_by_a_loop_that_is_always_late(run: Run) -> None:
    async def waits(url: str) -> None:
        pool, answer = Pool(Origin.parse(url)), Collector()
        connection = await pool.acquire()
        connection.send(REQUEST, b"", answer)
        patience = Patience(Watch(), connection, LIMIT_S, lambda: True)
        busy = asyncio.ensure_future(hog())
        async with asyncio.timeout(30):
            with pytest.raises(UpstreamError, match="no token within"):
                await answer.finished()
            with pytest.raises(TimeoutError):
                async with within(LIMIT_S):
                    await asyncio.Event().wait()
        busy.cancel()
        patience.stop()
        pool.close()

    async def hog() -> None:
        while True:
            time.sleep(0.15)  # noqa: ASYNC251 - this is what it is about
            await asyncio.sleep(0)

    with elsewhere(b"") as url:
        run(waits(url))
