"""Request bodies without their text, such that two of them can still be compared for where they part.

A string longer than 24 characters becomes ``{"$blocks": ["<16 hex>", ...], "chars": n}``: one keyed digest per 256
characters, each covering everything before it in the string. The key never leaves the machine that made it: digests
cannot be tried against guessed texts elsewhere, and records of two machines cannot be compared.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from homeport.fingerprint import JsonValue

BLOCK_CHARS = 256
MAX_PLAIN_CHARS = 24

_KEY_BYTES = 32


def redact(value: JsonValue, key: bytes) -> JsonValue:
    """``value`` with every long string as digests; member names and short strings stay as they are."""
    if isinstance(value, str):
        return value if len(value) <= MAX_PLAIN_CHARS else _blocks(value, key)
    if isinstance(value, list):
        return [redact(item, key) for item in value]
    if isinstance(value, dict):
        return {name: redact(member, key) for name, member in value.items()}
    return value


def _blocks(text: str, key: bytes) -> JsonValue:
    digests: list[JsonValue] = []
    before = b""
    for start in range(0, len(text), BLOCK_CHARS):
        block = text[start : start + BLOCK_CHARS].encode("utf-8", "surrogatepass")
        before = blake2b(before + block, digest_size=8, key=key).digest()
        digests.append(before.hex())
    return {"$blocks": digests, "chars": len(text)}


def expand(value: JsonValue) -> JsonValue:
    """``value`` with digests turned into stand-in strings of the true length: equal where the texts were equal, and
    different from the block on in which they parted."""
    if isinstance(value, list):
        return [expand(item) for item in value]
    if not isinstance(value, dict):
        return value
    text = _stand_in(value)
    return text if text is not None else {name: expand(member) for name, member in value.items()}


def _stand_in(value: Mapping[str, JsonValue]) -> str | None:
    digests, chars = value.get("$blocks"), value.get("chars")
    if len(value) != 2 or not isinstance(digests, list) or not isinstance(chars, int) or isinstance(chars, bool):
        return None
    if not all(isinstance(digest, str) and digest for digest in digests) or chars > len(digests) * BLOCK_CHARS:
        return None
    return "".join((str(digest) * BLOCK_CHARS)[:BLOCK_CHARS] for digest in digests)[: max(0, chars)]


def is_redacted(value: JsonValue) -> bool:
    """Whether a value is a string's digests."""
    return isinstance(value, dict) and _stand_in(value) is not None


def holds_digests(value: JsonValue) -> bool:
    """Whether any string in ``value`` was replaced by its digests."""
    if isinstance(value, list):
        return any(holds_digests(item) for item in value)
    return isinstance(value, dict) and (is_redacted(value) or any(holds_digests(item) for item in value.values()))


def local_key(path: Path | None = None) -> bytes:
    """This machine's redaction key: read from ``path`` (default: the user's data folder), made there at first use.

    The file is readable by its owner alone. Processes that start at the same time agree on one key. Raises OSError when
    it can neither be read nor made, ValueError when the file holds no key."""
    where = path or data_folder() / "redaction.key"
    with contextlib.suppress(FileNotFoundError):
        return _read_key(where)
    where.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, fresh = tempfile.mkstemp(dir=where.parent, prefix=".key-")  # 0600 from the start
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(fresh, where)  # fails when another process was first; its key then holds
    finally:
        os.unlink(fresh)
    return _read_key(where)


def _read_key(path: Path) -> bytes:
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise ValueError(f"{path} does not hold a redaction key; remove it to have a new one made")
    return key


def data_folder() -> Path:
    """The user's folder for Homeport's own files (XDG base directories; the platforms' customs elsewhere)."""
    if given := os.environ.get("XDG_DATA_HOME"):
        return Path(given) / "homeport"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "homeport"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "homeport"
    return Path.home() / ".local" / "share" / "homeport"
