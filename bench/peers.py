"""Other proxies to measure beside ours: installed from PyPI into environments of their own, near their defaults.

nginx, as a mark for what a proxy without any understanding of requests costs, is used when the system has it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from homeport_engines.cachedir import cache_dir
from homeport_proxy.local.checks import free_port

Command = Callable[[Path, int, int], list[str]]
"""From its environment, the port to listen on and the engine's port to its command line."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A proxy: what to install (None: the system's own program) and how to start it."""

    name: str
    requirement: str | None
    command: Command

    @property
    def title(self) -> str:
        """Its name and version."""
        return (self.requirement or self.name).replace("==", " ").replace("[proxy]", "")

    def start(self, port: int, engine_port: int) -> subprocess.Popen[bytes]:
        """Start it, quietly. Raises SystemExit when it cannot be installed or found."""
        home = self._installed()
        return subprocess.Popen(
            self.command(home, port, engine_port),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        )

    def _installed(self) -> Path:
        if self.requirement is None:
            if shutil.which(self.name) is None:
                raise SystemExit(f"{self.name} is not installed; leave it out of --peers")
            return Path("/")
        home = cache_dir() / "peers" / self.title.replace(" ", "-")
        if not (home / "bin" / self.name).exists():
            uv = str(Path(sys.prefix) / "bin" / "uv")
            print(f"installing {self.title} into {home}", file=sys.stderr, flush=True)
            subprocess.run([uv, "venv", "-q", "--clear", str(home)], check=True)
            python = str(home / "bin" / "python")
            subprocess.run([uv, "pip", "install", "-q", "--python", python, self.requirement], check=True)
        return home


def _vllm_router(home: Path, port: int, engine_port: int) -> list[str]:
    return [
        *(str(home / "bin" / "vllm-router"), "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"),
        *("--worker-urls", f"http://127.0.0.1:{engine_port}", "--prometheus-port", str(free_port())),
    ]


def _litellm(home: Path, port: int, engine_port: int) -> list[str]:
    model = f"{{model: openai/m, api_base: 'http://127.0.0.1:{engine_port}/v1', api_key: x}}"
    models = f"model_list:\n  - {{model_name: m, litellm_params: {model}}}\n"
    config = _file("litellm.yaml", models + "general_settings: {dangerously_permit_weak_or_unset_master_key: true}\n")
    return [str(home / "bin" / "litellm"), "--host", "127.0.0.1", "--port", str(port), "--config", str(config)]


def _nginx(_: Path, port: int, engine_port: int) -> list[str]:
    text = f"""
        daemon off; master_process off; pid /dev/null; error_log /dev/null;
        events {{ worker_connections 4096; }}
        http {{
          access_log off; client_max_body_size 64m; client_body_buffer_size 1m;
          upstream engine {{ server 127.0.0.1:{engine_port}; keepalive 64; }}
          server {{
            listen 127.0.0.1:{port};
            location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
                          proxy_buffering off; }}
          }}
        }}
    """
    return ["nginx", "-c", str(_file("nginx.conf", text))]


def _file(name: str, text: str) -> Path:
    path = Path(tempfile.mkdtemp()) / name
    path.write_text(text)
    return path


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("vllm-router", "vllm-router==0.1.17", _vllm_router),
        Peer("litellm", "litellm[proxy]==1.106.12", _litellm),
        Peer("nginx", None, _nginx),
    )
}
"""By name."""
