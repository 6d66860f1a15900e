"""`homeport engine emulate`: run one emulated engine as a process."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from homeport.cli import CommandError
from homeport_engines.base import Role
from homeport_engines.emulator.settings import (
    CacheGroup,
    EmulatorSettings,
    EventEncoding,
    Kv,
    LoadFailure,
    Rates,
    Speculation,
)

if TYPE_CHECKING:
    from homeport_engines.emulator.server import Emulator

HELP = "run an engine that computes no text but keeps true books of its cache, queue and hand-offs"


_RATES = {
    "t0_s": "s before any prefill",
    "tokens_per_s": "prefill, with nothing cached",
    "attention_tokens": "context at which attention doubles the time of a prefilled token",
    "step_s": "s of a decode step",
    "per_sequence_s": "s that each sequence adds to a decode step",
    "per_context_token_s": "s that each token held adds to a decode step",
    "transfer_t0_s": "s before any KV transfer",
    "transfer_tokens_per_s": "KV transfer between engines",
    "host_tokens_per_s": "KV loaded from the host tier",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    default = EmulatorSettings()
    _option(parser, "--host", default.host, "the address to listen on")
    _option(parser, "--port", 8000, "the port; 0 takes a free one")
    _option(parser, "--model", default.model, "the name it serves")
    _option(parser, "--role", default.role, "which part of a request it computes", choices=get_args(Role))
    _option(parser, "--kv", default.kv, "the KV connector it speaks", choices=get_args(Kv))
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable that holds the key it demands (default: no key)"
    )
    parser.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="answers by rule, YAML or JSON (default: words that follow from the prompt)",
    )
    _option(parser, "--time-scale", default.time_scale, "emulated seconds of computing per real second", metavar="X")
    _add_cache(parser, default)
    _add_transfer(parser, default)
    _add_events(parser, default)
    rates = parser.add_argument_group("rates (emulated seconds, tokens per emulated second)")
    for item in dataclasses.fields(Rates):
        _option(rates, _flag(item.name), getattr(default.rates, item.name), _RATES[item.name], metavar="X")


def _option(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    flag: str,
    default: str | float,
    text: str,
    *,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
) -> None:
    """An option of the default's own type, whose help tells the default."""
    shown = "empty" if default == "" else "%(default)s"
    parser.add_argument(
        flag, type=type(default), default=default, choices=choices, metavar=metavar, help=f"{text} (default: {shown})"
    )


def _add_cache(parser: argparse.ArgumentParser, default: EmulatorSettings) -> None:
    cache = parser.add_argument_group("cache and batch")
    _option(cache, "--block-tokens", default.block_tokens, "tokens of a KV block", metavar="N")
    _option(cache, "--kv-blocks", default.kv_blocks, "blocks of the KV cache", metavar="N")
    _option(cache, "--host-blocks", default.host_blocks, "blocks of a tier in host memory; 0: none", metavar="N")
    cache.add_argument(
        "--group",
        action="append",
        metavar="KIND[:WINDOW]",
        help="an attention group, e.g. full_attention, sliding_window:1024, mamba:1; repeat for a hybrid model "
        "(default: full_attention)",
    )
    _option(cache, "--max-model-len", default.max_model_len, "longest context in tokens", metavar="N")
    _option(cache, "--max-sequences", default.max_sequences, "requests computed at once", metavar="N")
    _option(cache, "--chunk-tokens", default.chunk_tokens, "most tokens prefilled in one step", metavar="N")
    _option(cache, "--data-parallel", default.data_parallel, "ranks, each with a cache of its own", metavar="RANKS")
    cache.add_argument(
        "--adapter", action="append", default=[], metavar="NAME", help="a LoRA adapter; repeat for more (default: none)"
    )
    cache.add_argument(
        "--speculate", metavar="TOKENS:ACCEPTANCE", help="speculative decoding, e.g. 4:0.7 (default: none)"
    )
    _option(cache, "--output-tokens", default.output_tokens, "usual length of an answer", metavar="N")
    _switch(cache, "--no-prompt-tokens-details", "do not report cached tokens (default: report them)")
    _switch(cache, "--priority-scheduling", "requests by their `priority` (default: in order of arrival)")
    _switch(cache, "--store-responses", "keep answers of /v1/responses to be named later (default: not)")
    _option(cache, "--seed", default.seed, "of what is left to chance: which drafted tokens are accepted", metavar="N")


def _add_transfer(parser: argparse.ArgumentParser, default: EmulatorSettings) -> None:
    transfer = parser.add_argument_group("KV hand-off (real seconds)")
    _option(
        transfer, "--lease-s", default.lease_s, "how long prefilled KV is kept for who does not fetch it", metavar="S"
    )
    transfer.add_argument(
        "--readback-ttl-s",
        type=float,
        metavar="S",
        help="keep a decode engine's blocks for the next turn's prefill (default: no read-back)",
    )
    _option(
        transfer,
        "--load-failure",
        default.load_failure,
        "what becomes of a request whose KV cannot be fetched",
        choices=get_args(LoadFailure),
    )
    _option(
        transfer,
        "--load-failure-s",
        default.load_failure_s,
        "until it notices that the other engine is gone",
        metavar="S",
    )
    _option(transfer, "--side-channel-port", 0, "NIXL's; rank i uses this port + i; 0: any free one", metavar="PORT")
    _option(transfer, "--bootstrap-port", 0, "Mooncake's; 0: any free one", metavar="PORT")
    _switch(transfer, "--survive", "go on after a request that kills a real engine (default: end)")


def _add_events(parser: argparse.ArgumentParser, default: EmulatorSettings) -> None:
    events = parser.add_argument_group("KV events")
    _switch(events, "--no-kv-events", "publish none (default: publish)")
    _option(
        events,
        "--event-encoding",
        default.event_encoding,
        "msgpack maps, or arrays as older vLLM sends them",
        choices=get_args(EventEncoding),
    )
    _option(events, "--event-port", 0, "rank i uses this port + i; 0: any free one", metavar="PORT")
    _option(events, "--replay-port", 0, "for events missed; rank i uses this port + i; 0: any", metavar="PORT")
    _option(events, "--event-topic", default.event_topic, "the topic they are published under", metavar="TOPIC")


def _switch(group: argparse._ArgumentGroup, flag: str, text: str) -> None:
    group.add_argument(flag, action="store_true", help=text)


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
    from homeport_engines.emulator.server import Emulator  # the HTTP server is not needed to say what it can do

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
