"""What is tried again and what is not, over one engine and over two; nothing generates twice, nothing is orphaned."""

from __future__ import annotations

import asyncio
import json
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar, cast

import aiohttp
import pytest
from aiohttp import web

from homeport_engines.base import EngineAddress, HandoffParams
from homeport_engines.base import Handoff as Pair
from homeport_engines.vllm.wire import TRANSFERS
from homeport_proxy.app import Proxy
from homeport_proxy.handoff import Held
from homeport_proxy.patience import Patience, Watch
from homeport_proxy.upstream import Connection
from proxy.scripted_engines import (
    NIXL,
    USAGE,
    Handler,
    RawEngine,
    ScriptedEngine,
    Seen,
    backends,
    chat,
    chunk,
    eventually,
    pair,
    proxy_for,
    reset,
    stream,
)

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello " * 300}]}
PATH = "/v1/chat/completions"
T = TypeVar("T")


def idle(proxy: Proxy) -> bool:
    """Nothing is left of any request."""
    pipeline = proxy.pipeline
    busy = sum(pool.busy_count for pool in pipeline.engines.pools())
    status = [
        place for place in proxy.control.places() if place.requests or place.prefill_tokens or place.decode_tokens
    ]
    return busy == 0 and proxy.control.placer.open_tickets == 0 and pipeline.desk.orphans.count == 0 and not status


