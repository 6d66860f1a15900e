"""vLLM's block hashes under ``--prefix-caching-hash-algo sha256_cbor``, written from their definition.

A block's hash is sha256 over canonical CBOR of ``[parent bytes, [tokens], extra_keys | null]``; the first parent is
sha256 over CBOR of the text ``vllm-none-hash``. Events carry the low 64 bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import cbor2

ROOT = hashlib.sha256(cbor2.dumps("vllm-none-hash")).digest()
_LOW_64 = (1 << 64) - 1


def block_hash(parent: bytes, tokens: Sequence[int], extra_keys: Sequence[str] | None) -> bytes:
    """The hash of one full block of tokens after ``parent``."""
    keys = list(extra_keys) if extra_keys else None
    return hashlib.sha256(cbor2.dumps([parent, list(tokens), keys])).digest()


def event_hash(digest: bytes) -> int:
    """A block hash as KV events carry it."""
    return int.from_bytes(digest, "big") & _LOW_64


def extra_keys(adapter: str | None, cache_salt: str | None, block: int) -> tuple[str, ...] | None:
    """What besides the tokens tells blocks apart: the adapter in every block, the salt in the first one."""
    keys = ((adapter,) if adapter else ()) + ((cache_salt,) if cache_salt and block == 0 else ())
    return keys or None
