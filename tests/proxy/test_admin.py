"""The admin API: who may ask, what is said; metrics, ledger, dashboard, reload. On real sockets."""

from __future__ import annotations

import asyncio
import csv
import io
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from homeport_proxy import config as cfg
from homeport_proxy.control import Control
from homeport_proxy.exchange import Caller, Exchange, Identity, LegRecord, State, TokenUsage
from homeport_proxy.observe.guard import why_not_local
from homeport_proxy.routing.views import Cost, Decision, Outcome, PlaceSpec, PrefixKeys, RequestView, Word
from proxy.control_kit import StubEngine, engine, serving, until


@asynccontextmanager
async def proxy(stub: StubEngine, extra: str = "", path: Path | None = None) -> AsyncIterator[tuple[Control, str]]:
    """A control plane with its routes served."""
    text = f"regions: {{r: {{backends: [{{name: d0, url: '{stub.url}'}}]}}}}\nlog: {{level: error}}\n{extra}"
    if path is not None:
        path.write_text(text)  # noqa: ASYNC240 - a few bytes of a test's own
    control = Control(cfg.load(path) if path else cfg.parse(text), config_path=path)
    await control.start()
    app = web.Application()
    app.add_routes(control.routes())
    try:
        async with serving(app) as url:
            yield control, url
    finally:
        await control.stop()


def exchange(request_id: str = "r1", tenant: str = "", **fields: object) -> Exchange:
    """A finished exchange."""
    headers: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict({"authorization": "Bearer secret"}))
    made = Exchange(request_id, "chat", "POST", "/v1/chat/completions", "", headers, "127.0.0.1", 10.0, 1.7e9)
    made.caller = Caller(name=tenant)
    made.model, made.status, made.body = "m", 200, b"x" * 400
    made.identity = Identity("5e551017", "x-session-id")
    made.region = "r"
    made.decision = Decision("d0", Word.HOME, "home", expected_cached_tokens=64, costs={"d0": Cost(0.5)})
    made.legs = [LegRecord("d0", "serve", "r1-0", State.DONE, 200, None, 10.01, 10.2, 10.2, 10.9)]
    made.usage = TokenUsage(100, 64, 7)
    made.outcome = Outcome(100, 64, {"new": 30, "evicted": 6})
    made.stream, made.first_token_s, made.ended_s, made.queued_s = True, 10.2, 10.9, 0.001
    for name, value in fields.items():
        setattr(made, name, value)
    return made


# who may ask


@pytest.mark.parametrize(
    ("peer", "headers", "ok"),
    [
        ("127.0.0.1", {"host": "127.0.0.1:8080"}, True),
        ("127.0.0.1", {"host": "localhost:8080"}, True),
        ("::1", {"host": "[::1]:8080"}, True),
        ("::ffff:127.0.0.1", {"host": "localhost"}, True),
        ("127.0.0.1", {"host": "localhost:8080", "origin": "http://localhost:8080"}, True),
        ("10.0.0.7", {"host": "localhost"}, False),
        (None, {"host": "localhost"}, False),
        ("127.0.0.1", {"host": "evil.example"}, False),
        ("127.0.0.1", {"host": "127.0.0.1.evil.example"}, False),
        ("127.0.0.1", {"host": ""}, False),
        ("127.0.0.1", {"host": "[::1"}, False),
        ("127.0.0.1", {}, False),
        ("127.0.0.1", {"host": "localhost", "forwarded": "for=1.2.3.4"}, False),
        ("127.0.0.1", {"host": "localhost", "X-Forwarded-For": "1.2.3.4"}, False),
        ("127.0.0.1", {"host": "localhost", "x-forwarded-proto": "https"}, False),
        ("127.0.0.1", {"host": "localhost", "origin": "http://evil.example"}, False),
        ("127.0.0.1", {"host": "localhost:8080", "origin": "http://localhost:9999"}, False),
        ("127.0.0.1", {"host": "localhost", "origin": "null"}, False),
    ],
)
def test_without_a_key_only_this_machine_may_ask(peer: str | None, headers: dict[str, str], ok: bool) -> None:
    assert (why_not_local(peer, CIMultiDict(headers)) is None) is ok


PATHS = [
    ("GET", "/homeport/v1/status"),
    ("GET", "/homeport/v1/sessions/x"),
    ("POST", "/homeport/v1/sessions/x/finish"),
    ("GET", "/homeport/v1/requests/x"),
    ("GET", "/homeport/v1/decisions"),
    ("POST", "/homeport/v1/backends/d0/drain"),
    ("POST", "/homeport/v1/backends/d0/undrain"),
    ("GET", "/homeport/v1/ledger"),
]


