"""The way of a request: arrive, identify, admit, locate, place, hand off, relay, account. It never turns back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

import msgspec
from aiohttp import web
from msgspec.structs import replace

from homeport.fingerprint import Api, JsonValue
from homeport.volatile import Declared
from homeport_engines import capabilities
from homeport_engines.registry import transfer_of
from homeport_proxy import handoff, paths, peering, slices, stored
from homeport_proxy.api import BY_PATH, of_path
from homeport_proxy.api.base import ClientApi, is_internal
from homeport_proxy.api.plain import OTHER
from homeport_proxy.carrying import carried
from homeport_proxy.config import Backend
from homeport_proxy.control import Control
from homeport_proxy.document import Document, messages_of
from homeport_proxy.downstream import Downstream, written
from homeport_proxy.engines import Engines
from homeport_proxy.errors import ProxyError, invalid_request, model_not_found, no_backend, overloaded, render
from homeport_proxy.exchange import Exchange, Identity
from homeport_proxy.grown import LONG_BYTES, GrownBodies
from homeport_proxy.headers import hop_by_hop, lines_of, of_exchange, usable_request_id
from homeport_proxy.identity import first_header, look
from homeport_proxy.ids import mint
from homeport_proxy.intake import read_body
from homeport_proxy.job import Job
from homeport_proxy.marks import Marks
from homeport_proxy.placer import Placed
from homeport_proxy.prefix import Prefixes
from homeport_proxy.profiles import calmed, rules_for
from homeport_proxy.routing.slices import ROUND_TOKENS
from homeport_proxy.routing.views import NoPlaceError, PrefixKeys, RequestView, SessionView, Ticket, Word
from homeport_proxy.splice import NotAnObjectError, edit
from homeport_proxy.tokens import TokenBlocks

log = logging.getLogger(__name__)

BLOCK_CHARS = 512
EXPECTED_OUTPUT_TOKENS = 256
LONGEST_MODEL_NAME = 128


class Pipeline:
    """Serves every request that goes to an engine. One per process."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.engines = Engines(control.fleet)
        self.prefixes = Prefixes(BLOCK_CHARS)
        self.bodies = GrownBodies()
        self.marks = Marks()
        self.token_blocks = TokenBlocks(control, self.engines)
        self.desk = handoff.Desk(
            engines=self.engines,
            health=control.health,
            placer=control.placer,
            timeouts=lambda: control.config.timeouts,
            on_gap=control.account.gap,
        )

    async def close(self) -> None:
        """Wait for what frees KV on engines, then close all connections."""
        await self.desk.orphans.close()
        self.engines.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request, from its head to its books."""
        exchange = arrive(request)
        down = Downstream(request)
        try:
            await self._serve(exchange, request, down)
        except ProxyError as error:
            self._refuse(exchange, down, error)
        except NotAnObjectError as error:
            self._refuse(exchange, down, invalid_request(f"The body is not JSON: {error}."))
        except asyncio.CancelledError:
            exchange.error = "client_closed"
            raise
        except ConnectionError:
            exchange.error = "client_closed"
        except Exception:
            log.exception("request %s failed inside the proxy", exchange.request_id)
            self._refuse(exchange, down, ProxyError(500, "internal", "The proxy failed; its log has the reason."))
        finally:
            exchange.ended_s = asyncio.get_running_loop().time()
            exchange.response_bytes = down.body_bytes
            self.control.account.done(exchange)
        return written(down)

    async def _serve(self, exchange: Exchange, request: web.BaseRequest, down: Downstream) -> None:
        config = self.control.config
        exchange.caller = self.control.admission.caller(request.headers)
        if paths.denied(exchange.path, config.passthrough.deny):
            raise invalid_request(f"{exchange.path} is not open to clients of this proxy", status=404)
        if self.control.stopping:
            raise overloaded("The proxy is stopping; send the request to another one.")
        exchange.body = await read_body(request, config.limits.body_bytes)
        job = self._understand(exchange, request)
        await self._identify(exchange, job)
        async with self.control.admission.enter(exchange):
            await self._locate_and_answer(exchange, job, down)

    # understand and identify

    def _understand(self, exchange: Exchange, request: web.BaseRequest) -> Job:
        """The request in wire terms: which model, streamed or not, and what every engine's copy needs changed."""
        api = of_path(exchange.path) if exchange.method == "POST" else OTHER
        exchange.api = api.name
        job = Job(
            api,
            exchange.method,
            (exchange.path if exchange.path in BY_PATH else paths.on_the_wire(exchange.path)) + exchange.query,
            request.raw_headers,
            exchange.body,
            drop_credentials=not self.control.admission.open,
            hop_by_hop=hop_by_hop(request.headers),
        )
        if exchange.body.lstrip(b" \t\r\n").startswith(b"{") or api.name != "other":
            self._read_members(exchange, job)
        profiles = self.control.config.profiles
        if profiles and (rules := rules_for(profiles, request.headers.get("user-agent"))):
            _keep_still(exchange, job, rules)
        exchange.model = self._resolve_model(exchange, job)
        if job.raws is not None:
            _plan_edits(exchange, job)
        return job

    def _read_members(self, exchange: Exchange, job: Job) -> None:
        """Decode the body once: the top level for edits, the document for identity and routing."""
        body = exchange.body
        if not body and job.api.name == "other":
            return
        try:
            exchange.document = self.bodies.document(self._hint(exchange) if len(body) >= LONG_BYTES else None, body)
            job.raws = exchange.document.raws
            exchange.stream = job.stream = exchange.document.get("stream") is True
        except NotAnObjectError as error:
            if job.api.name == "other":
                return
            raise invalid_request(f"The body is not a JSON object: {error}.") from None

    def _hint(self, exchange: Exchange) -> str | None:
        """By what a long body is remembered: the session header as it came."""
        found = first_header(exchange.headers, self.control.config.affinity.headers)
        return None if found is None else f"{exchange.tenant}\0{found[1]}"

    def _resolve_model(self, exchange: Exchange, job: Job) -> str:
        """The engines' name for the model that is asked for. Raises ProxyError 404 when nobody serves it."""
        asked = exchange.members.get("model")
        config, fleet = self.control.config, self.control.fleet
        exchange.model = _named(asked)
        if not isinstance(asked, str) or not asked:
            known = fleet.models()
            if job.api.name in ("other", "tokenize") or len(known) == 1:
                return known[0] if known else ""
            raise invalid_request("`model` is missing; name one of: " + ", ".join(known[:20]), "model")
        if not config.models:
            if not fleet.may_serve(asked):
                raise model_not_found(asked, fleet.models())
            return asked
        model = config.model(asked)
        if model is None:
            raise model_not_found(asked, fleet.models())
        if model.name != asked:
            job.put["model"] = model.name
        return model.name

    async def _identify(self, exchange: Exchange, job: Job) -> None:
        document = exchange.document
        estimate = self.control.account.bytes_per_token.tokens(exchange.model, len(exchange.body))
        exchange.prompt_tokens_estimate = self._placeable(exchange, estimate)
        if not job.api.generates or document is None:
            return
        seen = look(exchange, document, self.control.config.affinity.headers, self.marks)
        exchange.identity = await self.control.books.identify(seen)
        try:
            blocks = self.prefixes.blocks(cast("Api", exchange.api), exchange.identity.session, document)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return  # not the shape this API promises: the engine will say so
        exchange.prefix = PrefixKeys(blocks, BLOCK_CHARS)
        if len(exchange.body) >= LONG_BYTES and document.raws is job.raws:  # as it came, not calmed
            stands = self.prefixes.stands(exchange.identity.session)
            self.bodies.remember(self._hint(exchange), exchange.body, document, messages_of(exchange.api), stands)

    def _placeable(self, exchange: Exchange, tokens: int) -> int:
        """A prompt's length as the router gets it: what is too long is the engine's to refuse, a guess above all."""
        longest = self.control.fleet.max_model_len(exchange.model)
        return tokens if longest is None else min(tokens, longest - 1)

    # locate, place, answer

    async def _locate_and_answer(self, exchange: Exchange, job: Job, down: Downstream) -> None:
        if await self._answered_elsewhere(exchange, job, down):
            return
        ids: Sequence[int] = ()
        if exchange.identity is not None and (sizes := self.token_blocks.followed(exchange, job)):
            ids = await self._count_tokens(exchange, job, sizes)
        ticket, before = await self._place(exchange)
        try:
            if ticket.part_tokens is not None:
                await self._prefill_parts(exchange, job, down, ticket, before, ids)
            ids = ()  # not kept while the answer is relayed
            if (wanted := stored.named(exchange)) is not None:
                await self._hold_to_stored_state(exchange, wanted)
            await handoff.answer(self.desk, exchange, job, down)
            self._remember_stored(exchange)
        finally:
            self._give_back(exchange)

    async def _count_tokens(self, exchange: Exchange, job: Job, sizes: Mapping[str, int]) -> Sequence[int]:
        """The prompt in an engine's own tokens, where one can tell."""
        tokens = await self.token_blocks.of(exchange, job, sizes)
        if tokens is None or not tokens.blocks:
            return ()
        exchange.prefix = replace(exchange.prefix, token_blocks=tokens.blocks)
        exchange.prompt_tokens_estimate = self._placeable(exchange, len(tokens.ids))
        return tokens.ids

    async def _answered_elsewhere(self, exchange: Exchange, job: Job, down: Downstream) -> bool:
        """Find the region; True when another region's proxy has answered. A peer that takes nothing is left for the
        region that comes next, and in the end for this one, where the request may be served here at all."""
        failed: set[str] = set()
        while True:
            located = await self.control.books.locate(exchange)
            if located is None:
                raise no_backend("No region that may serve this request is usable.")
            peer = located.peer
            exchange.region, exchange.peer_region = located.region, peer is not None
            exchange.region_reason = located.reason or exchange.region_reason
            exchange.home_region_down = located.home_down or bool(failed)
            if peer is None:
                return False
            if peer.name in failed:
                exchange.hops += 1  # nobody else to ask: as if it had come from there
            elif await peering.answer(self.desk, self.control.regions, exchange, job, down, peer):
                return True
            failed.add(peer.name)

    async def _place(self, exchange: Exchange) -> Placed:
        loop = asyncio.get_running_loop()
        placer = self.control.placer
        started_s = loop.time()
        try:
            placed = ticket, before = await placer.place(exchange.region, self._view(exchange))
        except NoPlaceError as error:
            raise no_backend(f"{error}.") from None
        exchange.ticket = ticket
        if exchange.identity is not None:
            exchange.cache = cache_word(before)
        self._take_decision(exchange, ticket, before)
        waited_s = loop.time() - started_s
        held_s = (ticket.decided_s or ticket.arrived_s) - ticket.arrived_s
        exchange.queued_s = max(0.0, min(held_s, waited_s))
        exchange.decide_s = max(0.0, waited_s - exchange.queued_s)
        return placed

    def _take_decision(self, exchange: Exchange, ticket: Ticket, before: SessionView | None) -> None:
        """The router's decision, with what only the data plane knows of it."""
        if before is not None and ticket.decision is not None and exchange.document is not None:
            refuses = partial(_refuses, exchange=exchange)
            ticket.decision = carried(self.control.fleet, ticket.decision, before, refuses)
        if exchange.home_region_down and ticket.decision is not None and ticket.decision.word is Word.PLACED:
            ticket.decision = replace(ticket.decision, word=Word.FAILOVER)
        exchange.decision = ticket.decision

    async def _prefill_parts(
        self,
        exchange: Exchange,
        job: Job,
        down: Downstream,
        ticket: Ticket,
        before: SessionView | None,
        ids: Sequence[int],
    ) -> None:
        """Have the prompt prefilled part by part, as the router asks; between them others are served."""
        loop = asyncio.get_running_loop()
        done: dict[str, int] = {}
        scale, may = 1.0, slices.sliceable(exchange)
        while (tokens := ticket.part_tokens) is not None and ticket.decision is not None:
            place, part = ticket.decision.place, slices.FAILED
            may = may and ticket.decision.prefill_place is None  # else its KV comes from elsewhere
            if may and not ids:
                ids = await self.token_blocks.ids(place, exchange, job)
                scale = len(ids) / ticket.request.prompt_tokens  # parts are counted in what it was taken for
            tokens = int(tokens * scale) // ROUND_TOKENS * ROUND_TOKENS
            # what is asked for again was not kept: no part of it would be
            if may and done.get(place, 0) < tokens < len(ids):
                done[place] = tokens
                part = await slices.prefill(self.desk, exchange, job, down, ticket.decision, ids[:tokens])
            since_s = loop.time()
            try:
                await self.control.placer.sliced(ticket, part.cached_tokens, ok=part.ok)
            except NoPlaceError as error:
                raise no_backend(f"{error}.") from None
            finally:
                held_s = loop.time() - since_s
                exchange.queued_s += held_s
                if exchange.legs:
                    exchange.legs[-1].held_s += held_s
            self._take_decision(exchange, ticket, before)
        if exchange.slices and exchange.decision is not None:
            reason = f"{exchange.decision.reason}; prefilled in {exchange.slices + 1} parts"
            ticket.decision = exchange.decision = replace(exchange.decision, reason=reason)

    def _view(self, exchange: Exchange) -> RequestView:
        identity = exchange.identity or Identity(mint(128), "request", "side", final=True)
        document = exchange.document
        user = None if document is None else document.get("user")
        return RequestView(
            request_id=exchange.request_id,
            api=exchange.api,
            model=exchange.model,
            session=identity.session,
            prompt_tokens=max(1, exchange.prompt_tokens_estimate),
            prompt_estimated=not exchange.prefix.token_blocks,
            prefix=exchange.prefix,
            tenant=exchange.tenant,
            tenant_weight=exchange.caller.weight,
            user=user.encode("utf-8", "replace").decode()[:256] if isinstance(user, str) else "",
            parent=identity.parent,
            kind=identity.kind,
            final=identity.final,
            expected_output_tokens=_expected_output(document) if exchange.identity and document is not None else 1,
            split_refused=self._split_refused(exchange),
            sliceable=self.control.config.routing.slice_s > 0 and slices.may_slice(exchange),
        )

    def _split_refused(self, exchange: Exchange) -> str | None:
        if exchange.identity is None:
            return "it generates nothing"
        prefill = self.control.fleet.prefill_in(exchange.region)
        return None if prefill is None else _refuses(prefill, exchange)

    async def _hold_to_stored_state(self, exchange: Exchange, wanted: str) -> None:
        """A request that names stored state is served by the backend that holds it, or refused."""
        if exchange.ticket is None:
            return
        place = await self.control.books.holder(exchange.tenant, wanted)
        if place is None:
            raise invalid_request(
                f"`{wanted}` is not known here: it was stored on no backend that this proxy has used since it started.",
                "previous_response_id",
                status=404,
            )
        decision = exchange.decision
        if decision is not None and (decision.place != place or decision.prefill_place is not None):
            others = frozenset(self.control.fleet.place_names()) - {place}
            decision = await self.control.placer.again(exchange.ticket, others)
            if decision is None:
                raise no_backend(f"{place}, which holds `{wanted}`, cannot be used now.")
            decision = replace(decision, word=Word.HOME, reason="holds the stored response")
            exchange.ticket.decision = exchange.decision = decision

    def _remember_stored(self, exchange: Exchange) -> None:
        if exchange.response_id is None:
            return
        serving = exchange.serving
        if serving is not None and exchange.ok:
            self.control.books.stored(exchange.tenant, exchange.response_id, serving.place)

    def _give_back(self, exchange: Exchange) -> None:
        """Release the ticket, once, also when the client left."""
        ticket, placer = exchange.ticket, self.control.placer
        if ticket is None:
            return
        task = asyncio.current_task()
        if exchange.status is None or (task is not None and task.cancelling()):
            placer.cancel(ticket)
            return
        usage = exchange.usage
        exchange.outcome = placer.finished(
            ticket,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            ok=exchange.ok,
        )

    def _refuse(self, exchange: Exchange, down: Downstream, error: ProxyError) -> None:
        exchange.error = error.code
        if down.started:
            down.break_off()
            return
        answer_error(exchange, down, error)


