"""vLLM's `/metrics` -> one :class:`EngineStats` per data-parallel rank (the label ``engine``).

Names as in vLLM 0.32 (``vllm/v1/metrics/loggers.py``, ``vllm/v1/spec_decode/metrics.py``). What a version does not
expose stays None.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from homeport_engines.base import EngineStats, SpecStats
from homeport_engines.prometheus import samples

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
CACHE_CONFIG = "vllm:cache_config_info"
PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
PREEMPTIONS = "vllm:num_preemptions_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"

_SUMS = frozenset({RUNNING, WAITING, PREFIX_QUERIES, PREFIX_HITS, PREEMPTIONS, DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS})
_WANTED = _SUMS | {KV_USAGE, CACHE_CONFIG, BY_SOURCE}


def read(text: str) -> dict[int, EngineStats]:
    """Stats by rank. Raises ValueError when the text holds none of vLLM's metrics."""
    sums: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    usage: dict[int, float] = {}
    caches: dict[int, Mapping[str, str]] = {}
    sources: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for sample in samples(text, _WANTED):
        rank = _int(sample.labels.get("engine", "0"))
        if rank is None:
            continue
        if sample.name == KV_USAGE:
            usage[rank] = max(sample.value, usage.get(rank, 0.0))
        elif sample.name == CACHE_CONFIG:
            caches[rank] = sample.labels
        elif sample.name == BY_SOURCE:
            sources[rank][sample.labels.get("source", "")] += int(sample.value)
        else:
            sums[rank][sample.name] += sample.value
    ranks = {*sums, *usage, *caches, *sources}
    if not ranks:
        raise ValueError("its /metrics has none of vLLM's metrics")
    return {
        rank: _stats(sums.get(rank, {}), usage.get(rank), caches.get(rank, {}), sources.get(rank, {}))
        for rank in sorted(ranks)
    }


def _stats(
    sums: Mapping[str, float], usage: float | None, cache: Mapping[str, str], sources: Mapping[str, int]
) -> EngineStats:
    def count(name: str) -> int | None:
        return int(sums[name]) if name in sums else None

    block_tokens = _int(cache.get("block_size", ""))
    return EngineStats(
        running=count(RUNNING),
        waiting=count(WAITING),
        kv_usage=usage,
        kv_capacity_tokens=_capacity(cache, block_tokens),
        block_tokens=block_tokens,
        prefix_queries_tokens=count(PREFIX_QUERIES),
        prefix_hits_tokens=count(PREFIX_HITS),
        prompt_tokens_by_source=dict(sources),
        preemptions=count(PREEMPTIONS),
        spec=_speculation(count(DRAFTS), count(DRAFT_TOKENS), count(ACCEPTED_TOKENS)),
    )


def _capacity(cache: Mapping[str, str], block_tokens: int | None) -> int | None:
    """Tokens the KV cache holds: as told, else blocks times block size (older versions tell only those)."""
    told = _int(cache.get("kv_cache_size_tokens", ""))
    blocks = _int(cache.get("num_gpu_blocks", ""))
    if told is not None:
        return told
    return blocks * block_tokens if blocks is not None and block_tokens is not None else None


def _speculation(drafts: int | None, draft_tokens: int | None, accepted: int | None) -> SpecStats | None:
    if drafts is None or draft_tokens is None or accepted is None:
        return None
    return SpecStats(drafts=drafts, draft_tokens=draft_tokens, accepted_tokens=accepted)


def _int(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
