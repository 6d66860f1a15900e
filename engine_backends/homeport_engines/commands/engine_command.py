"""`homeport engine command`: the exact command that starts an engine on some machine, on standard output."""

from __future__ import annotations

import argparse
import json
import sys
from typing import get_args

from homeport.cli import CommandError
from homeport_engines.base import Role
from homeport_engines.launch import (
    SHAPES,
    SPECULATION,
    Connector,
    Launch,
    LaunchError,
    LaunchRequest,
    Shape,
    Speculation,
    speculation,
)
from homeport_engines.sglang import launch as sglang
from homeport_engines.vllm import launch as vllm

ENGINES = ("vllm", "vllm-cpu", "sglang")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    default = LaunchRequest(model="")
    parser.add_argument("engine", choices=ENGINES, help="the engine to start")
    parser.add_argument("--role", choices=get_args(Role), required=True, help="the part of a request it computes")
    parser.add_argument("--model", required=True, help="a name or path on the engine's machine; never opened here")
    parser.add_argument("--kv", choices=get_args(Connector), help="default: nixl for prefill and decode, else none")
    parser.add_argument("--kv-readback", action="store_true", help="nixl: decode engines give turns back to prefill")
    parser.add_argument(
        "--spec", metavar="PRESET|JSON", help=f"speculative decoding: {', '.join(SPECULATION)}, or JSON"
    )
    parser.add_argument("--draft-model", metavar="NAME", help="for the presets that need one")
    parser.add_argument(
        "--preset",
        choices=(*SHAPES, *SPECULATION),
        help=f"settings for a workload ({', '.join(SHAPES)}); a --spec preset is taken here too",
    )
    parser.add_argument("--served-name", metavar="NAME", help="the model name clients use")
    parser.add_argument(
        "--host",
        default=default.host,
        help="address that the engine listens on and, for NIXL, where peers reach its side channel; for engines on "
        "several machines give each its own machine's address (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, default=default.port, help="it listens on (default: %(default)s)")
    parser.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="longest context (default: what the model allows)"
    )
    parser.add_argument("--dtype", help="of weights and computing, such as bfloat16 (default: the engine's choice)")
    parser.add_argument("--tool-parser", metavar="NAME", help="turns on tool calls with the engine's parser")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that share each layer")
    parser.add_argument("--data-parallel", type=int, default=1, metavar="N", help="ranks, each a whole engine")
    parser.add_argument(
        "--side-channel-port", type=int, default=default.side_channel_port, help="NIXL's (default: %(default)s)"
    )
    parser.add_argument(
        "--bootstrap-port",
        type=int,
        default=default.bootstrap_port,
        help="of Mooncake or SGLang (default: %(default)s)",
    )
    parser.add_argument("--kv-events-port", type=int, metavar="PORT", help="publish KV events here")
    parser.add_argument("--json", action="store_true", help="as {argv, env, notes}")


def run(args: argparse.Namespace) -> int:
    """Print the command; notes go to standard error."""
    try:
        launch = build(args)
    except LaunchError as error:
        raise CommandError(str(error)) from None
    if args.json:
        print(json.dumps({"argv": launch.argv, "env": dict(launch.env), "notes": launch.notes}, indent=2))
        return 0
    print(launch.shell())
    for note in launch.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def build(args: argparse.Namespace) -> Launch:
    """The launch that the parsed options ask for."""
    shape, wanted = _preset(args)
    request = LaunchRequest(
        model=args.model,
        role=args.role,
        served_name=args.served_name,
        host=args.host,
        port=args.port,
        kv=args.kv or ("none" if args.role == "mixed" else "nixl"),
        kv_readback=args.kv_readback,
        speculation=wanted,
        shape=shape,
        max_model_len=args.max_model_len,
        dtype=args.dtype,
        tool_parser=args.tool_parser,
        tensor_parallel=args.tensor_parallel,
        data_parallel=args.data_parallel,
        side_channel_port=args.side_channel_port,
        bootstrap_port=args.bootstrap_port,
        events_port=args.kv_events_port,
    )
    if args.engine == "sglang":
        return sglang.command(request)
    return vllm.command(request, "cpu" if args.engine == "vllm-cpu" else "gpu")


def _preset(args: argparse.Namespace) -> tuple[Shape | None, Speculation | None]:
    spec = args.spec
    if args.preset in SPECULATION:
        if spec is not None:
            raise LaunchError(f"--preset {args.preset} and --spec {spec} both ask for speculative decoding: keep one")
        spec = args.preset
    if spec is None:
        if args.draft_model:
            raise LaunchError("--draft-model goes with --spec eagle3 or --spec draft-model")
        return SHAPES.get(args.preset or ""), None
    return SHAPES.get(args.preset or ""), speculation(spec, args.draft_model)
