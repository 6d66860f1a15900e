"""A tiny HTTP/1.1 server in a thread: records every request byte for byte and answers what the test says."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Seen:
    """One request as it arrived; header names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes

    @property
    def body(self) -> dict:
        return json.loads(self.content)


@dataclass
class Answer:
    """What to send back; several chunks make a chunked answer, one write each."""

    chunks: Sequence[bytes]
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})


Script = Callable[[Seen], Answer]


class TinyServer:
    """Listens on a free port of 127.0.0.1; ``seen`` holds the requests in order."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[Seen] = []
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                while (request := outer._read(self.rfile)) is not None:
                    outer.seen.append(request)
                    outer._write(self.wfile, outer.script(request))

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.root = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.base_url = f"{self.root}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> TinyServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def last(self) -> Seen:
        return self.seen[-1]

    def _read(self, stream) -> Seen | None:
        line = stream.readline()
        if not line.strip():
            return None
        method, path, _ = line.decode().split(" ", 2)
        headers: dict[str, str] = {}
        while (raw := stream.readline()) not in (b"\r\n", b""):
            name, _, value = raw.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        if headers.get("transfer-encoding") == "chunked":
            content = b""
            while size := int(stream.readline(), 16):
                content += stream.read(size)
                stream.readline()
            stream.readline()
        else:
            content = stream.read(int(headers.get("content-length", 0)))
        return Seen(method, path, headers, content)

    def _write(self, stream, answer: Answer) -> None:
        head = [f"HTTP/1.1 {answer.status} X", *(f"{name}: {value}" for name, value in answer.headers.items())]
        if len(answer.chunks) == 1:
            head.append(f"content-length: {len(answer.chunks[0])}")
            stream.write("\r\n".join(head).encode() + b"\r\n\r\n" + answer.chunks[0])
            return
        stream.write("\r\n".join([*head, "transfer-encoding: chunked"]).encode() + b"\r\n\r\n")
        for chunk in answer.chunks:
            stream.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            stream.flush()
        stream.write(b"0\r\n\r\n")


@contextmanager
def serving(script: Script) -> Iterator[TinyServer]:
    with TinyServer(script) as server:
        yield server


# --- answers of the APIs ---------------------------------------------------------------------------------------------

USAGE = {
    "prompt_tokens": 1200,
    "completion_tokens": 7,
    "total_tokens": 1207,
    "prompt_tokens_details": {"cached_tokens": 1024},
}


def chat_answer(text: str = "hello", usage: dict | None = USAGE, headers: dict[str, str] | None = None) -> Answer:
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
    }
    if usage is not None:
        body["usage"] = usage
    return Answer([json.dumps(body).encode()], headers={"content-type": "application/json", **(headers or {})})


def sse(*events: object) -> list[bytes]:
    return [
        b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n" for event in events
    ]


def chat_chunk(text: str | None = None, **extra: object) -> dict:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}, "finish_reason": None}]
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **extra}


def chat_stream(seen: Seen, headers: dict[str, str] | None = None) -> Answer:
    """A chat stream that sends the extra usage chunk only when it is asked for, as OpenAI and vLLM do."""
    asked = (seen.body.get("stream_options") or {}).get("include_usage")
    events = [chat_chunk("he"), chat_chunk("llo")]
    if asked:
        events.append(chat_chunk(None, usage=USAGE))
    return Answer(sse(*events, b"[DONE]"), headers={"content-type": "text/event-stream", **(headers or {})})


def chat(seen: Seen) -> Answer:
    return chat_stream(seen) if seen.body.get("stream") else chat_answer()
