"""The main job on real engines: hand-off with the same words, the cache seen and counted, faults survived."""

from __future__ import annotations

import threading
import urllib.error
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from openai import OpenAI

import homeport
from engines.conftest import CLIENT_KEY
from engines.engine_kit import BLOCK_TOKENS, Pair, fresh_text, until
from homeport_engines.vllm.kv import block_hashes

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

Message = dict[str, str]
QUESTIONS = ("What is this note about?", "Name the first three words of the note.", "Continue the note.")


def messages(words: int, question: str = "What is this note about?") -> list[Message]:
    return [{"role": "user", "content": f"{fresh_text(words)}\n{question}"}]


def body(pair: Pair, said: list[Message], tokens: int = 16, **more: Any) -> dict[str, Any]:
    return {"model": pair.model, "messages": said, "max_tokens": tokens, "temperature": 0, **more}


def ask(
    pair: Pair, said: list[Message], tokens: int = 16, headers: Mapping[str, str] | None = None, **more: Any
) -> httpx.Response:
    answer = httpx.post(
        f"{pair.base_url}/chat/completions",
        json=body(pair, said, tokens, **more),
        headers={"authorization": f"Bearer {CLIENT_KEY}", **(headers or {})},
        timeout=180,
    )
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_two_engines_say_what_one_says(pair: Pair, client: OpenAI, question: str, streamed: bool) -> None:
    said = messages(200, question)
    moved_before = pair.by_source("d0")["external_kv_transfer"]
    if streamed:
        raw = client.chat.completions.with_raw_response.create(
            **body(pair, said), stream=True, stream_options={"include_usage": True}
        )
        chunks = list(raw.parse())
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        usage = next(chunk.usage for chunk in reversed(chunks) if chunk.usage)
    else:
        raw = client.chat.completions.with_raw_response.create(**body(pair, said))
        whole = raw.parse()
        text, usage = whole.choices[0].message.content, whole.usage
    assert raw.headers["x-homeport-prefill-backend"] == "p0"
    assert raw.headers["x-homeport-backend"] == "d0"
    moved = pair.by_source("d0")["external_kv_transfer"] - moved_before
    assert moved == usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == 0, "the transfer is no cache hit"
    alone = pair.ask_engine("p0", "/v1/chat/completions", body(pair, said))
    assert text == alone["choices"][0]["message"]["content"]
    assert usage.completion_tokens == alone["usage"]["completion_tokens"]


def test_second_turn_finds_the_first_and_the_books_agree(pair: Pair, client: OpenAI) -> None:
    attached = homeport.attach(client)
    said = messages(250)
    cached_by_engines = 0
    prompts = []
    with homeport.session("books") as session:
        for turn in range(3):
            before = {name: pair.by_source(name)["local_cache_hit"] for name in ("p0", "d0")}
            raw = attached.chat.completions.with_raw_response.create(**body(pair, said))
            answer = raw.parse()
            used = "p0" if "x-homeport-prefill-backend" in raw.headers else "d0"
            cached = pair.by_source(used)["local_cache_hit"] - before[used]
            assert answer.usage.prompt_tokens_details.cached_tokens == cached
            if prompts:
                whole_blocks = prompts[-1] // BLOCK_TOKENS * BLOCK_TOKENS
                assert cached >= 0.9 * whole_blocks
                assert int(raw.headers["x-homeport-expected-cached-tokens"]) > 0
            cached_by_engines += cached
            prompts.append(answer.usage.prompt_tokens)
            said.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
            # the second turn is long enough for the prefill engine, the third is not
            said.append({"role": "user", "content": fresh_text(220) if turn == 0 else "Shorter, please."})
        report = session.report()
    assert report.cached_tokens == cached_by_engines
    assert report.input_tokens == sum(prompts)


