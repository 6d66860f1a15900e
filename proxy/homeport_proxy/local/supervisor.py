"""Starts a plan's engines and proxy, waits until all of them are ready, watches them, and stops every one."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, Protocol

import yaml

from homeport.cli import CommandError
from homeport_engines.processes import ManagedProcess, stop_all
from homeport_proxy.local.plan import Plan, PlannedEngine

POLL_S = 0.25
PROBE_TIMEOUT_S = 2.0
ENGINE_GRACE_S = 10.0
PROXY_READY_S = 60.0
TAIL_LINES = 25

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Loopback is asked directly, whatever HTTP_PROXY says."""

PartState = Literal["starting", "ready", "ended"]


@dataclass(slots=True)
class Part:
    """One started process as the progress display shows it."""

    name: str
    role: str
    process: ManagedProcess
    state: PartState = "starting"
    started_s: float = field(default_factory=time.monotonic)
    ready_after_s: float | None = None


class Display(Protocol):
    """Shown while waiting; called every quarter of a second."""

    def show(self, parts: list[Part]) -> None: ...


class Supervisor:
    """The processes of one plan. Not thread-safe: one owner starts, waits, watches and stops."""

    def __init__(self, plan: Plan, log_dir: Path) -> None:
        self.plan = plan
        self.log_dir = log_dir
        self.engines: dict[str, Part] = {}
        self.proxy: Part | None = None
        self._sockets = TemporaryDirectory(prefix="homeport-")
        log_dir.mkdir(parents=True, exist_ok=True)

    @property
    def config_file(self) -> Path:
        return self.log_dir / "homeport.yaml"

    @property
    def parts(self) -> list[Part]:
        """Everything started so far, the proxy last."""
        return [*self.engines.values(), *([self.proxy] if self.proxy else [])]

    def start(self, display: Display, timeout_s: float) -> None:
        """Start all engines at once, then the proxy; returns when every engine is ready and the proxy serves it.

        Raises CommandError, with the end of the log of what failed, after stopping everything.
        """
        try:
            for engine in self.plan.engines:
                self.start_engine(engine.name)
            self._wait(list(self.engines.values()), self._engine_ready, display, timeout_s)
            self.start_proxy()
            self._wait(self.parts[-1:], self._proxy_ready, display, PROXY_READY_S)
        except BaseException:
            self.stop()
            raise

    def start_engine(self, name: str) -> Part:
        """Start (or start again) one engine; does not wait for it."""
        engine = self.planned(name)
        log = self.log_dir / f"{name}.log"
        launch = engine.launch
        # vLLM never removes the sockets between its own processes
        env = {"VLLM_RPC_BASE_PATH": self._sockets.name, **launch.env}
        process = ManagedProcess(name, launch.argv, log, env=env, grace_s=ENGINE_GRACE_S)
        self.engines[name] = Part(name, engine.role, process)
        return self.engines[name]

    def start_proxy(self) -> Part:
        """Write the configuration and start the proxy; does not wait for it."""
        self.config_file.write_text(yaml.safe_dump(dict(self.plan.config), sort_keys=False), "utf-8")
        argv = self.plan.proxy_argv(self.config_file)
        log = self.log_dir / "proxy.log"
        process = ManagedProcess("proxy", argv, log, env=self.plan.proxy_env, grace_s=ENGINE_GRACE_S)
        self.proxy = Part("proxy", "proxy", process)
        return self.proxy

    def wait_for_engine(self, name: str, timeout_s: float) -> None:
        """Wait until a started engine answers. Raises CommandError."""
        self._wait([self.engines[name]], self._engine_ready, _Silent(), timeout_s)

    def planned(self, name: str) -> PlannedEngine:
        """The plan's entry of an engine."""
        return next(engine for engine in self.plan.engines if engine.name == name)

    def ended(self) -> Iterator[Part]:
        """Parts that ended since the last call."""
        for part in self.parts:
            if part.state != "ended" and part.process.poll() is not None:
                part.state = "ended"
                yield part

    def stop(self) -> None:
        """Stop the proxy first, so that no request meets a vanished engine, then the engines."""
        try:
            if self.proxy is not None:
                stop_all([self.proxy.process])
            stop_all(part.process for part in self.engines.values())
            self._sockets.cleanup()
        except BaseException:  # a second Ctrl-C: at once, but all of them
            for part in self.parts:
                part.process.kill()
            raise

    def _wait(self, parts: list[Part], ready: Callable[[Part], bool], display: Display, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while waiting := [part for part in parts if part.state != "ready"]:
            for part in waiting:
                if (status := part.process.poll()) is not None:
                    raise CommandError(f"{part.name} ended while starting (exit status {status}){_tail(part)}")
                if ready(part):
                    part.state = "ready"
                    part.ready_after_s = time.monotonic() - part.started_s
            display.show(self.parts)
            if time.monotonic() > deadline_s:
                late = next((part for part in parts if part.state != "ready"), None)
                if late is not None:
                    raise CommandError(
                        f"{late.name} was not ready within {timeout_s:.0f} s; give more with --timeout{_tail(late)}"
                    )
            time.sleep(POLL_S)

    def _engine_ready(self, part: Part) -> bool:
        return _status(f"{self.planned(part.name).url}/health") == 200

    def _proxy_ready(self, _: Part) -> bool:
        """The proxy is ready once it knows every engine as up."""
        if _status(f"{self.plan.proxy_url}/health/ready") != 200:
            return False
        with suppress(OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
            with _direct.open(f"{self.plan.proxy_url}/homeport/v1/status", timeout=PROBE_TIMEOUT_S) as answer:
                regions = json.load(answer)["regions"]
            states = [backend["state"] for region in regions.values() for backend in region["backends"]]
            return len(states) == len(self.plan.engines) and all(state == "up" for state in states)
        return False


class _Silent:
    def show(self, parts: list[Part]) -> None: ...


def _status(url: str) -> int | None:
    try:
        with _direct.open(url, timeout=PROBE_TIMEOUT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError, http.client.HTTPException):
        return None


def _tail(part: Part) -> str:
    lines = part.process.last_lines(TAIL_LINES)
    shown = "".join(f"\n  {line}" for line in lines) or "\n  (it wrote nothing)"
    return f"; the end of its log {part.process.log}:{shown}"
