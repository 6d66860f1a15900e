"""The HTTP surface as real clients and raw requests meet it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, NotFoundError
from prometheus_client.parser import text_string_to_metric_families

from emulator.emulating import Client, client, fast, said, until
from homeport_engines.emulator import Emulator, Speculation, parse_rules

TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 3},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "wind": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "near": {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}, "minItems": 2},
    },
    "required": ["city", "unit", "days", "wind", "near"],
    "additionalProperties": False,
}
CHAT_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": TOOL_SCHEMA}}
SCRIPT = parse_rules(
    [
        {"contains": "weather in Oslo", "answer": {"tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}]}},
        {"contains": "think", "answer": {"reasoning": "Let me see …", "text": "Done — ✓ fertig"}},
        {"tool": "step", "sequence": [{"tool_calls": [{"name": "step"}]}, "finished"]},
    ]
)


async def test_openai_chat_whole_and_streamed() -> None:
    async with Emulator(fast()) as engine, AsyncOpenAI(base_url=engine.url + "/v1", api_key="-") as openai:
        asked: Any = {"model": "emulated", "messages": [{"role": "user", "content": "hello"}]}
        whole = await openai.chat.completions.create(**asked)
        stream = await openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage is not None
        assert whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        with pytest.raises(NotFoundError, match="does not exist"):
            await openai.chat.completions.create(**{**asked, "model": "nobody"})


async def test_openai_tools_on_script() -> None:
    async with (
        Emulator(fast(), SCRIPT) as engine,
        AsyncOpenAI(base_url=engine.url + "/v1", api_key="-") as openai,
    ):
        asked: Any = {
            "model": "emulated",
            "messages": [{"role": "user", "content": "weather in Oslo?"}],
            "tools": [CHAT_TOOL],
        }
        whole = await openai.chat.completions.create(**asked)
        call: Any = (whole.choices[0].message.tool_calls or [None])[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
        assert whole.choices[0].finish_reason == "tool_calls"
        name, arguments, ids = "", "", set()
        async for chunk in await openai.chat.completions.create(**asked, stream=True):
            for piece in chunk.choices[0].delta.tool_calls or []:
                name += (piece.function and piece.function.name) or ""
                arguments += (piece.function and piece.function.arguments) or ""
                ids |= {piece.id} - {None}
        assert (name, arguments, ids) == ("weather", call.function.arguments, {call.id})


async def test_openai_responses_stream_in_order() -> None:
    async with (
        Emulator(fast(store_responses=True), SCRIPT) as engine,
        AsyncOpenAI(base_url=engine.url + "/v1", api_key="-") as openai,
    ):
        whole = await openai.responses.create(model="emulated", input="think")
        async with openai.responses.stream(model="emulated", input="think") as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == whole.output_text == "Done — ✓ fertig"
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert kinds.index("response.reasoning_text.delta") < kinds.index("response.output_text.delta")
        more = await openai.responses.create(model="emulated", input="again", previous_response_id=whole.id)
        assert more.usage is not None
        assert whole.usage is not None
        assert more.usage.input_tokens > whole.usage.input_tokens
        assert (await openai.responses.retrieve(whole.id)).id == whole.id


async def test_created_comes_before_the_prefill() -> None:
    async with Emulator(fast()) as engine, client(engine.url) as c:
        engine.hang()
        body = json.dumps({"input": "hello", "stream": True}).encode()
        async with c.http.post(engine.url + "/v1/responses", data=body) as answer:
            line = await asyncio.wait_for(answer.content.readline(), 5)
            assert line == b"event: response.created\n"
            assert engine.books.generated_tokens == 0
            engine.resume()
            assert b"response.completed" in await answer.read()


async def test_anthropic_messages_whole_streamed_and_counted() -> None:
    async with Emulator(fast(), SCRIPT) as engine, AsyncAnthropic(base_url=engine.url, api_key="-") as anthropic:
        asked: Any = {
            "model": "emulated",
            "max_tokens": 200,
            "messages": [{"role": "user", "content": "think"}],
        }
        whole = await anthropic.messages.create(**asked)
        assert [block.type for block in whole.content] == ["thinking", "text"]
        async with anthropic.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text"]
        assert final.content[1].text == whole.content[1].text  # type: ignore[union-attr]
        assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == whole.usage.input_tokens
        counted = await anthropic.messages.count_tokens(model="emulated", messages=asked["messages"])
        assert counted.input_tokens == whole.usage.input_tokens
        tool: Any = {"name": "weather", "input_schema": TOOL_SCHEMA}
        asked["messages"] = [{"role": "user", "content": "weather in Oslo"}]
        async with anthropic.messages.stream(**asked, tools=[tool]) as stream:
            called = await stream.get_final_message()
        assert called.stop_reason == "tool_use"
        assert called.content[-1].model_dump(include={"type", "name", "input"}) == {
            "type": "tool_use",
            "name": "weather",
            "input": {"city": "Oslo"},
        }


async def test_the_billing_line_of_claude_code_is_no_part_of_the_prompt() -> None:
    async with Emulator(fast()) as engine, client(engine.url) as c:
        counts = []
        for line in ("x-anthropic-billing-header: cc_version=1; cch=abc;", None):
            system = [{"type": "text", "text": text} for text in (line, "You are a pilot.") if text]
            body = {"messages": [{"role": "user", "content": "hi"}], "system": system}
            counts.append((await c.post("/v1/messages/count_tokens", body)).json["input_tokens"])
        assert counts[0] == counts[1]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("seed", range(4))
async def test_a_required_call_is_true_to_its_schema(choice: Any, seed: int) -> None:
    async with Emulator(fast()) as engine, client(engine.url) as c:
        answer = await c.chat(f"{seed}", tools=[CHAT_TOOL], tool_choice=choice)
        call = answer["choices"][0]["message"]["tool_calls"][0]["function"]
        jsonschema.validate(json.loads(call["arguments"]), TOOL_SCHEMA)


@pytest.mark.parametrize("seed", range(4))
async def test_structured_output_is_true_to_its_schema(seed: int) -> None:
    schema = {
        "$defs": {"port": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
        "type": "object",
        "properties": {
            "ports": {"type": "array", "items": {"$ref": "#/$defs/port"}, "minItems": 1},
            "when": {"type": "string", "format": "date"},
            "kind": {"const": "list"},
            "depth": {"type": "number", "multipleOf": 0.5, "maximum": 20},
        },
        "required": ["ports", "when", "kind", "depth"],
    }
    async with Emulator(fast()) as engine, client(engine.url) as c:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        jsonschema.validate(json.loads(said(await c.chat(f"{seed}", response_format=form))), schema)


async def test_a_sequence_follows_the_turns_of_the_conversation() -> None:
    tools = [{"type": "function", "function": {"name": "step", "parameters": {"type": "object"}}}]
    async with Emulator(fast(), SCRIPT) as engine, client(engine.url) as c:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        seen = []
        for _ in range(3):
            answer = await c.post("/v1/chat/completions", {"messages": messages, "tools": tools})
            message = answer.json["choices"][0]["message"]
            seen.append(message["content"] or message["tool_calls"][0]["function"]["name"])
            messages += [message, {"role": "tool", "content": "ok"}]
        assert seen[:2] == ["step", "finished"]
        assert seen[2] not in ("step", "finished")


async def test_a_request_may_bring_its_answer() -> None:
    async with Emulator(fast()) as engine, client(engine.url) as c:
        assert said(await c.chat("x", emulator_answer="as told")) == "as told"
        wrong = await c.post("/v1/chat/completions", {"messages": [{"role": "user"}], "emulator_answer": 3})
        assert wrong.status == 400


async def test_ids_carry_the_callers_id() -> None:
    async with Emulator(fast()) as engine, client(engine.url) as c:
        body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x", "max_tokens": 1}
        for path, prefix in (("chat/completions", "chatcmpl"), ("completions", "cmpl"), ("responses", "resp")):
            answer = await c.post(f"/v1/{path}", body, X_Request_Id="my-id")
            assert answer.json["id"] == f"{prefix}-my-id"
        assert len(engine.books.by_id("my-id")) == 3


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{", 400),
        ("/v1/chat/completions", [], 400),
        ("/v1/chat/completions", {"messages": "no"}, 400),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 10**9}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "cache_salt": ""}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "model": "nobody"}, 404),
        ("/v1/completions", {"prompt": ""}, 400),
        ("/v1/completions", {"prompt": [-1]}, 400),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, 400),
        ("/v1/responses", {"input": 3}, 400),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, 404),
        ("/v1/embeddings", {}, 400),
        ("/v1/nothing", {}, 404),
        ("/tokenize", {}, 400),
    ],
)
async def test_errors_have_vllms_shape(path: str, body: Any, status: int) -> None:
    async with Emulator(fast()) as engine, client(engine.url) as c:
        answer = await c.post(path, body)
        assert answer.status == status
        error = answer.json["error"]
        assert error["message"]
        if path == "/v1/messages":
            assert answer.json["type"] == "error"
        else:
            assert error["code"] == status
        assert engine.books.running == 0


async def test_keys_guard_v1_only() -> None:
    async with Emulator(fast(api_key="secret")) as engine, client(engine.url) as c:
        assert (await c.get("/v1/models")).status == 401
        assert (await c.get("/health")).status == 200
        async with c.http.get(engine.url + "/v1/models", headers={"Authorization": "Bearer secret"}) as answer:
            assert answer.status == 200


async def test_models_tokens_and_embeddings() -> None:
    async with Emulator(fast(adapters=("lora",))) as engine, client(engine.url) as c:
        models = (await c.get("/v1/models")).json["data"]
        assert [(model["id"], model["parent"]) for model in models] == [("emulated", None), ("lora", "emulated")]
        body = {"messages": [{"role": "user", "content": "héllo"}]}
        tokens = (await c.post("/tokenize", body)).json
        rendered = (await c.post("/v1/chat/completions/render", body)).json
        assert tokens["tokens"] == rendered["token_ids"]
        assert tokens["count"] == (await c.chat("héllo"))["usage"]["prompt_tokens"]
        back = (await c.post("/detokenize", {"tokens": tokens["tokens"]})).json["prompt"]
        assert "héllo" in back
        vectors = (await c.post("/v1/embeddings", {"input": ["a", "b", "a"], "dimensions": 8})).json["data"]
        assert vectors[0]["embedding"] == vectors[2]["embedding"] != vectors[1]["embedding"]
        assert (await c.post("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "/x"})).status == 200
        assert (await c.chat("x", model="new"))["model"] == "new"
        assert (await c.post("/v1/unload_lora_adapter", {"lora_name": "new"})).status == 200


async def test_metrics_parse_and_add_up() -> None:
    settings = fast(kv="nixl", data_parallel=2, speculation=Speculation(2, 0.5))
    async with Emulator(settings) as engine, client(engine.url) as c:
        for turn in range(6):
            await c.chat("hello " * 50 + str(turn), max_tokens=10)
        text = (await c.get("/metrics")).raw.decode()
        samples = {
            (sample.name, sample.labels["engine"], sample.labels.get("source"), sample.labels.get("le")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        ranks = [engine.core.ranks[0].counters, engine.core.ranks[1].counters]
        for index, counters in enumerate(ranks):
            assert samples["vllm:prefix_cache_queries_total", str(index), None, None] == counters.prefix_queries
            assert samples["vllm:time_to_first_token_seconds_count", str(index), None, None] == sum(
                counters.finished.values()
            )
        assert sum(counters.prompt_tokens for counters in ranks) == sum(
            value for (name, *_), value in samples.items() if name == "vllm:prompt_tokens_by_source_total"
        )
        assert "vllm:nixl_num_kv_expired_reqs_total" in text
        assert (
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="emulated",position="1"}' in text
        )
        assert 'num_gpu_blocks="8192"' in text


@pytest.mark.parametrize("wanted", ["JSON", "TEXT", ""])
async def test_load_is_told_on_request(wanted: str) -> None:
    async with Emulator(fast()) as engine, client(engine.url) as c:
        body = {"prompt": "x", "max_tokens": 1}
        answer = await c.post("/v1/completions", body, endpoint_load_metrics_format=wanted)
        assert answer.headers.get("endpoint-load-metrics", "").split(" ")[0] == wanted
        assert (await c.get("/load")).json == {"server_load": 0}


async def test_idle_connections_are_closed() -> None:
    async with Emulator(fast(keep_alive_s=0.05)) as engine:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await asyncio.wait_for(reader.read(), 10)  # ends: the engine closes
        writer.close()
        await until(lambda: engine.connections == 0)


async def test_several_prompts_in_one_completion() -> None:
    async with Emulator(fast()) as engine, client(engine.url) as c:
        body = {"prompt": ["one", "two"], "max_tokens": 5, "ignore_eos": True, "echo": True, "logprobs": 1}
        answer = (await c.post("/v1/completions", body)).json
        assert [choice["text"][:3] for choice in answer["choices"]] == ["one", "two"]
        assert answer["usage"]["completion_tokens"] == 10
        alone: Client = c
        single = (await alone.post("/v1/completions", {**body, "prompt": "two"})).json
        assert single["choices"][0]["text"] == answer["choices"][1]["text"]
