"""A real tool-calling agent on the openai client: eight user turns over a small project, through Homeport.

    python examples/agent.py --base-url http://127.0.0.1:8080/v1 --model smollm2

Two lines make it a Homeport agent: ``homeport.attach(client)`` and ``with homeport.session(...)``. ``--plain`` leaves
them out. The agent is as careless as many are: its system prompt carries the clock, and its tools come in the order a
set happens to have. The tool calls are reliable on a 135M model because ``tool_choice`` names the function and the
engine's structured output binds the arguments to the schema (``strict``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from openai import OpenAI

import homeport

FILES = {
    "README.md": "# Tidewatch\n\nTidewatch reads tide gauges and warns harbour masters before a surge.\n\n"
    "## Use\n\n    tidewatch --gauge north --limit 4.2\n",
    "tidewatch/gauge.py": "class Gauge:\n    def __init__(self, name, limit_m):\n        self.name = name\n"
    "        self.limit_m = limit_m\n\n    def over(self, level_m):\n        # TODO: smooth over three readings\n"
    "        return level_m > self.limit_m\n",
    "tidewatch/alarm.py": "def ring(gauge, level_m):\n    if gauge.over(level_m):\n"
    "        return f'{gauge.name}: {level_m:.2f} m, limit {gauge.limit_m:.2f} m'\n    return None\n",
    "tests/test_gauge.py": "from tidewatch.gauge import Gauge\n\n\ndef test_over():\n"
    "    assert Gauge('north', 4.2).over(4.3)\n",
    "CHANGELOG.md": "# Changelog\n\n## 0.2\n\n- Alarms name the gauge.\n\n## 0.1\n\n- First release.\n",
}

TASKS = [
    ("list_files", "Which files does the project have?"),
    ("read_file", "Open the file that explains what the project is for."),
    ("search", "Look for work that was left undone."),
    ("read_file", "Show me the source file that holds it."),
    ("count_lines", "How long is a source file here?"),
    ("read_file", "Read a test to see how it is checked."),
    ("write_note", "Write down what should be done next."),
    ("search", "Check who else uses the gauge."),
    ("list_files", "List the files once more, to be sure that the note is there."),
]

GUIDE = """You are a careful maintainer of a small Python project. Work step by step: look before you act, read a file
before you speak of it, and say only what a tool has shown. Keep answers under two sentences.

House rules of the project:
1. Every public function has a docstring that gives units. Levels are metres above chart datum, times are UTC.
2. A change comes with a test. A test says what it checks in its name; it never sleeps and never asks the network.
3. Names say what a thing is. No abbreviations except those of the field: LAT, HAT, MSL, UTC.
4. The command line prints one line a gauge; errors go to standard error in one readable line with the remedy.
5. Readings come in as floats; a missing reading is None and is never taken for zero.
6. Alarms are sent once per surge: a surge begins when a level passes its limit and ends 30 minutes after it fell below.
7. Configuration is TOML; unknown keys are refused by name; defaults are written down where they are used.
8. Releases follow semantic versioning; the changelog speaks to the people who use the program.
9. When you are not sure, read the file again. When a tool fails, say so and try another way.
10. Notes go to notes.md, one a line, newest last; they are for the next person, so write whole sentences."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of the run. Times in seconds, sizes in tokens; None where the answer did not say."""

    turn: int
    step: str
    prompt_tokens: int | None
    cached_tokens: int | None
    ttft_s: float
    backend: str | None
    prefill_backend: str | None
    decision: str | None


