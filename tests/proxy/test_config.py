"""The configuration file: defaults, inheritance, and one clear line for every fault."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeport_proxy import config as cfg

FULL = """
listen: 127.0.0.1:8080
region: local
models:
  - {name: smollm2, aliases: [gpt-4o-mini, "claude-*", "claude-opus-*"], regions: [local]}
  - {name: big, aliases: ["*"]}
regions:
  local:
    weight: 1.0
    defaults: {engine: vllm, pool: agents, headers: {X-Zone: a, X-Both: default}}
    backends:
      - name: p0
        url: http://127.0.0.1:8101/
        role: prefill
        key_env: ENGINE_KEY
        models: [smollm2]
        kv_transfer: nixl
        kv_store: none
        kv_readback: false
        kv_events: {pub: "tcp://127.0.0.1:5557"}
        data_parallel: 2
        spec: null
        capacity: 1.0
      - {name: d0, url: "http://127.0.0.1:${PORT:-8102}", role: decode, kv_transfer: nixl, headers: {X-Both: own}}
  ams: {proxy: "https://ams.example.net", key_env: AMS_KEY, rtt_ms: 80}
affinity: {idle_ttl_s: 3600, max_sessions: 100000}
routing: {policy: cost, load_bound: 1.25, shadow: [session]}
disaggregation: {min_uncached_tokens: 256}
health: {interval_s: 1, timeout_s: 5, fail_after: 2}
tenants:
  - {name: acme, key_env: KEY_ACME, keys_file: null, max_concurrent: 64, tokens_per_minute: 2000000, weight: 1,
     cache_scope: tenant, prices: null, regions: null}
