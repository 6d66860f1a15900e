"""vLLM's prefill-to-decode hand-off on the wire, one class per family of KV connectors.

Sources: vLLM 0.32's NixlConnector, NixlPushConnector, MooncakeConnector and the store connectors
(MooncakeStoreConnector, LMCacheConnectorV1, ExampleConnector), as observed on running engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from homeport.fingerprint import Api, JsonValue
from homeport_engines import capabilities
from homeport_engines.base import LEASE_MARGIN_S, BodyEdits, Handoff, HandoffParams, KvTransfer, Leg

NIXL_LEASE_S = 30.0
"""vLLM's default ``kv_lease_duration``: how long a prefill engine holds blocks nobody has fetched."""

NIXL_READBACK_S = 480.0
"""vLLM's default ``decoder_kv_blocks_ttl``: how long a decode engine holds a finished turn for the next."""

READBACK_MARGIN_S = 30.0

_ONE_TOKEN: Mapping[Api, Mapping[str, JsonValue]] = {
    "chat": {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1, "n": 1},
    "completions": {"max_tokens": 1, "min_tokens": 1, "n": 1},
    "responses": {"max_output_tokens": 1},
    "messages": {"max_tokens": 1},
}
"""Per API, the members that make a prefill answer end by length after one token (never by a stop token: Mooncake
sends nothing then)."""


def one_token(api: Api, extra: Mapping[str, JsonValue] | None = None) -> BodyEdits:
    """The client's body as a prefill leg: not streamed (a streamed answer carries no parameters), one token."""
    put: dict[str, JsonValue] = {"stream": False, **_ONE_TOKEN[api], **(extra or {})}
    drop = {"stream_options", "min_tokens", "stop", "stop_token_ids"} - put.keys()
    if api == "messages":
        drop = {"stop_sequences"}
    elif api == "responses":
        drop = {"stream_options", "background"}
    return BodyEdits(put, frozenset(drop))


def prompt_and_cached(api: Api, answer: Mapping[str, JsonValue]) -> tuple[int | None, int | None]:
    """Prompt and cached tokens of a prefill answer; None where the engine did not say."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None, None
    if api == "messages":
        cached = _count(usage.get("cache_read_input_tokens"))
        fresh = _count(usage.get("input_tokens"))
        written = _count(usage.get("cache_creation_input_tokens")) or 0
        return (None if fresh is None else fresh + (cached or 0) + written), cached
    prompt = _count(usage.get("input_tokens" if api == "responses" else "prompt_tokens"))
    details = usage.get("input_tokens_details" if api == "responses" else "prompt_tokens_details")
    return prompt, _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _count(value: JsonValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _holds_blocks(ids: JsonValue) -> bool:
    """Block ids come flat, or as one list per cache group."""
    if not isinstance(ids, list):
        return False
    return any(bool(item) if isinstance(item, list) else True for item in ids)


@dataclass(slots=True)
class Nixl:
    """NixlConnector (pull) and NixlPushConnector: prefill first, its answer's parameters go to one decode request."""

    name: str = "nixl"
    order: Literal["prefill_first", "concurrent"] = "prefill_first"
    lease_s: float | None = NIXL_LEASE_S - LEASE_MARGIN_S
    readback_s: float | None = NIXL_READBACK_S - READBACK_MARGIN_S

    def prefill_leg(self, api: Api, handoff: Handoff, last_turn: Mapping[str, JsonValue] | None = None) -> Leg:
        wanted: dict[str, JsonValue] = {**(last_turn or {}), "do_remote_decode": True, "do_remote_prefill": False}
        return Leg(one_token(api, {"kv_transfer_params": wanted}))

    def accept(self, api: Api, answer: Mapping[str, JsonValue]) -> HandoffParams | None:
        params = answer.get("kv_transfer_params")
        if not isinstance(params, dict) or not params.get("remote_engine_id"):
            return None
        if not _holds_blocks(params.get("remote_block_ids")):
            return None  # a prompt shorter than a block has nothing to transfer; a decode engine must not wait for it
        prompt, cached = prompt_and_cached(api, answer)
        if cached is None:
            cached = _count(params.get("remote_prefill_cached_tokens"))
        return HandoffParams(params, prompt, cached)

    def decode_leg(self, api: Api, handoff: Handoff, params: HandoffParams | None) -> Leg:
        if params is None:
            return Leg(BodyEdits())
        return Leg(BodyEdits({"kv_transfer_params": dict(params.params)}))

    def refuses(self, api: Api, body: Mapping[str, JsonValue]) -> str | None:
        return capabilities.refuses(self.name, api, body)


