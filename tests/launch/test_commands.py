"""Launch commands: what each engine, role and connector gets on its command line, and what is refused."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeport import cli
from homeport_engines.launch import (
    SHAPES,
    SPECULATION,
    Launch,
    LaunchError,
    LaunchRequest,
    Speculation,
    speculation,
)
from homeport_engines.sglang import launch as sglang
from homeport_engines.vllm import launch as vllm


def option(launch: Launch, name: str) -> str | None:
    """The value after an option, None when it is not there."""
    argv = list(launch.argv)
    return argv[argv.index(name) + 1] if name in argv else None


def settings(launch: Launch, name: str) -> dict[str, Any]:
    """An option's JSON object, empty when the option is not there."""
    found: dict[str, Any] = json.loads(option(launch, name) or "{}")
    return found


REQUEST = LaunchRequest(model="org/model", role="prefill", kv="nixl")


@pytest.mark.parametrize(
    ("role", "kv", "kv_role", "connector"),
    [
        ("prefill", "nixl", "kv_producer", "NixlConnector"),
        ("decode", "nixl", "kv_consumer", "NixlConnector"),
        ("mixed", "nixl", "kv_both", "NixlConnector"),
        ("prefill", "nixl-push", "kv_producer", "NixlPushConnector"),
        ("decode", "mooncake", "kv_consumer", "MooncakeConnector"),
        ("prefill", "lmcache", "kv_both", "LMCacheConnectorV1"),
        ("mixed", "mooncake-store", "kv_both", "MooncakeStoreConnector"),
        ("decode", "shared-folder", "kv_both", "ExampleConnector"),
    ],
)
def test_vllm_connector_and_role(role: Any, kv: Any, kv_role: str, connector: str) -> None:
    config = settings(vllm.command(replace(REQUEST, role=role, kv=kv)), "--kv-transfer-config")
    assert (config["kv_connector"], config["kv_role"]) == (connector, kv_role)


def test_vllm_on_cpu_sets_what_a_small_machine_needs() -> None:
    launch = vllm.command(replace(REQUEST, cpu_threads=2, kv_gib=3, side_channel_port=5601), "cpu")
    assert settings(launch, "--kv-transfer-config")["kv_buffer_device"] == "cpu"
    assert launch.env["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert launch.env["OMP_NUM_THREADS"] == "2"
    assert launch.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5601"
    assert launch.env["UCX_TLS"] == "tcp,sm,self"
    assert launch.env["HF_HUB_OFFLINE"] == "1"
    assert "--enforce-eager" in launch.argv


def test_mooncake_on_cpu_goes_over_tcp_and_says_what_is_missing() -> None:
    launch = vllm.command(replace(REQUEST, kv="mooncake", bootstrap_port=9001), "cpu")
    assert settings(launch, "--kv-transfer-config")["kv_connector_extra_config"]["mooncake_protocol"] == "tcp"
    assert launch.env["MC_FORCE_TCP"] == "1"
    assert launch.env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "9001"
    assert any("mooncake-transfer-engine" in note for note in launch.notes)


def test_vllm_on_gpu_leaves_the_engine_its_own_choices() -> None:
    launch = vllm.command(replace(REQUEST, gpus=(3,)))
    assert "--enforce-eager" not in launch.argv
    assert "kv_buffer_device" not in settings(launch, "--kv-transfer-config")
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "3"
    assert not {"UCX_TLS", "VLLM_CPU_KVCACHE_SPACE", "OMP_NUM_THREADS"} & set(launch.env)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (
            "ngram",
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        ),
        ("suffix", {"method": "suffix", "num_speculative_tokens": 16}),
        ("mtp", {"method": "mtp", "num_speculative_tokens": 1}),
    ],
)
def test_vllm_speculation_on_decode(preset: str, expected: dict[str, Any]) -> None:
    launch = vllm.command(replace(REQUEST, role="decode", speculation=speculation(preset)))
    assert settings(launch, "--speculative-config") == expected


@pytest.mark.parametrize(("preset", "method"), [("eagle3", "eagle3"), ("draft-model", "draft_model")])
def test_vllm_speculation_names_its_draft_or_marks_the_gap(preset: str, method: str) -> None:
    bare = vllm.command(replace(REQUEST, role="decode", speculation=speculation(preset)))
    config = settings(bare, "--speculative-config")
    assert config["method"] == method
    assert config["model"].startswith("<REPLACE-WITH-DRAFT-MODEL")
    assert "org/model" in config["model"]
    assert any(config["model"] in note for note in bare.notes)
    named = vllm.command(replace(REQUEST, role="decode", speculation=speculation(preset, "org/draft")))
    assert settings(named, "--speculative-config")["model"] == "org/draft"
    assert not named.notes


@pytest.mark.parametrize(
    ("text", "speculates"),
    [("ngram", False), ("draft-model", False), ("eagle3", True), ("mtp", True)],
)
def test_a_prefill_engine_speculates_only_where_the_hand_off_demands_it(text: str, speculates: bool) -> None:
    launch = vllm.command(replace(REQUEST, role="prefill", speculation=speculation(text)))
    assert ("--speculative-config" in launch.argv) is speculates
    assert speculates or launch.notes


def test_vllm_takes_its_own_json_as_it_is() -> None:
    own = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 9}
    launch = vllm.command(replace(REQUEST, role="decode", speculation=speculation(json.dumps(own))))
    assert settings(launch, "--speculative-config") == own