@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
def test_the_index_follows_the_engines_own_events(pair: Pair, path: str) -> None:
    """What is expected cached is what the engine finds; the blocks are named as it names them."""
    ask(pair, messages(220), tokens=2)  # an engine's first blocks tell how large they are
    said = messages(260)
    sent = {"model": pair.model, "messages": said, "max_tokens": 2, "temperature": 0}
    headers = {"x-session-id": f"indexed {path}", "authorization": f"Bearer {CLIENT_KEY}"}
    for turn in range(2):
        answer = httpx.post(pair.base_url + path, json=sent, headers=headers, timeout=180)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        cached = usage.get("cache_read_input_tokens", (usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
        assert int(answer.headers["x-homeport-expected-cached-tokens"]) == cached
        assert (cached >= 2 * BLOCK_TOKENS) is bool(turn)
        sent["messages"] = [*said, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
    assert {name: (shown["index"], shown["notes"]) for name, shown in pair.status().items()} == dict.fromkeys(
        ("p0", "d0"), ("exact", [])
    )
    for name in ("p0", "d0"):
        tokens = pair.ask_engine(name, "/tokenize", {"model": pair.model, "messages": said})["tokens"]
        assert set(block_hashes(tokens, BLOCK_TOKENS)) <= pair.stored_blocks(name)


def test_a_short_second_turn_stays_at_home_a_long_one_is_prefilled_apart(pair: Pair) -> None:
    headers = {"x-session-id": "short-and-long"}
    said = messages(220)
    first = ask(pair, said, headers=headers)
    assert first.headers["x-homeport-decision"] == "placed"
    assert first.headers["x-homeport-prefill-backend"] == "p0"
    said += [_assistant(first), {"role": "user", "content": "And in one word?"}]
    short = ask(pair, said, headers=headers)
    assert "x-homeport-prefill-backend" not in short.headers
    assert short.headers["x-homeport-decision"] == "home"
    said += [_assistant(short), {"role": "user", "content": fresh_text(220)}]
    long = ask(pair, said, headers=headers)
    assert long.headers["x-homeport-prefill-backend"] == "p0"
    assert long.headers["x-homeport-decision"] == "home"


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_engine_id": "x"},
    ],
)
def test_transfer_parameters_from_a_client_kill_nothing(pair: Pair, params: dict[str, Any]) -> None:
    answer = ask(pair, messages(20), kv_transfer_params=params, bootstrap_host="198.51.100.7")
    assert answer.json()["choices"][0]["message"]["content"]
    assert "kv_transfer_params" not in answer.text
    assert all(httpx.get(f"{pair.url(name)}/health", timeout=10).status_code == 200 for name in ("p0", "d0"))


def test_each_engine_takes_its_own_key_only(pair: Pair) -> None:
    # that requests through the proxy succeed with the client's key shows that it never reached an engine:
    assert ask(pair, messages(220), tokens=2).headers["x-homeport-prefill-backend"] == "p0"
    keys = {"p0": pair.key("p0"), "d0": pair.key("d0"), "client": CLIENT_KEY}
    accepted = {
        (engine, owner): httpx.get(
            f"{pair.url(engine)}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=10
        ).status_code
        for engine in ("p0", "d0")
        for owner, key in keys.items()
    }
    assert accepted == {(engine, owner): 200 if engine == owner else 401 for engine, owner in accepted}
    logs = "".join(part.process.log.read_text("utf-8", "replace") for part in pair.supervisor.parts)
    assert not [owner for owner, key in keys.items() if key in logs]
    assert not any(key in pair.supervisor.config_file.read_text("utf-8") for key in keys.values())


def test_speculation_is_seen_in_status(pair: Pair) -> None:
    said = [{"role": "user", "content": "Repeat: " + "one two three four five six seven eight nine ten. " * 12}]
    ask(pair, said, tokens=64)
    spec = pair.stats("d0").spec
    assert spec is not None
    assert spec.draft_tokens > 0

    def shown() -> bool:
        acceptance = pair.status()["d0"]["spec_acceptance"]
        return acceptance is not None and abs(acceptance - (spec.acceptance or 0.0)) < 1e-6

    assert until(shown), pair.status()["d0"]
    assert pair.status()["p0"]["spec_acceptance"] is None


def test_a_killed_prefill_engine_is_survived_and_used_again(pair: Pair) -> None:
    answers: list[httpx.Response] = []
    in_flight = threading.Thread(target=lambda: answers.append(ask(pair, messages(900), tokens=4)))
    in_flight.start()
    assert until(lambda: pair.status()["p0"]["inflight"]["prefill_tokens"] > 0)
    pair.supervisor.engines["p0"].process.kill()
    in_flight.join(180)
    assert len(answers) == 1, "the request under way was not served"
    assert "x-homeport-prefill-backend" not in answers[0].headers
    following = ask(pair, messages(220), tokens=4)
    assert "x-homeport-prefill-backend" not in following.headers
    assert following.headers["x-homeport-decision"] == "failover" or following.headers["x-homeport-reason"]
    with pytest.raises((urllib.error.URLError, OSError)):
        pair.stats("p0")

    pair.supervisor.start_engine("p0")
    pair.supervisor.wait_for_engine("p0", 600)
    assert until(lambda: pair.status()["p0"]["state"] == "up")
    for _ in range(2):
        again = ask(pair, messages(220), tokens=4)
        assert again.headers["x-homeport-prefill-backend"] == "p0"
    assert pair.status()["p0"]["index"] == "exact", "the new process's events are followed from their start"


def _assistant(answer: httpx.Response) -> Message:
    return {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]}
