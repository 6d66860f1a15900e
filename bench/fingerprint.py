"""What fingerprinting costs, as ratios to a plain decode of the same body; run it on an idle machine.

python bench/fingerprint.py [--kb 400]
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import timeit
from collections.abc import Callable

import msgspec

from homeport.explain import explain
from homeport.fingerprint import Incremental, identity, segments, text_blocks
from homeport.spans import Document
from homeport.stabilise import stabilise
from homeport.volatile import mask


def agent_body(size_bytes: int) -> dict[str, object]:
    """A coding agent's request of that size: 20 kB of tools, 10 kB of system text, then tool calls and source code."""
    code = inspect.getsource(argparse)
    words = ["the", "level", "of", "a", "gauge", "is", "read,", "and", "compared", "with", "its", "limit;", "harbour"]
    text = random.Random(1)
    prose = lambda chars: " ".join(text.choices(words, k=chars // 5))[:chars]  # noqa: E731
    properties = {f"p{index}": {"type": "string", "description": prose(60)} for index in range(8)}
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{index}",
                "description": prose(300),
                "parameters": {"type": "object", "properties": properties, "required": ["p0", "p1"]},
            },
        }
        for index in range(20)
    ]
    messages: list[dict[str, object]] = [{"role": "system", "content": prose(10_000)}]
    body: dict[str, object] = {"model": "qwen3", "tools": tools, "messages": messages, "stream": True}
    size = len(json.dumps(body))
    while size < size_bytes:
        arguments = json.dumps({"p0": prose(150), "p1": len(messages)})
        call = {"id": f"c{len(messages)}", "type": "function", "function": {"name": "tool_1", "arguments": arguments}}
        start = (size * 7) % (len(code) - 2_500)
        result = code[start : start + 2_500]
        turn = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": result},
        ]
        messages += turn
        size += len(json.dumps(turn))
    return body


def best_us(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The fastest run of each work in microseconds. All are run in turn, so that a busy machine is busy for all."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            best[name] = min(best[name], timeit.timeit(work, number=1) * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kb", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    size_bytes, rounds = args.kb * 1000, args.rounds
    body = agent_body(size_bytes)
    raw = json.dumps(body).encode()
    text = raw.decode()
    decoder = msgspec.json.Decoder()
    messages = body["messages"]
    assert isinstance(messages, list)
    before = {**body, "messages": messages[:-2]}
    earlier = Document(json.dumps(before))
    longer = Document(text, earlier).body
    plain, frozen = Incremental(), Incremental(frozen=True)
    known = identity("chat", earlier.body, mask=mask, tools=False)

    def next_turn(following: Incremental) -> Callable[[], object]:
        def back_and_forth() -> object:
            following.segments("chat", earlier.body)
            return following.segments("chat", longer)

        return back_and_forth

    state = stabilise(body).state  # type: ignore[arg-type]
    decode = "msgspec decode"
    works: dict[str, Callable[[], object]] = {
        decode: lambda: decoder.decode(raw),
        "segments": lambda: segments("chat", body),
        "segments, next turn, back and forth": next_turn(plain),
        "segments, the same, frozen objects": next_turn(frozen),
        "text_blocks of 512": lambda: text_blocks("chat", body),
        "identity": lambda: identity("chat", body, mask=mask, tools=False),
        "identity, next turn": lambda: identity("chat", longer, mask=mask, tools=False, after=known),
        "decode with spans": lambda: Document(text),
        "decode with spans, next turn": lambda: Document(text, earlier),
        "stabilise, nothing to change": lambda: stabilise(body, state),  # type: ignore[arg-type]
    }
    found = best_us(works, rounds)
    # apart from the others: it touches so much memory that whatever runs next pays for it
    found |= best_us({"explain a continuation": lambda: explain(before, body)}, 10)
    print(f"body: {len(raw):,} bytes, {len(messages)} messages; fastest of {rounds} runs")
    for name, cost in found.items():
        print(f"{name:<38}{cost:>10,.0f} us{cost / found[decode]:>8.2f} x decode")
    plain.segments("chat", body)
    print(f"memory of Incremental: {plain.size_bytes:,} bytes for {len(messages)} messages")


if __name__ == "__main__":
    main()
