"""Real harness programs, each run headless and offline in a home of its own, through ``homeport wrap``."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import harness_install

PATIENCE_S = 240
"""A harness that hangs longer has failed: a run takes 5 to 20 s on two idle cores."""


@dataclass(frozen=True, slots=True)
class Done:
    """A finished run: exit status, what it printed, and the sessions that ``homeport wrap`` reports."""

    status: int
    out: str
    err: str

    @property
    def report(self) -> list[dict[str, Any]]:
        """The report's sessions."""
        lines = [line for line in self.err.splitlines() if line.startswith('{"sessions"')]
        assert lines, f"no report in:\n{self.err[-3000:]}"
        return list(json.loads(lines[-1])["sessions"])


@dataclass(slots=True)
class Harness:
    """One installed harness with a home and a project folder. ``extra`` is added to its environment."""

    name: str
    home: Path
    project: Path
    url: str
    extra: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self.project.mkdir(parents=True, exist_ok=True)

    async def run(self, prompt: str, *, resume: str | bool = False, flags: Sequence[str] = (), stdin: str = "") -> Done:
        """Give it a prompt: in a new session, in the last one (``resume=True``), or in a named one. Without a prompt it
        reads ``stdin``, line by line."""
        program = await asyncio.to_thread(harness_install.installed, self.name)
        words = _COMMANDS[self.name](program, prompt, resume, list(flags))
        return await self.start(words, stdin=stdin)

    async def start(self, words: Sequence[str], *, report: bool = True, stdin: str = "") -> Done:
        """Run any command the way a user would: behind ``homeport wrap``."""
        wrap = [str(Path(sys.prefix) / "bin" / "homeport"), "wrap", "--url", self.url]
        wrap += ["--json"] if report else ["--no-report"]
        process = await asyncio.create_subprocess_exec(
            *wrap,
            "--",
            *words,
            cwd=self.project,
            env=await self.environment(),
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(stdin.encode() if stdin else None), PATIENCE_S)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        assert process.returncode is not None
        return Done(process.returncode, _plain(out), _plain(err))

    async def environment(self) -> Mapping[str, str]:
        """A clean environment: nothing of the machine's user leaks in, nothing calls out."""
        node = await asyncio.to_thread(harness_install.installed, "node")
        if self.name == "opencode":
            self.extra.setdefault("XDG_CONFIG_HOME", str(await asyncio.to_thread(harness_install.opencode_config)))
        return {
            "HOME": str(self.home),
            "PATH": f"{node.parent}:{os.environ['PATH']}",
            "TERM": "dumb",
            "LANG": "C.UTF-8",
            "HOMEPORT_OPENCODE_PLUGIN": str(harness_install.PLUGIN),
            # OpenCode
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_CONFIG_CONTENT": json.dumps({"permission": "allow", "share": "disabled", "autoupdate": False}),
            # Claude Code refuses to run without asking as root outside a sandbox
            "IS_SANDBOX": "1",
            "DISABLE_AUTOUPDATER": "1",
            **self.extra,
        }


def _plain(raw: bytes) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", raw.decode(errors="replace"))


def _opencode(program: Path, prompt: str, resume: str | bool, flags: list[str]) -> list[str]:
    again = ["-s", resume] if isinstance(resume, str) else ["--continue"] if resume else []
    return [str(program), "run", *again, *flags, prompt]


def _codex(program: Path, prompt: str, resume: str | bool, flags: list[str]) -> list[str]:
    again = ["resume", "--last"] if resume else []
    guard = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [str(program), "exec", *again, *guard, *flags, prompt]


def _claude(program: Path, prompt: str, resume: str | bool, flags: list[str]) -> list[str]:
    again = ["--continue"] if resume else []
    return [str(program), "-p", "--dangerously-skip-permissions", *again, prompt, *flags]


def _qwen(program: Path, prompt: str, resume: str | bool, flags: list[str]) -> list[str]:
    again = ["--continue"] if resume else []
    return [str(program.parents[2] / ".bin" / "qwen"), "-y", *again, *flags, "-p", prompt]


def _aider(program: Path, prompt: str, resume: str | bool, flags: list[str]) -> list[str]:
    quiet = ["--no-check-update", "--no-analytics", "--yes-always", "--no-git", "--no-show-model-warnings"]
    plain = ["--no-pretty", "--no-fancy-input", "--no-detect-urls"]
    return [str(program), *quiet, *plain, *flags, *(["--message", prompt] if prompt else [])]


_COMMANDS = {"opencode": _opencode, "codex": _codex, "claude": _claude, "qwen": _qwen, "aider": _aider}
