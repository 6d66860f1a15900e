"""The simulator against two real engines: speeds learned from one set of sessions, another set compared.

`python -m bench.real` starts two aggregated engines (real vLLM on the CPU, one thread each), plays agent sessions
through a real proxy in front of them and takes the speeds that its router learned; then it plays other sessions there,
and the same through the simulator with those speeds and the engines' own cache size, and prints both and their ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from bench.live import over, proxy_before
from homeport_engines.vllm import telemetry
from homeport_proxy.commands import up
from homeport_proxy.local.display import PlainDisplay
from homeport_proxy.local.supervisor import Supervisor
from homeport_proxy.routing.views import Rates
from homeport_proxy.simulate.cluster import Cluster, Decode, Prefill, Sessions
from homeport_proxy.simulate.live import LiveOptions, block_text, replay_live
from homeport_proxy.simulate.result import Row
from homeport_proxy.simulate.run import Simulation
from homeport_proxy.simulate.workload import Call, Conversation, Lane, Workload

BLOCK_TOKENS = 128
SESSIONS, TURNS = 10, 5
SPREAD_S = 6.0
OUTPUT_TOKENS = 24


def agents(first: int) -> Workload:
    """Sessions with a head of two blocks in common that begin with five to nine blocks of their own and grow by one to
    three a turn; ``first`` numbers the sessions, so that two sets share nothing but the head."""
    conversations = []
    for number in range(first, first + SESSIONS):
        own = [(number + 1) * 10_000 + index for index in range(100)]
        lane = Lane(f"s{number}")
        for turn in range(TURNS):
            keys = [1, 2, *own[: 5 + number % 5 + (1 + number % 3) * turn]]
            lane.calls.append(Call(len(keys) * BLOCK_TOKENS + 20, OUTPUT_TOKENS, keys, 2.0 + number % 3))
        conversations.append(Conversation(lane.name, [lane]))
    return Workload(conversations, closed=True, block_tokens=BLOCK_TOKENS)


def tokens_per_word(supervisor: Supervisor) -> float:
    """How many of the model's tokens a word of the replayed texts takes."""
    words = 2_000
    body = json.dumps({"model": supervisor.plan.model, "prompt": block_text(7, words)}).encode()
    request = urllib.request.Request(
        f"{supervisor.plan.proxy_url}/tokenize", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return len(json.load(answer)["tokens"]) / words


def cache_tokens(supervisor: Supervisor) -> int:
    """The smallest KV cache of the engines."""
    sizes = []
    for engine in supervisor.plan.engines:
        with urllib.request.urlopen(f"{engine.url}/metrics", timeout=60) as answer:
            sizes.append(telemetry.read(answer.read().decode())[0].kv_capacity_tokens or 0)
    return min(sizes)


@contextmanager
def engines(*options: str) -> Iterator[Supervisor]:
    """Real engines, started as `homeport up` does with these options, and stopped at the end."""
    parser = argparse.ArgumentParser()
    up.configure(parser)
    wanted = parser.parse_args(["--engine", "vllm-cpu", "--port", "0", *options])
    with tempfile.TemporaryDirectory() as folder:
        supervisor = Supervisor(up.plan_from(wanted), Path(folder))
        supervisor.start(PlainDisplay(sys.stderr), 600)
        try:
            yield supervisor
        finally:
            supervisor.stop()


def backends(supervisor: Supervisor) -> list[dict[str, str]]:
    """These engines for the configuration of another proxy of this process; their keys are put into its environment."""
    os.environ.update(supervisor.plan.proxy_env)
    return [{"name": one.name, "url": one.url, "key_env": one.key_variable} for one in supervisor.plan.engines]


async def played(supervisor: Supervisor) -> tuple[Row, Rates]:
    """Both sets through a proxy of this process: the second one's figures, and the mean of the speeds that the router
    knew of each engine after the first."""
    async with proxy_before(backends(supervisor)) as (url, control):
        options = LiveOptions(
            url,
            shrink=await asyncio.to_thread(tokens_per_word, supervisor),
            spread_s=SPREAD_S,
            max_output_tokens=OUTPUT_TOKENS,
        )
        await replay_live(agents(0), options, 0)
        known = control.routers["local"].status(time.monotonic()).places
        samples = await replay_live(agents(SESSIONS), options, 1)
        return samples.row("live", 1), mean([place.rates for place in known.values()])


def mean(rates: list[Rates]) -> Rates:
    """Each speed's mean over the engines."""
    values = {name: statistics.mean(getattr(one, name) for one in rates) for name in asdict(rates[0])}
    return replace(rates[0], **values)


def simulated(rates: Rates, cache_tokens: int) -> Row:
    """The second set in virtual time."""
    cluster = Cluster(
        replicas=2,
        cache_tokens=cache_tokens,
        block_tokens=BLOCK_TOKENS,
        prefill=Prefill(t0_s=rates.t0_s, tokens_per_s=rates.tokens_per_s, attention_tokens=rates.attention_tokens),
        decode=Decode(
            step_s=rates.step_s,
            per_sequence_s=rates.per_sequence_s,
            per_context_token_s=rates.per_context_token_s,
        ),
        sessions=Sessions(spread_s_per_session=SPREAD_S),
        steps=True,
    )
    return Simulation(agents(SESSIONS), cluster, "cost", seed=1, whole=True).run().row("simulated", 1)


def main() -> int:
    """Play, compare, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with engines("--mixed", "2", "--threads", "1") as supervisor:
        size = cache_tokens(supervisor)
        live, rates = asyncio.run(played(supervisor))
    model = simulated(rates, size)
    learned = {name: round(value, 5) for name, value in asdict(rates).items()}
    rows = {"simulated": asdict(model), "live": asdict(live), "live over simulated": over(live, model)}
    json.dump({"learned": learned, **rows}, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
