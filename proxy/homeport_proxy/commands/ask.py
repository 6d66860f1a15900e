"""How commands ask a running proxy: its admin API over HTTP, with the key from the environment."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote, urlsplit

from homeport.cli import CommandError

DEFAULT_URL = "http://127.0.0.1:8080"
KEY_ENV = "HOMEPORT_ADMIN_KEY"
TIMEOUT_S = 10.0


def add_url(parser: argparse.ArgumentParser) -> None:
    """The ``--url`` and ``--key-env`` options."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the proxy's address (default {DEFAULT_URL})")
    parser.add_argument("--key-env", default=KEY_ENV, help=f"variable with the admin key (default {KEY_ENV})")


def ask(args: argparse.Namespace, path: str, *, post: dict[str, object] | None = None) -> Any:
    """The JSON answer of ``/homeport/v1/<path>``. Raises CommandError with the proxy's own words."""
    base = args.url.rstrip("/").removesuffix("/v1")
    if urlsplit(base).scheme not in ("http", "https"):
        raise CommandError(f"--url {args.url}: give http://HOST:PORT")
    request = urllib.request.Request(f"{base}/homeport/v1/{path}", method="GET" if post is None else "POST")
    if post is not None:
        request.data = json.dumps(post).encode()
        request.add_header("content-type", "application/json")
    key = os.environ.get(args.key_env, "").strip()
    if key:
        request.add_header("authorization", f"Bearer {key}")
    # the system's web proxy is never between a person and the proxy they name
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise CommandError(_said(error, args.key_env)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise CommandError(f"no proxy answers at {base}: {reason}; is it running, is --url right?") from None


def quoted(part: str) -> str:
    """One path segment."""
    return quote(part, safe="")


def _said(error: urllib.error.HTTPError, key_env: str) -> str:
    try:
        message = str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the proxy answers {error.code}"
    return f"{message} Set {key_env}." if error.code == 401 else message