async def test_every_admin_path_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN", "s3cret")
    async with engine() as stub, aiohttp.ClientSession() as http:
        async with proxy(stub) as (_, url):
            for method, path in PATHS:
                async with http.request(method, url + path, headers={"Host": "evil.example"}) as answer:
                    assert answer.status == 403, path
                    assert (await answer.json())["error"]["code"] == "forbidden"
                async with http.request(method, url + path) as answer:
                    assert answer.status in (200, 404), path
            async with http.get(url + "/homeport", headers={"Host": "evil.example"}) as answer:
                assert answer.status == 403
        async with proxy(stub, "admin: {key_env: ADMIN}") as (_, url):
            for method, path in PATHS:
                for key in ("", "Bearer ", "Bearer s3cre", "Bearer s3crett", "Basic s3cret"):
                    async with http.request(method, url + path, headers={"authorization": key}) as answer:
                        assert answer.status == 401, (path, key)
                        assert "s3cret" not in await answer.text()
                for header in ({"authorization": "Bearer s3cret"}, {"x-api-key": "s3cret"}):
                    async with http.request(method, url + path, headers=header) as answer:
                        assert answer.status in (200, 404), path


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", "/homeport/v1/status", "GET, HEAD"),
        ("DELETE", "/homeport/v1/sessions/x", "GET, HEAD"),
        ("GET", "/homeport/v1/sessions/x/finish", "POST"),
        ("GET", "/homeport/v1/backends/d0/drain", "POST"),
        ("POST", "/homeport", "GET, HEAD"),
        ("POST", "/metrics", "GET, HEAD"),
        ("OPTIONS", "/health/live", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_told_the_right_one(method: str, path: str, allow: str) -> None:
    async with engine() as stub, aiohttp.ClientSession() as http, proxy(stub) as (_, url):
        async with http.request(method, url + path) as answer:
            assert (answer.status, answer.headers["allow"]) == (405, allow)
            assert (await answer.json())["error"]["code"] == "invalid_request"
        async with http.request(method, url + "/homeport/v1/nothing") as answer:
            assert answer.status == 404


async def test_health_needs_no_key_and_readiness_follows_the_fleet() -> None:
    async with engine() as stub, aiohttp.ClientSession() as http:
        extra = "health: {interval_s: 0.02}\ntenants: [{name: t, keys_file: /dev/null}]"
        async with proxy(stub, extra) as (control, url):
            async with http.get(url + "/health/live", headers={"Host": "anything"}) as answer:
                assert answer.status == 200
            async with http.get(url + "/health/ready") as answer:
                assert answer.status == 200
            stub.health = 500
            await until(lambda: not control.ready())
            async with http.get(url + "/health/ready") as answer:
                assert answer.status == 503


async def test_a_session_is_finished_by_its_owner_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KA", "a")
    monkeypatch.setenv("KB", "b")
    monkeypatch.setenv("ADMIN", "s3cret")
    extra = "tenants: [{name: a, key_env: KA}, {name: b, key_env: KB}]\nadmin: {key_env: ADMIN}"
    async with engine() as stub, aiohttp.ClientSession() as http, proxy(stub, extra) as (control, url):
        control.account.done(exchange(tenant="a"))
        assert control.routers["r"].adopt("5e551017", "d0", 0.0)
        finish = url + "/homeport/v1/sessions/5e551017/finish"
        for key, status in (("b", 401), ("wrong", 401), ("a", 200), ("a", 200)):
            async with http.post(finish, headers={"authorization": f"Bearer {key}"}) as answer:
                assert answer.status == status, key


# what is said


async def test_status_has_the_promised_shape() -> None:
    async with engine() as stub, aiohttp.ClientSession() as http, proxy(stub) as (control, url):
        control.account.done(exchange())
        async with http.get(url + "/homeport/v1/status") as answer:
            status = await answer.json()
    assert set(status) >= {"version", "region", "regions", "sessions", "savings", "degraded"}
    region = status["regions"]["r"]
    assert (region["kind"], region["up"], region["rtt_ms"]) == ("local", True, 0.0)
    (backend,) = region["backends"]
    assert set(backend) >= {
        *("name", "url", "role", "engine", "state", "inflight", "sessions", "hit_ratio", "index", "spec_acceptance"),
    }
    assert (backend["name"], backend["role"], backend["engine"], backend["state"]) == ("d0", "mixed", "vllm", "up")
    assert backend["inflight"] == {"requests": 0, "prefill_tokens": 0, "decode_tokens": 0}
    assert backend["hit_ratio"] is None, "unknown is null"
    assert backend["spec_acceptance"] is None
    assert status["savings"]["cached_tokens"] == 64


CONTRACT_METRICS = {
    "homeport_requests_total": {"api", "model", "tenant", "decision", "code"},
    "homeport_prompt_tokens_total": {"model", "tenant", "kind"},
    "homeport_output_tokens_total": {"model", "tenant"},
    "homeport_cache_miss_tokens_total": {"model", "cause"},
    "homeport_ttft_seconds": set(),
    "homeport_itl_seconds": set(),
    "homeport_overhead_seconds": set(),
    "homeport_queue_seconds": set(),
    "homeport_backend_inflight_tokens": {"backend", "phase"},
    "homeport_backend_up": {"backend"},
    "homeport_sessions": set(),
    "homeport_session_moves_total": {"reason"},
    "homeport_kv_transfers_total": {"backend", "outcome"},
    "homeport_index_confidence": {"backend"},
    "homeport_wanted_backends": {"pool", "role"},
}


async def test_metrics_are_those_promised_with_bounded_labels() -> None:
    async with engine() as stub, aiohttp.ClientSession() as http, proxy(stub) as (control, url):
        control.account.done(exchange(kv_transfer="ok"))
        moved = Decision("d0", Word.MOVED, "home d9 is draining")
        control.account.done(exchange("r2", model="made-up-by-a-client", decision=moved))
        control.account.done(exchange("r3", usage=TokenUsage(50, None, 3), outcome=None, error="client_closed"))
        control.account.gap(0.02)
        async with http.get(url + "/metrics") as answer:
            assert answer.content_type == "text/plain"
            text = await answer.text()
    for name, labels in CONTRACT_METRICS.items():
        assert f"# TYPE {name} " in text
        line = re.search(rf"^{name}(?:_bucket)?(?:\{{(.*?)\}})? ", text, re.M)
        assert line, name
        found = set(re.findall(r'(\w+)="', line.group(1) or "")) - {"le"}
        assert found == labels, name
    assert "homeport_spec_decode_acceptance" in text
    assert "made-up-by-a-client" not in text
    assert 'homeport_prompt_tokens_total{model="m",tenant="",kind="unknown"} 50' in text
    assert 'homeport_cache_miss_tokens_total{model="m",cause="evicted"} 6' in text
    assert 'homeport_session_moves_total{reason="draining"} 1' in text
    assert 'decision="home",code="499"} 1' in text
    assert "homeport_itl_seconds_count 1" in text


async def test_misses_sum_with_the_cached_tokens_to_the_prompt() -> None:
    async with engine() as stub, proxy(stub) as (control, _):
        control.account.done(exchange(outcome=Outcome(100, 64, {"new": 30, "evicted": 90})))
        control.account.done(exchange("r2", outcome=None))
        for request_id in ("r1", "r2"):
            summary = control.account.requests.get(request_id)
            assert summary is not None
            causes = summary["miss_causes"]
            assert isinstance(causes, dict)
            assert sum(causes.values()) + 64 == 100


async def test_why_tells_of_one_request_and_shows_no_secret() -> None:
    async with engine() as stub, aiohttp.ClientSession() as http, proxy(stub) as (control, url):
        control.account.done(exchange("r-7"))
        async with http.get(url + "/homeport/v1/requests/r-7") as answer:
            text = await answer.text()
            summary = await answer.json()
        async with http.get(url + "/homeport/v1/requests/unknown") as answer:
            assert answer.status == 404
        async with http.get(url + "/homeport/v1/decisions?limit=5") as answer:
            assert [d["request_id"] for d in (await answer.json())["decisions"]] == ["r-7"]
        for limit in ("0", "x", "-1", "1001", "9" * 30):
            async with http.get(url + f"/homeport/v1/decisions?limit={limit}") as answer:
                assert answer.status == 400
    assert summary["tokens"] == {
        "prompt": 100,
        "cached": 64,
        "expected_cached": 64,
        "output": 7,
        "estimated_prompt": None,
    }
    assert summary["costs"]["d0"]["total_s"] == 0.5
    assert summary["ms"]["first_token"] == pytest.approx(200)
    assert "secret" not in text


async def test_the_ledger_is_given_by_group_as_json_and_csv() -> None:
    extra = "ledger: {prices: {m: {input: 1, output: 2, cache_read: 0.1}}}"
    async with engine() as stub, aiohttp.ClientSession() as http, proxy(stub, extra) as (control, url):
        control.account.done(exchange())
        control.account.done(exchange("r2"))
        control.account.done(exchange("r2"))
        async with http.get(url + "/homeport/v1/ledger?by=tenant,model,day&format=json") as answer:
            (row,) = (await answer.json())["rows"]
        async with http.get(url + "/homeport/v1/ledger?by=model&format=csv") as answer:
            assert answer.content_type == "text/csv"
            (line,) = list(csv.DictReader(io.StringIO(await answer.text())))
        for query in ("by=colour", "format=xml"):
            async with http.get(url + f"/homeport/v1/ledger?{query}") as answer:
                assert answer.status == 400
    assert (row["model"], row["requests"], row["input_tokens"], row["cached_tokens"]) == ("m", 2, 200, 128)
    assert float(row["saved_usd"]) == pytest.approx(128 * 0.9 / 1e6)
    assert (line["model"], line["requests"], line["lost_tokens"]) == ("m", "2", "12")


async def test_drain_and_undrain_name_what_they_do() -> None:
    async with engine() as stub, aiohttp.ClientSession() as http, proxy(stub) as (control, url):
        base = url + "/homeport/v1/backends"
        async with http.post(f"{base}/d0/drain", json={"deadline_s": 5}) as answer:
            assert (await answer.json())["state"] == "draining"
        assert control.health.state(control.fleet.members["d0"]) == "draining"
        async with http.post(f"{base}/d0/drain", data=b"no json") as answer:
            assert answer.status == 200
        async with http.post(f"{base}/d0/drain", json={"deadline_s": "x"}) as answer:
            assert answer.status == 400
        async with http.post(f"{base}/d0/undrain") as answer:
            assert (await answer.json())["state"] == "up"
        async with http.post(f"{base}/d9/drain") as answer:
            assert answer.status == 404
            assert "known are d0" in (await answer.json())["error"]["message"]


async def test_the_dashboard_is_self_contained() -> None:
    async with (
        engine() as stub,
        proxy(stub) as (_, url),
        aiohttp.ClientSession() as http,
        http.get(url + "/homeport") as answer,
    ):
        policy = answer.headers["content-security-policy"]
        page = await answer.text()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?!#)""", page), "nothing is loaded from anywhere"
    assert not re.search(r"\sstyle\s*=|\son\w+\s*=", page), "nothing the policy would refuse"
    assert page.count("https://") == 0


# reload


async def test_a_changed_file_is_taken_and_a_bad_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / "homeport.yaml"
    async with engine() as stub, engine() as second, proxy(stub, "health: {interval_s: 0.05}", path) as (control, _):
        good = path.read_text()
        kept = control.fleet.members["d0"]
        path.write_text(good.replace("name: d0", "nome: d0"))
        os.utime(path, ns=(1, 1))
        await until(control.degraded)
        assert "did you mean 'name'" in control.degraded()[0]
        assert control.fleet.members["d0"] is kept

        path.write_text(good.replace("]}}", f", {{name: d1, url: '{second.url}'}}]}}}}"))
        os.utime(path, ns=(2, 2))
        await until(lambda: "d1" in control.fleet.members)
        await until(lambda: control.health.state(control.fleet.members["d1"]) == "up")
        assert control.fleet.members["d0"] is kept, "what is known of a backend survives"
        assert control.degraded() == []
        assert {place.name for place in control.places()} == {"d0", "d1"}


async def test_a_reload_reaches_what_the_routers_hold(tmp_path: Path) -> None:
    """Shadow policies, the idle time, the bounds of sessions and index."""
    path = tmp_path / "homeport.yaml"
    text = "regions: {r: {backends: [{name: d0, url: 'http://127.0.0.1:1'}]}}\n"
    path.write_text(text)
    control = Control(cfg.load(path), config_path=path)
    router = control.routers["r"]
    places = [PlaceSpec(f"d{i}", f"d{i}", "mixed", frozenset({"m"})) for i in range(2)]
    router.set_places(places)

    def ask(session: str, now_s: float, keys: int = 0) -> None:
        view = RequestView(
            session, "chat", "m", session, 1000, PrefixKeys([hash((session, i)) & (1 << 63) - 1 for i in range(keys)])
        )
        ticket = router.arrive(view, now_s)
        router.due(now_s)
        router.finished(ticket, now_s, prompt_tokens=1000, cached_tokens=0, output_tokens=1, ok=True)

    for number in range(8):
        ask(f"s{number}", float(number), keys=40_000)
    assert router.status(8.0).sessions == 8
    assert router.status(8.0).index_bytes > 2 * 1024 * 1024
    routing = "routing: {shadow: [session], index_mb: 1}\n"
    path.write_text(text + routing + "affinity: {max_sessions: 3, idle_ttl_s: 100}\n")
    assert control.reload()
    assert router.status(8.0).index_bytes <= 1024 * 1024
    for number in range(8):
        ask(f"t{number}", 9.0)
    assert router.status(9.0).sessions == 3
    assert router.status(9.0).shadows["session"].decisions == 8
    ask("u", 200.0)
    assert router.status(200.0).sessions == 1
    control.account.close()


async def test_a_reload_never_opens_the_proxy_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K", "k")
    path = tmp_path / "homeport.yaml"
    tenants = "listen: 0.0.0.0:1\ntenants: [{name: t, key_env: K}]"
    async with engine() as stub, proxy(stub, tenants, path) as (control, _):
        path.write_text(path.read_text().replace("tenants: [{name: t, key_env: K}]", ""))
        assert not control.reload()
        assert not control.admission.open
        assert "add tenants" in (control.reload_fault or "")
        await asyncio.sleep(0)
