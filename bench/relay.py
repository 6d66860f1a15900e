"""CPU the proxy spends per request and per stream chunk, beside a plain aiohttp proxy and others in the same run.

    python -m bench.relay [--peers vllm-router litellm nginx] [--seconds 3] [--rounds 2] [--json]

A stub engine (asyncio protocols, no HTTP library), the proxies and the client are processes of their own; what counts
is the CPU time of the proxy's process divided by what it served, so the figures hold on a busy machine too. Compare
the ratios, not the milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from bench.peers import PEERS, Peer
from homeport_proxy.local.checks import free_port

SIZES_KB = (1, 100, 400)
CHUNKS = 200
STREAMS = 50
_ANSWER = json.dumps(
    {
        "id": "c",
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
    }
).encode()
_STREAMED = re.compile(rb'"stream": ?true')
_FRAME = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"tok"}}]}\n\n'
_USAGE = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":200,"total_tokens":209}}\n\n'


class StubEngine(asyncio.Protocol):
    """Answers every POST: whole, or as a stream of ``CHUNKS`` chunks paced over about two seconds."""

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            mark = head.find(b"content-length:")
            length = int(head[mark + 15 :].split(b"\r\n", 1)[0]) if mark >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get"):
            return self._whole(b'{"object":"list","data":[{"id":"m","max_model_len":1000000}]}')
        if not _STREAMED.search(body):  # anywhere: some proxies write the body anew, in another order
            return self._whole(_ANSWER)
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self._chunk(0)
        return None

    def _whole(self, body: bytes) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )

    def _chunk(self, number: int) -> None:
        if self.transport.is_closing():
            return
        if number == CHUNKS:
            tail = _USAGE + b"data: [DONE]\n\n"
            self.transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(tail), tail))
            return
        self.transport.write(b"%x\r\n%s\r\n" % (len(_FRAME), _FRAME))
        asyncio.get_running_loop().call_later(0.01, self._chunk, number + 1)


def _loop_run(main: Callable[[], object]) -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())  # type: ignore[arg-type]


def engine_process(port: int) -> None:
    """The stub engine on ``port``."""

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(StubEngine, "127.0.0.1", port)
        await server.serve_forever()

    _loop_run(main)


def homeport_process(port: int, engine: int) -> None:
    """Homeport as `homeport serve` runs it."""
    import logging
    import os

    from homeport_proxy import config
    from homeport_proxy.commands.serve import serve

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    logging.getLogger().setLevel(logging.INFO)
    text = json.dumps(
        {
            "listen": f"127.0.0.1:{port}",
            "regions": {"local": {"backends": [{"name": "b0", "url": f"http://127.0.0.1:{engine}"}]}},
        }
    )
    with tempfile.TemporaryDirectory(prefix="homeport-bench-") as folder:
        path = Path(folder) / "homeport.yaml"
        path.write_text(text)
        _loop_run(lambda: serve(config.load(path), path))


def plain_process(port: int, engine: int) -> None:
    """The usual aiohttp proxy: read the body, decode it, forward it, copy the chunks."""
    from aiohttp import ClientSession, TCPConnector, web

    async def main() -> None:
        async with ClientSession(connector=TCPConnector(limit=0), auto_decompress=False) as session:

            async def handle(request: web.Request) -> web.StreamResponse:
                body = await request.read()
                json.loads(body)
                headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length")}
                url = f"http://127.0.0.1:{engine}{request.path_qs}"
                async with session.request(request.method, url, data=body, headers=headers) as answer:
                    if "event-stream" not in answer.headers.get("content-type", ""):
                        return web.Response(
                            body=await answer.read(), status=answer.status, content_type="application/json"
                        )
                    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
                    await response.prepare(request)
                    async for chunk in answer.content.iter_any():
                        await response.write(chunk)
                    await response.write_eof()
                    return response

            app = web.Application(client_max_size=1 << 27)
            app.router.add_route("*", "/{tail:.*}", handle)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            await asyncio.Event().wait()

    _loop_run(main)


def request_bytes(kilobytes: int, *, stream: bool, session: int = 0) -> bytes:
    """An agent's request: history in messages of 1 kB, the flags at the end."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"{session} {i} " + "word " * 190} for i in range(kilobytes)
    ]
    body = json.dumps({"model": "m", "messages": messages, "stream": stream}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"X-Session-Affinity: s{session}\r\nUser-Agent: bench\r\nAuthorization: Bearer x\r\nAccept: */*\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """One answer of either framing. Raises SystemExit when it is a refusal."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200"):
        raise SystemExit(f"a proxy under test answered {head[9:40]!r}")
    if b"transfer-encoding: chunked" in head:
        return await reader.readuntil(b"\r\n0\r\n\r\n")
    mark = head.find(b"content-length:")
    return await reader.readexactly(int(head[mark + 15 :].split(b"\r\n", 1)[0]))


