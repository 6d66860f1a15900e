"""Prefill on one engine, decode on another: leases, single use, notifications, failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from emulator.emulating import PREFILL, Client, cached, client, fast, said, until
from homeport_engines.emulator import Emulator

TEXT = "Containers stand on the quay in long rows. " * 30
MEMBERS = (
    "do_remote_prefill do_remote_decode remote_block_ids remote_engine_id remote_request_id remote_host remote_port "
    "tp_size dcp_size pp_size remote_num_tokens remote_blocks_expiry_time transfer_mode remote_prefill_cached_tokens"
)


@dataclass(slots=True)
class Pair:
    p: Emulator
    d: Emulator
    to_p: Client
    to_d: Client

    async def prefill(self, text: str, **more: Any) -> Any:
        return await self.to_p.chat(text, max_tokens=1, kv_transfer_params=PREFILL, **more)


@asynccontextmanager
async def pair(kv: str = "nixl", decode: dict[str, Any] | None = None, **changes: Any) -> AsyncIterator[Pair]:
    """A prefill and a decode engine."""
    async with (
        Emulator(fast(kv=kv, role="prefill", **changes)) as p,
        Emulator(fast(kv=kv, role="decode", **{**changes, **(decode or {})})) as d,
        client(p.url) as to_p,
        client(d.url) as to_d,
    ):
        yield Pair(p, d, to_p, to_d)


async def test_parameters_have_the_members_of_vllm() -> None:
    async with pair() as both:
        params = (await both.prefill(TEXT))["kv_transfer_params"]
        assert list(params) == MEMBERS.split()
        assert params["do_remote_prefill"] is True
        assert params["remote_prefill_cached_tokens"] == 0
        assert both.p.pinned_blocks == len(params["remote_block_ids"][0])


async def test_a_split_request_says_the_same_and_frees_the_prefill_engine() -> None:
    async with pair() as both:
        params = (await both.prefill(TEXT))["kv_transfer_params"]
        split = await both.to_d.chat(TEXT, kv_transfer_params=params)
        await until(lambda: both.p.held_leases == 0)
        assert both.p.used_blocks == both.d.used_blocks == 0
        assert said(split) == said(await both.to_p.chat(TEXT))
        record = both.d.books.requests[-1]
        assert record.transferred_tokens == record.prompt_tokens
        assert record.computed_tokens == 1
        assert not record.stale


async def test_usage_carries_what_the_prefill_engine_found() -> None:
    async with pair() as both:
        await both.prefill(TEXT)
        answer = await both.prefill(TEXT + "more")
        split = await both.to_d.chat(TEXT + "more", kv_transfer_params=answer["kv_transfer_params"])
        assert cached(split) == cached(answer) > 0


async def test_only_what_is_missing_is_transferred() -> None:
    async with pair() as both:
        await both.to_d.chat(TEXT)
        params = (await both.prefill(TEXT + "more"))["kv_transfer_params"]
        await both.to_d.chat(TEXT + "more", kv_transfer_params=params)
        record = both.d.books.requests[-1]
        assert 0 < record.transferred_tokens < record.prompt_tokens / 2


@pytest.mark.parametrize("stream", [False, True])
async def test_streamed_prefills_carry_no_parameters(stream: bool) -> None:
    async with pair() as both:
        body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1, "kv_transfer_params": PREFILL}
        answer = await both.to_p.post("/v1/chat/completions", {**body, "stream": stream})
        shown = answer.frames if stream else [answer.json]
        found = [frame for frame in shown if isinstance(frame, dict) and frame.get("kv_transfer_params")]
        assert bool(found) is not stream


@pytest.mark.parametrize(
    ("path", "body", "cap"),
    [
        ("/v1/completions", {"prompt": TEXT}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}, "max_completion_tokens"),
        ("/v1/responses", {"input": TEXT}, "max_output_tokens"),
        ("/v1/messages", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 50}, "max_tokens"),
    ],
)
async def test_every_api_hands_off(path: str, body: dict[str, Any], cap: str) -> None:
    async with pair() as both:
        whole = await both.to_p.post(path, body)
        prefill = await both.to_p.post(path, {**body, cap: 1, "kv_transfer_params": PREFILL})
        params = prefill.json["kv_transfer_params"]
        split = await both.to_d.post(path, {**body, "kv_transfer_params": params})
        for name in ("choices", "content", "output"):
            assert _without_ids(split.json.get(name)) == _without_ids(whole.json.get(name))
        await until(lambda: both.p.held_leases == 0)


def _without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_ids(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_ids(item) for name, item in value.items() if name != "id"}
    return value


async def test_reading_after_the_lease_is_not_refused_and_wrong() -> None:
    async with pair(lease_s=0.02) as both:
        right = said(await both.to_p.chat(TEXT))
        params = (await both.prefill(TEXT))["kv_transfer_params"]
        await until(lambda: both.p.held_leases == 0)
        assert both.p.books.orphans == 1
        late = await both.to_d.chat(TEXT, kv_transfer_params=params)
        assert both.d.books.read_after_lease == both.p.books.read_after_lease == 1
        assert said(late) != right
        assert both.d.books.requests[-1].stale


async def test_parameters_serve_one_request() -> None:
    async with pair() as both:
        params = (await both.prefill(TEXT))["kv_transfer_params"]
        right = said(await both.to_d.chat(TEXT, kv_transfer_params=params))
        async with Emulator(fast(kv="nixl")) as other, client(other.url) as c:
            assert said(await c.chat(TEXT, kv_transfer_params=params)) != right
            assert other.books.reused_params == 1
        assert both.p.books.reused_params == 1


async def test_heartbeats_keep_the_lease_while_the_decode_engine_is_busy() -> None:
    async with pair(lease_s=0.3) as both:
        params = (await both.prefill(TEXT))["kv_transfer_params"]
        both.d.hang()
        asked = asyncio.ensure_future(both.to_d.chat(TEXT, kv_transfer_params=params))
        await asyncio.sleep(0.9)  # three leases long
        assert both.p.held_leases == 1
        both.d.resume()
        await asked
        assert both.d.books.read_after_lease == 0
        await until(lambda: both.p.held_leases == 0)


async def test_a_decode_engine_whose_client_leaves_frees_the_prefill_engine() -> None:
    async with pair() as both:
        params = (await both.prefill(TEXT))["kv_transfer_params"]
        both.d.hang()
        asked = asyncio.ensure_future(both.to_d.chat(TEXT, kv_transfer_params=params))
        await until(lambda: both.d.books.running)
        asked.cancel()
        await until(lambda: both.p.held_leases == 0)
        assert both.p.books.orphans == 0
        assert both.p.used_blocks == both.d.used_blocks == 0


@pytest.mark.parametrize(("policy", "status"), [("fail", 500), ("recompute", 200)])
@pytest.mark.parametrize("gone", ["killed", "restarted"])
async def test_when_the_prefill_engine_is_gone(policy: str, status: int, gone: str) -> None:
    async with pair(load_failure=policy) as both:
        right = said(await both.to_d.chat("x" + TEXT))
        params = (await both.prefill(TEXT))["kv_transfer_params"]
        if gone == "killed":
            await both.p.kill()
        else:
            both.p.restart()
        body = {"messages": [{"role": "user", "content": TEXT}], "kv_transfer_params": params}
        answer = await both.to_d.post("/v1/chat/completions", body)
        assert answer.status == status
        counters = both.d.core.ranks[0].counters
        assert counters.failed_transfers == 1
        assert counters.by_source["external_kv_transfer"] == 0
        assert both.d.used_blocks == 0
        assert said(await both.to_d.chat("x" + TEXT)) == right


async def test_a_failed_transfer_in_a_stream_is_an_error_frame() -> None:
    async with pair() as both:
        params = (await both.prefill(TEXT))["kv_transfer_params"]
        await both.p.kill()
        body = {"messages": [{"role": "user", "content": TEXT}], "kv_transfer_params": params, "stream": True}
        frames = (await both.to_d.post("/v1/chat/completions", body)).frames
        assert frames[-2]["error"]["code"] == 500
        assert frames[-1] == "[DONE]"


async def test_an_orphan_pins_blocks_until_the_lease_ends() -> None:
    async with pair(lease_s=0.05) as both:
        await both.prefill(TEXT)
        assert both.p.pinned_blocks > 0
        await until(lambda: both.p.pinned_blocks == 0)
        assert both.p.books.orphans == 1


async def test_a_prefill_that_ends_by_itself_hands_nothing_over() -> None:
    async with pair() as both:
        body = {"messages": [{"role": "user", "content": TEXT}], "emulator_answer": "", "max_tokens": 1}
        answer = await both.to_p.post("/v1/chat/completions", {**body, "kv_transfer_params": PREFILL})
        assert answer.json["choices"][0]["finish_reason"] == "stop"
        assert answer.json["kv_transfer_params"] is None
        assert both.p.used_blocks == 0


@pytest.mark.parametrize("kv", ["nixl", "mooncake"])
async def test_a_client_sent_remote_prefill_kills_the_engine(kv: str) -> None:
    async with Emulator(fast(kv=kv)) as engine, client(engine.url) as c:
        with pytest.raises(aiohttp.ClientConnectionError):
            await c.chat(TEXT, kv_transfer_params={"do_remote_prefill": True})
        assert engine.books.deaths == 1
        await c.chat(TEXT)


async def test_without_a_connector_parameters_mean_nothing() -> None:
    async with Emulator(fast()) as engine, client(engine.url) as c:
        answer = await c.chat(TEXT, kv_transfer_params={"do_remote_prefill": True})
        assert answer["kv_transfer_params"] is None


async def test_the_decode_engine_gives_its_blocks_back_for_the_next_turn() -> None:
    """Decode-to-prefill read-back: the prefill engine fetches what only the decode engine has."""
    async with pair(readback_ttl_s=60.0) as both:
        params = (await both.prefill(TEXT))["kv_transfer_params"]
        answer = await both.to_d.chat(TEXT, kv_transfer_params=params, max_tokens=200, ignore_eos=True)
        back = answer["kv_transfer_params"]
        assert back["remote_num_tokens"] == answer["usage"]["total_tokens"] - 1
        history = [
            {"role": "user", "content": TEXT},
            {"role": "assistant", "content": said(answer)},
            {"role": "user", "content": "and then?"},
        ]
        body = {"messages": history, "max_tokens": 1, "kv_transfer_params": {**back, **PREFILL}}
        await both.to_p.post("/v1/chat/completions", body)
        record = both.p.books.requests[-1]
        assert record.transferred_tokens > 150
        assert record.computed_tokens < 50
        await until(lambda: both.d.held_leases == 0)


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_mooncake_legs_start_in_any_order(first: str) -> None:
    async with pair("mooncake") as both:
        bootstrap = f"http://127.0.0.1:{both.p.core.side_channels[0].port}"
        query = await Client(both.to_p.http, bootstrap).get("/query")
        engine_id = query.json["0"]["engine_id"]
        keep = {**PREFILL, "transfer_id": "t-1"}
        fetch = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": bootstrap,
            "remote_engine_id": engine_id,
            "transfer_id": "t-1",
        }
        right = said(await both.to_p.chat("x" + TEXT))
        legs = {
            "prefill": lambda: both.to_p.chat("x" + TEXT, max_tokens=1, kv_transfer_params=keep),
            "decode": lambda: both.to_d.chat("x" + TEXT, kv_transfer_params=fetch),
        }
        tasks = {first: asyncio.ensure_future(legs[first]())}
        started = both.p.books if first == "prefill" else both.d.books
        await until(lambda: started.started > (first == "prefill"))
        other = "decode" if first == "prefill" else "prefill"
        tasks[other] = asyncio.ensure_future(legs[other]())
        prefilled, decoded = await tasks["prefill"], await tasks["decode"]
        assert prefilled["kv_transfer_params"] is None
        assert said(decoded) == right
        assert cached(decoded) == decoded["usage"]["prompt_tokens"]  # Mooncake counts the transfer as cached
        await until(lambda: both.p.held_leases == 0)


async def test_data_parallel_ranks_hand_off_from_their_own_ports() -> None:
    async with pair(data_parallel=2) as both:
        seen = set()
        for rank in ("0", "1"):
            body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1, "kv_transfer_params": PREFILL}
            answer = await both.to_p.post("/v1/chat/completions", body, X_data_parallel_rank=rank)
            params = answer.json["kv_transfer_params"]
            seen.add((params["remote_port"], params["remote_engine_id"]))
            await both.to_d.chat(TEXT, kv_transfer_params=params)
        assert len(seen) == 2
        await until(lambda: both.p.held_leases == 0)
