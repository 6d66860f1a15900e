"""Decode-to-prefill read-back: the next turn's prefill engine reads what the last answer left at its decode engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from emulator.emulating import fast
from homeport_engines.emulator import Emulator
from homeport_proxy import handoff
from proxy.scripted_engines import NIXL, ScriptedEngine, Seen, chat, eventually, pair, proxy_for

BACK = NIXL | {"remote_engine_id": "d", "do_remote_prefill": False, "do_remote_decode": True}
TEXT = "The harbour has many berths. " * 200


def readback(config: dict[str, Any]) -> dict[str, Any]:
    for backend in config["regions"]["local"]["backends"]:
        backend["kv_readback"] = True
    return config


def text_of(api: str, answer: str) -> str:
    """What the model said."""
    if api == "chat":
        return str(json.loads(answer)["choices"][0]["message"]["content"])
    frames = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: ")]
    done = next(frame for frame in frames if frame["type"] in ("response.completed", "response.incomplete"))
    return str(done["response"]["output"][-1]["content"][0]["text"])


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_the_next_turn_reads_the_answer_back(api: str) -> None:
    """Over emulated engines: what the model said is not computed again, and every lease ends by being read."""
    path = {"chat": "/v1/chat/completions", "responses": "/v1/responses"}[api]
    name = {"chat": "messages", "responses": "input"}[api]
    settings = fast(kv="nixl", model="m", readback_ttl_s=60.0)
    async with Emulator(settings) as prefill, Emulator(settings) as decode:
        config = readback(pair(prefill, decode))  # type: ignore[arg-type]
        async with proxy_for(config) as (url, proxy), aiohttp.ClientSession() as client:
            history: list[dict[str, Any]] = [{"role": "user", "content": TEXT}]
            for turn in range(3):
                body: dict[str, Any] = {"model": "m", name: history, "ignore_eos": True}
                body |= {"max_tokens": 400} if api == "chat" else {"max_output_tokens": 400, "stream": True}
                async with client.post(url + path, json=body, headers={"x-session-id": "s"}) as answer:
                    text = await answer.text()
                    assert answer.status == 200, text
                assert "kv_transfer" not in text
                assert answer.headers["x-homeport-prefill-backend"] == "p0"
                await eventually(lambda: proxy.control.placer.open_tickets == 0)
                if turn:
                    leg = prefill.books.requests[-1]
                    assert leg.transferred_tokens >= 300, "most of the last answer"
                    assert leg.computed_tokens < 300
                assert decode.books.requests[-1].output_tokens == 400
                history += [{"role": "assistant", "content": text_of(api, text)}]
                history += [{"role": "user", "content": TEXT[:600]}]
            await eventually(lambda: prefill.held_leases == 0)
            assert decode.held_leases == 1, "the last answer waits for a next turn"
            assert decode.books.reused_params == prefill.books.reused_params == 0


@pytest.mark.parametrize("why", ["off", "side request", "too late", "hangs", "another session"])
async def test_when_nothing_is_read_back(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def prefiller(request: web.Request, seen: Seen) -> web.StreamResponse:
        if why == "hangs" and seen.body["kv_transfer_params"].get("remote_engine_id") == "d":
            await asyncio.Event().wait()
        return await chat(request, seen)

    async def decoder(request: web.Request, seen: Seen) -> web.StreamResponse:
        answer: Any = await chat(request, seen)
        return web.json_response({**json.loads(answer.body), "kv_transfer_params": BACK})

    monkeypatch.setattr(handoff, "READBACK_S", 0.2)
    prefill, decode = await ScriptedEngine(prefiller).start(), await ScriptedEngine(decoder).start()
    config = pair(prefill, decode)
    async with proxy_for(config if why == "off" else readback(config)) as (url, proxy):
        last_turns, session = proxy.pipeline.desk.last_turns, ""
        for turn in range(2):
            headers = {"x-session-id": f"s{turn if why == 'another session' else 0}"}
            if why == "side request" and turn:
                headers["x-homeport-kind"] = "side"
            if why == "too late" and turn:
                last = last_turns.pop(session)
                assert last is not None
                last_turns.put(session, handoff.LastTurn(last.transfer, last.params, expires_s=0.0))
            body = {"model": "m", "messages": [{"role": "user", "content": TEXT + str(turn)}]}
            async with aiohttp.request("POST", url + "/v1/chat/completions", json=body, headers=headers) as answer:
                assert answer.status == 200
                assert "kv_transfer" not in await answer.text()
            session = answer.headers["x-homeport-session"]
        asked = [seen.body["kv_transfer_params"] for seen in prefill.seen]
        assert asked[0] == {"do_remote_decode": True, "do_remote_prefill": False}
        assert asked[-1] == (asked[0] if why != "hangs" else BACK)
        assert (answer.headers.get("x-homeport-prefill-backend") == "p0") is (why != "hangs")
        assert decode.seen[-1].body.get("kv_transfer_params") == (None if why == "hangs" else NIXL)
    await prefill.stop()
    await decode.stop()
