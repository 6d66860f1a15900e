"""A prompt in an engine's own tokens, as names of its KV blocks: what the exact index compares with an engine's events.

Only asked for while some engine's events are followed, and of an engine, because only it has the model's template and
tokenizer: of vLLM by ``/tokenize``, which takes chats and completions, and by the ``render`` endpoints of the other
APIs, which it serves with ``--enable-scale-out`` only. It costs a round trip and the engine's tokenizer before placing,
so it is bounded tightly; without an answer the approximate index decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from homeport_engines.base import BodyEdits
from homeport_engines.registry import kind
from homeport_engines.vllm.kv import block_hashes
from homeport_proxy.attention import within
from homeport_proxy.control import Control
from homeport_proxy.engines import Engine, Engines
from homeport_proxy.exchange import Exchange
from homeport_proxy.fleet import Member
from homeport_proxy.headers import lines_of, request_head
from homeport_proxy.job import Job
from homeport_proxy.upstream import Collector, UpstreamError

ANSWER_S = 0.25
SLICED_S = 5.0
"""How long it is waited for where a prefill of seconds is at stake."""
REST_S = 30.0
"""How long an engine is not asked again after it failed to answer in time."""
NOT_OFFERED_S = 600.0
"""How long it is not asked again after it said that it does not offer this; a restart may change that."""
_NOT_OFFERED = frozenset({403, 404, 405, 501})
MOST_BLOCKS = 4096
ABLE_KEPT = 256
_PROMPT: Mapping[str, tuple[str, ...]] = {
    "chat": (
        "model",
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "mm_processor_kwargs",
    ),
    "completions": ("model", "prompt", "add_special_tokens"),
}
"""Per API, the members of a request that ``/tokenize`` takes; the other APIs' are rendered whole."""


class _Answer(msgspec.Struct):
    """``tokens`` of /tokenize, ``token_ids`` of a render endpoint."""

    tokens: list[int] = []
    token_ids: list[int] = []


class Tokens(NamedTuple):
    """A prompt in an engine's tokens, and the names of its KV blocks by block size in tokens."""

    ids: Sequence[int]
    blocks: Mapping[int, Sequence[int]]


class TokenBlocks:
    """Asks engines for tokens. ``resting`` holds the (backend, API) pairs that are not asked, until when."""

    def __init__(self, control: Control, engines: Engines) -> None:
        self._control = control
        self._engines = engines
        self._resting: dict[tuple[str, str], float] = {}
        self._able_of = -1
        self._able_by: dict[tuple[str, str, str], list[tuple[Member, str]]] = {}

    async def of(self, exchange: Exchange, job: Job, sizes: Mapping[str, int]) -> Tokens | None:
        """The prompt; None when none of the places could say. ``sizes``: :meth:`followed`."""
        ids = await self._tokens(next(iter(sizes)), job, ANSWER_S)
        if not ids:
            return None
        exchange.prompt_tokens_counted = len(ids)
        salt = exchange.caller.cache_salt if exchange.tenant else exchange.members.get("cache_salt")
        blocks = {
            size: block_hashes(ids, size, cache_salt=salt if isinstance(salt, str) else None)
            for size in set(sizes.values())
            if len(ids) <= size * MOST_BLOCKS
        }
        return Tokens(ids, blocks)

    async def ids(self, place: str, exchange: Exchange, job: Job) -> Sequence[int]:
        """The prompt in the tokens of one place, for a part of it to be prefilled there; empty when it cannot say."""
        able = any(place == name for _, name in self._able(exchange))
        member = self._engines.of(place).member if able else None
        now_s = asyncio.get_running_loop().time()
        if member is None or self._resting.get((member.name, exchange.api), 0.0) > now_s:
            return []
        ids = await self._tokens(place, job, SLICED_S)
        if ids:
            exchange.prompt_tokens_counted = len(ids)
        return ids

    def followed(self, exchange: Exchange, job: Job) -> dict[str, int]:
        """Places that can tell this prompt's tokens and whose events are followed, with their block size in tokens."""
        router = self._control.routers.get(exchange.region)
        if router is None or job.raws is None or "prompt_embeds" in job.raws:
            return {}
        now_s = asyncio.get_running_loop().time()
        found: dict[str, int] = {}
        for member, place in self._able(exchange):
            size = router.block_tokens(place)
            if not size or self._control.health.state(member) == "down":
                continue
            if self._resting.get((member.name, exchange.api), 0.0) <= now_s:
                found[place] = size
        return found

    def _able(self, exchange: Exchange) -> list[tuple[Member, str]]:
        """Places of the region that serve the model and can tell its tokens; looked for once per change of the
        fleet."""
        fleet = self._control.fleet
        if self._able_of != fleet.version or len(self._able_by) >= ABLE_KEPT:
            self._able_of = fleet.version
            self._able_by.clear()
        key = (exchange.region, exchange.model, exchange.api)
        found = self._able_by.get(key)
        if found is None:
            found = self._able_by[key] = [
                (member, place)
                for member in fleet.members.values()
                if member.region == exchange.region
                and (member.models is None or exchange.model in member.models)
                and kind(member.backend.engine).tokens_path(exchange.api) is not None
                for place in member.place_names()
            ]
        return found

    async def _tokens(self, place: str, job: Job, within_s: float) -> list[int]:
        engine = self._engines.of(place)
        assert engine.member is not None, "an engine of ours"
        rest_s = REST_S
        try:
            async with within(within_s):
                status, tokens = await self._ask(engine, engine.member, job)
            if status not in _NOT_OFFERED:
                return tokens
            rest_s = NOT_OFFERED_S
        except (TimeoutError, UpstreamError, msgspec.DecodeError, RecursionError):
            pass
        self._resting[engine.member.name, job.api.name] = asyncio.get_running_loop().time() + rest_s
        return []

    async def _ask(self, engine: Engine, member: Member, job: Job) -> tuple[int, list[int]]:
        body = _question(job)
        path = engine.pool.origin.prefix + (kind(member.backend.engine).tokens_path(job.api.name) or "")
        lines = lines_of(engine.put, "strict")
        if not engine.own_key and not job.drop_credentials:
            lines += b"".join([b"%s: %s\r\n" % pair for pair in job.headers if pair[0].lower() == b"authorization"])
        lines += b"content-type: application/json\r\n"
        answer = Collector()
        connection = await engine.aside.acquire()
        connection.send(request_head("POST", path, engine.pool.origin.host_header, lines, len(body)), body, answer)
        try:
            head, document = await answer.finished()
        except BaseException:
            connection.abort()
            raise
        if head.status != 200:
            return head.status, []
        found = msgspec.json.decode(document, type=_Answer)
        return head.status, found.tokens or found.token_ids


def _question(job: Job) -> bytes:
    members = _PROMPT.get(job.api.name)
    if members is None:
        return job.body_with(BodyEdits())
    raws = job.raws or {}
    return msgspec.json.encode({name: job.put.get(name, raws[name]) for name in members if name in raws})
