"""A fault in any function of Homeport on a request's path: the caller's request and the answer go through, counted."""

from __future__ import annotations

import inspect
import json
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType

import httpx2
import pytest

import homeport
import homeport.runtime
from homeport.failures import reset_failures
from homeport.transport import attach
from homeport.volatile import forget_declared
from homeport.worker import _Job
from sdk.tiny_server import Answer, Seen, TinyServer, chat, chat_answer, serving

MODULES = (
    "books", "breaks", "call", "canonical", "conversations", "diagnostics", "explain", "explicit", "fingerprint",
    "ledger", "mcp_names", "moments", "parting", "prices", "profiles", "prompt", "providers", "redaction", "report",
    "runtime", "session", "spans", "sse", "worker", "stabilise", "tap", "templates", "tokens", "trace", "transport",
    "usage", "volatile",
)  # fmt: skip

# the guards themselves: each is a try around one call, and hands the caller's own bytes on
GUARDS = {
    "transport._Wrapped._outgoing", "transport._Wrapped._incoming", "transport._SyncMixin.handle_request",
    "transport._AsyncMixin.handle_async_request", "transport._SyncStream.__iter__", "transport._SyncStream.__init__",
    "transport._SyncStream.close", "transport._AsyncStream.__aiter__", "transport._AsyncStream.__init__",
    "transport._AsyncStream.aclose", "transport._passed", "transport._rest", "transport._closed",
    "transport._SyncMixin.close", "transport._AsyncMixin.aclose", "transport._Wrapped.__getattr__",
}  # fmt: skip

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("zoom", "add")
]
BODY = {
    "model": "m",
    "messages": [{"role": "system", "content": "It is 12:00:01."}, {"role": "user", "content": "hi"}],
    "tools": TOOLS,
}
CHILD = homeport.Session("child", parent="root", kind="subagent")
FOLLOWING = {
    **BODY,
    "messages": [*BODY["messages"], {"role": "assistant", "content": "he"}, {"role": "user", "content": "2"}],
}


def functions() -> Iterator[tuple[str, object, str, FunctionType]]:
    """(name, owner, attribute, function) for every function and method defined in the modules on the path."""
    for short in MODULES:
        __import__(f"homeport.{short}")
        module = sys.modules[f"homeport.{short}"]
        for name, value in vars(module).items():
            value = inspect.unwrap(value) if callable(value) and not inspect.isclass(value) else value
            if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                yield f"{short}.{name}", module, name, value
            elif inspect.isclass(value) and value.__module__ == module.__name__:
                for method, function in vars(value).items():
                    if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                        yield f"{short}.{value.__name__}.{method}", value, method, function


ALL = {name: (owner, attribute, function) for name, owner, attribute, function in functions() if name not in GUARDS}


# what finds the frame that only Homeport asked for: a fault here lets it pass
HIDING = {
    "tap.is_usage_frame", "tap.Tap._feed_hiding", "tap.Tap.feed", "tap._as_it_is", "sse.data_of", "sse.Frames.feed",
}  # fmt: skip


class InjectedError(Exception):
    pass


def answers(seen: Seen) -> Answer:
    return chat(seen) if seen.body.get("stream") else chat_answer(headers={"x-homeport-session": "d1"})


# put behind the work of a run, to wait for it without Homeport's own functions; made before any fault is injected
BARRIERS = [_Job(lambda: None) for _ in range(2_000)]
homeport.runtime._books.do(lambda: None)  # starts the thread


