"""SGLang's prefill-to-decode hand-off: both legs at once, bound by a random bootstrap room."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from homeport.fingerprint import Api, JsonValue
from homeport_engines import capabilities
from homeport_engines.base import BodyEdits, Handoff, HandoffParams, KvTransfer, Leg
from homeport_engines.vllm.wire import prompt_and_cached

DEFAULT_BOOTSTRAP_PORT = 8998
"""SGLang's default ``--disaggregation-bootstrap-port``."""


def room(transfer_id: str) -> int:
    """A 63-bit bootstrap room from a transfer id; unique because the id is, and the same for both legs."""
    return int.from_bytes(hashlib.blake2b(transfer_id.encode(), digest_size=8).digest()) >> 1


@dataclass(slots=True)
class Bootstrap:
    """Both engines get the client's body plus the same three members; the prefill leg's answer is read and dropped.

    The cached tokens of the prefill side come back in its usage; nothing has to be taken over for the decode leg.
    """

    name: str = "bootstrap"
    order: Literal["prefill_first", "concurrent"] = "concurrent"
    lease_s: float | None = None
    readback_s: float | None = None

    def prefill_leg(self, api: Api, handoff: Handoff, last_turn: Mapping[str, JsonValue] | None = None) -> Leg:
        # the engine itself stops after the prefill; only the answer must come in one piece
        members = _members(handoff)
        return Leg(BodyEdits({**members, "stream": False}, frozenset({"stream_options"})))

    def accept(self, api: Api, answer: Mapping[str, JsonValue]) -> HandoffParams | None:
        prompt, cached = prompt_and_cached(api, answer)
        return HandoffParams({}, prompt, cached)

    def decode_leg(self, api: Api, handoff: Handoff, params: HandoffParams | None) -> Leg:
        return Leg(BodyEdits(_members(handoff)))

    def refuses(self, api: Api, body: Mapping[str, JsonValue]) -> str | None:
        return capabilities.refuses(self.name, api, body)


def _members(handoff: Handoff) -> dict[str, JsonValue]:
    prefill = handoff.prefill
    return {
        "bootstrap_host": urlsplit(prefill.url).hostname or "",
        "bootstrap_port": prefill.bootstrap_port or DEFAULT_BOOTSTRAP_PORT,
        "bootstrap_room": room(handoff.transfer_id),
    }


TRANSFERS: Mapping[str, KvTransfer] = {"bootstrap": Bootstrap()}