@pytest.mark.parametrize(
    ("where", "endpoint", "replay", "warned"),
    [
        ({"events_port": 5557}, "tcp://*:5557", "tcp://*:6557", True),
        ({"events_socket": "kv"}, "ipc://@kv", "ipc://@kv-replay", False),
    ],
)
def test_kv_events_are_published_where_vllm_binds(
    where: dict[str, Any], endpoint: str, replay: str, warned: bool
) -> None:
    """To an address without a wildcard vLLM connects: nobody would hear it."""
    launch = vllm.command(replace(REQUEST, **where, served_name="m", port=8101))
    config = settings(launch, "--kv-events-config")
    assert (config["endpoint"], config["replay_endpoint"]) == (endpoint, replay)
    assert config["topic"] == "kv@127.0.0.1:8101@m"
    assert any("5557" in note for note in launch.notes) is warned
    assert option(launch, "--prefix-caching-hash-algo") == "sha256_cbor"
    assert "--enable-scale-out" in launch.argv, "else Messages and Responses prompts have no tokens to index"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_read_back_makes_both_engines_givers_and_takers(role: Any) -> None:
    config = settings(vllm.command(replace(REQUEST, role=role, kv_readback=True)), "--kv-transfer-config")
    assert config["kv_role"] == "kv_both"
    assert config["kv_connector_extra_config"] == {"bidirectional_kv_xfer": True}


@pytest.mark.parametrize("shape", SHAPES)
def test_workload_presets_reach_both_engines(shape: str) -> None:
    request = LaunchRequest(model="m", shape=SHAPES[shape])
    assert option(vllm.command(request), "--max-num-batched-tokens") == str(SHAPES[shape].batched_tokens)
    assert option(sglang.command(request), "--chunked-prefill-size") == str(SHAPES[shape].batched_tokens)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"role": "prefill"}, ["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl"]),
        ({"role": "decode", "kv": "mooncake"}, ["--disaggregation-mode", "decode"]),
        ({"role": "prefill", "bootstrap_port": 9000}, ["--disaggregation-bootstrap-port", "9000"]),
        ({"role": "mixed", "kv": "lmcache"}, ["--enable-lmcache"]),
        ({"role": "mixed", "kv": "none", "max_model_len": 4096}, ["--context-length", "4096"]),
        ({"role": "decode", "speculation": SPECULATION["ngram"]}, ["--speculative-algorithm", "NGRAM"]),
        ({"role": "decode", "speculation": SPECULATION["mtp"]}, ["--speculative-algorithm", "NEXTN"]),
        ({"tensor_parallel": 8, "data_parallel": 2}, ["--tp-size", "8", "--dp-size", "2"]),
    ],
)
def test_sglang(changes: dict[str, Any], expected: list[str]) -> None:
    argv = list(sglang.command(replace(REQUEST, **changes)).argv)
    start = argv.index(expected[0])
    assert argv[start : start + len(expected)] == expected
    assert {"--enable-cache-report", "--enable-metrics"} <= set(argv)


@pytest.mark.parametrize(
    ("build", "fragment"),
    [
        (lambda: vllm.command(replace(REQUEST, kv="none")), "--kv nixl"),
        (lambda: vllm.command(replace(REQUEST, kv="lmcache"), "cpu"), "CPU build"),
        (lambda: vllm.command(replace(REQUEST, kv="mooncake", kv_readback=True)), "--kv nixl only"),
        (lambda: sglang.command(replace(REQUEST, kv_readback=True)), "leave it out"),
        (lambda: sglang.command(replace(REQUEST, kv="lmcache")), "--role mixed"),
        (lambda: sglang.command(replace(REQUEST, speculation=Speculation("suffix", 4))), "suffix"),
        (lambda: sglang.command(replace(REQUEST, speculation=speculation('{"num_speculative_tokens":1}'))), "JSON"),
        (lambda: speculation("eagle9"), "ngram"),
        (lambda: speculation("{"), "valid JSON"),
        (lambda: speculation('{"method":"ngram"}'), "num_speculative_tokens"),
        (lambda: speculation('{"num_speculative_tokens":true}'), "num_speculative_tokens"),
        (lambda: speculation("ngram", "org/draft"), "no draft model"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(build: Any, fragment: str) -> None:
    with pytest.raises(LaunchError, match=fragment):
        build()


@given(model=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), name=st.text(min_size=1))
def test_the_shell_line_reads_back_to_the_same_words(model: str, name: str) -> None:
    launch = vllm.command(replace(REQUEST, model=model, served_name=name), "cpu")
    words = shlex.split(launch.shell())
    assert words == [*(f"{key}={value}" for key, value in launch.env.items()), *launch.argv]


def test_command_line_prints_one_command_and_never_opens_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["engine", "command", "vllm", "--role", "decode", "--model", "/no/such", "--preset", "eagle3"])
    out = capsys.readouterr()
    assert code == 0
    assert out.out.count("\n") == 1
    assert "/no/such" in shlex.split(out.out)
    assert "<REPLACE-WITH-DRAFT-MODEL" in out.out
    assert "--draft-model" in out.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["vllm-cpu", "--role", "decode", "--kv", "lmcache", "--model", "m"],
        ["sglang", "--role", "decode", "--kv", "lmcache", "--model", "m"],
        ["vllm", "--role", "decode", "--model", "m", "--spec", "ngram", "--preset", "mtp"],
        ["vllm", "--role", "decode", "--model", "m", "--draft-model", "d"],
    ],
)
def test_command_line_refuses_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["engine", "command", *arguments]) == 1
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.startswith("homeport: ")
    assert out.err.count("\n") == 1
