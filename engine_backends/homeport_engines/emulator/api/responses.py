"""POST /v1/responses, and the stored ones when the engine keeps them."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

from homeport.fingerprint import JsonValue
from homeport_engines.emulator.answers import Delta
from homeport_engines.emulator.api.jobs import Body, Desk, integer, load_header, make_job, request_id
from homeport_engines.emulator.engine import Generation, Job
from homeport_engines.emulator.http import ApiError, Stream
from homeport_engines.emulator.prompt import namespaced, responses

Item = dict[str, JsonValue]
_STORED = 1_000


class Store:
    """Finished responses by id, the oldest forgotten first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[list[JsonValue], Item]] = OrderedDict()

    def put(self, conversation: list[JsonValue], response: Item) -> None:
        """Keep a response with the items it continued."""
        self._kept[str(response["id"])] = (conversation, response)
        if len(self._kept) > _STORED:
            self._kept.popitem(last=False)

    def get(self, ident: str) -> tuple[list[JsonValue], Item]:
        """A kept response. Raises ApiError 404."""
        found = self._kept.get(ident)
        if found is None:
            raise ApiError(404, f"Response with id '{ident}' not found.", "response_id")
        return found


async def create(desk: Desk, store: Store, request: web.Request, body: Body) -> web.StreamResponse:
    """Answer one response."""
    stored = desk.engine.settings.store_responses
    items = _items(body.get("input"))
    previous = body.get("previous_response_id")
    if previous is not None:
        if not stored:
            raise ApiError(404, f"Response with id '{previous}' not found.", "response_id")
        earlier, answered = store.get(str(previous))
        output = answered["output"]
        items = [*earlier, *(output if isinstance(output, list) else []), *items]
        body = {**body, "input": items}
    try:
        talk = responses(body)
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    job = make_job(
        desk,
        request,
        body,
        api="responses",
        ident=request_id(request, "resp"),
        prompt=talk.tokens(),
        talk=talk,
        limit=integer(body, "max_output_tokens", least=1),
        schema=_schema(body),
    )
    generation = desk.engine.submit(job)
    build = _Output(desk, body, job)
    try:
        if body.get("stream"):
            return await _stream(desk, store if stored else None, items, request, generation, build)
        async for step in generation.steps():
            build.add(step.deltas)
        answer = build.response(generation, final=True)
        if stored:
            store.put(items, answer)
        return await desk.wire.reply(request, answer, headers=load_header(desk, request))
    finally:
        generation.close()


def _items(given: JsonValue) -> list[JsonValue]:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given if isinstance(given, list) else []


def _schema(body: Body) -> JsonValue:
    text = body.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    if not isinstance(form, dict):
        return None
    if form.get("type") == "json_object":
        return {"type": "object", "properties": {"answer": {"type": "string"}}}
    return form.get("schema")


@dataclass(slots=True)
class _Output:
    """The output items of one response, growing."""

    desk: Desk
    body: Body
    job: Job
    items: list[Item] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))
    namespaced: Mapping[str, tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        self.namespaced = namespaced(self.body)

    def add(self, deltas: tuple[Delta, ...]) -> None:
        """Take what became visible, without events."""
        for delta in deltas:
            self.place(delta)

    def place(self, delta: Delta) -> tuple[int, bool]:
        """Append a piece to its item; the item's index and whether it is new."""
        kind = {"reasoning": "reasoning", "content": "message"}.get(delta.kind, "function_call")
        new = not self.items or self.items[-1]["type"] != kind or delta.kind == "tool_name"
        if new:
            self.items.append(self._item(kind, delta))
        item = self.items[-1]
        if kind == "function_call":
            item["arguments"] = str(item["arguments"]) + (delta.text if delta.kind == "tool_arguments" else "")
        else:
            content = item["content"]
            if isinstance(content, list) and isinstance(content[0], dict):
                content[0]["text"] = str(content[0]["text"]) + delta.text
        return len(self.items) - 1, new

    def _item(self, kind: str, delta: Delta) -> Item:
        ident = uuid.uuid5(uuid.NAMESPACE_OID, f"{self.job.request_id}/{len(self.items)}").hex
        if kind == "function_call":
            call_id = f"call_{ident[:24]}"
            space, name = self.namespaced.get(delta.text, ("", delta.text))
            base: Item = {"id": f"fc_{ident[:24]}", "call_id": call_id, "name": name, "arguments": ""}
            return {**base, "type": kind, "status": "in_progress", **({"namespace": space} if space else {})}
        part = "reasoning_text" if kind == "reasoning" else "output_text"
        content: Item = {"type": part, "text": ""}
        if kind == "reasoning":
            return {"id": f"rs_{ident}", "type": kind, "summary": [], "content": [content], "status": "in_progress"}
        content |= {"annotations": [], "logprobs": None}
        return {"id": f"msg_{ident}", "type": kind, "role": "assistant", "content": [content], "status": "in_progress"}

    def response(self, generation: Generation, *, final: bool) -> Item:
        """The whole response object."""
        cut = final and generation.answer(0).finish == "length"
        if final:
            for item in self.items:
                item["status"] = "completed"
        body = self.body
        return {
            "id": self.job.request_id,
            "object": "response",
            "created_at": self.created,
            "status": "in_progress" if not final else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "model": self.desk.model(body),
            "output": [dict(item) for item in self.items] if final else [],
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "temperature": body.get("temperature", 1.0),
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools", []),
            "top_p": body.get("top_p", 1.0),
            "background": False,
            "max_output_tokens": body.get("max_output_tokens"),
            "previous_response_id": body.get("previous_response_id"),
            "prompt": None,
            "reasoning": body.get("reasoning"),
            "service_tier": "auto",
            "text": body.get("text"),
            "truncation": "disabled",
            "usage": self._usage(generation) if final else None,
            "user": body.get("user"),
            "kv_transfer_params": generation.transfer_params if final else None,
        }

    def _usage(self, generation: Generation) -> JsonValue:
        shown = self.desk.engine.settings.prompt_tokens_details
        prompt, output = generation.prompt_tokens, generation.output_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": generation.cached_tokens if shown else 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + output,
        }