def answer_error(exchange: Exchange, down: Downstream, error: ProxyError) -> None:
    """An answer of ours in the shape of the API that was called."""
    status, headers, body = render(error, exchange.api, exchange.request_id)
    exchange.status = status
    if error.status in (408, 413, 501):  # the rest of its body is not worth waiting for
        down.keep_alive = False
    down.whole(status, lines_of(headers) + of_exchange(exchange).encode("latin-1", "replace"), body)


def arrive(request: web.BaseRequest) -> Exchange:
    """The exchange of a request whose head has come."""
    target, headers = request.raw_path, request.headers
    path, query = (target, "") if target in BY_PATH else paths.split_target(target)
    given = headers.get("x-request-id")
    hops = headers.get("x-homeport-hops", "")
    return Exchange(
        request_id=given if given is not None and usable_request_id(given) else f"req_{mint(96)}",
        api=of_path(path).name,
        method=request.method,
        path=path,
        query=query,
        headers=headers,
        peer=request.remote,
        arrived_s=asyncio.get_running_loop().time(),
        arrived_unix_s=time.time(),
        hops=int(hops) if hops.isdigit() and len(hops) < 4 else 0,
    )


def _named(asked: JsonValue) -> str:
    """What a client calls its model, as logs and books may show it: short, and no line breaks or the like."""
    name = asked[:LONGEST_MODEL_NAME] if isinstance(asked, str) else ""
    return name if name.isprintable() else "".join(char if char.isprintable() else "?" for char in name)


