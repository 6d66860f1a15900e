"""What an emulated engine says and books: prefix hits, isolation, batches, preemption, speed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from emulator.emulating import cached, client, fast, said, until
from homeport_engines.emulator import Emulator, EmulatorSettings, Rates, Speculation

LONG = "All work and no play makes a long prompt. " * 40


async def test_the_answer_follows_from_the_prompt_alone() -> None:
    async with Emulator(fast()) as one, Emulator(fast(seed=7)) as two, client(one.url) as a, client(two.url) as b:
        first = await a.chat(LONG)
        assert said(first) == said(await a.chat(LONG)) == said(await b.chat(LONG))
        assert said(first) != said(await a.chat(LONG + "!"))
        assert said(first) != said(await a.chat(LONG, seed=1))


async def test_a_repeated_prompt_hits_all_but_its_last_block() -> None:
    async with Emulator(fast(block_tokens=16)) as engine, client(engine.url) as c:
        first, second = await c.chat(LONG), await c.chat(LONG)
        prompt = first["usage"]["prompt_tokens"]
        assert cached(first) == 0
        assert cached(second) == (prompt - 1) // 16 * 16
        assert engine.used_blocks == 0


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_an_append_only_conversation_finds_its_whole_past(api: str) -> None:
    """What was generated is in the cache too, as the template renders it in the next turn."""
    async with Emulator(fast(block_tokens=4)) as engine, client(engine.url) as c:
        history: list[Any] = [{"role": "user", "content": LONG}]
        last = 0
        for _ in range(4):
            total, hit = await _turn(c, api, history)
            assert hit >= last - 4  # all of the last turn but the end mark and an unfilled block
            last = total


async def _turn(c: Any, api: str, history: list[Any]) -> tuple[int, int]:
    """Ask, append the answer; tokens after this turn, tokens found cached."""
    if api == "chat":
        answer = await c.post("/v1/chat/completions", {"messages": history})
        usage = answer.json["usage"]
        history.append(answer.json["choices"][0]["message"])
        total, hit = usage["total_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    elif api == "messages":
        answer = await c.post("/v1/messages", {"messages": history, "max_tokens": 500})
        usage = answer.json["usage"]
        history.append({"role": "assistant", "content": answer.json["content"]})
        hit = usage["cache_read_input_tokens"]
        total = usage["input_tokens"] + hit + usage["output_tokens"]
    else:
        answer = await c.post("/v1/responses", {"input": history})
        usage = answer.json["usage"]
        history.extend(answer.json["output"])
        total, hit = usage["total_tokens"], usage["input_tokens_details"]["cached_tokens"]
    history.append({"role": "user", "content": "go on"})
    return total, hit


async def test_salts_and_adapters_have_caches_of_their_own() -> None:
    async with Emulator(fast(adapters=("lora",))) as engine, client(engine.url) as c:
        plain = await c.chat(LONG)
        assert cached(await c.chat(LONG, cache_salt="a")) == 0
        assert cached(await c.chat(LONG, cache_salt="b")) == 0
        adapted = await c.chat(LONG, model="lora")
        assert cached(adapted) == 0
        assert adapted["model"] == "lora"
        assert said(adapted) != said(plain)
        for more in ({}, {"cache_salt": "a"}, {"model": "lora"}):
            assert cached(await c.chat(LONG, **more)) > 0


async def test_ranks_have_caches_of_their_own() -> None:
    async with Emulator(fast(data_parallel=2)) as engine, client(engine.url) as c:
        body = {"messages": [{"role": "user", "content": LONG}]}
        hits = [
            cached((await c.post("/v1/chat/completions", body, X_data_parallel_rank=rank)).json)
            for rank in ("0", "1", "0", "1")
        ]
        assert hits[:2] == [0, 0]
        assert all(hits[2:])
        wrong = await c.post("/v1/chat/completions", body, X_data_parallel_rank="2")
        assert wrong.status == 400


async def test_blocks_are_evicted_when_room_is_needed() -> None:
    async with Emulator(fast(kv_blocks=64, block_tokens=16)) as engine, client(engine.url) as c:
        await c.chat(LONG)  # 26 blocks
        await c.chat("b" + LONG)
        await c.chat("c" + LONG)
        assert cached(await c.chat("c" + LONG)) == 27 * 16 - 16
        assert cached(await c.chat(LONG)) < 12 * 16  # its tail went first, some of its head is left


async def test_preemption_computes_again_and_changes_no_answer() -> None:
    async with Emulator(fast()) as roomy, client(roomy.url) as c:
        wanted = [said(await c.chat(f"{n}{LONG}", max_tokens=200, ignore_eos=True)) for n in range(3)]
    async with Emulator(fast(kv_blocks=96, block_tokens=16)) as engine, client(engine.url) as c:
        answers = await asyncio.gather(*(c.chat(f"{n}{LONG}", max_tokens=200, ignore_eos=True) for n in range(3)))
        assert [said(answer) for answer in answers] == wanted
        assert engine.core.ranks[0].counters.preemptions > 0
        assert engine.used_blocks == 0


async def test_a_client_that_leaves_frees_its_blocks() -> None:
    async with Emulator(fast(time_scale=0.001)) as engine, client(engine.url) as c:
        asked = asyncio.ensure_future(c.chat(LONG))
        await until(lambda: engine.books.running)
        asked.cancel()
        await until(lambda: not engine.books.running)
        assert engine.books.aborted == 1
        assert engine.used_blocks == 0


async def test_prefill_and_decode_take_their_time() -> None:
    """In emulated seconds, from the engine's own records, so a slow machine only makes them longer."""
    rates = Rates(t0_s=1.0, tokens_per_s=100.0, attention_tokens=1000.0, step_s=0.5)
    async with Emulator(EmulatorSettings(rates=rates, time_scale=200.0)) as engine, client(engine.url) as c:
        await c.chat(LONG, max_tokens=5, ignore_eos=True)
        record = engine.books.requests[-1]
        prompt = record.prompt_tokens
        wanted = 1.0 + prompt / 100 * (1 + prompt / 2 / 1000)
        assert record.first_token_s is not None
        assert record.finished_s is not None
        assert record.first_token_s - record.arrived_s >= wanted
        assert record.finished_s - record.first_token_s >= 4 * 0.5 * 0.99 - 200 * 0.05
        await c.chat(LONG, max_tokens=1)
        warm = engine.books.requests[-1]
        assert warm.computed_tokens == prompt - warm.cached_tokens < prompt


