"""`homeport serve`: the proxy alone, in front of engines that already run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from pathlib import Path

from homeport.cli import CommandError
from homeport.words import plural
from homeport_proxy import config as configuration
from homeport_proxy import lint
from homeport_proxy.app import Proxy
from homeport_proxy.config import Config, ConfigError
from homeport_proxy.control import Control
from homeport_proxy.loop import listener_tls, loop_factory, settle_memory
from homeport_proxy.observe import logs
from homeport_proxy.probe import reason_of
from homeport_proxy.workers.parent import Parent

HELP = "run the proxy in front of engines that already run"


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the configuration file (YAML)")
    parser.add_argument("--host", help="listen on this address instead of the file's")
    parser.add_argument("--port", type=int, help="listen on this port instead of the file's (0: any free one)")
    parser.add_argument("--workers", type=_count, default=1, metavar="N", help="serving processes (default 1)")
    parser.add_argument("-t", "--test", action="store_true", help="test the file and exit")
    parser.add_argument("--insecure", action="store_true", help="listen beyond this machine without tenants")


def run(args: argparse.Namespace) -> int:
    """Run until a signal stops it; 0 after a graceful stop."""
    path = Path(args.config)
    try:
        config = _with_listen(configuration.load(path), args.host, args.port)
        if args.test:
            found = lint.offline(config, insecure=args.insecure) + lint.unreadable(config, "error")
            faults = [f"{one.where}: {one.text}" for one in found if one.level == "error"]
            if faults:
                raise ConfigError(faults)
            print(f"{path}: good")
            return 0
        logs.configure(config.log)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(serve(config, path, insecure=args.insecure, workers=args.workers))
    except ConfigError as error:
        for line in error.errors:
            told = line if line.startswith(f"{path}:") else f"{path}: {line}"
            print(f"homeport: {told}", file=sys.stderr)
        return 1


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 256:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of workers; give 1 to 256")
    return int(text)


def _with_listen(config: Config, host: str | None, port: int | None) -> Config:
    if host is None and port is None:
        return config
    listen = config.listen
    name = host or listen.host
    address = f"[{name}]" if ":" in name else name
    address = f"{address}:{listen.port if port is None else port}"
    return config.model_copy(update={"listen": listen.model_copy(update={"address": address})})


async def serve(config: Config, path: Path | None, *, insecure: bool = False, workers: int = 1) -> int:
    """Start everything, serve until SIGTERM or SIGINT, stop gracefully; a second signal stops at once."""
    control = Control(config, config_path=path, insecure=insecure)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None

    def on_stop() -> None:
        if stop.is_set():
            main.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_stop)
    if hasattr(signal, "SIGHUP"):
        loop.add_signal_handler(signal.SIGHUP, control.reload)
    # the first look at the engines may take as long as one that hangs is waited for
    known = len(config.backends)
    print(f"homeport: starting; asking {known} {plural('backend', known)}", file=sys.stderr, flush=True)
    await control.start()
    server: Proxy | Parent | None = None
    try:
        server, port = await _listen(control, workers)
        settle_memory()
        print(f"homeport: listening on {_url(config, port)}", file=sys.stderr, flush=True)
        await stop.wait()
        print("homeport: stopping; streams under way may finish", file=sys.stderr, flush=True)
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            if server is not None:
                await server.stop()
        await control.stop()
    return 0


async def _listen(control: Control, workers: int) -> tuple[Proxy | Parent, int]:
    listen = control.config.listen
    try:
        tls = listener_tls(listen)
        if workers > 1:
            parent = Parent(control, workers)
            return parent, await parent.start(listen.host, listen.port)
        proxy = Proxy(control)
        await proxy.start()
        return proxy, await proxy.listen(listen.host, listen.port, tls=tls)
    except OSError as error:
        # asyncio's own words repeat the address
        raise CommandError(
            f"cannot listen on {listen.address}: {reason_of(error)}; choose another port with --port"
        ) from None


def _url(config: Config, port: int) -> str:
    scheme = "https" if config.listen.tls else "http"
    host = f"[{config.listen.host}]" if ":" in config.listen.host else config.listen.host
    return f"{scheme}://{host}:{port}"
