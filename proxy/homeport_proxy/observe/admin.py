"""What the proxy says of itself over HTTP: health, metrics, the admin API under ``/homeport/v1/`` and the dashboard."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, cast

import msgspec
from aiohttp import web

from homeport.ledger import GroupBy, Totals
from homeport_proxy.config import ConfigError
from homeport_proxy.errors import ProxyError, method_not_allowed
from homeport_proxy.observe import guard
from homeport_proxy.observe.dashboard import page
from homeport_proxy.observe.prometheus import CONTENT_TYPE
from homeport_proxy.observe.status import backends, status
from homeport_proxy.observe.summary import Summary
from homeport_proxy.routing.views import Cost

if TYPE_CHECKING:
    from homeport_proxy.control import Control

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_NOT_CARRIED: Final = "KV is not carried, each session prefills once at its next home"
MAX_DECISIONS: Final = 1000
PEER_HEADER: Final = "x-homeport-peer"
TRUSTS_PEER_HEADER: Final = web.AppKey("trusts_peer_header", bool)
"""Set on an application that only this proxy's own workers reach: they say who asked them."""


def routes(control: Control) -> list[web.RouteDef]:
    """The routes, to be added to the application that serves clients."""
    api = _Admin(control)
    guarded = api.guarded
    return [
        web.get("/health/live", api.live),
        web.get("/health/ready", api.ready),
        web.get("/metrics", api.metrics),
        web.get("/homeport", api.dashboard),
        web.get("/homeport/", api.dashboard),
        web.get("/homeport/v1/status", guarded(api.status)),
        web.get("/homeport/v1/region", api.region),
        web.get("/homeport/v1/sessions/{digest}", guarded(api.session)),
        web.post("/homeport/v1/sessions/{digest}/finish", api.finish),
        web.get("/homeport/v1/requests/{id}", guarded(api.request)),
        web.get("/homeport/v1/decisions", guarded(api.decisions)),
        web.post("/homeport/v1/backends/{name}/drain", guarded(api.drain)),
        web.post("/homeport/v1/backends/{name}/undrain", guarded(api.undrain)),
        web.get("/homeport/v1/ledger", guarded(api.ledger)),
        web.route("*", "/{unknown:.*}", api.unknown),
    ]


