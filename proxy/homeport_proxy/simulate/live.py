"""A workload against a live proxy: every block id becomes a fixed random text, every think time a wait."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import aiohttp

from homeport.fingerprint import JsonValue
from homeport.session import affinity_id
from homeport_proxy.simulate.result import Sample, Samples
from homeport_proxy.simulate.workload import Call, Lane, Workload

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """``url``: base URL ending in /v1. ``speed`` divides think times, ``shrink`` divides prompt sizes (small engines).
    ``model`` None: the first that the proxy lists. ``spread_s``: seconds between session starts, before ``speed``."""

    url: str
    model: str | None = None
    key: str | None = None
    speed: float = 1.0
    shrink: float = 1.0
    spread_s: float = 1.0
    max_output_tokens: int = 64
    timeout_s: float = 600.0
    session_ids: bool = True


class LiveError(RuntimeError):
    """The proxy cannot be replayed against; the text says what it answered."""


def block_text(key: int, tokens: int) -> str:
    """The fixed random text of a block: ``tokens`` words of three letters, about a token each."""
    rng = Random(key)
    return "".join("".join(rng.choices(_LETTERS, k=3)) + " " for _ in range(tokens))


def prompt_text(call: Call, block_tokens: int, shrink: float) -> str:
    """A call's prompt: its blocks' texts, then the tail that fills no block."""
    size = max(1, round(block_tokens / shrink))
    tail = round((call.prompt_tokens - len(call.keys) * block_tokens) / shrink)
    blocks = [block_text(key, size) for key in call.keys]
    return "".join(blocks) + block_text(call.prompt_tokens, max(1, tail))


async def replay_live(workload: Workload, options: LiveOptions, seed: int) -> Samples:
    """Play the workload once. Raises :class:`LiveError` when the first answer is not usable."""
    samples = Samples()
    started_s = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=options.timeout_s)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
        player = _Player(workload, options, client, samples, started_s)
        await player.probe()
        try:
            async with asyncio.TaskGroup() as group:
                if workload.closed:
                    order = list(range(len(workload.conversations)))
                    Random(seed).shuffle(order)
                    for number, index in enumerate(order):
                        for lane in workload.conversations[index].lanes:
                            group.create_task(player.closed(lane, number * options.spread_s / options.speed))
                else:
                    for conversation in workload.conversations:
                        for call in conversation.lanes[0].calls:
                            group.create_task(player.opened(conversation.name, call))
        except* LiveError as errors:
            raise errors.exceptions[0] from None
    return samples


class _Player:
    def __init__(
        self,
        workload: Workload,
        options: LiveOptions,
        client: aiohttp.ClientSession,
        samples: Samples,
        started_s: float,
    ) -> None:
        self._workload = workload
        self._options = options
        self._client = client
        self._samples = samples
        self._started_s = started_s
        self._model = options.model or ""

    async def probe(self) -> None:
        """Fail early, and readably, when nothing answers."""
        try:
            async with self._client.get(f"{self._options.url}/models", headers=self._headers(None)) as response:
                if response.status >= 400:
                    raise LiveError(f"{self._options.url}/models answered {response.status}")
                listed = await response.json(content_type=None)
                names = [str(model["id"]) for model in listed["data"]]
                self._model = self._options.model or (names[0] if names else "")
                if not self._model:
                    raise LiveError(f"{self._options.url}/models lists no model; name one with --model")
        except (KeyError, TypeError, ValueError) as error:
            raise LiveError(f"{self._options.url}/models is no model list; is this a proxy's /v1?") from error
        except aiohttp.ClientError as error:
            raise LiveError(f"{self._options.url}: {error}; is the proxy running?") from error

    async def closed(self, lane: Lane, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        for position, call in enumerate(lane.calls):
            if position or lane.after is not None:
                await asyncio.sleep(call.wait_s / self._options.speed)
            await self._ask(lane.name, call)

    async def opened(self, session: str, call: Call) -> None:
        await asyncio.sleep(call.wait_s / self._options.speed)
        await self._ask(session, call)

    def _headers(self, session: str | None) -> dict[str, str]:
        headers = {}
        if self._options.key:
            headers["authorization"] = f"Bearer {self._options.key}"
        if session is not None and self._options.session_ids:
            headers["x-session-affinity"] = affinity_id("homeport-replay", session)
        return headers

    async def _ask(self, session: str, call: Call) -> None:
        options = self._options
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt_text(call, self._workload.block_tokens, options.shrink)}],
            "max_tokens": max(1, min(call.output_tokens, options.max_output_tokens)),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent_s = time.monotonic()
        url = f"{options.url}/chat/completions"
        try:
            async with self._client.post(url, json=body, headers=self._headers(session)) as response:
                if response.status != 200:
                    raise LiveError(f"{url} answered {response.status}: {(await response.text())[:300]}")
                await self._read(response, sent_s)
        except aiohttp.ClientError as error:
            raise LiveError(f"{url}: {error}") from error

    async def _read(self, response: aiohttp.ClientResponse, sent_s: float) -> None:
        first_s = last_s = None
        gaps: list[float] = []
        usage: Mapping[str, JsonValue] = {}
        pending = b""
        async for chunk in response.content.iter_any():
            *events, pending = (pending + chunk).split(b"\n\n")
            for event in events:
                frame = _frame(event)
                if frame is None:
                    continue
                found = frame.get("usage")
                usage = found if isinstance(found, dict) else usage
                if frame.get("choices"):
                    now_s = time.monotonic()
                    first_s = first_s or now_s
                    if last_s is not None:
                        gaps.append(now_s - last_s)
                    last_s = now_s
        if first_s is None:
            raise LiveError("an answer ended without a token")
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        prompt = usage.get("prompt_tokens")
        word = response.headers.get("x-homeport-decision", "")
        arrived_s = sent_s - self._started_s
        self._samples.add(
            Sample(
                arrived_s=arrived_s,
                ttft_s=first_s - sent_s,
                prompt_tokens=prompt if isinstance(prompt, int) else 0,
                cached_tokens=cached if isinstance(cached, int) else 0,
                moved=word not in ("", "home", "placed"),
                crossed=word == "peer",
            )
        )
        for gap_s in gaps:
            self._samples.gaps(arrived_s, gap_s, 2, [])


def _frame(event: bytes) -> dict[str, JsonValue] | None:
    """The JSON object of one SSE event, None for anything else."""
    data = b"".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
    if not data.startswith(b"{"):
        return None
    try:
        frame = json.loads(data)
    except ValueError:
        return None
    return frame if isinstance(frame, dict) else None
