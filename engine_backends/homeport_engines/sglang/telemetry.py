"""SGLang's `/metrics` (needs `--enable-metrics`) -> one :class:`EngineStats` per data-parallel rank.

Names as documented (production metrics); not every version has each, and what is missing stays None.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from homeport_engines.base import EngineStats
from homeport_engines.prometheus import samples

RUNNING = "sglang:num_running_reqs"
WAITING = "sglang:num_queue_reqs"
KV_USAGE = "sglang:token_usage"
KV_CAPACITY = "sglang:max_total_num_tokens"
PROMPT_TOKENS = "sglang:prompt_tokens_total"
CACHED_TOKENS = "sglang:cached_tokens_total"

_GAUGES = frozenset({RUNNING, WAITING, KV_USAGE, KV_CAPACITY})
_COUNTERS = frozenset({PROMPT_TOKENS, CACHED_TOKENS})


def read(text: str) -> dict[int, EngineStats]:
    """Stats by rank. Raises ValueError when the text holds none of SGLang's metrics."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for sample in samples(text, _GAUGES | _COUNTERS):
        label = sample.labels.get("dp_rank", "0")
        values = found[int(label) if label.isdecimal() else 0]
        if sample.name in _GAUGES:
            # every tensor-parallel rank reports the same queue: once, not once a rank
            values[sample.name] = max(sample.value, values.get(sample.name, 0.0))
        else:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    if not found:
        raise ValueError("its /metrics has none of SGLang's metrics; start it with --enable-metrics")
    return {rank: _stats(values) for rank, values in sorted(found.items())}


def _stats(values: Mapping[str, float]) -> EngineStats:
    def count(name: str) -> int | None:
        return int(values[name]) if name in values else None

    return EngineStats(
        running=count(RUNNING),
        waiting=count(WAITING),
        kv_usage=values.get(KV_USAGE),
        kv_capacity_tokens=count(KV_CAPACITY),
        prefix_queries_tokens=count(PROMPT_TOKENS),
        prefix_hits_tokens=count(CACHED_TOKENS),
    )
