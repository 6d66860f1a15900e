"""What must be true before anything is started; each failure is one line with its remedy."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from homeport.cli import CommandError
from homeport.words import plural

HOST = "127.0.0.1"
PORTS = range(10_000, 30_000)
ENGINE_BASE_GIB = 1.7
"""Memory of one CPU engine without weights and KV cache (API server and engine core share what they imported)."""

_candidates = iter(random.sample(PORTS, len(PORTS)))


def free_port() -> int:
    """A TCP port where nothing listens; each call gives another.

    From below the range that operating systems hand out by themselves: an engine binds some ports "of any number" while
    it starts, and must not be given the one planned for another.
    """
    for port in _candidates:
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise CommandError(f"no free port from {PORTS.start} to {PORTS.stop - 1}; stop what listens there")


def require_port(port: int, option: str) -> int:
    """``port``, or a free one for 0. Raises CommandError when something else listens there."""
    if port == 0:
        return free_port()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OverflowError:
            raise CommandError(f"{option} {port}: a port is a number from 0 to 65535") from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise CommandError(
                    f"port {port} is in use; stop what listens there, or choose another with {option} (0: any free one)"
                ) from None
            raise CommandError(f"port {port} cannot be used: {error.strerror}; choose another with {option}") from None
    return port


def require_model_folder(path: str) -> Path:
    """The model folder of a CPU or GPU engine. Raises CommandError when it is none."""
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise CommandError(f"--model {path}: no such folder; give a folder in Hugging Face format, with a config.json")
    if not (folder / "config.json").is_file():
        raise CommandError(f"--model {path}: has no config.json; give a folder in Hugging Face format")
    return folder


def context_tokens(folder: Path) -> int | None:
    """The longest context the model's configuration names, None when it names none."""
    with suppress(OSError, ValueError):
        value = json.loads((folder / "config.json").read_text("utf-8")).get("max_position_embeddings")
        return value if isinstance(value, int) else None
    return None


def require_memory(engines: int, folder: Path, kv_gib: int, *, bytes_per_weight_byte: float) -> None:
    """Whether ``engines`` CPU engines fit. Raises CommandError with what is missing and what helps."""
    available_gib = available_memory_gib()
    weights_gib = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**30 * bytes_per_weight_byte
    needed_gib = engines * (ENGINE_BASE_GIB + weights_gib + kv_gib)
    if available_gib is not None and available_gib < needed_gib:
        raise CommandError(
            f"{engines} CPU {plural('engine', engines)} of this model need about {needed_gib:.1f} GiB of memory, "
            f"{available_gib:.1f} GiB are available; close other programs, take fewer engines (--mixed 1), "
            "or `--engine emulator`"
        )


def available_memory_gib() -> float | None:
    """Memory that can be had without swapping, the control group's limit included; None where it is not known."""
    found: list[float] = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        found.append(int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) / 2**20)
    with suppress(OSError, ValueError):
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text("ascii")) for name in ("max", "current"))
        found.append((limit - used) / 2**30)
    return min(found, default=None)


def gpu_vllm() -> tuple[tuple[str, ...], int] | None:
    """The command of this machine's own vLLM and the number of GPUs; None when either is missing."""
    program = shutil.which("vllm") or str(Path(sys.executable).with_name("vllm"))
    tool = shutil.which("nvidia-smi")
    if tool is None or not os.access(program, os.X_OK):
        return None
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
        gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
        return ((program, "serve"), gpus) if gpus else None
    return None
