"""An agent that breaks its own prompt cache in four ways, its requests recorded, and what Homeport says of them.

    python examples/broken_agent.py --base-url http://127.0.0.1:8080/v1 --model smollm2
    python examples/broken_agent.py --base-url http://127.0.0.1:8080/v1 --model smollm2 --stabilise
    python examples/broken_agent.py --engine emulator        # both, on an engine that is started for it; about a minute

``--engine`` takes emulator (computes no text), vllm-cpu (a model on the CPU: many minutes) and vllm (on a GPU).

The faults are common ones, each at its own rhythm: the clock stands in the system prompt, the tools are kept in a set
that is built anew whenever their server reconnects, the history is pruned when it grows, and a session that is loaded
from its file comes back with the tool calls' arguments parsed and dumped again. ``--stabilise`` mends what can be
mended from outside: the order of the tools, and the clock, because it is declared. The others are the agent's to mend.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import random
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
from agent import GUIDE, TASKS, Workshop
from demo import DemoError, fleet
from openai import APIError, OpenAI

import homeport
from homeport.analysis import conversations
from homeport.cli import main as homeport_command
from homeport.record import Record, RecordWriter, read

PRICES = Path(__file__).with_name("prices.json")
CLOCK = re.compile(r"The time is [^\n]*\n")

SECONDS_PER_REQUEST = 12
RECONNECT_EVERY, RELOAD_EVERY = 7, 9
KEPT_MESSAGES = 24
REQUESTS_PER_ROUND = 2 * len(TASKS)
PLAIN_PROGRESS_EVERY = 9


@dataclass(frozen=True)
class Tool:
    """A tool as this agent keeps it: in a set, where its place depends on the connection it came by."""

    name: str
    definition: str
    connection: int

    def __hash__(self) -> int:
        return zlib.crc32(f"{self.connection}/{self.name}".encode())


class BrokenAgent:
    """Works through the tasks of ``agent.py``, carelessly."""

    def __init__(
        self, client: OpenAI, model: str, workshop: Workshop, definitions: Sequence[dict[str, Any]], day: int
    ) -> None:
        self._client, self._model, self._workshop = client, model, workshop
        self._definitions = definitions
        self._history: list[dict[str, Any]] = []
        self._started = datetime(2026, 3, day, 9, 0, tzinfo=UTC)
        self._requests = 0

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            for tool, question in TASKS:
                self._history.append({"role": "user", "content": question})
                choice = {"type": "function", "function": {"name": tool}}
                for call in self._ask(tool_choice=choice, max_tokens=64).get("tool_calls") or []:
                    self._history.append({"role": "tool", "tool_call_id": call["id"], "content": self._use(call)})
                self._ask(tool_choice="none", max_tokens=24)

    def _ask(self, **options: Any) -> dict[str, Any]:
        self._requests += 1
        if len(self._history) > KEPT_MESSAGES:
            # fault: the oldest third goes, and with it everything that was computed behind it
            self._history = self._history[KEPT_MESSAGES // 3 :]
            while self._history[0]["role"] != "user":
                del self._history[0]
        if self._requests % RELOAD_EVERY == 0:
            self._reload()
        answer = self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "system", "content": self._system()}, *self._history],  # type: ignore[list-item]
            tools=self._tools(),  # type: ignore[arg-type]
            temperature=0,
            **options,
        )
        message = answer.choices[0].message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
        self._history.append({"content": "", **message})
        return message

    def _system(self) -> str:
        # fault: a clock at the head of the prompt
        now = self._started + timedelta(seconds=SECONDS_PER_REQUEST * self._requests)
        return f"The time is {now:%Y-%m-%d %H:%M} UTC.\n\n{GUIDE}"

    def _tools(self) -> list[dict[str, Any]]:
        # fault: the order of a set
        connection = self._requests // RECONNECT_EVERY
        tools = {Tool(one["function"]["name"], json.dumps(one), connection) for one in self._definitions}
        return [json.loads(tool.definition) for tool in tools]

    def _reload(self) -> None:
        # fault: what the model wrote is parsed and dumped with its keys in another order
        for message in self._history:
            for call in message.get("tool_calls") or []:
                arguments = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(arguments, sort_keys=True)

    def _use(self, call: dict[str, Any]) -> str:
        function = call["function"]
        arguments = json.loads(function["arguments"])
        arguments.pop("attempt", None)
        return str(getattr(self._workshop, function["name"])(**arguments))


class Recorder(httpx.BaseTransport):
    """Writes every request that leaves, as it leaves, with the usage of its answer; ``answered`` is told of each."""

    def __init__(
        self, inner: httpx.BaseTransport, writer: RecordWriter, session: str, answered: Callable[[], None]
    ) -> None:
        self._inner, self._writer, self._session, self._answered = inner, writer, session, answered

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        started, began = time.time(), time.perf_counter()
        response = self._inner.handle_request(request)
        payload = json.loads(response.read() or b"{}")
        self._writer.write(
            Record(
                body=json.loads(request.read()),
                ts=started,
                session=self._session,
                url=str(request.url),
                headers=dict(request.headers),
                status=response.status_code,
                response_headers=dict(response.headers),
                usage=payload.get("usage"),
                elapsed_s=time.perf_counter() - began,
            )
        )
        self._answered()
        return response

    def close(self) -> None:
        self._inner.close()


def run(
    base_url: str,
    model: str,
    record: Path,
    session: str,
    *,
    stabilise: bool,
    rounds: int,
    answered: Callable[[], None] = lambda: None,
) -> None:
    """Run the agent once; its requests are appended to ``record``, text and all. ``answered`` is called after each."""
    with (
        tempfile.TemporaryDirectory() as folder,
        RecordWriter(record, text=True) as writer,
        httpx.Client(transport=Recorder(httpx.HTTPTransport(), writer, session, answered), timeout=600) as http,
    ):
        client = OpenAI(base_url=base_url, api_key="-", max_retries=0, http_client=http)
        if stabilise:
            homeport.volatile(CLOCK, kind="timestamp")
        client = homeport.attach(client, mode="stabilise" if stabilise else "observe")
        workshop = Workshop(Path(folder))
        with homeport.session(session):
            # on another day, so that one run finds nothing of the other's in the engine's cache
            BrokenAgent(client, model, workshop, _definitions(workshop), 30 if stabilise else 29).run(rounds)


def _definitions(workshop: Workshop) -> list[dict[str, Any]]:
    """The tools of ``agent.py``; those with a parameter have a second one, so that arguments have an order."""
    definitions = workshop.definitions(random.Random(0))
    for one in definitions:
        schema = one["function"]["parameters"]
        if schema["properties"]:
            schema["properties"]["attempt"] = {"type": "integer", "enum": [1, 2, 3], "description": "Which try it is."}
            schema["required"].append("attempt")
    return definitions


@contextlib.contextmanager
def progress(name: str, requests: int) -> Iterator[Callable[[], None]]:
    """A counter of answered requests on stderr: a bar on a terminal, else a line now and then."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as shown:
            task = shown.add_task(name, total=requests)
            yield lambda: shown.advance(task)
        return
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        if done % PLAIN_PROGRESS_EVERY == 0 or done == requests:
            print(f"{name}: {done} of {requests} requests", file=sys.stderr, flush=True)

    yield count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--record", type=Path, default=None, help="where to write the requests (default: a new file)")
    parser.add_argument("--rounds", type=int, default=2, help="how often to work through the nine tasks")
    parser.add_argument("--stabilise", action="store_true", help='attach with mode="stabilise", the clock declared')
    parser.add_argument(
        "--engine",
        metavar="ENGINE",
        help="start an engine of this kind (emulator, vllm-cpu, vllm) and run both ways on it; further options "
        "go to `homeport up`",
    )
    args, options = parser.parse_known_args()
    if options and not args.engine:
        parser.error(f"unknown: {' '.join(options)} (options of `homeport up` go with --engine)")
    try:
        return show(args, options)
    except (DemoError, APIError) as error:
        print(f"broken_agent: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def show(args: argparse.Namespace, options: Sequence[str]) -> int:
    """Run the agent, once or both ways, and explain its recorded requests."""
    if not args.engine:
        _see_that_it_answers(args.base_url)
    ways = (False, True) if args.engine else (args.stabilise,)
    print(
        f"{len(ways)} x {args.rounds * REQUESTS_PER_ROUND} requests: about a minute on an emulated engine, "
        "many minutes on a model on the CPU",
        file=sys.stderr,
        flush=True,
    )
    with contextlib.ExitStack() as stack:
        base_url, model = args.base_url, args.model
        if args.engine:
            place = stack.enter_context(fleet("--mixed", "1", "--engine", args.engine, *options))
            base_url, model = place.base_url, place.model
        record = args.record or Path(tempfile.mkstemp(prefix="broken-agent-", suffix=".jsonl")[1])
        for stabilise in ways:
            _run_once(base_url, model, record, stabilise, args.rounds)
    print(f"Recorded in {record}\n")
    status = homeport_command(["explain", str(record), "--prices", str(PRICES)])
    with record.open(encoding="utf-8") as lines:
        shares = [f"{one.session}: {_share(one.report.cached_share)}" for one in conversations(read(lines))]
    print("\nCached share of the input: " + ", ".join(shares))
    return status


def _see_that_it_answers(base_url: str) -> None:
    """Raises DemoError where nobody listens."""
    try:
        httpx.get(f"{base_url.rstrip('/')}/models", timeout=10)
    except (httpx.TransportError, httpx.InvalidURL):
        raise DemoError(
            f"no proxy at {base_url}; start one with `make up` or give --engine emulator | vllm-cpu"
        ) from None


def _run_once(base_url: str, model: str, record: Path, stabilise: bool, rounds: int) -> None:
    name = "stabilised" if stabilise else "broken"
    with progress(name, rounds * REQUESTS_PER_ROUND) as answered:
        session = f"{name}-{int(time.time())}"
        run(base_url, model, record, session, stabilise=stabilise, rounds=rounds, answered=answered)


def _share(share: float | None) -> str:
    return "not reported" if share is None else f"{share:.1%}"


if __name__ == "__main__":
    sys.exit(main())
