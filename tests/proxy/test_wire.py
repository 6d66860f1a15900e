"""Per connector and API: what each leg's body becomes, what is taken from a prefill answer, what is never split."""

from __future__ import annotations

import json
from typing import Any

import pytest

from homeport.fingerprint import Api
from homeport_engines import capabilities
from homeport_engines.base import EngineAddress, Handoff, KvTransfer
from homeport_engines.registry import KINDS, kind, transfer_of
from homeport_engines.sglang.wire import room
from homeport_proxy.splice import edit

PAIR = Handoff(
    "t" * 32,
    EngineAddress("p0", "http://10.0.0.1:8101", rank=1, bootstrap_port=8998, engine_ids={0: "e0", 1: "e1"}),
    EngineAddress("d0", "http://10.0.0.2:8102"),
)
CLIENT: dict[Api, dict[str, Any]] = {
    "chat": {
        "model": "m",
        "messages": [{"role": "user", "content": "é"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 500,
        "max_completion_tokens": 400,
        "min_tokens": 10,
        "n": 1,
        "stop": ["x"],
        "temperature": 0.5,
        "tools": [{"type": "function"}],
        "cache_salt": "s",
    },
    "completions": {"model": "m", "prompt": "p", "stream": True, "max_tokens": 9, "stop_token_ids": [1], "seed": 3},
    "responses": {"model": "m", "input": "i", "stream": True, "max_output_tokens": 90, "instructions": "s"},
    "messages": {
        "model": "m",
        "max_tokens": 77,
        "messages": [],
        "stream": True,
        "stop_sequences": ["x"],
        "system": "s",
    },
}
NIXL_WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
GIVEN = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "e", "remote_port": 5600}
APIS: tuple[Api, ...] = ("chat", "completions", "responses", "messages")


def applied(api: Api, leg: Any) -> dict[str, Any]:
    body = json.dumps(CLIENT[api]).encode()
    return json.loads(edit(body, leg.edits.set, leg.edits.drop))


def transfer(name: str) -> KvTransfer:
    return next(found.transfers[name] for found in KINDS.values() if name in found.transfers)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", ["nixl", "nixl-push", "mooncake", "store"])
def test_vllms_prefill_leg(api: Api, name: str) -> None:
    sent = applied(api, transfer(name).prefill_leg(api, PAIR))
    assert sent["stream"] is False
    assert not {"stream_options", "stop", "stop_token_ids", "stop_sequences"} & sent.keys()
    cap = {"responses": "max_output_tokens"}.get(api, "max_tokens")
    assert sent[cap] == 1
    if api == "chat":
        assert sent["max_completion_tokens"] == 1
    assert sent.get("min_tokens", 1) == 1
    assert sent.get("n", 1) == 1
    wanted: dict[str, Any] | None = {
        "nixl": NIXL_WANTED,
        "nixl-push": NIXL_WANTED,
        "mooncake": NIXL_WANTED | {"transfer_id": PAIR.transfer_id},
        "store": None,
    }[name]
    assert sent.get("kv_transfer_params") == wanted
    assert sent.get("ignore_eos", False) is (name == "mooncake" and api in ("chat", "completions"))
    touched = {
        "stream", "stream_options", "stop", "stop_token_ids", "stop_sequences", "max_tokens", "max_completion_tokens",
        "max_output_tokens", "min_tokens", "n", "kv_transfer_params", "ignore_eos",
    }  # fmt: skip
    assert {k: v for k, v in sent.items() if k not in touched} == {
        k: v for k, v in CLIENT[api].items() if k not in touched
    }


@pytest.mark.parametrize("api", APIS)
def test_nixls_decode_leg_carries_what_came_back_and_changes_nothing_else(api: Api) -> None:
    nixl = transfer("nixl")
    params = nixl.accept(api, {"kv_transfer_params": GIVEN, "usage": {}})
    assert params is not None
    assert applied(api, nixl.decode_leg(api, PAIR, params)) == CLIENT[api] | {"kv_transfer_params": GIVEN}
    assert applied(api, nixl.decode_leg(api, PAIR, None)) == CLIENT[api]


@pytest.mark.parametrize(
    "given",
    [
        None,
        {},
        {"remote_block_ids": [1]},
        GIVEN | {"remote_block_ids": []},
        GIVEN | {"remote_block_ids": [[], []]},
        [1],
    ],
)
def test_nixl_parameters_that_hold_nothing_are_not_used(given: Any) -> None:
    assert transfer("nixl").accept("chat", {"kv_transfer_params": given}) is None


@pytest.mark.parametrize("api", APIS)
def test_mooncakes_decode_leg_names_the_ranks_engine(api: Api) -> None:
    sent = applied(api, transfer("mooncake").decode_leg(api, PAIR, None))
    assert sent["kv_transfer_params"] == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": "http://10.0.0.1:8998",
        "remote_engine_id": "e1",
        "transfer_id": PAIR.transfer_id,
    }
    unknown = Handoff("t", EngineAddress("p0", "http://x"), PAIR.decode)
    with pytest.raises(ValueError, match="p0"):
        transfer("mooncake").decode_leg(api, unknown, None)


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_sglangs_legs_share_a_room(api: Api) -> None:
    bootstrap = transfer("bootstrap")
    one, two = applied(api, bootstrap.prefill_leg(api, PAIR)), applied(api, bootstrap.decode_leg(api, PAIR, None))
    members = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": room(PAIR.transfer_id)}
    assert members.items() <= one.items()
    assert two == CLIENT[api] | members
    assert one["stream"] is False
    assert one["max_tokens"] == CLIENT[api]["max_tokens"]
    assert 0 <= room("a") < 2**63
    assert room("a") != room("b")


