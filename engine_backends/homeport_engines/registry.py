"""Engine families by the name used in configuration."""

from __future__ import annotations

from collections.abc import Mapping

from homeport_engines.base import EngineKind, KvTransfer
from homeport_engines.openai import OPENAI
from homeport_engines.sglang import wire as sglang_wire
from homeport_engines.vllm import wire as vllm_wire

KINDS: Mapping[str, EngineKind] = {
    "vllm": EngineKind(
        name="vllm",
        transfers=vllm_wire.TRANSFERS,
        tokens_paths=vllm_wire.TOKENS_PATHS,
        token_ids_path="/v1/completions",
    ),
    "sglang": EngineKind(name="sglang", transfers=sglang_wire.TRANSFERS),
    "openai": OPENAI,
}


def kind(name: str) -> EngineKind:
    """The engine family of that name. Raises KeyError for an unknown one (configuration refuses those)."""
    return KINDS[name]


def transfer_of(engine: str, kv_transfer: str, kv_store: str) -> KvTransfer | None:
    """The choreography a backend's settings ask for; None when its engines cannot hand a prefill over.

    A direct transfer wins; without one a shared store carries the KV.
    """
    transfers = KINDS[engine].transfers
    if kv_transfer != "none":
        return transfers.get(kv_transfer)
    return transfers.get("store") if kv_store != "none" else None