def answer(document: object, code: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A JSON answer that nobody caches."""
    return web.Response(
        status=code,
        body=msgspec.json.encode(document),
        content_type="application/json",
        headers={"cache-control": "no-store", **(headers or {})},
    )


def fault(code: int, word: str, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error answer in the shape of the proxy's other errors."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": word}
    return answer({"error": error}, code, headers)


class _Admin:
    def __init__(self, control: Control) -> None:
        self._control = control

    # who may

    def guarded(self, handler: Handler) -> Handler:
        """The handler behind the admin rule."""

        async def checked(request: web.Request) -> web.StreamResponse:
            return self._refusal(request) or await handler(request)

        return checked

    def _refusal(self, request: web.Request) -> web.Response | None:
        try:
            key = self._control.config.admin.key()
        except ConfigError:
            return fault(403, "forbidden", "The admin key is configured but cannot be read; see the log.")
        if key is not None:
            if guard.has_key(request.headers, key):
                return None
            return fault(401, "invalid_api_key", "The admin API needs its key: `Authorization: Bearer KEY`.")
        why = guard.why_not_local(_peer(request), request.headers)
        if why is None:
            return None
        message = f"Without an admin key only this machine may ask: {why}. Configure `admin: {{key_env: NAME}}`."
        return fault(403, "forbidden", message)

    def _tenant(self, request: web.Request) -> str | None:
        try:
            return self._control.admission.caller(request.headers).name
        except ProxyError:
            return None

    # health and metrics

    async def live(self, _: web.Request) -> web.Response:
        return answer({"status": "live"})

    async def ready(self, _: web.Request) -> web.Response:
        ready = self._control.ready()
        word = "ready" if ready else "stopping" if self._control.stopping else "no usable backend"
        return answer({"status": word}, 200 if ready else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """Open where the proxy is; with tenants only to the admin key or this machine, for it names them."""
        if not self._control.admission.open:
            local = guard.why_not_local(_peer(request), request.headers) is None
            if not local and (refusal := self._refusal(request)) is not None:
                return refusal
        self._control.account.book()
        text = self._control.metrics.registry.render()
        return web.Response(body=text.encode(), headers={"content-type": CONTENT_TYPE})

    async def unknown(self, request: web.Request) -> web.Response:
        here = request.match_info.route.resource
        pages = [page for page in request.app.router.resources() if page is not here]
        allowed = set[str]().union(*[(await page.resolve(request))[1] for page in pages])
        if allowed:
            refusal = method_not_allowed(request.method, allowed)
            return fault(refusal.status, refusal.code, refusal.message, refusal.headers)
        message = f"Nothing is served for {request.method} at this path; the proxy's own API is below /homeport/v1/."
        return fault(404, "not_found", message)

    # the fleet

    async def status(self, _: web.Request) -> web.Response:
        return answer(status(self._control, await self._totals()))

    async def region(self, request: web.Request) -> web.Response:
        """What a peer's proxy asks: the load here. For whoever may send requests; backends only for admins."""
        if not self._control.admission.open and self._tenant(request) is None:
            refusal = self._refusal(request)
            if refusal is not None:
                return refusal
        report = self._control.report()
        if self._refusal(request) is None:
            report.backends = backends(self._control, report.region)
        return answer(report)

    async def drain(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        options = await _options(request)
        deadline_s = options.get("deadline_s")
        if deadline_s is not None and (not isinstance(deadline_s, int | float) or deadline_s < 0):
            return fault(400, "invalid_request", "`deadline_s` must be seconds, 0 or more.")
        carry = options.get("carry") is True
        if not self._control.drain(name, None if deadline_s is None else float(deadline_s), carry=carry):
            return self._no_backend(name)
        note: str | None = None
        if carry:
            why = self._control.why_not_carried(name)
            note = f"{_NOT_CARRIED}: {why}" if why else "each session takes its KV along when it moves"
        return answer({"name": name, "state": "draining", "note": note})

    async def undrain(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if not self._control.undrain(name):
            return self._no_backend(name)
        member = self._control.fleet.members.get(name)
        return answer({"name": name, "state": self._control.health.state(member) if member else "up"})

    def _no_backend(self, name: str) -> web.Response:
        known = ", ".join([*self._control.fleet.members, *self._control.config.regions])
        return fault(404, "not_found", f"There is no backend or region {name!r}; known are {known}.")

    # sessions and requests

    async def session(self, request: web.Request) -> web.Response:
        view = await self._control.placer.session(request.match_info["digest"])
        if view is None:
            return fault(404, "not_found", "No session of that digest is known; it may have been idle for too long.")
        return answer(view)

    async def finish(self, request: web.Request) -> web.Response:
        """End a session: for the admin, or for the tenant whose session it is."""
        digest = request.match_info["digest"]
        refusal = self._refusal(request)
        tenant = self._tenant(request)
        owner = self._control.account.owner(digest)
        if refusal is not None and (not tenant or tenant != owner):
            return refusal
        if not await self._control.placer.finish_session(digest):
            return fault(404, "not_found", "No session of that digest is known.")
        return answer({"session": digest, "finished": True})

    async def request(self, request: web.Request) -> web.Response:
        summary = self._control.account.requests.get(request.match_info["id"])
        if summary is None:
            return fault(404, "not_found", "No request of that id is remembered; only recent ones are kept.")
        return answer(_readable(summary))

    async def decisions(self, request: web.Request) -> web.Response:
        limit = request.query.get("limit", "100")
        if not limit.isdecimal() or not 0 < int(limit) <= MAX_DECISIONS:
            return fault(400, "invalid_request", f"`limit` must be a whole number from 1 to {MAX_DECISIONS}.")
        latest = self._control.account.requests.latest(int(limit))
        return answer({"decisions": [_readable(summary) for summary in latest]})

    # the ledger

    async def ledger(self, request: web.Request) -> web.Response:
        groups = [name for name in request.query.get("by", "").split(",") if name]
        form = request.query.get("format", "json")
        if form not in ("json", "csv"):
            return fault(400, "invalid_request", "`format` must be json or csv.")
        self._control.account.book()
        try:
            totals = await asyncio.to_thread(self._control.account.totals, cast("list[GroupBy]", groups))
        except ValueError as error:
            return fault(400, "invalid_request", f"`by`: {error}.")
        rows = [total.to_dict() for total in totals]
        if form == "csv":
            return web.Response(text=_csv(rows), content_type="text/csv", headers={"cache-control": "no-store"})
        return answer({"by": groups, "rows": rows})

    async def _totals(self) -> Totals | None:
        self._control.account.book()
        totals = await asyncio.to_thread(self._control.account.totals)
        return totals[0] if totals else None

    # the dashboard

    async def dashboard(self, request: web.Request) -> web.StreamResponse:
        if self._control.config.admin.key_env is None and self._control.config.admin.key_file is None:
            refusal = self._refusal(request)
            if refusal is not None:
                return refusal
        body, headers = page()
        return web.Response(body=body, headers=headers)


def _readable(summary: Summary) -> Summary:
    """A request's summary with the costs of its places by name."""
    costs = cast("dict[str, Cost]", summary["costs"])
    return {**summary, "costs": {place: msgspec.structs.asdict(cost) for place, cost in costs.items()}}


def _peer(request: web.Request) -> str | None:
    if request.app.get(TRUSTS_PEER_HEADER, False):
        return request.headers.get(PEER_HEADER)
    return request.remote


async def _options(request: web.Request) -> dict[str, object]:
    body = await request.read()
    if not body:
        return {}
    try:
        return msgspec.json.decode(body, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _csv(rows: list[dict[str, float | str | int | None]]) -> str:
    out = io.StringIO()
    if rows:
        table = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    return out.getvalue()
