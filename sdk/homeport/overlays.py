"""What points each agent harness at a proxy: environment variables and command-line flags, nothing written to its own
configuration. Pure: the caller says what the harness is, what is already set, and what the proxy serves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

KEY = "homeport"
"""Sent where a harness insists on a key and the proxy asks for none."""
_PACKAGES = {"claude-code": "claude", "opencode-ai": "opencode", "qwen-code": "qwen", "pi-coding-agent": "pi"}
"""npm packages by their last part, for `npx PACKAGE`."""
_NO_PLUGIN = "the OpenCode plugin was not found: only session headers are sent (npm: opencode-homeport)"


@dataclass(frozen=True, slots=True)
class Model:
    """A model the proxy serves; ``context_tokens`` is None when it does not say."""

    name: str
    context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """The proxy: its URL without ``/v1``, the key for it (None: none needed), its models, the one to use first."""

    url: str
    models: tuple[Model, ...]
    model: str
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Overlay:
    """How to start the harness: the command, variables to set on top of the environment, and what to put into the
    temporary folder first: ``files`` (text) and ``links`` (to files of the user's), both by relative name."""

    harness: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, Path] = field(default_factory=dict)
    kept: tuple[Path, ...] = ()
    """Folders of the user's that must be there before they are linked to: what the harness leaves in them stays."""
    notes: tuple[str, ...] = ()
    sign: Path | None = None
    """A file that the harness's plugin writes anew when it is loaded."""


def overlay(command: Sequence[str], target: Target, environment: Mapping[str, str], folder: Path) -> Overlay:
    """The overlay for a command line.

    ``folder`` is an empty folder for the harness's temporary files. Variables that a harness needs and the user has
    set himself are kept where they do not lead elsewhere (models, prices), replaced where they do (addresses, keys).
    """
    # `npx @openai/codex`, `env X=1 codex`: the harness is the first word that names one
    known = next((word for word in (_harness(PurePath(part).name) for part in command[:3]) if word), None)
    general = _general(target, environment)
    if known is None:
        return Overlay(PurePath(command[0]).name, tuple(command), general)
    special = _HARNESSES[known](tuple(command), target, environment, folder)
    return replace(special, environment={**general, **special.environment})


def _harness(word: str) -> str | None:
    stem = word.removesuffix(".exe").removesuffix(".js").partition("@")[0]
    named = _PACKAGES.get(stem, stem)
    return named if named in _HARNESSES else None


def _general(target: Target, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that OpenAI's and Anthropic's own clients read, and most programs built on them."""
    v1 = f"{target.url}/v1"
    out = {
        "HOMEPORT_URL": target.url,
        "OPENAI_BASE_URL": v1,
        "OPENAI_API_BASE": v1,
        "OPENAI_API_KEY": target.key or environment.get("OPENAI_API_KEY") or KEY,
        "ANTHROPIC_BASE_URL": target.url,
    }
    if target.key:
        out["ANTHROPIC_AUTH_TOKEN"] = target.key
    elif not environment.get("ANTHROPIC_API_KEY") and not environment.get("ANTHROPIC_AUTH_TOKEN"):
        out["ANTHROPIC_AUTH_TOKEN"] = KEY
    return out


def _opencode(command: tuple[str, ...], target: Target, environment: Mapping[str, str], _: Path) -> Overlay:
    """Inline configuration: OpenCode lays it over every file of the user's, and joins the plugin lists."""
    config = _opencode_config(environment.get("OPENCODE_CONFIG_CONTENT"), target)
    plugin = plugin_path(environment)
    listed = config.get("plugin")
    plugins: list[object] = listed if isinstance(listed, list) else []
    if plugin and "homeport" not in json.dumps(plugins):
        config["plugin"] = [*plugins, plugin]
    home = Path(environment.get("XDG_DATA_HOME") or Path(environment.get("HOME", "~")) / ".local" / "share")
    data = Path(environment.get("HOMEPORT_OPENCODE_DATA") or home / "opencode-homeport")
    return Overlay(
        "opencode",
        command,
        {"OPENCODE_CONFIG_CONTENT": json.dumps(config)},
        notes=() if plugin else (_NO_PLUGIN,),
        sign=data / "loaded.json" if plugin else None,
    )


def _kilo(command: tuple[str, ...], target: Target, environment: Mapping[str, str], _: Path) -> Overlay:
    """Built on OpenCode: the same inline configuration under its own name, without the plugin, which is not made for
    it. It sends OpenCode's session headers by itself."""
    config = _opencode_config(environment.get("KILO_CONFIG_CONTENT"), target)
    return Overlay("kilo", command, {"KILO_CONFIG_CONTENT": json.dumps(config)})


def _opencode_config(given: str | None, target: Target) -> dict[str, object]:
    """What the user gave inline, with the proxy as a provider and its model as the one to use."""
    config = _json_object(given)
    models = {model.name: {"name": model.name, **_limit(model.context_tokens)} for model in target.models}
    config.setdefault("$schema", "https://opencode.ai/config.json")
    providers = _json_object(config.get("provider"))
    providers["homeport"] = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Homeport",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key or KEY},
        "models": models,
    }
    config["provider"] = providers
    config["model"] = config["small_model"] = f"homeport/{target.model}"
    return config


