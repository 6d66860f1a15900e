"""`make bench`: the data plane's and the SDK's figures in one run, with date, machine and versions.

Compare ratios within one run; run it on an idle machine. Routing and whole agents have benchmarks of their own
(`make bench-routing`, `make bench-agents`).
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version

PARTS = {
    "relay": "what a request and a stream chunk cost, beside a plain aiohttp proxy",
    "decide": "what a routing decision costs, and what the index holds in memory",
    "fingerprint": "what fingerprinting costs, beside a plain decode of the same body",
    "bookkeeping": "what metrics, logs and ledger cost a request",
}
PEERS = ("homeport", "aiohttp", "uvloop", "msgspec", "xxhash", "prometheus-client")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    wanted = parser.parse_args().parts or list(PARTS)
    unknown = [part for part in wanted if part not in PARTS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    print(
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, {platform.machine()}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    )
    print(", ".join(f"{name} {version(name)}" for name in PEERS))
    status = 0
    for part in wanted:
        print(f"\n== {part}: {PARTS[part]}", flush=True)
        status |= subprocess.run([sys.executable, "-m", f"bench.{part}"], check=False).returncode
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