admin: {key_env: ADMIN_KEY}
state: {redis: "redis://:hunter2@127.0.0.1:6379/0"}
record: {file: null, text: false}
ledger: {path: ledger.sqlite}
timeouts: {connect_s: 5, first_token_s: 600, idle_s: 120, drain_s: 600}
limits: {body_bytes: 67108864, queue: 1024}
"""
MINIMAL = "regions: {local: {backends: [{name: a, url: 'http://127.0.0.1:1'}]}}\n"


def faults(text: str) -> list[str]:
    with pytest.raises(cfg.ConfigError) as caught:
        cfg.parse(text)
    return caught.value.errors


def test_the_full_file_is_read() -> None:
    config = cfg.parse(FULL, base=Path("/etc/homeport"), env={"PORT": "9102"})
    p0, d0 = config.here.backends
    assert (p0.url, p0.pool, p0.engine, p0.data_parallel) == ("http://127.0.0.1:8101", "agents", "vllm", 2)
    assert isinstance(p0.kv_events, cfg.KvEventSource)
    assert d0.url == "http://127.0.0.1:9102"
    assert d0.headers == {"X-Zone": "a", "X-Both": "own"}
    assert config.regions["ams"].kind == "peer"
    assert config.ledger.path == Path("/etc/homeport/ledger.sqlite")


def test_the_least_file_has_every_default() -> None:
    config = cfg.parse(MINIMAL)
    assert (config.listen.host, config.listen.port, config.region) == ("127.0.0.1", 8080, "local")
    backend = config.here.backends[0]
    assert (backend.role, backend.engine, backend.kv_transfer, backend.pool) == ("mixed", "vllm", "none", "default")
    assert (config.health.interval_s, config.health.timeout_s, config.health.fail_after) == (1, 5, 2)
    assert (config.timeouts.first_token_s, config.limits.body_bytes, config.limits.queue) == (600, 67108864, 1024)
    assert config.affinity.headers[0] == "x-session-affinity"


@pytest.mark.parametrize(
    ("asked", "name"),
    [("smollm2", "smollm2"), ("gpt-4o-mini", "smollm2"), ("claude-opus-5", "smollm2"), ("anything", "big")],
)
def test_a_model_is_found_by_name_alias_and_wildcard(asked: str, name: str) -> None:
    model = cfg.parse(FULL).model(asked)
    assert model is not None
    assert model.name == name


def test_an_unknown_model_is_none_only_when_models_are_listed() -> None:
    assert cfg.parse(MINIMAL + "models: [{name: m}]").model("other") is None
    any_model = cfg.parse(MINIMAL).model("other")
    assert any_model is not None
    assert any_model.name == "other"


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        (MINIMAL + "reigon: x", "reigon", "did you mean 'region'"),
        ("regionz: {a: {backends: [{name: x, url: 'http://x'}]}}", "regionz", "did you mean 'regions'"),
        (MINIMAL + "helth: {}", "helth", "did you mean 'health'"),
        (MINIMAL + "health: {intervall_s: 2}", "health.intervall_s", "did you mean 'interval_s'"),
        (MINIMAL + "health: {interval_s: 0}", "health.interval_s", "greater than 0"),
        (MINIMAL + "limits: {queue: x}", "limits.queue", "integer"),
        (MINIMAL + "listen: '8080'", "listen", "HOST:PORT"),
        (MINIMAL + "listen: '::1:8080'", "listen", "brackets"),
        (MINIMAL + "region: ams", "region", "none of the regions"),
        (MINIMAL + "tenants: [{name: x}]", "tenants[0]", "has no key"),
        (MINIMAL + "tenants: [{name: x, key_env: A, regions: [z]}]", "tenants[0].regions", "none of the regions"),
        (MINIMAL + "models: [{name: m, regions: []}]", "models[0].regions", "is empty"),
        (MINIMAL + "state: {redis: 'http://x'}", "state", "redis://"),
        (MINIMAL + "admin: {key_env: A, key_file: b}", "admin", "not both"),
        (MINIMAL + "routing: {policy: best}", "routing.policy", "'cost'"),
        (MINIMAL + "routing: {load_bound: 0.5}", "routing.load_bound", "greater than or equal to 1"),
        (MINIMAL + "routing: {slice_s: -1}", "routing.slice_s", "greater than or equal to 0"),
        ("regions: {}", "regions", "at least 1"),
        ("models: []", "regions", "is missing"),
        ("regions: {a: {backends: []}}", "regions.a", "no backends"),
        ("regions: {a: {proxy: 'http://p', backends: [{name: x, url: 'http://x'}]}}", "regions.a", "not both"),
        ("regions: {a: {proxy: 'http://p'}}", "region", "stands in"),
        ("regions: {a: {backends: [{name: a/b, url: 'http://x'}]}}", "regions.a.backends[0].name", "is no name"),
        ("regions: {a: {backends: [{name: x}]}}", "regions.a.backends[0].url", "is missing"),
        ("regions: {a: {backends: [{name: x, url: 'ftp://x'}]}}", "regions.a.backends[0].url", "http://"),
        ("regions: {a: {backends: [{name: x, url: 'http://u:p@x'}]}}", "regions.a.backends[0].url", "key_env"),
        ("regions: {a: {backends: [{name: x, url: 'http://x', role: both}]}}", "regions.a.backends[0].role", "'mixed'"),
        (
            "regions: {a: {defaults: {rol: x}, backends: [{name: x, url: 'http://x'}]}}",
            "regions.a.defaults.rol",
            "role",
        ),
        ("regions: {a: {discovery: [{type: dns, hots: x}]}}", "regions.a.discovery[0].hots", "'host'"),
        ("regions: {a: {discovery: [{type: zk}]}}", "regions.a.discovery[0]", "'kubernetes'"),
        ("[]", "the file must be a mapping of sections; at least `regions` is needed", ""),
        ("a: [1", "line 1, column 6", ""),
        ("a: 1\na: 2", "line 2, column 1", "stands twice"),
        ("[" * 5000, "not YAML of ours", "nested too deeply"),
    ],
)
def test_a_fault_names_its_path_and_the_remedy(text: str, path: str, says: str) -> None:
    found = [line for line in faults(text) if line == path or line.startswith(f"{path}: ")]
    assert found, faults(text)
    assert says in found[0]


def test_every_fault_is_told_at_once() -> None:
    text = "regions: {a: {backends: [{name: x, url: 'http://x', rol: 1, pool: ''}]}}\nhealth: {timeout_s: -1}\nx: 1"
    assert len(faults(text)) == 4


def test_a_name_may_stand_once_in_all_regions() -> None:
    text = """
