"""`homeport check`: errors name the backend and end with status 1; what cannot be determined is a warning."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from homeport.cli import main
from homeport_proxy import config as cfg
from homeport_proxy import lint
from homeport_proxy.lint import Finding
from proxy.control_kit import engine, serving


def found(text: str) -> list[tuple[str, str, str]]:
    return [(f.level, f.where, f.text) for f in lint.offline(cfg.parse(text))]


def pool(*backends: str, rest: str = "") -> str:
    listed = ", ".join(f"{{url: 'http://h:{i}', {backend}}}" for i, backend in enumerate(backends))
    return f"regions: {{r: {{backends: [{listed}]}}}}\n{rest}"


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        (pool("name: p0, role: prefill", "name: d0, role: decode"), "p0", "cannot reach a decode backend"),
        (pool("name: p0, role: prefill, kv_transfer: nixl"), "p0", "no decode or mixed backend"),
        (
            pool("name: p0, role: prefill, kv_transfer: nixl", "name: d0, role: decode, kv_transfer: mooncake"),
            "d0",
            "p0 transfers by nixl, d0 by mooncake",
        ),
        (
            pool("name: p0, role: prefill, kv_transfer: nixl", "name: d0, role: decode, kv_transfer: nixl-push"),
            "d0",
            "by nixl, d0 by nixl-push",
        ),
        (
            pool("name: p0, role: prefill, kv_transfer: nixl", "name: d0, role: decode"),
            "d0",
            "d0 has no kv_transfer or kv_store",
        ),
        (
            pool("name: p0, role: prefill, kv_transfer: nixl, pool: a", "name: d0, role: decode, kv_transfer: nixl"),
            "p0",
            "pool a",
        ),
        (pool("name: a, engine: openai, kv_transfer: nixl"), "a", "engine openai cannot do nixl"),
        (pool("name: a, kv_readback: true"), "a", "kv_readback works with kv_transfer nixl only"),
        (
            pool("name: p0, role: prefill, kv_store: lmcache", "name: d0, role: decode, kv_store: mooncake"),
            "d0",
            "store lmcache",
        ),
        (
            pool("name: p0, role: prefill, kv_transfer: nixl", "name: m0, kv_transfer: mooncake"),
            "p0",
            "can hand over to no decode backend",
        ),
        (
            pool("name: a, engine: sglang, kv_transfer: nixl"),
            "a",
            "(nixl is its transport behind that; write kv_transfer: bootstrap)",
        ),
        (pool("name: a, models: [x]", rest="models: [{name: y}]"), "models[0]", "lists 'y'"),
    ],
)
def test_settings_that_cannot_work_name_the_backend(text: str, where: str, says: str) -> None:
    errors = [(place, said) for level, place, said in found(text) if level == "error"]
    assert any(place == where and says in said for place, said in errors), errors


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (pool("name: p0, role: prefill", "name: d0, role: decode, kv_transfer: nixl"), ["p0"]),
        (pool("name: p0, role: prefill, kv_transfer: nixl", "name: d0, role: decode"), ["d0"]),
        (
            pool(
                "name: p0, role: prefill, kv_transfer: nixl",
                "name: d0, role: decode, engine: sglang, kv_store: hicache",
            ),
            ["d0"],
        ),
        (
            pool(
                "name: p0, role: prefill, kv_transfer: nixl",
                "name: p1, role: prefill, kv_transfer: mooncake",
                "name: d0, role: decode, kv_transfer: nixl",
                "name: d1, role: decode",
            ),
            ["d1", "p1"],
        ),
    ],
)
def test_one_fault_is_told_once(text: str, names: list[str]) -> None:
    assert [(level, place) for level, place, _ in found(text)] == [("error", name) for name in names]


@pytest.mark.parametrize(
    "text",
    [
        pool("name: p0, role: prefill, kv_transfer: nixl", "name: d0, role: decode, kv_transfer: nixl"),
        pool("name: p0, role: prefill, kv_transfer: mooncake", "name: d0, kv_transfer: mooncake", "name: m"),
        pool("name: p0, role: prefill, kv_store: shared-folder", "name: d0, role: decode, kv_store: shared-folder"),
        pool("name: m"),
        pool("name: d0, role: decode").replace("{r: {", "{r: {discovery: [{type: dns, host: h, port: 1}], "),
    ],
)
def test_settings_that_work_have_no_error(text: str) -> None:
    assert found(text) == []


def test_decode_backends_alone_are_a_warning_that_names_them() -> None:
    ((level, where, said),) = found(pool("name: d0, role: decode", "name: d1, role: decode", "name: m"))
    assert (level, where) == ("warning", "regions.r")
    assert "so d0, d1 will prefill by itself" in said


@pytest.mark.parametrize(("path", "guessed"), [("/v1", True), ("/v1/", True), ("/v1/engines", False), ("/llm", False)])
def test_a_url_that_ends_in_v1_is_seen_in_the_file(path: str, guessed: bool) -> None:
    text = f"regions: {{r: {{backends: [{{name: a, url: 'http://h{path}'}}]}}}}"
    findings = [(f.level, f.where) for f in lint.guesses(cfg.parse(text))]
    assert findings == ([("warning", "a")] if guessed else [])


async def asked(text: str) -> list[Finding]:
    config = cfg.parse(text)
    findings, _ = await lint.online(config, config.backends)
    return findings


async def test_engines_are_asked_what_they_are() -> None:
    async with engine(models=["m"]) as up, engine(models=["m"], metrics=None) as mute:
        text = f"""
