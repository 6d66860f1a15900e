"""vLLM's KV events on the wire: what a batch says, and how the engine names a block.

Frames of the PUB socket: topic, sequence (8 bytes, big endian), msgpack ``[ts, [events], data_parallel_rank]``.
Events are maps with ``type`` (vLLM 0.32) or arrays with the tag first (before). The replay endpoint answers a DEALER's
``[b"", start]`` with ``[b"", topic, seq, payload]`` frames and ends with sequence -1; it keeps the last 10,000 batches.
Blocks are named by the low 64 bits of ``sha256(CBOR([parent bytes, [tokens], extra keys or null]))`` under
``--prefix-caching-hash-algo sha256_cbor``; the first parent is ``sha256(CBOR("vllm-none-hash"))``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import cbor2
import msgspec

Wire: TypeAlias = "bool | int | float | str | bytes | list[Wire] | dict[str, Wire] | None"

_LOW_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Full blocks were stored: ``hashes`` in order, chained below ``parent`` (None: at the root).

    ``group`` is the KV cache group of a hybrid model, ``medium`` where the copy lies (``GPU`` on a CPU engine too).
    """

    hashes: tuple[int, ...]
    parent: int | None
    block_tokens: int
    medium: str = "GPU"
    group: int = 0
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One copy of each block left ``medium``; ``group`` None: the event does not say."""

    hashes: tuple[int, ...]
    medium: str = "GPU"
    group: int | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole cache was dropped."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class KvBatch:
    """One published batch; ``ts`` in seconds of the engine's clock, ``rank`` the data-parallel rank when told."""

    seq: int
    ts: float
    events: tuple[KvEvent, ...]
    rank: int | None = None


class EventFormatError(ValueError):
    """A frame that is not a KV event batch; the text says what was found."""


EVENT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""An event's members in the order of its array form, behind the tag."""


def decode_batch(seq: int, payload: bytes) -> KvBatch:
    """One payload; unknown event types are left out. Raises :class:`EventFormatError`."""
    try:
        batch = cast("Wire", msgspec.msgpack.decode(payload))
    except msgspec.DecodeError as error:
        raise EventFormatError(f"not msgpack: {error}") from error
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise EventFormatError("a batch is [timestamp, [events], rank]")
    ts = batch[0] if isinstance(batch[0], int | float) else 0.0
    rank = batch[2] if len(batch) > 2 and isinstance(batch[2], int) else None
    events = tuple(event for event in map(_event, batch[1]) if event is not None)
    return KvBatch(seq, float(ts), events, rank)


def _event(wire: Wire) -> KvEvent | None:
    if isinstance(wire, dict):
        return _built(wire.get("type"), wire)
    if isinstance(wire, list) and wire:
        names = EVENT_FIELDS.get(str(wire[0]), ())
        return _built(wire[0], dict(zip(names, wire[1:], strict=False)))
    raise EventFormatError(f"an event is a map or an array, not {type(wire).__name__}")


def _built(tag: Wire, fields: dict[str, Wire]) -> KvEvent | None:
    if tag == "AllBlocksCleared":
        return AllBlocksCleared()
    if tag not in ("BlockStored", "BlockRemoved"):
        return None
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list):
        raise EventFormatError(f"{tag} without block_hashes")
    named = tuple(_low(item) for item in hashes)
    medium = fields.get("medium")
    place = medium if isinstance(medium, str) else "GPU"
    group = fields.get("group_idx")
    if tag == "BlockRemoved":
        return BlockRemoved(named, place, group if isinstance(group, int) else None)
    parent = fields.get("parent_block_hash")
    size = fields.get("block_size")
    adapter = fields.get("lora_name") or fields.get("lora_id")
    return BlockStored(
        named,
        None if parent is None else _low(parent),
        size if isinstance(size, int) else 0,
        place,
        group if isinstance(group, int) else 0,
        None if adapter is None else str(adapter),
    )


def _low(item: Wire) -> int:
    if isinstance(item, int):
        return item & _LOW_64
    if isinstance(item, bytes):
        return int.from_bytes(item, "big") & _LOW_64
    raise EventFormatError(f"a block hash is an integer or bytes, not {type(item).__name__}")


_NONE_HASH = hashlib.sha256(cbor2.dumps("vllm-none-hash", canonical=True)).digest()


def block_hashes(
    tokens: Sequence[int],
    block_tokens: int,
    *,
    cache_salt: str | None = None,
    adapter: str | None = None,
    low_64: bool = True,
) -> list[int]:
    """The engine's names of a prompt's full blocks (``sha256_cbor``), computed outside the engine.

    ``cache_salt`` enters the first block only, ``adapter`` every block; ``low_64``: as events carry them.
    """
    if block_tokens <= 0:
        raise ValueError(f"block_tokens must be positive, not {block_tokens}")
    parent = _NONE_HASH
    names: list[int] = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        extra = ([adapter] if adapter else []) + ([cache_salt] if cache_salt and start == 0 else [])
        content = [parent, list(tokens[start : start + block_tokens]), extra or None]
        parent = hashlib.sha256(cbor2.dumps(content, canonical=True)).digest()
        name = int.from_bytes(parent, "big")
        names.append(name & _LOW_64 if low_64 else name)
    return names
