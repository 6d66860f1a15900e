"""Real tool-calling sessions (tau-bench, airline) replayed turn by turn through an OpenAI client.

The recorded assistant messages stand in the history, so each request is what the recorded agent sent; the engine's own
answer is thrown away after a token or two.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI

TRACE = Path(__file__).parent / "traces" / "tau_airline_sessions.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded session: its name and its messages."""

    name: str
    messages: list[dict[str, Any]]

    def prompts(self) -> Iterator[list[dict[str, Any]]]:
        """The messages before each assistant message: the prompts of the recorded agent."""
        for index, message in enumerate(self.messages):
            if message["role"] == "assistant":
                yield self.messages[:index]


@dataclass(frozen=True, slots=True)
class Served:
    """One replayed request. Sizes in tokens; None where the answer did not say."""

    prompt_tokens: int
    cached_tokens: int | None
    backend: str | None
    prefill_backend: str | None
    decision: str | None


def sessions(count: int | None = None, max_chars: int = 22_000) -> list[Recorded]:
    """The first ``count`` recorded sessions that fit a small context (all that fit when None)."""
    found: list[Recorded] = []
    with gzip.open(TRACE, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if len(json.dumps(row["messages"])) <= max_chars:
                found.append(Recorded(row["session_id"], [_replayable(message) for message in row["messages"]]))
            if count is not None and len(found) == count:
                break
    return found


def _replayable(message: dict[str, Any]) -> dict[str, Any]:
    """Without members the API does not take back (nulls)."""
    return {name: value for name, value in message.items() if value is not None}


def replay(
    client: OpenAI,
    model: str,
    session: Recorded,
    *,
    before: Callable[[], None] = lambda: None,
    after: Callable[[Served], None] = lambda _: None,
) -> list[Served]:
    """Send every prompt of ``session`` in order; ``before`` and ``after`` run around each request."""
    served: list[Served] = []
    for prompt in session.prompts():
        before()
        raw = client.chat.completions.with_raw_response.create(
            model=model,
            messages=prompt,  # type: ignore[arg-type]
            max_tokens=2,
            temperature=0,
        )
        usage = raw.parse().usage
        if usage is None:
            raise RuntimeError("the answer carries no usage")
        details = usage.prompt_tokens_details
        one = Served(
            usage.prompt_tokens,
            details.cached_tokens if details else None,
            raw.headers.get("x-homeport-backend"),
            raw.headers.get("x-homeport-prefill-backend"),
            raw.headers.get("x-homeport-decision"),
        )
        after(one)
        served.append(one)
    return served
