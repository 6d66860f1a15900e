"""An emulated engine's counters in Prometheus text, under vLLM's names and labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from homeport_engines.emulator.books import Histogram
from homeport_engines.emulator.handoff import Leases
from homeport_engines.emulator.scheduler import Rank
from homeport_engines.emulator.settings import EmulatorSettings

Sample = tuple[str, str, float]
"""Suffix, further labels, value."""


def exposition(
    settings: EmulatorSettings, ranks: Sequence[Rank], leases: Sequence[Leases], missing: Sequence[str]
) -> str:
    """The text of ``/metrics``; families named in ``missing`` are left out."""
    families: dict[str, tuple[str, list[str]]] = {}
    for rank, held in zip(ranks, leases, strict=True):
        labels = f'engine="{rank.index}",model_name="{_escape(settings.model)}"'
        for name, kind, samples in _families(settings, rank, held):
            lines = families.setdefault(name, (kind, []))[1]
            for suffix, more, value in samples:
                lines.append(f"{name}{suffix}{{{labels}{more}}} {_number(value)}")
    shown = (item for item in families.items() if item[0] not in missing)
    return "".join(
        f"# HELP {name} Emulated.\n# TYPE {name} {kind}\n" + "".join(line + "\n" for line in lines)
        for name, (kind, lines) in shown
    )


def _families(settings: EmulatorSettings, rank: Rank, leases: Leases) -> Iterator[tuple[str, str, list[Sample]]]:
    counters = rank.counters
    yield "vllm:num_requests_running", "gauge", [("", "", len(rank.running))]
    yield "vllm:num_requests_waiting", "gauge", [("", "", len(rank.waiting) + len(rank.loading))]
    yield "vllm:kv_cache_usage_perc", "gauge", [("", "", rank.cache.usage)]
    yield "vllm:cache_config_info", "gauge", [("", _cache_config(settings), 1)]
    plain = {
        "vllm:prefix_cache_queries": counters.prefix_queries,
        "vllm:prefix_cache_hits": counters.prefix_hits,
        "vllm:external_prefix_cache_queries": counters.external_queries,
        "vllm:external_prefix_cache_hits": counters.external_hits,
        "vllm:num_preemptions": counters.preemptions,
        "vllm:prompt_tokens": counters.prompt_tokens,
        "vllm:generation_tokens": counters.generation_tokens,
    }
    for name, value in plain.items():
        yield name + "_total", "counter", [("", "", value)]
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    yield (
        "vllm:prompt_tokens_by_source_total",
        "counter",
        [("", f',source="{source}"', counters.by_source[source]) for source in sources],
    )
    reasons = ("stop", "length", "abort", "error")
    ended = {**counters.finished, "stop": counters.finished["stop"] + counters.finished["tool_calls"]}
    yield (
        "vllm:request_success_total",
        "counter",
        [("", f',finished_reason="{reason}"', ended.get(reason, 0)) for reason in reasons],
    )
    yield "vllm:time_to_first_token_seconds", "histogram", _buckets(counters.first_token_s)
    yield "vllm:inter_token_latency_seconds", "histogram", _buckets(counters.inter_token_s)
    yield "vllm:request_queue_time_seconds", "histogram", _buckets(counters.queue_s)
    yield "vllm:e2e_request_latency_seconds", "histogram", _buckets(counters.whole_s)
    if settings.speculation is not None:
        yield from _speculation(rank, settings.speculation.draft_tokens)
    if settings.kv == "nixl":
        yield from _nixl(rank, leases)


def _speculation(rank: Rank, draft_tokens: int) -> Iterator[tuple[str, str, list[Sample]]]:
    counters = rank.counters
    yield "vllm:spec_decode_num_drafts_total", "counter", [("", "", counters.drafts)]
    yield "vllm:spec_decode_num_draft_tokens_total", "counter", [("", "", counters.draft_tokens)]
    yield "vllm:spec_decode_num_accepted_tokens_total", "counter", [("", "", counters.accepted_tokens)]
    yield (
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        [("", f',position="{position}"', counters.accepted_at[position]) for position in range(draft_tokens)],
    )


def _nixl(rank: Rank, leases: Leases) -> Iterator[tuple[str, str, list[Sample]]]:
    counters = rank.counters
    bytes_per_token = 16384  # of no model in particular: there is no KV here
    yield (
        "vllm:nixl_bytes_transferred",
        "histogram",
        [
            ("_bucket", ',le="+Inf"', counters.transfers),
            ("_sum", "", counters.transferred_tokens * bytes_per_token),
            ("_count", "", counters.transfers),
        ],
    )
    yield "vllm:nixl_xfer_time_seconds", "histogram", _buckets(counters.transfer_s)
    yield "vllm:nixl_num_failed_transfers_total", "counter", [("", "", counters.failed_transfers)]
    yield "vllm:nixl_num_kv_expired_reqs_total", "counter", [("", "", counters.expired_leases)]
    yield "vllm:nixl_num_notifications_after_expiry_total", "counter", [("", "", counters.late_notifications)]


def _cache_config(settings: EmulatorSettings) -> str:
    return (
        f',block_size="{settings.block_tokens}",num_gpu_blocks="{settings.kv_blocks}"'
        f',kv_cache_size_tokens="{settings.kv_blocks * settings.block_tokens // len(settings.groups)}"'
    )


def _buckets(histogram: Histogram) -> list[Sample]:
    samples: list[Sample] = []
    running = 0
    for bound, count in zip((*histogram.bounds, None), histogram.counts, strict=True):
        running += count
        samples.append(("_bucket", f',le="{"+Inf" if bound is None else bound}"', running))
    return [*samples, ("_sum", "", histogram.total), ("_count", "", running)]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return repr(float(value))