@dataclass(slots=True)
class Mooncake:
    """MooncakeConnector: both legs at once, bound by a transfer id that the proxy mints; no parameters come back.

    The decode engine finds the prefill engine by its bootstrap address and its engine id, which
    ``GET http://P:<bootstrap port>/query`` tells per data-parallel rank.
    """

    name: str = "mooncake"
    order: Literal["prefill_first", "concurrent"] = "concurrent"
    lease_s: float | None = None
    readback_s: float | None = None

    def prefill_leg(self, api: Api, handoff: Handoff, last_turn: Mapping[str, JsonValue] | None = None) -> Leg:
        wanted: dict[str, JsonValue] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": handoff.transfer_id,
        }
        extra: dict[str, JsonValue] = {"kv_transfer_params": wanted}
        if api in ("chat", "completions"):
            extra["ignore_eos"] = True  # ended by a stop token it would never send the blocks
        return Leg(one_token(api, extra))

    def accept(self, api: Api, answer: Mapping[str, JsonValue]) -> HandoffParams | None:
        prompt, cached = prompt_and_cached(api, answer)
        return HandoffParams({}, prompt, cached)

    def decode_leg(self, api: Api, handoff: Handoff, params: HandoffParams | None) -> Leg:
        prefill = handoff.prefill
        engine_id = prefill.engine_ids.get(prefill.rank or 0)
        if engine_id is None or prefill.bootstrap_port is None:
            raise ValueError(f"{prefill.name}: its Mooncake bootstrap address or engine id is not known")
        host = urlsplit(prefill.url).hostname or ""
        host = f"[{host}]" if ":" in host else host
        wanted: dict[str, JsonValue] = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": f"http://{host}:{prefill.bootstrap_port}",
            "remote_engine_id": engine_id,
            "transfer_id": handoff.transfer_id,
        }
        return Leg(BodyEdits({"kv_transfer_params": wanted}))

    def refuses(self, api: Api, body: Mapping[str, JsonValue]) -> str | None:
        return capabilities.refuses(self.name, api, body)


@dataclass(slots=True)
class Store:
    """Connectors with a shared store: the prefill engine fills it, the decode engine looks blocks up by hash."""

    name: str = "store"
    order: Literal["prefill_first", "concurrent"] = "prefill_first"
    lease_s: float | None = None
    readback_s: float | None = None

    def prefill_leg(self, api: Api, handoff: Handoff, last_turn: Mapping[str, JsonValue] | None = None) -> Leg:
        return Leg(one_token(api))

    def accept(self, api: Api, answer: Mapping[str, JsonValue]) -> HandoffParams | None:
        prompt, cached = prompt_and_cached(api, answer)
        return HandoffParams({}, prompt, cached)

    def decode_leg(self, api: Api, handoff: Handoff, params: HandoffParams | None) -> Leg:
        return Leg(BodyEdits())

    def refuses(self, api: Api, body: Mapping[str, JsonValue]) -> str | None:
        return capabilities.refuses(self.name, api, body)


TRANSFERS: Mapping[str, KvTransfer] = {
    "nixl": Nixl(),
    "nixl-push": Nixl("nixl-push", readback_s=None),
    "mooncake": Mooncake(),
    "store": Store(),
}

TOKENS_PATHS: Mapping[str, str] = {
    "chat": "/tokenize",
    "completions": "/tokenize",
    "messages": "/v1/messages/render",
    "responses": "/v1/responses/render",
}
"""Where vLLM tells a prompt's tokens; the ``render`` endpoints answer 403 without ``--enable-scale-out``."""