models: [{{name: m}}]
regions:
  r:
    backends:
      - {{name: up, url: "{up.url}"}}
      - {{name: mute, url: "{mute.url}"}}
      - {{name: gone, url: "http://127.0.0.1:1"}}
      - {{name: other, url: "{up.url}", models: [z]}}
"""
        findings = [(f.level, f.where) for f in await asked(text)]
    assert findings == [("warning", "mute"), ("error", "gone"), ("error", "other")]


async def test_a_pair_must_serve_one_model_and_one_version() -> None:
    async with engine(version="0.32.0") as p, engine(version="0.31.0") as d:
        text = f"""
regions:
  r:
    defaults: {{kv_transfer: nixl}}
    backends:
      - {{name: p0, url: "{p.url}", role: prefill}}
      - {{name: d0, url: "{d.url}", role: decode}}
"""
        findings = await asked(text)
        d.version, d.models = "0.32.0", ["other"]
        second = await asked(text)
    assert [(f.level, f.where) for f in findings] == [("error", "p0")]
    assert "runs vLLM 0.32.0, d0 0.31.0" in findings[0].text
    assert [(f.level, f.where) for f in second] == [("error", "p0")]
    assert "serves no model that d0 serves" in second[0].text


@pytest.mark.parametrize(
    ("health", "more", "level"),
    [(404, "", "error"), (200, "", "warning"), (404, ", models: [m]", "warning"), (404, ", engine: openai", "error")],
)
async def test_what_has_no_list_of_models_is_not_taken_for_an_engine(health: int, more: str, level: str) -> None:
    async def answers(_: web.Request) -> web.Response:
        return web.Response(status=health)

    app = web.Application()
    app.router.add_get("/health", answers)
    async with serving(app) as url:
        (finding,) = await asked(f"regions: {{r: {{backends: [{{name: a, url: '{url}'{more}}}]}}}}")
    assert (finding.level, finding.where) == (level, "a")
    assert "/v1/models answers 404" in finding.text


async def test_a_url_that_leads_nowhere_comes_with_a_remedy() -> None:
    async with engine() as up:
        text = f"""
regions:
  r:
    backends:
      - {{name: tls, url: "{up.url.replace("http", "https")}"}}
      - {{name: gone, url: "http://127.0.0.1:1"}}
      - {{name: long, url: "{up.url}/v1"}}
  far: {{proxy: "{up.url.replace("http", "https")}"}}
