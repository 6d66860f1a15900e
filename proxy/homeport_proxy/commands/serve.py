"""`homeport serve`: the proxy alone, in front of engines that already run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import ssl
import sys
from collections.abc import Callable
from pathlib import Path

from homeport.cli import CommandError
from homeport_proxy import config as configuration
from homeport_proxy.app import Proxy
from homeport_proxy.config import Config, ConfigError
from homeport_proxy.control import Control

HELP = "run the proxy in front of engines that already run"


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the configuration file (YAML)")
    parser.add_argument("--host", help="listen on this address instead of the file's")
    parser.add_argument("--port", type=int, help="listen on this port instead of the file's (0: any free one)")
    parser.add_argument("-t", "--test", action="store_true", help="test the file and exit")
    parser.add_argument("--insecure", action="store_true", help="listen beyond this machine without tenants")


def run(args: argparse.Namespace) -> int:
    """Run until a signal stops it; 0 after a graceful stop."""
    path = Path(args.config)
    try:
        config = _with_listen(configuration.load(path), args.host, args.port)
        if args.test:
            Control(config, insecure=args.insecure)
            print(f"{path}: good")
            return 0
        logging.basicConfig(level=config.log.level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        return _run_loop(config, path, insecure=args.insecure)
    except ConfigError as error:
        raise CommandError(f"{path}: " + "; ".join(error.errors)) from None


def _with_listen(config: Config, host: str | None, port: int | None) -> Config:
    if host is None and port is None:
        return config
    listen = config.listen
    name = host or listen.host
    address = f"[{name}]" if ":" in name else name
    address = f"{address}:{listen.port if port is None else port}"
    return config.model_copy(update={"listen": listen.model_copy(update={"address": address})})


def _run_loop(config: Config, path: Path, *, insecure: bool) -> int:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(serve(config, path, insecure=insecure))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # a platform without it
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def serve(config: Config, path: Path | None, *, insecure: bool = False) -> int:
    """Start everything, serve until SIGTERM or SIGINT, stop gracefully; a second signal stops at once."""
    control = Control(config, config_path=path, insecure=insecure)
    proxy = Proxy(control)
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
    await control.start()
    try:
        await proxy.start()
        port = await _listen(proxy, config)
        print(f"homeport: listening on {_url(config, port)}", file=sys.stderr, flush=True)
        await stop.wait()
        print("homeport: stopping; streams under way may finish", file=sys.stderr, flush=True)
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await proxy.stop()
        await control.stop()
    return 0


async def _listen(proxy: Proxy, config: Config) -> int:
    listen = config.listen
    tls = None
    if listen.tls is not None:
        try:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(listen.tls.cert, listen.tls.key)
        except (OSError, ssl.SSLError) as error:
            raise CommandError(f"listen.tls: cannot be loaded: {error}") from None
    try:
        return await proxy.listen(listen.host, listen.port, tls=tls)
    except OSError as error:
        raise CommandError(
            f"cannot listen on {listen.address}: {error.strerror or error}; choose another port with --port"
        ) from None


def _url(config: Config, port: int) -> str:
    scheme = "https" if config.listen.tls else "http"
    host = f"[{config.listen.host}]" if ":" in config.listen.host else config.listen.host
    return f"{scheme}://{host}:{port}"
