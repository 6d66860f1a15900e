"""`homeport engine emulate`: run one emulated engine as a process."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
from pathlib import Path
from typing import get_args

from homeport.cli import CommandError
from homeport_engines.base import Role
from homeport_engines.emulator.server import Emulator
from homeport_engines.emulator.settings import (
    CacheGroup,
    EmulatorSettings,
    EventEncoding,
    Kv,
    LoadFailure,
    Rates,
    Speculation,
)

HELP = "run an engine that computes no text but keeps true books of its cache, queue and hand-offs"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    default = EmulatorSettings()
    parser.add_argument("--host", default=default.host)
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument("--model", default=default.model, help="the name it serves")
    parser.add_argument("--role", choices=get_args(Role), default=default.role)
    parser.add_argument("--kv", choices=get_args(Kv), default=default.kv, help="the KV connector it speaks")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the key it demands")
    parser.add_argument("--script", type=Path, metavar="FILE", help="answers by rule (YAML or JSON)")
    parser.add_argument("--time-scale", type=float, default=1.0, metavar="X", help="emulated seconds per real second")
    _add_cache(parser, default)
    _add_transfer(parser, default)
    _add_events(parser, default)
    rates = parser.add_argument_group("rates (emulated seconds and tokens)")
    for item in dataclasses.fields(Rates):
        rates.add_argument(_flag(item.name), type=float, default=getattr(default.rates, item.name), metavar="X")


def _add_cache(parser: argparse.ArgumentParser, default: EmulatorSettings) -> None:
    cache = parser.add_argument_group("cache and batch")
    cache.add_argument("--block-tokens", type=int, default=default.block_tokens)
    cache.add_argument("--kv-blocks", type=int, default=default.kv_blocks)
    cache.add_argument("--host-blocks", type=int, default=default.host_blocks, help="a host tier of this size")
    cache.add_argument(
        "--group",
        action="append",
        metavar="KIND[:WINDOW]",
        help="an attention group, e.g. full_attention, sliding_window:1024, mamba:1 (repeat for a hybrid model)",
    )
    cache.add_argument("--max-model-len", type=int, default=default.max_model_len)
    cache.add_argument("--max-sequences", type=int, default=default.max_sequences)
    cache.add_argument("--chunk-tokens", type=int, default=default.chunk_tokens)
    cache.add_argument("--data-parallel", type=int, default=default.data_parallel, metavar="RANKS")
    cache.add_argument("--adapter", action="append", default=[], metavar="NAME", help="a LoRA adapter (repeat)")
    cache.add_argument("--speculate", metavar="TOKENS:ACCEPTANCE", help="speculative decoding, e.g. 4:0.7")
    cache.add_argument("--output-tokens", type=int, default=default.output_tokens, help="usual length of an answer")
    cache.add_argument("--no-prompt-tokens-details", action="store_true", help="do not report cached tokens")
    cache.add_argument("--priority-scheduling", action="store_true")
    cache.add_argument("--store-responses", action="store_true")
    cache.add_argument("--seed", type=int, default=default.seed)


def _add_transfer(parser: argparse.ArgumentParser, default: EmulatorSettings) -> None:
    transfer = parser.add_argument_group("KV hand-off (real seconds)")
    transfer.add_argument("--lease-s", type=float, default=default.lease_s)
    transfer.add_argument("--readback-ttl-s", type=float, help="keep a decode engine's blocks for the next turn")
    transfer.add_argument("--load-failure", choices=get_args(LoadFailure), default=default.load_failure)
    transfer.add_argument("--load-failure-s", type=float, default=default.load_failure_s)
    transfer.add_argument("--side-channel-port", type=int, default=0, help="NIXL; rank i uses this port + i")
    transfer.add_argument("--bootstrap-port", type=int, default=0, help="Mooncake")
    transfer.add_argument("--survive", action="store_true", help="go on after a request that kills a real engine")


def _add_events(parser: argparse.ArgumentParser, default: EmulatorSettings) -> None:
    events = parser.add_argument_group("KV events")
    events.add_argument("--no-kv-events", action="store_true")
    events.add_argument("--event-encoding", choices=get_args(EventEncoding), default=default.event_encoding)
    events.add_argument("--event-port", type=int, default=0, help="rank i uses this port + i")
    events.add_argument("--replay-port", type=int, default=0, help="rank i uses this port + i")
    events.add_argument("--event-topic", default=default.event_topic)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def settings_from(args: argparse.Namespace) -> EmulatorSettings:
    """The settings a command line describes. Raises CommandError naming what is wrong."""
    key = None
    if args.api_key_env:
        key = os.environ.get(args.api_key_env)
        if not key:
            raise CommandError(f"--api-key-env: {args.api_key_env} is not set in the environment")
    same = {item.name for item in dataclasses.fields(EmulatorSettings)} & set(vars(args)) - {"speculate"}
    values = {name: getattr(args, name) for name in same if name != "group"}
    try:
        settings = EmulatorSettings(**values)
        return dataclasses.replace(
            settings,
            api_key=key,
            rates=Rates(**{item.name: getattr(args, item.name) for item in dataclasses.fields(Rates)}),
            groups=tuple(_group(text) for text in args.group) if args.group else settings.groups,
            adapters=tuple(args.adapter),
            speculation=_speculation(args.speculate) if args.speculate else None,
            prompt_tokens_details=not args.no_prompt_tokens_details,
            kv_events=not args.no_kv_events,
            dies=not args.survive,
        )
    except ValueError as error:
        raise CommandError(str(error)) from None


def _group(text: str) -> CacheGroup:
    kind, _, window = text.partition(":")
    if window and not window.isdigit():
        raise ValueError(f"--group: {text!r} is not KIND or KIND:WINDOW")
    return CacheGroup(kind, int(window) if window else None)


def _speculation(text: str) -> Speculation:
    tokens, _, acceptance = text.partition(":")
    try:
        return Speculation(int(tokens), float(acceptance))
    except ValueError:
        raise ValueError(f"--speculate: {text!r} is not TOKENS:ACCEPTANCE, e.g. 4:0.7") from None


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
    settings = settings_from(args)
    try:
        engine = Emulator(settings)
    except (OSError, ValueError) as error:
        raise CommandError(f"--script {settings.script}: {error}") from None
    return asyncio.run(_serve(engine))


async def _serve(engine: Emulator) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await engine.start()
    except OSError as error:
        await engine.stop()
        raise CommandError(f"cannot listen: {error}; choose another --port") from None
    print(f"emulated engine {engine.settings.model} ({engine.settings.role}) ready at {engine.url}", flush=True)
    await stop.wait()
    await engine.stop()
    return 0