async def test_the_longest_prefill_is_computed_once() -> None:
    async with Emulator(fast(chunk_tokens=64)) as engine, client(engine.url) as c:
        answer = await c.chat(LONG)
        assert engine.books.requests[-1].computed_tokens == answer["usage"]["prompt_tokens"]
        sources = engine.core.ranks[0].counters.by_source
        assert sources["local_compute"] == answer["usage"]["prompt_tokens"]


async def test_priority_goes_first_when_the_engine_schedules_by_it() -> None:
    settings = fast(time_scale=1.0, max_sequences=1, priority_scheduling=True, rates=Rates(step_s=0.001))
    async with Emulator(settings) as engine, client(engine.url) as c:
        engine.hang()
        asked = []
        for text, priority in (("a", 0), ("late", 5), ("soon", -5)):
            before = engine.books.started
            asked.append(asyncio.ensure_future(c.chat(text, priority=priority)))
            await until(lambda: engine.books.started > before)  # noqa: B023 - awaited in the same turn
        engine.resume()
        await asyncio.gather(*asked)
        done = sorted(engine.books.requests, key=lambda record: record.finished_s or 0)
        assert [record.prompt_tokens for record in done][-1] == engine.books.requests[1].prompt_tokens


async def test_speculation_counts_what_it_accepts() -> None:
    async with Emulator(fast(speculation=Speculation(3, 1.0))) as engine, client(engine.url) as c:
        plain = await c.chat("hello", max_tokens=41, ignore_eos=True)
        assert plain["usage"]["completion_tokens"] == 41
        counters = engine.core.ranks[0].counters
        assert counters.drafts == 10
        assert counters.draft_tokens == counters.accepted_tokens == 30
    async with Emulator(fast(speculation=Speculation(3, 0.0))) as engine, client(engine.url) as c:
        assert said(await c.chat("hello", max_tokens=41, ignore_eos=True)) == said(plain)
        assert engine.core.ranks[0].counters.accepted_tokens == 0


@pytest.mark.parametrize(("details", "shown"), [(True, {"cached_tokens": 0}), (False, None)])
async def test_cached_tokens_are_reported_only_when_asked_for(details: bool, shown: Any) -> None:
    async with Emulator(fast(prompt_tokens_details=details)) as engine, client(engine.url) as c:
        assert (await c.chat("hello"))["usage"]["prompt_tokens_details"] == shown


async def test_several_choices_share_one_prompt() -> None:
    async with Emulator(fast()) as engine, client(engine.url) as c:
        answer = await c.chat("hello", n=3, max_tokens=8, ignore_eos=True)
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert len(set(texts)) == 3
        assert texts[0] == said(await c.chat("hello", max_tokens=8, ignore_eos=True))
        assert answer["usage"]["completion_tokens"] == 24


async def test_length_and_stop() -> None:
    async with Emulator(fast()) as engine, client(engine.url) as c:
        whole = await c.chat("hello", max_tokens=30, ignore_eos=True)
        assert whole["choices"][0]["finish_reason"] == "length"
        word = said(whole).split()[3]
        cut = await c.chat("hello", max_tokens=30, ignore_eos=True, stop=[word])
        assert cut["choices"][0]["finish_reason"] == "stop"
        assert cut["choices"][0]["stop_reason"] == word
        assert said(whole).startswith(said(cut))
        assert len(said(cut)) < len(said(whole))
        free = await c.chat("hello")
        assert free["choices"][0]["finish_reason"] == "stop"