@pytest.mark.parametrize(
    ("api", "usage", "expected"),
    [
        ("chat", {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, (9, 4)),
        ("chat", {"prompt_tokens": 9, "prompt_tokens_details": None}, (9, None)),
        ("responses", {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 0}}, (9, 0)),
        ("messages", {"input_tokens": 5, "cache_read_input_tokens": 4}, (9, 4)),
        ("messages", {"input_tokens": 9}, (9, None)),
        ("chat", {}, (None, None)),
    ],
)
def test_what_the_prefill_engine_found_cached(api: Api, usage: dict[str, Any], expected: tuple[Any, Any]) -> None:
    params = transfer("store").accept(api, {"usage": usage})
    assert params is not None
    assert (params.prompt_tokens, params.cached_tokens) == expected


def test_without_usage_details_nixls_own_figure_counts() -> None:
    params = transfer("nixl").accept("chat", {"kv_transfer_params": GIVEN | {"remote_prefill_cached_tokens": 3}})
    assert params is not None
    assert params.cached_tokens == 3


@pytest.mark.parametrize("name", list(capabilities.TABLE))
@pytest.mark.parametrize(
    ("api", "asked", "split"),
    [
        ("chat", {}, True),
        ("chat", {"n": 1}, True),
        ("chat", {"n": 2}, "store"),
        ("chat", {"prompt_logprobs": 0}, False),
        ("chat", {"use_beam_search": True}, "store"),
        ("completions", {"echo": True}, False),
        ("completions", {"best_of": 3}, "store"),
        ("completions", {"prompt": ["a", "b"]}, "store"),
        ("completions", {"prompt": ["a"]}, True),
        ("completions", {"prompt": [1, 2, 3]}, True),
        ("responses", {"previous_response_id": "r"}, False),
        ("responses", {"tools": [{"type": "web_search_preview"}]}, False),
        ("responses", {"tools": [{"type": "function", "name": "f"}, {"type": "mcp"}]}, False),
        ("responses", {"tools": [{"type": "namespace", "tools": []}, {"type": "web_search"}]}, True),
        ("responses", {"tools": [{"type": "function"}]}, True),
        ("responses", {"background": True}, False),
        ("messages", {}, True),
    ],
)
def test_capability_table(name: str, api: Api, asked: dict[str, Any], split: bool | str) -> None:
    expected = split is True or split == name
    assert (transfer(name).refuses(api, asked) is None) is expected
    assert asked.keys() <= capabilities.MEMBERS | {"x"}


@pytest.mark.parametrize(
    ("engine", "kv_transfer", "kv_store", "name"),
    [
        ("vllm", "nixl", "none", "nixl"),
        ("vllm", "nixl", "lmcache", "nixl"),
        ("vllm", "none", "mooncake", "store"),
        ("vllm", "none", "none", None),
        ("vllm", "bootstrap", "none", None),
        ("sglang", "bootstrap", "none", "bootstrap"),
        ("openai", "nixl", "none", None),
    ],
)
def test_which_choreography_settings_mean(engine: str, kv_transfer: str, kv_store: str, name: str | None) -> None:
    found = transfer_of(engine, kv_transfer, kv_store)
    assert (found.name if found else None) == name


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(KeyError, match="nothing"):
        kind("nothing")
