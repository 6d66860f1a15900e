"""Where Homeport keeps what it installs and can build again: `HOMEPORT_CACHE`, or the platform's cache folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The cache folder (not created): `HOMEPORT_CACHE`, else the place the platform's own rules name.

    Linux and others follow the XDG base directory specification (a relative `XDG_CACHE_HOME` is ignored, as it says).
    """
    environ = os.environ if environ is None else environ
    if chosen := environ.get("HOMEPORT_CACHE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "homeport"
    if sys.platform == "win32":
        return Path(environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "homeport" / "Cache"
    base = Path(environ.get("XDG_CACHE_HOME") or "")
    return (base if base.is_absolute() else Path.home() / ".cache") / "homeport"