class Bench:
    """One client and one server; :meth:`run` sends two turns and a sub-agent's request, streamed or not."""

    def __init__(self, server: TinyServer, client: httpx2.Client) -> None:
        self.server, self.client = server, client
        self.speaker: homeport.Session | None = None

    def run(self) -> tuple[list[bytes], list[bytes]]:
        """What the server saw and what the client read."""
        self.server.seen.clear()
        read: list[bytes] = []
        for body, self.speaker, stream in ((BODY, None, True), (FOLLOWING, None, True), (BODY, CHILD, False)):
            content = json.dumps({**body, "stream": stream})
            with self.client.stream("POST", f"{self.server.base_url}/chat/completions", content=content) as answer:
                read.append(b"".join(answer.iter_raw()))
        barrier = BARRIERS.pop()
        homeport.runtime._books._queue.put(barrier)
        assert barrier.done.wait(20)
        return [request.content for request in self.server.seen], read


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[list[bytes], list[bytes]]]:
    """What server and client see without Homeport."""
    with serving(answers) as server, httpx2.Client(verify=False) as client:
        yield Bench(server, client).run()


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with serving(answers) as server, httpx2.Client(verify=False) as client:
        bench = Bench(server, client)
        attach(client, session=lambda: bench.speaker)
        yield bench


def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that knows nothing, and no memoised results: every function runs."""
    monkeypatch.setattr(homeport.runtime, "_runtime", homeport.runtime.Runtime())
    for cached in CACHED:
        cached.cache_clear()
    forget_declared()
    homeport.volatile("It is 12:00:01.", name="clock")


CACHED = [
    value
    for module in [module for name, module in sys.modules.items() if name.startswith("homeport.")]
    for value in vars(module).values()
    if hasattr(value, "cache_clear") and getattr(value, "__module__", "") == module.__name__
]


def inject(name: str, monkeypatch: pytest.MonkeyPatch, called: list[str]) -> None:
    owner, attribute, _ = ALL[name]
    original = inspect.getattr_static(owner, attribute)

    def fault(*args: object, **kwargs: object) -> object:
        if threading.current_thread().name == "homeport-ledger":
            return original(*args, **kwargs)  # the ledger's writer: not on the path of a request
        called.append(name)
        raise InjectedError(name)

    if inspect.isclass(owner):
        monkeypatch.setattr(owner, attribute, fault)
        return
    for module in [module for name, module in sys.modules.items() if name.startswith("homeport.")]:
        for held, value in list(vars(module).items()):
            if value is original:
                monkeypatch.setattr(module, held, fault)


@pytest.fixture(scope="module")
def sound(bench: Bench) -> Iterator[tuple[list[bytes], list[bytes], set[CodeType]]]:
    """What server and client see with Homeport, and every function it runs through."""
    with pytest.MonkeyPatch.context() as patch:
        fresh_process(patch)
        ran: set[CodeType] = set()

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                ran.add(frame.f_code)

        books = homeport.runtime._books._queue
        books.put(_Job(lambda: sys.setprofile(note)))
        sys.setprofile(note)
        try:
            seen, read = bench.run()
        finally:
            sys.setprofile(None)
            books.put(_Job(lambda: sys.setprofile(None)))
        yield seen, read, ran


@pytest.mark.parametrize("module", MODULES)
def test_request_and_answer_survive_a_fault_in(
    module: str,
    plain: tuple[list[bytes], list[bytes]],
    sound: tuple[list[bytes], list[bytes], set[CodeType]],
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (name for name in ALL if name.startswith(f"{module}.") and ALL[name][2].__code__ in sound[2]):
        called: list[str] = []
        reset_failures()
        with monkeypatch.context() as patch:
            fresh_process(patch)
            inject(name, patch, called)
            seen, read = bench.run()
        whole = [b"".join(answers(request).chunks) for request in bench.server.seen]
        assert len(seen) == 3, name
        for index in range(3):
            # intact, or what a Homeport without a fault sends and hands out
            assert seen[index] in (plain[0][index], sound[0][index]), name
            fits = [plain[1][index], sound[1][index], *([whole[index]] if name in HIDING else [])]
            assert read[index] in fits, name
        if called:
            assert homeport.failures(), name


def test_the_list_covers_what_a_request_runs_through(
    sound: tuple[list[bytes], list[bytes], set[CodeType]],
) -> None:
    files = [code.co_filename.partition("/sdk/homeport/") for code in sound[2]]
    ran = {name.removesuffix(".py") for _, found, name in files if found}
    assert ran - set(MODULES) <= {"__init__", "ledger_store", "budgets", "failures"}


def test_without_a_fault_nothing_is_counted(bench: Bench) -> None:
    bench.run()
    assert homeport.failures() == {}
