"""What `homeport up` will start: each engine's command, port and key, and the proxy's configuration. Starts nothing."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from homeport.fingerprint import JsonValue
from homeport_engines.base import Role
from homeport_engines.launch import Launch, LaunchRequest, Speculation
from homeport_engines.vllm import launch as vllm

EngineName = Literal["vllm", "vllm-cpu", "emulator"]
HOST = "127.0.0.1"
DRAIN_S = 5.0
"""Seconds a stopping proxy waits for streams: whoever presses Ctrl-C wants an end."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user asked for, checked. ``model`` is a folder (or any name, for the emulator)."""

    engine: EngineName
    model: str
    served_name: str
    prefill: int = 1
    decode: int = 1
    mixed: int = 0
    max_model_len: int = 8192
    proxy_port: int = 8080
    speculation: Speculation | None = None
    spec: str | Mapping[str, JsonValue] | None = None
    """The speculation as it stands in the proxy's configuration."""
    tool_parser: str | None = None
    dtype: str | None = None
    cpu_threads: int | None = None
    kv_gib: int = 1
    min_uncached_tokens: int | None = None
    policy: str | None = None
    program: tuple[str, ...] | None = None
    engine_env: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0

    @property
    def roles(self) -> list[tuple[str, Role]]:
        """Names and roles, prefill engines first."""
        counts: list[tuple[str, Role, int]] = [
            ("p", "prefill", self.prefill),
            ("d", "decode", self.decode),
            ("m", "mixed", self.mixed),
        ]
        return [(f"{letter}{number}", role) for letter, role, count in counts for number in range(count)]


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """One engine: how it is started, where it will answer, and the key it demands."""

    name: str
    role: Role
    port: int
    key: str = field(repr=False)
    launch: Launch

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def key_variable(self) -> str:
        """The environment variable that carries the key to the proxy."""
        return f"HOMEPORT_UP_KEY_{self.name.upper()}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything to start. The keys travel by environment only, never in a file or on a command line."""

    engines: tuple[PlannedEngine, ...]
    proxy_port: int
    config: Mapping[str, JsonValue]
    model: str

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.proxy_port}/v1"

    @property
    def proxy_url(self) -> str:
        return f"http://{HOST}:{self.proxy_port}"

    @property
    def proxy_env(self) -> dict[str, str]:
        return {engine.key_variable: engine.key for engine in self.engines}

    def proxy_argv(self, config_file: Path) -> list[str]:
        return [sys.executable, "-m", "homeport.cli", "serve", "-c", str(config_file)]


def make_plan(wanted: Wanted, free_port: Callable[[], int]) -> Plan:
    """Give every engine its ports, key and command. ``free_port`` returns a new free port at each call."""
    engines = tuple(_engine(wanted, name, role, index, free_port) for index, (name, role) in enumerate(wanted.roles))
    return Plan(engines, wanted.proxy_port, _proxy_config(wanted, engines), wanted.served_name)


def _engine(wanted: Wanted, name: str, role: Role, index: int, free_port: Callable[[], int]) -> PlannedEngine:
    key = secrets.token_urlsafe(24)
    port = free_port()
    if wanted.engine == "emulator":
        launch = _emulator(wanted, role, port, free_port(), key)
    else:
        launch = _vllm(wanted, name, role, port, index, free_port, key)
    return PlannedEngine(name=name, role=role, port=port, key=key, launch=launch)


def _vllm(
    wanted: Wanted, name: str, role: Role, port: int, index: int, free_port: Callable[[], int], key: str
) -> Launch:
    request = LaunchRequest(
        model=wanted.model,
        role=role,
        served_name=wanted.served_name,
        host=HOST,
        port=port,
        kv="none" if role == "mixed" else "nixl",
        speculation=wanted.speculation,
        max_model_len=wanted.max_model_len,
        dtype=wanted.dtype,
        tool_parser=wanted.tool_parser,
        side_channel_port=free_port(),
        events_socket=f"homeport-kv-{name}-{secrets.token_hex(8)}",
        cpu_threads=wanted.cpu_threads or threads(role, cores()),
        kv_gib=wanted.kv_gib,
        gpus=(index,) if wanted.gpus else None,
        program=wanted.program,
    )
    launch = vllm.command(request, "cpu" if wanted.engine == "vllm-cpu" else "gpu")
    return Launch(launch.argv, {**launch.env, **wanted.engine_env, "VLLM_API_KEY": key}, launch.notes)


def _emulator(wanted: Wanted, role: Role, port: int, side_channel_port: int, key: str) -> Launch:
    argv = [sys.executable, "-m", "homeport.cli", "engine", "emulate", "--host", HOST, "--port", str(port)]
    argv += ["--model", wanted.served_name, "--role", role, "--kv", "none" if role == "mixed" else "nixl"]
    argv += ["--max-model-len", str(wanted.max_model_len), "--side-channel-port", str(side_channel_port)]
    argv += ["--api-key-env", "HOMEPORT_EMULATOR_KEY"]
    if wanted.speculation is not None and role != "prefill":
        argv += ["--speculate", f"{wanted.speculation.tokens}:0.7"]
    return Launch(tuple(argv), {"HOMEPORT_EMULATOR_KEY": key})


def _proxy_config(wanted: Wanted, engines: tuple[PlannedEngine, ...]) -> dict[str, JsonValue]:
    config: dict[str, JsonValue] = {
        "listen": f"{HOST}:{wanted.proxy_port}",
        "models": [{"name": wanted.served_name}],
        "regions": {"local": {"backends": [_backend(wanted, engine) for engine in engines]}},
        "timeouts": {"drain_s": DRAIN_S},
    }
    if wanted.min_uncached_tokens is not None:
        config["disaggregation"] = {"min_uncached_tokens": wanted.min_uncached_tokens}
    if wanted.policy is not None:
        config["routing"] = {"policy": wanted.policy}
    return config


def _backend(wanted: Wanted, engine: PlannedEngine) -> dict[str, JsonValue]:
    backend: dict[str, JsonValue] = {
        "name": engine.name,
        "url": engine.url,
        "role": engine.role,
        "engine": "vllm",
        "key_env": engine.key_variable,
        "kv_transfer": "none" if engine.role == "mixed" else "nixl",
        "max_model_len": wanted.max_model_len,
    }
    if wanted.spec is not None and engine.role != "prefill":
        backend["spec"] = dict(wanted.spec) if isinstance(wanted.spec, Mapping) else wanted.spec
    return backend


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(role: Role, available: int) -> int:
    """Threads of one CPU engine. Prefill is a few large products: all cores. Decode is many small ones, each ended by a
    barrier, and waits whenever a prefill holds a core: half of them."""
    return max(1, available // 2) if role == "decode" else available
