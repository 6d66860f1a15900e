"""Real tool-calling sessions (tau-bench, airline) replayed turn by turn through an OpenAI client, beside the books.

The recorded assistant messages stand in the history, so each request is what the recorded agent sent; the engine's own
answer is thrown away after a token or two.
"""

from __future__ import annotations

import gzip
import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from openai import OpenAI

import homeport
from homeport_engines.vllm import telemetry

TRACE = Path(__file__).parent / "traces" / "tau_airline_sessions.jsonl.gz"
LOCAL_HIT = "local_cache_hit"


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
class Books:
    """One replayed session: what the SDK reports, what the engines that prefilled it count, and what one engine alone
    would have found cached. Sizes in tokens; None where the SDK was told nothing."""

    session: str
    requests: int
    prompt_tokens: int | None
    cached_tokens: int | None
    engine_prompt_tokens: int
    engine_cached_tokens: int
    one_engine_cached_tokens: int
    backends: int

    @property
    def agree(self) -> bool:
        """Whether the SDK's report and the engines' counters say the same."""
        mine = (self.prompt_tokens, self.cached_tokens)
        return mine == (self.engine_prompt_tokens, self.engine_cached_tokens)


class OneCache:
    """What one engine alone, with room for everything, would find cached: whole blocks seen before, and never the whole
    prompt, because its last token is always computed."""

    def __init__(self, block_tokens: int = 128) -> None:
        self._block_tokens = block_tokens
        self._nodes: dict[tuple[int, tuple[int, ...]], int] = {}
        """A tree: (the block before, this block's tokens) to this block's number; 0 is the root."""

    def take(self, tokens: Sequence[int]) -> int:
        """Tokens of this prompt found cached; the prompt is cached afterwards."""
        block = self._block_tokens
        node = found = 0
        for end in range(block, len(tokens) + 1, block):
            key = (node, tuple(tokens[end - block : end]))
            if key in self._nodes:
                found = end
            node = self._nodes.setdefault(key, len(self._nodes) + 1)
        return min(found, (len(tokens) - 1) // block * block)


class Engines:
    """The engines behind a proxy, asked for their own counters."""

    def __init__(self, proxy_url: str) -> None:
        self._proxy_url = proxy_url
        with urllib.request.urlopen(f"{proxy_url}/homeport/v1/status", timeout=30) as answer:
            regions = json.load(answer)["regions"]
        self.urls: Mapping[str, str] = {
            backend["name"]: backend["url"] for region in regions.values() for backend in region["backends"]
        }

    def by_source(self, name: str) -> Mapping[str, int]:
        """Prompt tokens of one engine by where their KV came from."""
        with urllib.request.urlopen(f"{self.urls[name]}/metrics", timeout=30) as answer:
            return telemetry.read(answer.read().decode())[0].prompt_tokens_by_source

    def tokens(self, model: str, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt's tokens, as the engine's own template and tokenizer make them."""
        body = json.dumps({"model": model, "messages": messages}).encode()
        request = urllib.request.Request(f"{self._proxy_url}/tokenize", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: list[int] = json.load(answer)["tokens"]
            return found


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
    recorded: Recorded,
    engines: Engines,
    alone: OneCache,
    *,
    name: str,
    max_requests: int | None = None,
) -> Books:
    """Send the prompts of a recorded session one after another under a Homeport session called ``name``, through an
    attached client, and set the session's report beside the engines' counters."""
    prompt_tokens = cached_tokens = best = requests = 0
    backends: set[str] = set()
    with homeport.session(name) as session:
        for prompt in islice(recorded.prompts(), max_requests):
            best += alone.take(engines.tokens(model, prompt))
            before = {engine: engines.by_source(engine) for engine in engines.urls}
            raw = client.chat.completions.with_raw_response.create(
                model=model,
                messages=prompt,  # type: ignore[arg-type]
                max_tokens=2,
                temperature=0,
            )
            requests += 1
            backends.add(raw.headers["x-homeport-backend"])
            # the engine that prefilled: its counters say where the prompt came from
            engine = raw.headers.get("x-homeport-prefill-backend") or raw.headers["x-homeport-backend"]
            counted = engines.by_source(engine)
            risen = {source: count - before[engine].get(source, 0) for source, count in counted.items()}
            prompt_tokens += sum(risen.values())
            cached_tokens += risen.get(LOCAL_HIT, 0)
    report = session.report()
    return Books(
        recorded.name,
        requests,
        report.input_tokens,
        report.cached_tokens,
        prompt_tokens,
        cached_tokens,
        best,
        len(backends),
    )