region: r
"""
        said = {f.where: f.text for f in await asked(text)}
    assert said["tls"].endswith("cannot be reached: the port speaks no TLS; write http:// in the url")
    assert said["gone"].endswith("refuses connections; is the engine running? look at host and port")
    assert said["long"].endswith("; leave out the /v1 at the end of the url, the proxy adds it itself")
    assert said["far"].endswith("cannot be reached: the port speaks no TLS; write http:// in the url")


# the command


def config_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "homeport.yaml"
    path.write_text(text)
    return str(path)


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """A proxy that starts takes the process's logging over."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_the_command_ends_with_1_and_names_the_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = config_file(tmp_path, "regions: {r: {backends: [{name: gone, url: 'http://127.0.0.1:1'}]}}")
    assert main(["check", "-c", file]) == 1
    out = capsys.readouterr()
    assert "gone" in out.err
    assert "refuses connections" in out.err
    assert "Traceback" not in out.out + out.err
    assert main(["check", "-c", file, "--offline"]) == 0


def test_the_command_tells_every_fault_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = config_file(tmp_path, "regions: {r: {backends: [{name: a, url: x, rol: y}]}}\nhelth: 1")
    assert main(["check", "-c", file, "--offline", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert {f["where"] for f in document["findings"]} == {
        "regions.r.backends[0].url",
        "regions.r.backends[0].rol",
        "helth",
    }


@pytest.mark.parametrize(
    ("more", "where", "anywhere"),
    [
        ("listen: 0.0.0.0:18080", "listen", True),
        ("tenants: [{name: t, key_env: NO_KEY_HERE}]", "tenants[0].key_env", False),
        ("admin: {key_file: none.key}", "admin.key_file", False),
        ("listen: {address: '127.0.0.1:0', tls: {cert: none.pem, key: none.pem}}", "listen.tls", False),
    ],
)
@pytest.mark.usefixtures("logging_as_before")
def test_what_serve_refuses_is_an_error_in_the_same_words(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: str,
    where: str,
    anywhere: bool,
) -> None:
    """What may only be missing here is a warning offline."""
    monkeypatch.delenv("NO_KEY_HERE", raising=False)
    file = config_file(tmp_path, f"regions: {{r: {{backends: [{{name: a, url: 'http://127.0.0.1:1'}}]}}}}\n{more}")
    assert main(["check", "-c", file]) == 1
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"error: {where}")]
    fault = line.removeprefix("error: ")
    for test in ([], ["-t"]):
        assert main(["serve", "-c", file, *test]) == 1
        assert f"homeport: {file}: {fault}" in capsys.readouterr().err.splitlines()
    assert main(["check", "-c", file, "--offline"]) == int(anywhere)
    out = capsys.readouterr()
    assert (f"error: {fault}" in out.err) is anywhere
    assert (f"warning: {fault}" in out.out) is not anywhere


def test_unset_keys_are_errors_but_only_warnings_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_KEY_HERE", raising=False)
    text = "regions: {r: {backends: [{name: a, url: 'http://127.0.0.1:1', key_env: NO_KEY_HERE}]}}"
    file = config_file(tmp_path, text)
    assert main(["check", "-c", file, "--offline"]) == 0
    assert "NO_KEY_HERE" in capsys.readouterr().out
    assert main(["check", "-c", file]) == 1


def test_what_serve_may_do_insecurely_check_lets_pass(tmp_path: Path) -> None:
    file = config_file(tmp_path, pool("name: a", rest="listen: 0.0.0.0:18080"))
    assert main(["check", "-c", file, "--offline", "--insecure"]) == 0


def test_a_guess_about_a_url_is_left_out_where_the_engine_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(tmp_path, "regions: {r: {backends: [{name: a, url: 'http://127.0.0.1:1/v1'}]}}")
    assert main(["check", "-c", file, "--offline"]) == 0
    assert "warning: a: url http://127.0.0.1:1/v1 ends in /v1" in capsys.readouterr().out
    assert main(["check", "-c", file]) == 1
    assert "ends in /v1" not in capsys.readouterr().out


def test_dump_prints_the_effective_file_without_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "regions: {r: {backends: [{name: a, url: 'http://h', headers: {authorization: hush}}]}}"
    assert main(["check", "-c", config_file(tmp_path, text), "--offline", "--dump"]) == 0
    out = capsys.readouterr().out
    assert "first_token_s: 600" in out
    assert "hush" not in out
