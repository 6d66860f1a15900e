"""The exact command line and environment of a vLLM engine (0.32), for a GPU and for the CPU build."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

from homeport.fingerprint import JsonValue
from homeport_engines.base import Role
from homeport_engines.launch import (
    Connector,
    Launch,
    LaunchError,
    LaunchRequest,
    Speculation,
    draft_model,
)

Device = Literal["gpu", "cpu"]

KV_ROLES: Mapping[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer", "mixed": "kv_both"}
CONNECTORS: Mapping[Connector, str] = {
    "nixl": "NixlConnector",
    "nixl-push": "NixlPushConnector",
    "mooncake": "MooncakeConnector",
    "lmcache": "LMCacheConnectorV1",
    "mooncake-store": "MooncakeStoreConnector",
    "shared-folder": "ExampleConnector",
}
PAIR_CONNECTORS = frozenset({"nixl", "nixl-push", "mooncake"})
"""These move one request's KV between two engines; the others share a store, where every engine reads and writes."""

CPU_CONNECTORS = frozenset({"none", "nixl", "mooncake", "shared-folder"})
METHODS = {"ngram": "ngram", "suffix": "suffix", "eagle3": "eagle3", "draft-model": "draft_model", "mtp": "mtp"}
EVENTS_REPLAY_OFFSET = 1000
EVENTS_NOTE = (
    "vLLM publishes KV events on every address of its machine ({}, {}), and they show tenants' cache salts: "
    "let only the proxy reach these ports"
)
MOONCAKE_CPU_NOTE = (
    "the CPU environment does not hold Mooncake: add mooncake-transfer-engine-non-cuda==0.3.13.post1 (pip, --no-deps) "
    "and the system's libibverbs1 and librdmacm1"
)


def command(request: LaunchRequest, device: Device = "gpu") -> Launch:
    """The launch of one engine. Pure: opens nothing, asks nothing. Raises LaunchError for what cannot work."""
    if device == "cpu" and request.kv not in CPU_CONNECTORS:
        raise LaunchError(f"--kv {request.kv} does not run on the CPU build; use {', '.join(sorted(CPU_CONNECTORS))}")
    if request.kv_readback and request.kv != "nixl":
        raise LaunchError("--kv-readback works with --kv nixl only")
    if request.role != "mixed" and request.kv == "none":
        raise LaunchError(f"a {request.role} engine needs a KV connector: give --kv nixl (or another)")
    argv = [*(request.program or ("vllm", "serve")), request.model]
    if request.served_name:
        argv += ["--served-model-name", request.served_name]
    argv += ["--host", request.host, "--port", str(request.port)]
    argv += _sizes(request)
    argv += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if request.tool_parser:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", request.tool_parser]
    env: dict[str, str] = {"VLLM_NO_USAGE_STATS": "1"}
    notes: list[str] = []
    if device == "cpu":
        argv += ["--enforce-eager"]
        env |= _cpu_environment(request)
    elif request.gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, request.gpus))
    if request.kv != "none":
        argv += ["--kv-transfer-config", _json(_transfer(request, device))]
        env |= _transfer_environment(request, device)
        if request.kv == "mooncake" and device == "cpu":
            notes.append(MOONCAKE_CPU_NOTE)
    if (endpoints := _event_endpoints(request)) is not None:
        argv += ["--kv-events-config", _json(_events(request, *endpoints))]
        argv += ["--prefix-caching-hash-algo", "sha256_cbor"]  # the only hash that can be computed outside the engine
        argv += ["--enable-scale-out"]  # tells the tokens of Messages and Responses prompts, as /tokenize does of chats
        if request.events_socket is None:
            notes.append(EVENTS_NOTE.format(*endpoints))
    if request.speculation is not None:
        if _speculates(request.role, request.speculation):
            config, more = _speculative(request, request.speculation)
            argv += ["--speculative-config", _json(config)]
            notes += more
        else:
            notes.append("a prefill engine has nothing to speculate about: the setting goes to the decode engines")
    return Launch(tuple(argv), env, tuple(notes))


def _sizes(request: LaunchRequest) -> list[str]:
    argv: list[str] = []
    if request.dtype:
        argv += ["--dtype", request.dtype]
    if request.max_model_len is not None:
        argv += ["--max-model-len", str(request.max_model_len)]
    if request.shape is not None:
        argv += ["--max-num-batched-tokens", str(request.shape.batched_tokens)]
        argv += ["--max-num-seqs", str(request.shape.sequences)]
    if request.tensor_parallel > 1:
        argv += ["--tensor-parallel-size", str(request.tensor_parallel)]
    if request.data_parallel > 1:
        argv += ["--data-parallel-size", str(request.data_parallel)]
    return argv