def answering(status: int, **headers: str) -> Handler:
    async def handler(request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.json_response({"error": {"message": f"said {status}"}}, status=status, headers=headers)

    return handler


async def post(url: str, body: dict[str, Any], path: str = PATH) -> tuple[int, dict[str, str], str]:
    async with aiohttp.request("POST", url + path, json=body) as answer:
        return answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.text()


@pytest.mark.parametrize("status", [429, 502, 503])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_refusal_is_tried_on_one_other_backend(status: int, streamed: bool) -> None:
    bad = await ScriptedEngine(answering(status, **{"retry-after": "3"})).start()
    good = await ScriptedEngine(chat).start()
    async with proxy_for(backends(bad, good)) as (url, proxy):
        words = set()
        for number in range(6):
            body = BODY | {"stream": streamed, "messages": [{"role": "user", "content": f"{number} " * 50}]}
            code, headers, _ = await post(url, body)
            assert code == 200
            assert headers["x-homeport-backend"] == "b1"
            words.add(headers["x-homeport-decision"])
        assert "failover" in words or not bad.seen
        await eventually(lambda: idle(proxy))
    assert len(good.seen) == 6
    await bad.stop()
    await good.stop()


async def test_if_all_refuse_the_last_answer_passes_through() -> None:
    one = await ScriptedEngine(answering(503, **{"retry-after": "7"})).start()
    two = await ScriptedEngine(answering(429, **{"retry-after": "9"})).start()
    async with proxy_for(backends(one, two)) as (url, proxy):
        code, headers, text = await post(url, BODY)
        assert (code, headers["retry-after"]) in ((503, "7"), (429, "9"))
        assert f"said {code}" in text
        assert len(one.seen) == len(two.seen) == 1
        await eventually(lambda: idle(proxy))
    await one.stop()
    await two.stop()


async def test_an_engines_refusal_outlives_connections_that_are_refused() -> None:
    busy, gone = await ScriptedEngine(answering(429)).start(), await ScriptedEngine(chat).start()
    async with proxy_for(backends(busy, gone)) as (url, proxy):
        await gone.stop()
        for number in range(3):
            code, _, text = await post(url, BODY | {"user": str(number)})
            assert code == 429
            assert "said 429" in text
        await eventually(lambda: idle(proxy))
    await busy.stop()


@pytest.mark.parametrize("status", [400, 404, 422, 500])
async def test_other_answers_pass_through_untried(status: int) -> None:
    one, two = await ScriptedEngine(answering(status)).start(), await ScriptedEngine(answering(status)).start()
    async with proxy_for(backends(one, two)) as (url, proxy):
        code, _, text = await post(url, BODY)
        assert code == status
        assert f"said {status}" in text
        assert len(one.seen) + len(two.seen) == 1
        assert idle(proxy)
    await one.stop()
    await two.stop()


async def test_a_reset_connection_is_tried_elsewhere_once() -> None:
    async def resetting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        reset(writer)

    bad = await RawEngine(resetting).start()
    good = await ScriptedEngine(chat).start()
    config = {"regions": {"local": {"backends": [{"name": "bad", "url": bad.url}, {"name": "good", "url": good.url}]}}}
    async with proxy_for(config) as (url, proxy):
        for number in range(4):
            code, headers, _ = await post(url, BODY | {"user": str(number)})
            assert (code, headers["x-homeport-backend"]) == (200, "good")
        await eventually(lambda: idle(proxy))
    await bad.stop()
    await good.stop()


async def test_no_engine_takes_the_connection() -> None:
    engine = await ScriptedEngine(chat).start()
    async with proxy_for(backends(engine)) as (url, proxy):
        await engine.stop()
        code, headers, text = await post(url, BODY)
        assert code == 503
        assert json.loads(text)["error"]["code"] == "no_backend"
        assert int(headers["retry-after"]) >= 1
        code, headers, text = await post(url, BODY | {"max_tokens": 5}, "/v1/messages")
        assert code == 529
        assert json.loads(text)["error"]["type"] == "overloaded_error"
        assert headers["retry-after"]
        assert idle(proxy)


async def test_an_engine_that_resets_every_time_is_502() -> None:
    async def resetting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        reset(writer)

    bad = await RawEngine(resetting).start()
    async with proxy_for(backends(bad)) as (url, proxy):  # type: ignore[arg-type]
        code, _, text = await post(url, BODY)
        assert code == 502
        assert json.loads(text)["error"]["code"] == "upstream_error"
        assert idle(proxy)
    await bad.stop()


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_silent_engine_is_504_and_never_tried_again(streamed: bool) -> None:
    async def silent(request: web.Request, seen: Seen) -> web.StreamResponse:
        if seen.body.get("stream"):
            return await stream(request, [b": hello\n\n", b"x"], pause=asyncio.Event())
        await asyncio.Event().wait()
        raise AssertionError

    one, two = await ScriptedEngine(silent).start(), await ScriptedEngine(silent).start()
    timeouts = {"first_token_s": 0.2, "idle_s": 0.2}
    async with proxy_for(backends(one, two, timeouts=timeouts)) as (url, proxy):
        proxy.control.account.bytes_per_token._ratio["m"] = 64.0
        if not streamed:
            # unstreamed, only an engine that is known to be down is given up
            for member in proxy.control.fleet.members.values():
                proxy.control.health.state = lambda _: "down"  # type: ignore[method-assign,assignment]
                assert member
        code, headers, text = await post(url, BODY | {"stream": streamed})
        if streamed:
            # the comment was relayed, so the failure is told in the stream
            assert code == 200
            assert "upstream_timeout" in text
            assert "[DONE]" not in text
        else:
            assert code == 504
            assert headers["x-should-retry"] == "false"
        assert len(one.seen) + len(two.seen) == 1
        await eventually(lambda: idle(proxy))
    await one.stop()
    await two.stop()


async def test_an_unstreamed_answer_may_take_its_time() -> None:
    async def slow(request: web.Request, seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(1.0)
        return await chat(request, seen)

    engine = await ScriptedEngine(slow).start()
    async with proxy_for(backends(engine, timeouts={"first_token_s": 0.1, "idle_s": 0.1})) as (url, _):
        code, _, _ = await post(url, BODY)
        assert code == 200
    await engine.stop()


async def test_an_engine_that_goes_down_is_given_up_soon_however_long_a_stream_may_idle() -> None:
    given_up = asyncio.Event()

    class Silent:
        def fail(self, why: str, *, timed_out: bool) -> None:
            given_up.set()

    answers = iter([False, False, True])
    patience = Patience(Watch(), cast("Connection", Silent()), 0.01, lambda: next(answers), idle_s=3600)
    async with asyncio.timeout(30):
        await given_up.wait()
    patience.stop()


async def test_silence_after_the_first_token_ends_the_stream() -> None:
    async def stalls(request: web.Request, seen: Seen) -> web.StreamResponse:
        return await stream(request, [chunk("a"), chunk("b")], pause=asyncio.Event())

    engine = await ScriptedEngine(stalls).start()
    async with proxy_for(backends(engine, timeouts={"idle_s": 0.2})) as (url, proxy):
        _, _, text = await post(url, BODY | {"stream": True})
        assert "upstream_timeout" in text
        await eventually(lambda: engine.open == 0 and idle(proxy))
    await engine.stop()


# two engines


@pytest.mark.parametrize("fault", ["refused", "reset", "500", "503", "429", "not json"])
async def test_a_failed_prefill_makes_the_decode_engine_prefill(fault: str) -> None:
    async def bad(request: web.Request, seen: Seen) -> web.StreamResponse:
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
        if fault == "not json":
            return web.Response(text="hello", content_type="application/json")
        return web.json_response({"error": "x"}, status=int(fault) if fault.isdigit() else 500)

    prefill, decode = await ScriptedEngine(bad).start(), await ScriptedEngine(chat).start()
    async with proxy_for(pair(prefill, decode)) as (url, proxy):
        if fault == "refused":
            await prefill.stop()
        code, headers, text = await post(url, BODY)
        assert code == 200, text
        assert headers["x-homeport-backend"] == "d0"
        assert "x-homeport-prefill-backend" not in headers
        assert headers["x-homeport-decision"] == "placed"
        assert "p0" in headers["x-homeport-reason"] or "prefill" in headers["x-homeport-reason"]
        assert "kv_transfer_params" not in decode.seen[0].body
        assert json.loads(text)["usage"] == USAGE
        await eventually(lambda: idle(proxy))
    await prefill.stop()
    await decode.stop()


async def test_the_prefill_engines_4xx_is_the_answer() -> None:
    prefill, decode = await ScriptedEngine(answering(400)).start(), await ScriptedEngine(chat).start()
    async with proxy_for(pair(prefill, decode)) as (url, proxy):
        code, _, text = await post(url, BODY)
        assert code == 400
        assert "said 400" in text
        assert not decode.seen
        assert idle(proxy)
    await prefill.stop()
    await decode.stop()


@pytest.mark.parametrize("status", [429, 503, 502])
async def test_a_retry_takes_unused_parameters_along_or_prefills_afresh(status: int) -> None:
    """429 and 503 turn a request away unread; behind a 502 somebody may have read the blocks."""
    prefill = await ScriptedEngine(chat).start()
    bad, good = await ScriptedEngine(answering(status)).start(), await ScriptedEngine(chat).start()
    config = pair(prefill, bad)
    nixl = {"role": "decode", "kv_transfer": "nixl"}
    config["regions"]["local"]["backends"].append({"name": "d1", "url": good.url, **nixl})
    async with proxy_for(config) as (url, proxy):
        for number in range(4):
            body = BODY | {"messages": [{"role": "user", "content": f"{number} " * 600}]}
            code, headers, _ = await post(url, body)
            assert (code, headers["x-homeport-backend"]) == (200, "d1")
        await eventually(lambda: idle(proxy))
    asked, turned_away = len(good.seen), len(bad.seen)
    assert turned_away, "the sessions begin at both"
    assert all("kv_transfer_params" in seen.body for seen in good.seen)
    assert len(prefill.seen) == (asked + turned_away if status == 502 else asked)
    for engine in (prefill, bad, good):
        await engine.stop()


async def test_parameters_that_nobody_takes_are_given_back() -> None:
    """All decode engines are busy: the one that refused is asked once more, so that the prefill engine may free."""
    prefill, decode = await ScriptedEngine(chat).start(), await ScriptedEngine(answering(503)).start()
    async with proxy_for(pair(prefill, decode)) as (url, proxy):
        code, _, _ = await post(url, BODY | {"messages": [{"role": "user", "content": "word " * 600}]})
        assert code == 503
        await eventually(lambda: idle(proxy))
        assert len(prefill.seen) == 1
        assert [seen.body["kv_transfer_params"] for seen in decode.seen] == [NIXL, NIXL]
        assert "-free-" in decode.seen[-1].headers["x-request-id"]
    await prefill.stop()
    await decode.stop()


def test_parameters_are_not_used_after_their_lease() -> None:
    address = EngineAddress("p0", "http://x")
    held = Held(Pair("t", address, address), TRANSFERS["nixl"], HandoffParams({}, None, None), expires_s=100.0)
    assert held.usable(99.0)
    assert not held.usable(100.0)


@pytest.mark.parametrize(("lease_s", "handed"), [(30.0, True), (1e-6, False)])
async def test_an_engines_own_lease_bounds_its_parameters(lease_s: float, handed: bool) -> None:
    """Behind the lease a decode engine reads freed blocks and says nothing of it: it prefills by itself instead."""
    prefill, decode = await ScriptedEngine(chat).start(), await ScriptedEngine(chat).start()
    config = pair(prefill, decode)
    config["regions"]["local"]["backends"][0]["kv_lease_s"] = lease_s
    async with proxy_for(config) as (url, _):
        code, _, _ = await post(url, BODY | {"messages": [{"role": "user", "content": "word " * 600}]})
    assert code == 200
    assert ("kv_transfer_params" in decode.seen[0].body) is handed
    for engine in (prefill, decode):
        await engine.stop()


@pytest.mark.parametrize("fault", ["none", "prefill 500", "prefill 400", "prefill slow", "decode 500"])
async def test_both_legs_at_once(fault: str) -> None:
    """SGLang's order: one room for both, the first failure ends the other leg."""
    handed = asyncio.Event()

    async def prefiller(request: web.Request, seen: Seen) -> web.StreamResponse:
        if fault in ("prefill 500", "prefill 400"):
            return web.json_response({"error": {"message": "no"}}, status=int(fault[-3:]))
        if fault == "prefill slow":
            await asyncio.sleep(0.1)
        handed.set()
        return web.json_response({"usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 40}}})

    async def decoder(request: web.Request, seen: Seen) -> web.StreamResponse:
        if fault == "decode 500":
            return web.json_response({"error": {"message": "said 500"}}, status=500)
        if "bootstrap_room" in seen.body:
            await handed.wait()
        return await chat(request, seen)

    prefill, decode = await ScriptedEngine(prefiller).start(), await ScriptedEngine(decoder).start()
    config = pair(prefill, decode)
    for backend in config["regions"]["local"]["backends"]:
        backend |= {"engine": "sglang", "kv_transfer": "bootstrap", "bootstrap_port": 9000}
    async with proxy_for(config) as (url, proxy):
        body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
        code, headers, text = await post(url, body)
        if fault in ("none", "prefill slow"):
            assert code == 200
            assert headers["x-homeport-prefill-backend"] == "p0"
            assert '"cached_tokens": 40' in text
            assert decode.seen[0].body["bootstrap_room"] == prefill.seen[0].body["bootstrap_room"]
        elif fault == "prefill 500":
            assert code == 200
            assert "bootstrap_room" not in decode.seen[-1].body
            assert '"cached_tokens": 7' in text
        else:
            assert code == int(fault[-3:])
        await eventually(lambda: idle(proxy) and decode.open == 0 and prefill.open == 0)
    await prefill.stop()
    await decode.stop()


# cancellation at every await


@types.coroutine
def cancelling_at(coro: Coroutine[Any, Any, T], step: int, reached: list[bool]) -> Generator[Any, Any, T]:
    """Run ``coro``; cancel its task at its n-th suspension."""
    count = 0
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            future = coro.throw(error) if error is not None else coro.send(value)
        except StopIteration as stop:
            return stop.value
        value = error = None
        count += 1
        if count == step:
            reached.append(True)
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        try:
            value = yield future
        except BaseException as caught:  # whatever is thrown in belongs to the coroutine
            error = caught


def cancel_request_at(proxy: Proxy, step: int, reached: list[bool]) -> Callable[[], None]:
    original = proxy.pipeline.handle

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return await cancelling_at(original(request), step, reached)  # type: ignore[no-any-return,misc]

    proxy.pipeline.handle = handle  # type: ignore[method-assign]
    return lambda: setattr(proxy.pipeline, "handle", original)


async def _slow_prefill(request: web.Request, seen: Seen) -> web.StreamResponse:
    if (seen.body.get("kv_transfer_params") or {}).get("do_remote_decode") or "bootstrap_room" in seen.body:
        await asyncio.sleep(0.02)
    return await chat(request, seen)


async def _slow_decode(request: web.Request, seen: Seen) -> web.StreamResponse:
    await asyncio.sleep(0.02)
    return await chat(request, seen)


def _tenants(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"tenants": [{"name": "t", "key_env": "SWEEP_KEY", "max_concurrent": 1}]}


PATHS: dict[str, Callable[[ScriptedEngine, ScriptedEngine], dict[str, Any]]] = {
    "one engine": lambda a, b: backends(b),
    "tenant": lambda a, b: _tenants(backends(b)),
    "nixl": pair,
    "both at once": lambda a, b: {
        "regions": {
            "local": {
                "defaults": {"engine": "sglang", "kv_transfer": "bootstrap", "bootstrap_port": 9000},
                "backends": [
                    {"name": "p0", "url": a.url, "role": "prefill"},
                    {"name": "d0", "url": b.url, "role": "decode"},
                ],
            }
        },
        "disaggregation": {"min_uncached_tokens": 1},
    },
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", list(PATHS))
async def test_cancelled_at_every_await_nothing_is_left(
    path: str, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_KEY", "secret")
    prefill, decode = await ScriptedEngine(_slow_prefill).start(), await ScriptedEngine(_slow_decode).start()
    async with proxy_for(PATHS[path](prefill, decode)) as (url, proxy):
        headers = {"authorization": "Bearer secret"}
        steps = 0
        for step in range(1, 200):
            prefilled = len([seen for seen in prefill.seen if not seen.aborted])
            decoded = len([seen for seen in decode.seen if seen.body.get("kv_transfer_params") == NIXL])
            reached: list[bool] = []
            restore = cancel_request_at(proxy, step, reached)
            body = BODY | {"stream": streamed, "messages": [{"role": "user", "content": f"{step} " * 400}]}
            try:
                async with aiohttp.request("POST", url + PATH, json=body, headers=headers) as answer:
                    await answer.read()
                assert not reached or answer.status == 200
            except aiohttp.ClientError:
                assert reached
            restore()
            await eventually(lambda: idle(proxy) and prefill.open == 0 and decode.open == 0)
            if path == "nixl":
                done = len([seen for seen in prefill.seen if not seen.aborted])
                asked = len([seen for seen in decode.seen if seen.body.get("kv_transfer_params") == NIXL])
                assert asked - decoded == done - prefilled, f"step {step}: every finished prefill is taken over"
            if not reached:
                steps = step
                break
        assert steps > 2, "the sweep ends because a request went through, and it had something to cancel"
        left = [task.get_name() for task in asyncio.all_tasks() if "handoff" in repr(task) or "pipeline" in repr(task)]
        assert not left
    await prefill.stop()
    await decode.stop()
