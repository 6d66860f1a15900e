"""Short prompts behind a long one on a real engine, with and without parts: `python -m bench.slices`.

Starts one engine (real vLLM on the CPU) and plays the same through a real proxy twice, with `routing.slice_s` 0 and 1:
a prompt of several thousand tokens, and while it is prefilled short ones, one after the other. Prints the time to first
token of the long one, and of the short ones the mean and the longest. The router learns the engine's speed before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import replace

import aiohttp

from bench.live import proxy_before
from bench.real import backends, engines
from homeport_proxy.local.supervisor import Supervisor
from homeport_proxy.simulate.live import block_text

LONG_WORDS, SHORT_WORDS, WARM_WORDS = 2_400, 12, 300
SHORT = 6
STEP_TOKENS = 512
"""What the router takes for a step of this engine, whose context is short: parts are two of these at least."""


async def asked(http: aiohttp.ClientSession, url: str, model: str, key: int, words: int) -> tuple[float, str]:
    """Seconds until a streamed answer to a prompt of its own begins, and the proxy's reason."""
    body = {"model": model, "prompt": block_text(key, words), "max_tokens": 4, "stream": True}
    began_s = time.monotonic()
    async with http.post(f"{url}/completions", json=body) as answer:
        answer.raise_for_status()
        await answer.content.readany()
        took_s = time.monotonic() - began_s
        await answer.read()
        return took_s, answer.headers["x-homeport-reason"]


async def played(supervisor: Supervisor, slice_s: float, first_key: int) -> dict[str, float | int]:
    """The figures with parts of ``slice_s`` seconds (0: none)."""
    model = supervisor.plan.model
    async with proxy_before(backends(supervisor)) as (url, control), aiohttp.ClientSession() as http:
        router = control.routers["local"]
        router.reconfigure(replace(router.settings, slice_s=slice_s, step_tokens=STEP_TOKENS))
        for number in range(6):
            await asked(http, url, model, first_key + number, WARM_WORDS + 40 * number)
        long = asyncio.create_task(asked(http, url, model, first_key + 10, LONG_WORDS))
        await asyncio.sleep(0.5)
        short: list[float] = []
        while len(short) < SHORT and not long.done():
            took_s, _ = await asked(http, url, model, first_key + 20 + len(short), SHORT_WORDS)
            short.append(took_s)
        long_s, reason = await long
    return {
        "slice_s": slice_s,
        "reason": reason,
        "long_ttft_s": round(long_s, 2),
        "short": len(short),
        "short_mean_ttft_s": round(sum(short) / len(short), 2),
        "short_longest_ttft_s": round(max(short), 2),
    }


def main() -> int:
    """Play both and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with engines("--mixed", "1") as supervisor:
        rows = [asyncio.run(played(supervisor, slice_s, 1_000 * (1 + int(slice_s)))) for slice_s in (0.0, 1.0)]
    json.dump(rows, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