def _cpu_environment(request: LaunchRequest) -> dict[str, str]:
    env = {
        # without a size the engine takes 92 % of the memory, and a second one cannot start
        "VLLM_CPU_KVCACHE_SPACE": str(request.kv_gib),
        "HF_HUB_OFFLINE": "1",
        # the worker lives in the engine core's process: one process, 700 MB and 14 s of imports less
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # numba's OpenMP layer makes libgomp rebuild its threads in every step that drafts: 0.6 tokens/s instead of 11
        "NUMBA_THREADING_LAYER": "workqueue",
    }
    if request.cpu_threads is not None:
        env["OMP_NUM_THREADS"] = str(request.cpu_threads)
    return env


def _transfer(request: LaunchRequest, device: Device) -> dict[str, JsonValue]:
    one_way = request.kv in PAIR_CONNECTORS and not request.kv_readback
    role = KV_ROLES[request.role] if one_way else "kv_both"
    config: dict[str, JsonValue] = {"kv_connector": CONNECTORS[request.kv], "kv_role": role}
    if request.kv in {"nixl", "nixl-push"}:
        if device == "cpu":
            config["kv_buffer_device"] = "cpu"
        config["kv_load_failure_policy"] = "fail"
        config["kv_connector_extra_config"] = {"bidirectional_kv_xfer": True} if request.kv_readback else {}
    elif request.kv == "mooncake" and device == "cpu":
        config["kv_connector_extra_config"] = {"mooncake_protocol": "tcp", "num_workers": 2}
    elif request.kv == "shared-folder":
        config["kv_connector_extra_config"] = {"shared_storage_path": request.store_path}
    return config


def _transfer_environment(request: LaunchRequest, device: Device) -> dict[str, str]:
    if request.kv in {"nixl", "nixl-push"}:
        env = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": request.host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(request.side_channel_port),
        }
        return env | {"UCX_TLS": "tcp,sm,self", "UCX_NET_DEVICES": "all"} if device == "cpu" else env
    if request.kv == "mooncake":
        env = {"VLLM_HOST_IP": request.host, "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(request.bootstrap_port)}
        return env | {"MC_FORCE_TCP": "1"} if device == "cpu" else env
    return {}


def _event_endpoints(request: LaunchRequest) -> tuple[str, str] | None:
    """Where KV events and their replay are published. vLLM binds only a wildcard's port or a local socket: to any other
    address it connects, and whoever subscribes there hears nothing."""
    if request.events_socket is not None:
        return f"ipc://@{request.events_socket}", f"ipc://@{request.events_socket}-replay"
    if request.events_port is None:
        return None
    return f"tcp://*:{request.events_port}", f"tcp://*:{request.events_port + EVENTS_REPLAY_OFFSET}"


def _events(request: LaunchRequest, endpoint: str, replay_endpoint: str) -> dict[str, JsonValue]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint,
        "replay_endpoint": replay_endpoint,
        "topic": f"kv@{request.host}:{request.port}@{request.served_name or request.model}",
    }


def _speculates(role: Role, wanted: Speculation) -> bool:
    """Decode engines do; prefill engines only where the draft's own KV must match (part of NIXL's compatibility
    hash since its version 6: EAGLE and MTP)."""
    method = str(wanted.options.get("method", "")) if wanted.method == "custom" else wanted.method
    return role != "prefill" or method.startswith(("eagle", "mtp"))


def _speculative(request: LaunchRequest, wanted: Speculation) -> tuple[dict[str, JsonValue], tuple[str, ...]]:
    if wanted.method == "custom":
        return dict(wanted.options), ()
    config: dict[str, JsonValue] = {"method": METHODS[wanted.method], "num_speculative_tokens": wanted.tokens}
    notes: tuple[str, ...] = ()
    if wanted.needs_draft:
        config["model"], notes = draft_model(request, wanted)
    if wanted.method == "suffix":
        notes = ("the suffix method needs the package arctic-inference beside vLLM",)
    return config | dict(wanted.options), notes


def _json(value: Mapping[str, JsonValue]) -> str:
    return json.dumps(value, separators=(",", ":"))
