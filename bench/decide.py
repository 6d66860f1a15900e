"""Decision time and memory of the router: `python -m bench.decide [--backends 64] [--sessions 10000]`.

Every request goes through `arrive` and `due` (placement, queue, load books, index), timed together, on a warm fleet
whose sessions have grown prompts; then what the index and the sessions take in memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import tracemalloc
from random import Random

from homeport_proxy.routing.index.lru import PrefixLru
from homeport_proxy.routing.router import Router
from homeport_proxy.routing.views import PlaceSpec, PrefixKeys, RequestView, RoutingSettings
from homeport_proxy.simulate.result import quantile

BLOCK_TOKENS = 128


def main(argv: list[str] | None = None) -> int:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", type=int, default=64)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=20_000)
    args = parser.parse_args(argv)
    result = {
        "backends": args.backends,
        "sessions": args.sessions,
        **decision_time_ms(args.backends, args.sessions, args.requests),
        "index_mb_per_million_blocks": round(index_bytes_per_block(), 1),
        "mb_per_100k_sessions": round(session_bytes() * 100_000 / 1e6, 1),
    }
    json.dump(result, sys.stdout)
    print()
    return 0


def decision_time_ms(backends: int, sessions: int, requests: int) -> dict[str, float | None]:
    """Quantiles of process time from arrival to a decision with its load taken, ms."""
    rng = Random(1)
    router = Router(RoutingSettings(index_bytes=4 << 30))
    router.set_places(
        [PlaceSpec(f"e{n}", f"e{n}", "mixed", frozenset({"m"}), kv_capacity_tokens=2_600_000) for n in range(backends)]
    )
    head = [rng.getrandbits(62) for _ in range(40)]
    bodies = [head + [rng.getrandbits(62) for _ in range(rng.randint(10, 160))] for _ in range(sessions)]
    took_ms: list[float] = []
    now_s = 0.0
    gc.collect()
    gc.disable()
    for number in range(sessions + requests):
        session = number if number < sessions else rng.randrange(sessions)
        keys = bodies[session]
        if number >= sessions:
            keys.extend(rng.getrandbits(62) for _ in range(4))
        request = RequestView(
            f"r{number}", "chat", "m", f"s{session}", len(keys) * BLOCK_TOKENS, PrefixKeys(list(keys)), sliceable=True
        )
        started = time.thread_time_ns()
        ticket = router.arrive(request, now_s)
        router.due(now_s)
        elapsed_ms = (time.thread_time_ns() - started) / 1e6
        while ticket.part_tokens is not None:
            router.sliced(ticket, now_s, cached_tokens=None, ok=True)
            router.due(now_s)
        if number >= sessions:
            took_ms.append(elapsed_ms)
        router.first_token(ticket, now_s + 0.1)
        router.finished(
            ticket, now_s + 0.5, prompt_tokens=request.prompt_tokens, cached_tokens=0, output_tokens=50, ok=True
        ) if number % 7 == 0 else router.cancel(ticket, now_s + 0.5)
        now_s += 0.02
    gc.enable()
    took_ms.sort()
    return {f"decide_p{round(share * 100)}_ms": quantile(took_ms, share) for share in (0.5, 0.9, 0.99)}


def index_bytes_per_block(blocks: int = 200_000) -> float:
    """Bytes of one block in a place's index (also MB per million blocks)."""
    rng = Random(2)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = PrefixLru(blocks * 2)
    for _ in range(blocks // 100):
        index.use([rng.getrandbits(62) for _ in range(100)])
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / len(index)


def session_bytes(sessions: int = 5_000) -> float:
    """Bytes of one session in the router's book, its remembered prompt included, its index entries not."""
    router = Router(RoutingSettings(index_bytes=1))
    router.set_places([PlaceSpec("e0", "e0", "mixed", frozenset({"m"}))])
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(sessions):
        keys = [number * 1_000 + index for index in range(100)]
        ticket = router.arrive(
            RequestView(f"r{number}", "chat", "m", f"session-{number}", 12_800, PrefixKeys(keys)), 0.0
        )
        router.due(0.0)
        router.cancel(ticket, 0.0)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / sessions


if __name__ == "__main__":
    sys.exit(main())