def plugin_path(environment: Mapping[str, str]) -> str | None:
    """The OpenCode plugin: ``HOMEPORT_OPENCODE_PLUGIN``, else the one that came with this package or its checkout."""
    given = environment.get("HOMEPORT_OPENCODE_PLUGIN")
    if given:
        return given
    here = Path(__file__).resolve().parent
    for candidate in (here / "opencode", here.parents[1] / "integrations" / "opencode"):
        for entry in (candidate / "dist" / "index.js", candidate / "src" / "index.ts", candidate / "index.ts"):
            if entry.is_file():
                return str(entry)
    return None


def _limit(context_tokens: int | None) -> dict[str, dict[str, int]]:
    if not context_tokens:
        return {}
    return {"limit": {"context": context_tokens, "output": max(1, min(8_192, context_tokens // 4))}}


def _codex(command: tuple[str, ...], target: Target, _: Mapping[str, str], __: Path) -> Overlay:
    """Settings as flags, so that sessions stay in the user's own folder and can be resumed with or without."""
    settings = {
        "model_provider": '"homeport"',
        "model_providers.homeport.name": '"Homeport"',
        "model_providers.homeport.base_url": json.dumps(f"{target.url}/v1"),
        "model_providers.homeport.env_key": '"OPENAI_API_KEY"',
        "model_providers.homeport.wire_api": '"responses"',
        "model": json.dumps(target.model),
    }
    flags = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    return Overlay("codex", _with_flags("codex", command, flags), {})


def _claude(command: tuple[str, ...], target: Target, environment: Mapping[str, str], _: Path) -> Overlay:
    """No billing line before everything else in the prompt: it differs with every first message and sub-agent."""
    context_tokens = next((model.context_tokens for model in target.models if model.name == target.model), None)
    chosen = {
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "ANTHROPIC_MODEL": environment.get("ANTHROPIC_MODEL") or target.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": environment.get("ANTHROPIC_DEFAULT_HAIKU_MODEL") or target.model,
    }
    if context_tokens and "CLAUDE_CODE_MAX_CONTEXT_TOKENS" not in environment:
        chosen["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(context_tokens)
    return Overlay("claude", command, chosen)


def _qwen(command: tuple[str, ...], target: Target, _: Mapping[str, str], __: Path) -> Overlay:
    given = any(word.startswith("--auth-type") for word in command)
    at = 1 + next(
        n for n, part in enumerate(command) if _harness(PurePath(part).name) == "qwen" or part.endswith("cli-entry.js")
    )
    flags = () if given else ("--auth-type", "openai")
    return Overlay("qwen", (*command[:at], *flags, *command[at:]), {"OPENAI_MODEL": target.model})


def _aider(command: tuple[str, ...], target: Target, environment: Mapping[str, str], _: Path) -> Overlay:
    chosen = {
        "AIDER_MODEL": environment.get("AIDER_MODEL") or f"openai/{target.model}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return Overlay("aider", command, chosen)


def _pi(command: tuple[str, ...], target: Target, environment: Mapping[str, str], folder: Path) -> Overlay:
    """A copy of the agent folder made of links, with a provider that names its sessions added."""
    home = Path(environment.get("PI_CODING_AGENT_DIR") or Path(environment.get("HOME", "~")) / ".pi" / "agent")
    own = home / "models.json"
    models = _json_object(own.read_text(encoding="utf-8") if own.is_file() else None)
    providers = _json_object(models.get("providers"))
    providers["homeport"] = {
        "baseUrl": f"{target.url}/v1",
        "apiKey": target.key or KEY,
        "api": "openai-completions",
        "compat": {"sendSessionAffinityHeaders": True},
        "models": [{"id": model.name, **_pi_limit(model.context_tokens)} for model in target.models],
    }
    models["providers"] = providers
    entries = home.iterdir() if home.is_dir() else ()
    sessions = home / "sessions"
    links = {f"pi/{entry.name}": entry for entry in (*entries, sessions) if entry != own}
    flags = () if "--provider" in command else ("--provider", "homeport", "--model", target.model)
    chosen = {"PI_CODING_AGENT_DIR": str(folder / "pi")}
    files = {"pi/models.json": json.dumps(models)}
    return Overlay("pi", _with_flags("pi", command, flags), chosen, files, links, kept=(sessions,))


def _pi_limit(context_tokens: int | None) -> dict[str, int]:
    return {"contextWindow": context_tokens} if context_tokens else {}


def _with_flags(harness: str, command: tuple[str, ...], flags: Sequence[str]) -> tuple[str, ...]:
    """The command with flags right behind the harness's own word."""
    at = 1 + next(n for n, part in enumerate(command) if _harness(PurePath(part).name) == harness)
    return (*command[:at], *flags, *command[at:])


def _json_object(value: object) -> dict[str, object]:
    """A JSON object given as such or as text; anything else counts as empty: the harness itself will complain of it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


_HARNESSES: dict[str, Callable[[tuple[str, ...], Target, Mapping[str, str], Path], Overlay]] = {
    "opencode": _opencode,
    "kilo": _kilo,
    "codex": _codex,
    "claude": _claude,
    "qwen": _qwen,
    "aider": _aider,
    "pi": _pi,
}