@dataclass(slots=True)
class _Events:
    """Numbers the events of one stream and sends them."""

    stream: Stream
    number: int = 0

    async def send(self, kind: str, **members: JsonValue) -> None:
        """One event."""
        event: Mapping[str, JsonValue] = {"type": kind, "sequence_number": self.number, **members}
        self.number += 1
        await self.stream.frame(dict(event), kind)


async def _stream(
    desk: Desk,
    store: Store | None,
    items: list[JsonValue],
    request: web.Request,
    generation: Generation,
    build: _Output,
) -> web.StreamResponse:
    events = _Events(desk.wire.stream(request, load_header(desk, request)))
    await events.stream.open()
    # these two are sent before the prefill has begun
    await events.send("response.created", response=build.response(generation, final=False))
    await events.send("response.in_progress", response=build.response(generation, final=False))
    open_item: int | None = None
    async for step in generation.steps():
        for delta in step.deltas:
            index, new = build.place(delta)
            if new:
                await _close_item(events, build, open_item)
                await _open_item(events, build, index)
                open_item = index
            await _delta(events, build.items[index], index, delta)
    await _close_item(events, build, open_item)
    answer = build.response(generation, final=True)
    if store is not None:
        store.put(items, answer)
    ended = "response.incomplete" if answer["status"] == "incomplete" else "response.completed"
    await events.send(ended, response=answer)
    return await events.stream.close()


async def _open_item(events: _Events, build: _Output, index: int) -> None:
    item = build.items[index]
    if item["type"] == "function_call":
        await events.send("response.output_item.added", output_index=index, item=dict(item))
        return
    await events.send("response.output_item.added", output_index=index, item={**item, "content": []})
    part = _part(item)
    await events.send(
        "response.reasoning_part.added" if item["type"] == "reasoning" else "response.content_part.added",
        item_id=item["id"],
        output_index=index,
        content_index=0,
        part={**part, "text": ""},
    )


async def _delta(events: _Events, item: Item, index: int, delta: Delta) -> None:
    if delta.kind == "tool_name":
        return
    place: Item = {"item_id": item["id"], "output_index": index}
    if delta.kind == "tool_arguments":
        await events.send("response.function_call_arguments.delta", **place, delta=delta.text)
        return
    place["content_index"] = 0
    if delta.kind == "reasoning":
        await events.send("response.reasoning_text.delta", **place, delta=delta.text)
    else:
        await events.send("response.output_text.delta", **place, delta=delta.text, logprobs=[])


async def _close_item(events: _Events, build: _Output, index: int | None) -> None:
    if index is None:
        return
    item = build.items[index]
    item["status"] = "completed"
    place: Item = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        await events.send(
            "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
        )
    else:
        place["content_index"] = 0
        part = _part(item)
        if item["type"] == "reasoning":
            await events.send("response.reasoning_text.done", **place, text=part["text"])
            await events.send("response.reasoning_part.done", **place, part=part)
        else:
            await events.send("response.output_text.done", **place, text=part["text"], logprobs=[])
            await events.send("response.content_part.done", **place, part=part)
    await events.send("response.output_item.done", output_index=index, item=dict(item))


def _part(item: Item) -> Item:
    content = item["content"]
    part = content[0] if isinstance(content, list) else None
    return dict(part) if isinstance(part, dict) else {}
