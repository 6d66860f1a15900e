"""What every serving process begins with: the event loop, and the listener's TLS."""

from __future__ import annotations

import asyncio
import gc
import ssl
from collections.abc import Callable

from homeport_proxy.config import ConfigError, Listen


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's where there is one."""
    try:
        import uvloop
    except ImportError:  # a platform without it
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def collect_seldom() -> None:
    """Make Python look for reference cycles seldom, now that all is loaded: requests make few, and looking through what
    is remembered of sessions took a tenth of a request's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def listener_tls(listen: Listen) -> ssl.SSLContext | None:
    """The listener's certificate, None for plain HTTP. Raises ConfigError when it cannot be loaded."""
    if listen.tls is None:
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(listen.tls.cert, listen.tls.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError([f"listen.tls: cannot be loaded: {error}"]) from None
    return context
