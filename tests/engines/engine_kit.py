"""One real prefill engine, one real decode engine and the proxy, with what tests ask them directly."""

from __future__ import annotations

import argparse
import itertools
import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from homeport_engines.base import EngineStats
from homeport_engines.vllm import telemetry
from homeport_engines.vllm.kv import BlockStored, decode_batch
from homeport_proxy.commands import up
from homeport_proxy.local.display import PlainDisplay
from homeport_proxy.local.supervisor import Supervisor

BLOCK_TOKENS = 128
MIN_UNCACHED_TOKENS = 200
"""Low, so that short prompts, quickly prefilled, already go to the prefill engine."""
START_TIMEOUT_S = 600.0
_WORDS = (
    *(
        "harbour",
        "lantern",
        "quarry",
        "meadow",
        "copper",
        "violin",
        "orchard",
        "glacier",
        "compass",
        "thistle",
        "anchor",
    ),
    *("pepper", "saddle", "walnut", "ribbon", "furnace", "pebble", "canyon", "mirror", "feather", "trumpet", "barrel"),
)


@dataclass(frozen=True)
class Pair:
    """The running pair. ``p0`` prefills, ``d0`` decodes (with n-gram speculation)."""

    supervisor: Supervisor

    @property
    def base_url(self) -> str:
        return self.supervisor.plan.base_url

    @property
    def proxy_url(self) -> str:
        return self.supervisor.plan.proxy_url

    @property
    def model(self) -> str:
        return self.supervisor.plan.model

    def url(self, engine: str) -> str:
        return self.supervisor.planned(engine).url

    def key(self, engine: str) -> str:
        return self.supervisor.planned(engine).key

    def stats(self, engine: str) -> EngineStats:
        """The engine's own counters, now."""
        with urllib.request.urlopen(f"{self.url(engine)}/metrics", timeout=30) as answer:
            return telemetry.read(answer.read().decode())[0]

    def by_source(self, engine: str) -> Mapping[str, int]:
        """Prompt tokens of the engine by where their KV came from."""
        return self.stats(engine).prompt_tokens_by_source

    def ask_engine(self, engine: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A request past the proxy, with the engine's own key."""
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.key(engine)}"}
        request = urllib.request.Request(self.url(engine) + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def stored_blocks(self, engine: str) -> set[int]:
        """Names of the blocks that the engine said it stored since its start, by its own replay socket."""
        with urllib.request.urlopen(f"{self.url(engine)}/kv_event_sources", timeout=30) as answer:
            source = json.load(answer)["0"]
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, 10_000)
            socket.connect(source["replay_endpoint"])
            socket.send_multipart([b"", (0).to_bytes(8, "big")])
            batches = []
            while int.from_bytes((frames := socket.recv_multipart())[-2], "big", signed=True) >= 0:
                batches.append(decode_batch(0, frames[-1]))
        events = [event for batch in batches for event in batch.events if isinstance(event, BlockStored)]
        return {name for event in events for name in event.hashes}

    def status(self) -> dict[str, dict[str, Any]]:
        """The proxy's view of each engine, by name."""
        with urllib.request.urlopen(f"{self.proxy_url}/homeport/v1/status", timeout=30) as answer:
            regions = json.load(answer)["regions"]
        return {backend["name"]: backend for region in regions.values() for backend in region["backends"]}


@contextmanager
def running_pair(log_dir: Path, say: Any) -> Iterator[Pair]:
    """Start a pair as `homeport up` does, stop it at the end."""
    parser = argparse.ArgumentParser()
    up.configure(parser)
    options = ["--engine", "vllm-cpu", "--port", "0", "--spec", "ngram", "--max-model-len", "4096"]
    options += ["--min-uncached-tokens", str(MIN_UNCACHED_TOKENS)]
    supervisor = Supervisor(up.plan_from(parser.parse_args(options)), log_dir)
    supervisor.start(PlainDisplay(say), START_TIMEOUT_S)
    try:
        yield Pair(supervisor)
    finally:
        supervisor.stop()


_fresh = itertools.count(1)


def fresh_text(words: int) -> str:
    """Text no test has used before, different from its first word on, so that no cache can hold its beginning."""
    number = next(_fresh)
    picked = (_WORDS[(number * 7 + index * index + index * number) % len(_WORDS)] for index in range(words))
    return f"Note {number} of {number * 7919}: " + " ".join(picked) + "."


def until(what: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Wait for an outside fact, looking four times a second; False when it never came true."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if what():
            return True
        time.sleep(0.25)
    return False