class Workshop:
    """The agent's real tools, confined to one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, text in FILES.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)

    def _names(self) -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())

    def list_files(self) -> str:
        return "\n".join(self._names())

    def read_file(self, path: str) -> str:
        return (self.root / path).read_text()

    def search(self, word: str) -> str:
        hits = [
            f"{name}:{number}: {line.strip()}"
            for name in self._names()
            for number, line in enumerate((self.root / name).read_text().splitlines(), 1)
            if word in line
        ]
        return "\n".join(hits) or "nothing found"

    def count_lines(self, path: str) -> str:
        return str(len(self.read_file(path).splitlines()))

    def write_note(self, topic: str) -> str:
        with (self.root / "notes.md").open("a") as notes:
            notes.write(f"Next: {topic}.\n")
        return "noted"

    def definitions(self, order: random.Random) -> list[dict[str, Any]]:
        """The tools as the model is told of them, in whatever order they come out this time."""
        a_file = {"type": "string", "enum": sorted(FILES), "description": "A file of the project, by its path."}
        tools = [
            _tool("list_files", "List every file of the project, one path a line."),
            _tool("read_file", "Read one file of the project and return its text as it stands.", path=a_file),
            _tool(
                "search",
                "Search all files for a word and return each line that has it, with file and line number.",
                word={"type": "string", "enum": ["TODO", "Gauge", "limit", "alarm"], "description": "The word."},
            ),
            _tool("count_lines", "Count the lines of one file of the project.", path=a_file),
            _tool(
                "write_note",
                "Append one sentence to notes.md for the next person who works here.",
                topic={
                    "type": "string",
                    "enum": ["smooth the readings", "test the alarm", "document the units"],
                    "description": "What the note is about.",
                },
            ),
        ]
        order.shuffle(tools)
        return tools


def _tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters, "strict": True},
    }


class Agent:
    """Runs the tasks one after another and keeps a record of each request."""

    def __init__(self, client: OpenAI, model: str, workshop: Workshop, order: random.Random) -> None:
        self._client, self._model, self._workshop, self._order = client, model, workshop, order
        self._history: list[dict[str, Any]] = []
        self.turns: list[Turn] = []

    def run(self, show: Callable[[Turn], None]) -> None:
        for number, (tool, question) in enumerate(TASKS, 1):
            self._history.append({"role": "user", "content": question})
            self._call_tool(number, tool, show)
            self._answer(number, show)

    def _call_tool(self, number: int, tool: str, show: Callable[[Turn], None]) -> None:
        choice = {"type": "function", "function": {"name": tool}}
        message = self._request(number, tool, show, tool_choice=choice, max_tokens=64)
        self._history.append(message)
        for call in message.get("tool_calls", []):
            function = call["function"]
            result = getattr(self._workshop, function["name"])(**json.loads(function["arguments"]))
            self._history.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    def _answer(self, number: int, show: Callable[[Turn], None]) -> None:
        self._history.append(self._request(number, "answer", show, tool_choice="none", max_tokens=24))

    def _request(self, number: int, step: str, show: Callable[[Turn], None], **options: Any) -> dict[str, Any]:
        system = f"The time is {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC.\n\n{GUIDE}"
        started = time.perf_counter()
        raw = self._client.chat.completions.with_raw_response.create(
            model=self._model,
            messages=[{"role": "system", "content": system}, *self._history],  # type: ignore[list-item]
            tools=self._workshop.definitions(self._order),  # type: ignore[arg-type]
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        )
        message, usage, first_s = _collect(raw.parse(), started)
        details = getattr(usage, "prompt_tokens_details", None)
        turn = Turn(
            number,
            step,
            getattr(usage, "prompt_tokens", None),
            getattr(details, "cached_tokens", None),
            first_s,
            raw.headers.get("x-homeport-backend"),
            raw.headers.get("x-homeport-prefill-backend"),
            raw.headers.get("x-homeport-decision"),
        )
        self.turns.append(turn)
        show(turn)
        return message


def _collect(stream: Any, started: float) -> tuple[dict[str, Any], Any, float]:
    """Put a streamed answer together: the message for the history, the usage, and the time to the first token."""
    text, calls, usage, first_s = "", {}, None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta
            if first_s is None and (delta.content or delta.tool_calls):
                first_s = time.perf_counter() - started
            text += delta.content or ""
            for part in delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": part.id, "name": "", "arguments": ""})
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls.values()
        ]
    return message, usage, time.perf_counter() - started if first_s is None else first_s


@contextlib.contextmanager
def _session(name: str, plain: bool) -> Iterator[Any]:
    if plain:
        yield None
    else:
        with homeport.session(name) as session:
            yield session


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--session", default=f"demo-{int(time.time())}")
    parser.add_argument("--plain", action="store_true", help="without Homeport's SDK, for comparison")
    parser.add_argument("--json", action="store_true", help="print the turns as JSON instead of a table")
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key="-", timeout=600, max_retries=0)
    if not args.plain:
        # the clock in the system prompt is declared volatile: Homeport holds the session's first one
        homeport.volatile(re.compile(r"The time is [^\n]*\n"), kind="timestamp")
        client = homeport.attach(client)
    with tempfile.TemporaryDirectory() as folder, _session(args.session, args.plain) as session:
        agent = Agent(client, args.model, Workshop(Path(folder)), random.Random(7))
        agent.run(_quiet if args.json else _print_row)
    if args.json:
        print(json.dumps([asdict(turn) for turn in agent.turns]))
    else:
        print(_total(agent.turns))
        if session is not None:
            print(f"\n{session.report()}")
    return 0


def _quiet(_: Turn) -> None:
    return None


def _print_row(turn: Turn) -> None:
    if turn.turn == 1 and turn.step == TASKS[0][0]:
        print(f"{'turn':>4}  {'step':<12}{'prompt':>7}{'cached':>8}{'TTFT s':>8}  {'backend':<9}{'prefill':<9}decision")
    print(
        f"{turn.turn:>4}  {turn.step:<12}{_known(turn.prompt_tokens):>7}{_known(turn.cached_tokens):>8}"
        f"{turn.ttft_s:>8.2f}  {turn.backend or '-':<9}{turn.prefill_backend or '-':<9}{turn.decision or '-'}",
        flush=True,
    )


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)


def _total(turns: list[Turn]) -> str:
    prompt = sum(turn.prompt_tokens or 0 for turn in turns)
    cached = sum(turn.cached_tokens or 0 for turn in turns)
    mean_s = sum(turn.ttft_s for turn in turns) / len(turns)
    share = f"{cached / prompt:.0%}" if prompt else "?"
    return f"\n{len(turns)} requests, {prompt} prompt tokens, {cached} cached ({share}), mean TTFT {mean_s:.2f} s"


if __name__ == "__main__":
    sys.exit(main())