def _keep_still(exchange: Exchange, job: Job, rules: Sequence[Declared]) -> None:
    """What the harness's profile changes; identity and routing see the prompt as the engines will."""
    if job.raws is None or exchange.document is None:
        return
    changed = calmed(exchange.document, rules)
    if changed:
        job.put.update(changed)
        exchange.document = Document({**job.raws, **changed})


def _plan_edits(exchange: Exchange, job: Job) -> None:
    """What every engine's copy of the body needs: engines' own members out, scope in, usage asked for."""
    raws = job.raws or {}
    job.drop.update([name for name in raws if is_internal(name)])
    if exchange.tenant:
        job.drop.add("priority")
        if exchange.caller.cache_salt is None:
            job.drop.add("cache_salt")
        else:
            job.put["cache_salt"] = exchange.caller.cache_salt
    _ask_for_usage(job.api, exchange, job)


def _ask_for_usage(api: ClientApi, exchange: Exchange, job: Job) -> None:
    if not (api.usage_in_stream_options and job.stream):
        return
    options = exchange.members.get("stream_options")
    if isinstance(options, dict):
        if options.get("include_usage") is True:
            return
        raw = bytes(memoryview((job.raws or {})["stream_options"]))
        job.put["stream_options"] = msgspec.Raw(edit(raw, {"include_usage": True}))
    elif options is None:
        job.put["stream_options"] = {"include_usage": True}
    else:
        return  # not an object: the engine will say what is wrong with it
    job.hide_usage = True


def _expected_output(document: Document) -> int:
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if name not in document.raws:
            continue
        value = document[name]
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return min(value, EXPECTED_OUTPUT_TOKENS)
    return EXPECTED_OUTPUT_TOKENS


def _refuses(prefill: Backend, exchange: Exchange) -> str | None:
    """Why this request's prefill cannot be handed over by that backend; None when it can."""
    transfer = transfer_of(prefill.engine, prefill.kv_transfer, prefill.kv_store)
    if transfer is None:
        return f"{prefill.name} cannot hand over"
    asked = {name: exchange.members[name] for name in capabilities.MEMBERS if name in exchange.members}
    return transfer.refuses(cast("Api", exchange.api), asked)


def cache_word(before: SessionView | None) -> str:
    """``x-homeport-cache``: what a request found when it came, and for how long an answer keeps it there."""
    if before is None or not before.warm or before.keep_s is None:
        return "cold"
    return f"warm; keep={round(before.keep_s)}"