async def asked(port: int, request: bytes, seconds: float, connections: int = 8) -> int:
    """How many requests were answered in that time over keep-alive connections."""
    until = time.monotonic() + seconds
    count = 0

    async def one() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        while time.monotonic() < until:
            writer.write(request)
            await read_answer(reader)
            count += 1
        writer.close()

    await asyncio.gather(*(one() for _ in range(connections)))
    return count


async def streamed(port: int) -> int:
    """Chunks relayed by ``STREAMS`` streams at once."""
    request = request_bytes(1, stream=True)

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        writer.write(request)
        frames = (await read_answer(reader)).count(b"data: {")
        writer.close()
        return frames

    return sum(await asyncio.gather(*(one() for _ in range(STREAMS))))


class Process(Protocol):
    """A started process."""

    @property
    def pid(self) -> int | None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


Start = Callable[[int, int], Process]
"""From the port to listen on and the engine's port to the proxy's process."""


def spawned(target: Callable[[int, int], None]) -> Start:
    """A function of this module in a process of its own."""

    def start(port: int, engine: int) -> Process:
        process = multiprocessing.get_context("spawn").Process(target=target, args=(port, engine), daemon=True)
        process.start()
        return process

    return start


class Contender:
    """One proxy's process and its figures: CPU in ms per request by body size, in us per chunk, memory in MB."""

    def __init__(self, name: str, start: Start, engine: int) -> None:
        self.name = name
        self.port = free_port()
        self.process = start(self.port, engine)
        self._usage = psutil.Process(self.process.pid)
        self.figures: dict[str, list[float]] = {}

    def wait(self) -> None:
        """Until it listens."""
        wait_for(self.port, alive=lambda: self._usage.status() != psutil.STATUS_ZOMBIE, name=self.name)

    def measure(self, name: str, work: Callable[[], int], unit: float) -> None:
        """CPU of the process while ``work`` runs, per item, times ``unit``."""
        before_s = self._cpu_s()
        count = work()
        self.figures.setdefault(name, []).append((self._cpu_s() - before_s) / max(1, count) * unit)

    def _cpu_s(self) -> float:
        times = [process.cpu_times() for process in (self._usage, *self._usage.children(recursive=True))]
        return sum(one.user + one.system for one in times)

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        try:
            self._usage.wait(5)
        except psutil.TimeoutExpired:
            self.process.kill()


def wait_for(
    port: int, limit_s: float = 240.0, alive: Callable[[], bool] = lambda: True, name: str = "the engine"
) -> None:
    """Until somebody listens there. Raises SystemExit when it ended or takes too long."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and alive():
        try:
            socket.create_connection(("127.0.0.1", port), 0.5).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"{name} does not listen on port {port}" + ("" if alive() else ": it ended"))


def run(seconds: float, rounds: int, peers: Sequence[Peer] = ()) -> dict[str, dict[str, float]]:
    """All figures, interleaved round by round: {contender: {figure: median}}."""
    engine_port = free_port()
    engine = multiprocessing.get_context("spawn").Process(target=engine_process, args=(engine_port,), daemon=True)
    engine.start()
    wait_for(engine_port)
    starts = {"homeport": spawned(homeport_process), "plain aiohttp": spawned(plain_process)}
    starts |= {peer.title: peer.start for peer in peers}
    contenders: list[Contender] = []
    try:
        contenders += [Contender(name, start, engine_port) for name, start in starts.items()]
        for contender in contenders:
            contender.wait()
        for round_number in range(rounds):
            for contender in contenders:
                for size in SIZES_KB:
                    request = request_bytes(size, stream=False, session=round_number)
                    asyncio.run(asked(contender.port, request, 0.3))
                    contender.measure(
                        f"ms per request, {size} kB",
                        lambda port=contender.port, body=request: asyncio.run(asked(port, body, seconds)),  # type: ignore[misc]
                        1e3,
                    )
                contender.measure("us per chunk", lambda port=contender.port: asyncio.run(streamed(port)), 1e6)  # type: ignore[misc]
        return {c.name: {name: statistics.median(values) for name, values in c.figures.items()} for c in contenders}
    finally:
        for contender in contenders:
            contender.stop()
        engine.terminate()


def main() -> int:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="load per figure and round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=[], help="other proxies to measure")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = run(args.seconds, args.rounds, [PEERS[name] for name in args.peers])
    if args.json:
        print(json.dumps(figures))
        return 0
    names = list(figures)
    print(f"{'CPU (homeport over each)':28}" + "".join(f"{name:>24}" for name in names))
    for figure in figures[names[0]]:
        own = figures[names[0]][figure]
        values = [figures[name][figure] for name in names]
        print(f"{figure:28}" + "".join(f"{f'{value:.3f} ({own / value:.2f}x)':>24}" for value in values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
