"""What every serving process begins with: the event loop, and the listener's TLS."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import ssl
from collections.abc import Callable

from homeport_proxy.config import ConfigError, Listen

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``, from ``malloc.h``."""


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's where there is one."""
    try:
        import uvloop
    except ImportError:  # a platform without it
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def settle_memory() -> None:
    """Fit memory's upkeep to serving, now that all is loaded.

    Python looks for reference cycles seldom: requests make none, and looking through what is remembered of sessions
    took a tenth of a request's time. The C library keeps what a body took for the next one: given back to the system
    and asked for again, its pages took a fifth of a long request's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library than Linux' usual one
        return
    mallopt(_M_MMAP_THRESHOLD, 8 * 1024 * 1024)
    mallopt(_M_TRIM_THRESHOLD, 64 * 1024 * 1024)


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
