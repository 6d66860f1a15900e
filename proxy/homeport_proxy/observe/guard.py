"""Who may use the admin API: its key, or, when none is configured, somebody at this very machine and nobody else."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from homeport_proxy.admit import hash_of, key_in
from homeport_proxy.config import is_loopback


def has_key(headers: Mapping[str, str], key: str) -> bool:
    """Whether the request carries this key (compared in constant time)."""
    return hmac.compare_digest(hash_of(key_in(headers) or ""), hash_of(key))


def why_not_local(peer: str | None, headers: Mapping[str, str]) -> str | None:
    """Why a request does not come from a person at this machine, or None when it does.

    The peer must be loopback, and so must ``Host`` (a page of another origin can make a browser connect here by
    rebinding its name); a relay in between shows itself by ``Forwarded`` or ``X-Forwarded-*``; a page shows its origin.
    """
    if peer is None or not is_loopback(peer.partition("%")[0]):
        return "it comes from another machine"
    if not is_loopback(_host_of(headers.get("host", ""))):
        return "its Host is not this machine's loopback"
    if any(name.lower() == "forwarded" or name.lower().startswith("x-forwarded-") for name in headers):
        return "it was forwarded"
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
        return "it comes from a page of another origin"
    return None


def _host_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