regions:
  a: {backends: [{name: x, url: "http://x"}]}
  b: {backends: [{name: x, url: "http://y"}]}
region: a
"""
    assert faults(text) == [
        "regions.b.backends: backend name 'x' stands twice; names are unique over the whole file",
    ]


def test_an_unset_variable_is_named_once() -> None:
    lines = faults("regions: {a: {backends: [{name: x, url: '${NO_SUCH_VARIABLE_HERE}'}]}}")
    assert lines == [
        "regions.a.backends[0].url: environment variable NO_SUCH_VARIABLE_HERE is not set; export it or write "
        "${NO_SUCH_VARIABLE_HERE:-...}"
    ]


@given(st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=40))
def test_expansion_never_reads_what_a_variable_holds_as_syntax(value: str) -> None:
    text = "regions: {a: {backends: [{name: x, url: 'http://x', headers: {h: '${VALUE}', d: '$${VALUE}'}}]}}"
    backend = cfg.parse(text, env={"VALUE": value}).here.backends[0]
    assert backend.headers == {"h": value, "d": "${VALUE}"}


@pytest.mark.parametrize(
    ("listen", "loopback"),
    [
        ("127.0.0.1:1", True),
        ("127.3.4.5:1", True),
        ("localhost:1", True),
        ("'[::1]:1'", True),
        ("'[::ffff:127.0.0.1]:1'", True),
        ("0.0.0.0:1", False),
        ("':1'", False),
        ("'[::]:1'", False),
        ("10.0.0.1:1", False),
        ("proxy.example:1", False),
    ],
)
def test_an_open_proxy_listens_on_this_machine_only(listen: str, loopback: bool) -> None:
    config = cfg.parse(MINIMAL + f"listen: {listen}")
    refusal = config.refuses_to_listen()
    assert (refusal is None) is loopback
    assert config.refuses_to_listen(insecure=True) is None
    with_tenants = cfg.parse(MINIMAL + f"listen: {listen}\ntenants: [{{name: t, key_env: K}}]")
    assert with_tenants.refuses_to_listen() is None


def test_missing_secrets_are_named_with_their_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ENGINE_KEY", "AMS_KEY", "KEY_ACME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ADMIN_KEY", "x")
    lines = cfg.missing_secrets(cfg.parse(FULL, base=tmp_path))
    assert [line.partition(": ")[0] for line in lines] == [
        "regions.local.backends[0].key_env",
        "regions.ams.key_env",
        "tenants[0].key_env",
    ]


def test_a_dump_shows_no_secret() -> None:
    text = FULL.replace("X-Zone: a", "Authorization: Bearer topsecret")
    shown = json.dumps(cfg.dump(cfg.parse(text)))
    assert "hunter2" not in shown
    assert "topsecret" not in shown
    assert "redis://:***@127.0.0.1:6379/0" in shown


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(cfg.ConfigError, match="give an existing file") as caught:
        cfg.load(tmp_path / "none.yaml")
    assert len(caught.value.errors) == 1


def test_the_documented_file_is_the_default_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 4
    documented, plain = cfg.parse(blocks[1]), cfg.parse(blocks[0])
    for name in set(cfg.Config.model_fields) - {"models", "regions", "affinity"}:
        assert getattr(documented, name) == getattr(plain, name), name
    told = set(documented.here.backends[0].model_dump())
    assert all(re.search(rf"\b{key}:", blocks[1]) for key in told), "every key of a backend is named"
    cfg.parse(MINIMAL + blocks[2])
    cfg.parse("regions:\n  local:\n" + "".join(f"    {line}\n" for line in blocks[3].splitlines()))
