"""The simulator against the live proxy: one trace through emulated engines in scaled time and through virtual time.

`python -m bench.live [--speed 2]` plays growing agent sessions through a real proxy in front of three emulated engines
(emulated time runs `--speed` times faster than the clock) and through the simulator with the same speeds and caches,
and prints both lines and their ratios. The proxy learns the engines' speeds, the simulator is told them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict

from homeport_engines.emulator import Emulator, EmulatorSettings
from homeport_engines.emulator.settings import Rates
from homeport_proxy import config as configuration
from homeport_proxy.app import Proxy
from homeport_proxy.control import Control
from homeport_proxy.simulate.cluster import Cluster, Decode, Prefill, Sessions
from homeport_proxy.simulate.live import LiveOptions, replay_live
from homeport_proxy.simulate.result import Row, quantile
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


def simulated(workload: Workload, seed: int) -> Row:
    """The workload in virtual time."""
    return Simulation(workload, CLUSTER, "cost", seed=seed, whole=True).run().row("simulated", seed)


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


async def lived(workload: Workload, seed: int, speed: float) -> Row:
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
    row = samples.row("live", seed)
    ttft_s = sorted(sample.ttft_s * speed for sample in samples.measured)
    scaled = {f"ttft_p{round(share * 100)}_s": quantile(ttft_s, share) for share in (0.5, 0.9, 0.99)}
    return Row(**{**asdict(row), **scaled, "itl_p99_s": None})


def main() -> int:
    """Play both and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", type=float, default=1.0, help="emulated seconds per real one (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    workload = agents()
    model, live = simulated(workload, args.seed), asyncio.run(lived(workload, args.seed, args.speed))
    found = {"simulated": asdict(model), "live": asdict(live), "live over simulated": over(live, model)}
    json.dump(found, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
