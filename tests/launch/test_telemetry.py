"""Engine metrics read as stats: what is told, what is missing, what is nonsense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from homeport_engines import telemetry
from homeport_engines.base import EngineStats, SpecStats
from homeport_engines.prometheus import samples

VLLM = r"""
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 2003.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.795985831223454e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1024.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 979.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 1024.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 0.0
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 22.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 88.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 61.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 20.0
vllm:cache_config_info{block_size="128",engine="0",kv_cache_size_tokens="46592",num_gpu_blocks="364"} 1.0
vllm:cache_config_info{block_size="128",engine="1",kv_cache_size_tokens="None",num_gpu_blocks="10"} 1.0
"""


def test_vllm_by_rank() -> None:
    stats = telemetry.read("vllm", VLLM)
    assert stats[0] == EngineStats(
        running=2,
        waiting=0,
        kv_usage=0.25,
        kv_capacity_tokens=46592,
        block_tokens=128,
        prefix_queries_tokens=2003,
        prefix_hits_tokens=1024,
        prompt_tokens_by_source={"local_compute": 979, "local_cache_hit": 1024, "external_kv_transfer": 0},
        preemptions=3,
        spec=SpecStats(drafts=22, draft_tokens=88, accepted_tokens=61),
    )
    assert stats[1] == EngineStats(running=1, kv_capacity_tokens=1280, block_tokens=128)


@pytest.mark.parametrize(
    ("line", "running"),
    [
        ('vllm:num_requests_running{engine="0"} NaN', None),
        ('vllm:num_requests_running{engine="0"} +Inf', None),
        ('vllm:num_requests_running{engine="0"} soon', None),
        ('vllm:num_requests_running{engine="0"}', None),
        ('vllm:num_requests_running{engine="zero"} 1', None),
        ("vllm:num_requests_running 4", 4),
        ('vllm:num_requests_running{model_name="a}b \\"c\\"",engine="0"} 4 1700000000000', 4),
    ],
)
def test_what_is_no_number_is_unknown_not_zero(line: str, running: int | None) -> None:
    stats = telemetry.read("vllm", line + '\nvllm:num_requests_waiting{engine="0"} 1\n')
    assert stats[0].running == running
    assert stats[0].waiting == 1


def test_two_models_of_one_rank_are_added() -> None:
    text = 'vllm:num_requests_running{engine="0",model_name="a"} 1\n'
    text += 'vllm:num_requests_running{engine="0",model_name="b"} 2\n'
    assert telemetry.read("vllm", text)[0].running == 3


def test_sglang_counts_a_queue_once_for_all_tensor_ranks() -> None:
    text = "".join(f'sglang:num_running_reqs{{dp_rank="1",tp_rank="{rank}"}} 5\n' for rank in range(4))
    text += 'sglang:prompt_tokens_total{model_name="m"} 1000\n'
    text += 'sglang:cached_tokens_total{cache_source="device",model_name="m"} 300\n'
    text += 'sglang:cached_tokens_total{cache_source="host",model_name="m"} 100\n'
    stats = telemetry.read("sglang", text)
    assert stats[1].running == 5
    assert (stats[0].prefix_queries_tokens, stats[0].prefix_hits_tokens) == (1000, 400)


@pytest.mark.parametrize("text", ["", "<html>", "process_cpu_seconds_total 3\n"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_foreign_text_is_an_error_not_an_idle_engine(engine: str, text: str) -> None:
    with pytest.raises(ValueError, match="metrics"):
        telemetry.read(engine, text)


def test_an_engine_without_known_metrics() -> None:
    with pytest.raises(ValueError, match="openai"):
        telemetry.read("openai", VLLM)


@given(
    label=st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc"))),
    value=st.floats(allow_nan=False, allow_infinity=False),
)
def test_reads_what_the_reference_writer_writes(label: str, value: float) -> None:
    registry = CollectorRegistry()
    Gauge("wanted", "A gauge.", ["name"], registry=registry).labels(label).set(value)
    Counter("other", "A counter.", registry=registry).inc(3)
    found = list(samples(generate_latest(registry).decode(), {"wanted"}))
    assert [(sample.labels, sample.value) for sample in found] == [({"name": label}, value)]


@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    list(samples(text, {"a"}))
    list(samples("vllm:num_requests_running{" + text, {"vllm:num_requests_running"}))
