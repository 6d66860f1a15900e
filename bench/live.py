"""The simulator against the live proxy: traces through emulated engines in scaled time and through virtual time.

`python -m bench.live [--speed 2]` plays growing agent sessions through a real proxy in front of three emulated engines
(emulated time runs `--speed` times faster than the clock) and through the simulator with the same speeds and caches,
and prints both lines and their ratios. The proxy learns the engines' speeds, the simulator is told them. Each seed is
another order of the sessions, before engines of its own, all at the same time; figures are over the requests of all:
of one order's 144 requests p90 says little: a prompt that falls into another step changes whom the next ones wait for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace

from homeport_engines.emulator import Emulator, EmulatorSettings
from homeport_engines.emulator.settings import Rates
from homeport_proxy import config as configuration
from homeport_proxy.app import Proxy
from homeport_proxy.control import Control
from homeport_proxy.simulate.cluster import Cluster, Decode, Prefill, Sessions
from homeport_proxy.simulate.live import LiveOptions, replay_live
from homeport_proxy.simulate.result import Row, Samples
from homeport_proxy.simulate.run import Simulation
from homeport_proxy.simulate.workload import Call, Conversation, Lane, Workload

BLOCK_TOKENS = 128
ENGINE_BLOCK_TOKENS = 16
SESSIONS, TURNS = 24, 6
OUTPUT_TOKENS = 30
CLUSTER = Cluster(
    replicas=3,
    cache_tokens=80_000,
    block_tokens=BLOCK_TOKENS,
    prefill=Prefill(tokens_per_s=2_000),
    decode=Decode(step_s=0.03),
    sessions=Sessions(spread_s_per_session=2.5),
    chunk_tokens=4096,
    steps=True,
)


def agents() -> Workload:
    """Sessions with a head in common that grow by a tenth to a half of a prompt each turn."""
    head = list(range(1, 11))
    conversations = []
    for number in range(SESSIONS):
        own = [(number + 1) * 10_000 + index for index in range(200)]
        lane = Lane(f"s{number}")
        for turn in range(TURNS):
            keys = head + own[: 20 + number % 5 + (6 + number % 7) * turn]
            lane.calls.append(Call(len(keys) * BLOCK_TOKENS + 40, OUTPUT_TOKENS, keys, 3.0 + number % 3))
        conversations.append(Conversation(lane.name, [lane]))
    return Workload(conversations, closed=True, block_tokens=BLOCK_TOKENS)


def simulated(workload: Workload, seed: int) -> Samples:
    """The workload in virtual time."""
    return Simulation(workload, CLUSTER, "cost", seed=seed, whole=True).run()


@asynccontextmanager
async def proxy_before(backends: Sequence[Mapping[str, str]]) -> AsyncIterator[tuple[str, Control]]:
    """A proxy of this process before these engines: its /v1, and its parts."""
    document = {"listen": "127.0.0.1:0", "regions": {"local": {"backends": backends}}, "log": {"level": "warning"}}
    control = Control(configuration.parse(json.dumps(document)))
    proxy = Proxy(control)
    await control.start()
    try:
        await proxy.start()
        yield f"http://127.0.0.1:{await proxy.listen('127.0.0.1', 0)}/v1", control
    finally:
        await proxy.stop()
        await control.stop()


def over(live: Row, model: Row) -> dict[str, float]:
    """What was lived over what was simulated, by figure."""
    return {
        name: round(getattr(live, name) / getattr(model, name), 3)
        for name in ("hit_ratio", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s")
        if getattr(live, name) and getattr(model, name)
    }


async def lived(workload: Workload, seed: int, speed: float) -> Samples:
    """The workload through a proxy and emulated engines; times in emulated seconds."""
    prefill, decode = CLUSTER.prefill, CLUSTER.decode
    settings = EmulatorSettings(
        model="m",
        time_scale=speed,
        rates=Rates(
            t0_s=prefill.t0_s,
            tokens_per_s=prefill.tokens_per_s,
            attention_tokens=prefill.attention_tokens,
            step_s=decode.step_s,
            per_sequence_s=decode.per_sequence_s,
            per_context_token_s=decode.per_context_token_s,
        ),
        block_tokens=ENGINE_BLOCK_TOKENS,
        kv_blocks=CLUSTER.cache_tokens // ENGINE_BLOCK_TOKENS,
        chunk_tokens=CLUSTER.chunk_tokens,
    )
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Emulator(settings)) for _ in range(CLUSTER.replicas)]
        backends = [{"name": f"e{number}", "url": engine.url} for number, engine in enumerate(engines)]
        url, _ = await stack.enter_async_context(proxy_before(backends))
        options = LiveOptions(
            url, speed=speed, spread_s=CLUSTER.sessions.spread_s_per_session, max_output_tokens=OUTPUT_TOKENS
        )
        samples = await replay_live(workload, options, seed)
    return Samples(all=[replace(sample, ttft_s=sample.ttft_s * speed) for sample in samples.measured])


async def lived_at_once(workload: Workload, seeds: Sequence[int], speed: float) -> Sequence[Samples]:
    """Every seed before engines and a proxy of its own."""
    return await asyncio.gather(*[lived(workload, seed, speed) for seed in seeds])


def together(parts: Sequence[Samples], name: str) -> Row:
    """All seeds' requests in one line (gaps between tokens left out)."""
    return Samples(all=[sample for part in parts for sample in part.measured]).row(name, 0)


def main() -> int:
    """Play both and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--speed", type=float, default=1.0, help="emulated seconds per real one (default 1)")
    parser.add_argument("--seeds", type=int, default=6)
    args = parser.parse_args()
    workload, seeds = agents(), range(args.seeds)
    lives = asyncio.run(lived_at_once(workload, seeds, args.speed))
    model, live = together([simulated(workload, seed) for seed in seeds], "simulated"), together(lives, "live")
    found: dict[str, object] = {"seeds": args.seeds, "live over simulated": over(live, model)}
    found |= {row.policy: {key: value for key, value in asdict(row).items() if key != "seed"} for row in (model, live)}
    json.dump(found, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
