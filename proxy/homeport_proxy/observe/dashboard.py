"""The dashboard: one self-contained page under a strict content policy; its data come from the admin API."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers. Only its own script and style may run, told by their hashes; it talks to its own
    origin only, and nobody may frame it."""
    body = files("homeport_proxy.observe").joinpath("dashboard.html").read_bytes()
    hashes = {
        kind.decode(): base64.b64encode(hashlib.sha256(text).digest()).decode() for kind, text in _INLINE.findall(body)
    }
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return body, headers
