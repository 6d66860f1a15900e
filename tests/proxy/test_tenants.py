"""Tenants: keys, limits, scopes; a counter never leaks, whatever ends a request."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from homeport_proxy import config as cfg
from homeport_proxy.admit import Admission, hash_of
from homeport_proxy.errors import ProxyError
from homeport_proxy.exchange import Caller, Exchange, TokenUsage
from homeport_proxy.limits import Bucket, LocalLimits, TenantLimit
from proxy.control_kit import Clock


def tenants(text: str, base: Path | None = None) -> list[cfg.Tenant]:
    return cfg.parse(
        f"regions: {{r: {{backends: [{{name: a, url: 'http://h'}}]}}}}\ntenants: [{text}]", base=base
    ).tenants


def exchange(tenant: str, tokens: int = 10) -> Exchange:
    headers: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict())
    made = Exchange("r1", "chat", "POST", "/v1/chat/completions", "", headers, "127.0.0.1", 0.0, 0.0)
    made.caller = Caller(name=tenant)
    made.prompt_tokens_estimate = tokens
    return made


def headers(key: str | None, name: str = "authorization") -> CIMultiDict[str]:
    if key is None:
        return CIMultiDict()
    return CIMultiDict({name: f"Bearer {key}" if name == "authorization" else key})


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> Admission:
    monkeypatch.setenv("KEY_ACME", "sk-acme")
    monkeypatch.setenv("KEY_ZETA", "sk-zeta")
    text = "{name: acme, key_env: KEY_ACME, weight: 2}, {name: zeta, key_env: KEY_ZETA, cache_scope: fleet}"
    return Admission(tenants(text), LocalLimits(Clock()))


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
def test_a_key_names_its_tenant(acme: Admission, name: str) -> None:
    assert acme.caller(headers("sk-acme", name)).name == "acme"
    assert acme.caller(headers("sk-zeta", name)).name == "zeta"


@pytest.mark.parametrize("key", [None, "", "sk-acm", "sk-acmee", "SK-ACME", "\udcff", hash_of("sk-acme").hex()])
def test_any_other_key_is_refused_alike(acme: Admission, key: str | None) -> None:
    with pytest.raises(ProxyError) as caught:
        acme.caller(headers(key))
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_without_tenants_everybody_is_nobody() -> None:
    assert Admission([], LocalLimits(Clock())).caller(headers("whatever")) == Caller()


def test_scopes_salt_the_cache(acme: Admission) -> None:
    salt = acme.caller(headers("sk-acme")).cache_salt
    assert salt
    assert "acme" not in salt
    assert acme.caller(headers("sk-zeta")).cache_salt is None
    again = Admission(tenants("{name: acme, key_env: KEY_ACME}"), LocalLimits(Clock()))
    assert again.caller(headers("sk-acme")).cache_salt == salt, "the same after a restart and on every proxy"


def test_keys_files_hold_hashes_and_are_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# comment\nsha256:{hash_of('one').hex()} laptop\n{hash_of('two').hex()}\n")
    admission = Admission(tenants("{name: t, keys_file: keys}", tmp_path), LocalLimits(Clock()))
    assert admission.caller(headers("one")).name == admission.caller(headers("two")).name == "t"
    assert not admission.reload_keys()

    file.write_text(f"sha256:{hash_of('three').hex()}\n")
    os.utime(file, ns=(1, 1))
    assert admission.reload_keys()
    assert admission.caller(headers("three")).name == "t"
    with pytest.raises(ProxyError):
        admission.caller(headers("one"))

    file.write_text("sk-plain-key\n")
    os.utime(file, ns=(2, 2))
    admission.reload_keys()
    assert admission.caller(headers("three")).name == "t", "the last good hashes stay"
    assert "never the key" in admission.faults[0]
    assert "sk-plain-key" not in caplog.text + str(admission.faults)

    file.write_text(f"sha256:{hash_of('four').hex()}\n")
    os.utime(file, ns=(3, 3))
    admission.reload_keys()
    assert admission.faults == []


async def test_concurrency_is_refused_at_once_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K", "k")
    limits = LocalLimits(Clock())
    admission = Admission(tenants("{name: t, key_env: K, max_concurrent: 1}"), limits)
    async with admission.enter(exchange("t")):
        with pytest.raises(ProxyError) as caught:
            async with admission.enter(exchange("t")):
                pass
        assert (caught.value.status, caught.value.code) == (429, "rate_limited")
        assert caught.value.retry_after_s
    with pytest.raises(ZeroDivisionError):
        async with admission.enter(exchange("t")):
            raise ZeroDivisionError
    assert limits.open_requests == {}


async def test_a_request_cancelled_at_any_await_leaves_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K", "k")
    limits = LocalLimits(Clock())
    admission = Admission(tenants("{name: t, key_env: K, max_concurrent: 5}"), limits)

    async def request() -> None:
        async with admission.enter(exchange("t")):
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    for steps in range(8):
        task = asyncio.create_task(request())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(5):
            await asyncio.sleep(0)
        assert limits.open_requests == {}, steps


@pytest.mark.parametrize(
    ("usage", "ok", "charged"),
    [
        (TokenUsage(100, 0, 50), True, 150),
        (TokenUsage(None, None, None), True, 10),
        (TokenUsage(None, None, None), False, 0),
        (TokenUsage(None, None, 7), True, 17),
    ],
)
async def test_tokens_are_charged_as_used(
    monkeypatch: pytest.MonkeyPatch, usage: TokenUsage, ok: bool, charged: int
) -> None:
    monkeypatch.setenv("K", "k")
    clock = Clock()
    limits = LocalLimits(clock)
    admission = Admission(tenants("{name: t, key_env: K, tokens_per_minute: 1000}"), limits)
    async with admission.enter(made := exchange("t", 10)):
        made.usage, made.status = usage, 200 if ok else 503
    limit = TenantLimit(None, 1000)
    assert limits.take_now("t", 1000 - charged, limit) is None
    refusal = limits.take_now("t", 60, limit)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(60 * 60 / 1000)


@given(st.integers(1, 10**6), st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 120)), max_size=40))
def test_no_minute_gives_more_than_two_minutes_worth_and_nobody_starves(
    per_minute: int, requests: list[tuple[int, float]]
) -> None:
    bucket, now_s, taken, first_s = Bucket(per_minute, 0.0), 0.0, 0.0, 0.0
    for tokens, pause_s in requests:
        now_s += pause_s
        tokens = min(tokens, per_minute)
        wait_s = bucket.take(tokens, now_s)
        if wait_s is None:
            taken += tokens
        else:
            assert wait_s <= 60.0 + 1e-6
            assert bucket.take(tokens, now_s + wait_s + 1e-3) is None, "what was promised is there"
            now_s += wait_s + 1e-3
            taken += tokens
        assert taken <= per_minute * (1 + (now_s - first_s) / 60.0) + 1e-3


def test_a_request_larger_than_a_minutes_worth_can_go() -> None:
    bucket = Bucket(100, 0.0)
    assert bucket.take(1000, 0.0) is None
    wait_s = bucket.take(1, 0.0)
    assert wait_s is not None
    assert wait_s > 60
