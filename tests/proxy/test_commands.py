"""status, why, drain and undrain against a running proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

import pytest
from aiohttp import web
from rich.console import Console

from homeport.cli import main
from homeport_proxy import config as cfg
from homeport_proxy.commands import status as status_command
from homeport_proxy.commands.why import render
from homeport_proxy.control import Control
from homeport_proxy.exchange import Exchange, TokenUsage
from homeport_proxy.observe.status import savings
from homeport_proxy.observe.summary import summarise
from homeport_proxy.routing.views import Decision, Word
from proxy.control_kit import engine, serving
from proxy.test_admin import exchange


def refused(request_id: str) -> Exchange:
    """A request for a model that nobody serves."""
    fields = {"decision": None, "legs": [], "usage": TokenUsage(), "outcome": None, "first_token_s": None}
    return exchange(request_id, model="gone", status=404, error="model_not_found", region="", **fields)


@contextlib.contextmanager
def running(extra: str = "") -> Iterator[tuple[str, Control]]:
    """A control plane with its routes, in a thread of its own: commands block."""
    ready, stop = threading.Event(), asyncio.Event()
    found: list[tuple[str, Control, asyncio.AbstractEventLoop]] = []

    async def serve() -> None:
        async with engine() as stub:
            text = f"regions: {{r: {{backends: [{{name: d0, url: '{stub.url}'}}]}}}}\nlog: {{level: error}}\n{extra}"
            control = Control(cfg.parse(text))
            await control.start()
            control.account.done(exchange("req-1"))
            control.account.done(refused("req-2"))
            app = web.Application()
            app.add_routes(control.routes())
            async with serving(app) as url:
                found.append((url, control, asyncio.get_running_loop()))
                ready.set()
                await stop.wait()
            await control.stop()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    url, control, loop = found[0]
    try:
        yield url, control
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)


def test_status_shows_the_fleet_and_gives_json(capsys: pytest.CaptureFixture[str]) -> None:
    with running() as (url, _):
        assert main(["status", "--url", url]) == 0
        out = capsys.readouterr().out
        assert main(["status", "--url", url + "/v1", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
    assert "d0" in out
    assert "cached share 64.0%" in out
    assert "1 answered request, 100 prompt tokens" in out, "the refused one is not among them"
    assert document["regions"]["r"]["backends"][0]["state"] == "up"


@pytest.mark.parametrize(("count", "said"), [(0, "0 sessions"), (1, "1 session"), (2, "2 sessions")])
def test_status_counts_in_words(count: int, said: str) -> None:
    status = {"version": "1", "region": "r", "regions": {}, "sessions": count, "degraded": []}
    with (console := Console(width=120)).capture() as caught:
        console.print(status_command.render({**status, "savings": savings(None)}))
    assert caught.get().splitlines()[0].endswith(said)


def test_why_tells_where_time_and_tokens_went(capsys: pytest.CaptureFixture[str]) -> None:
    with running() as (url, _):
        assert main(["why", "req-1", "--url", url]) == 0
        out = capsys.readouterr().out
        assert main(["why", "unknown", "--url", url]) == 1
        error = capsys.readouterr().err
    for said in ("home: d0\n", "found in the cache", "computed: evicted", "until the first token"):
        assert said in out
    assert error.startswith("homeport: No request of that id")


def test_why_tells_what_is_known_of_a_request_that_reached_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    with running() as (url, _):
        assert main(["why", "req-2", "--url", url]) == 0
        out = capsys.readouterr().out
    assert "req-2: chat gone, status 404 (model_not_found)" in out
    assert "refused by the proxy before it was sent to an engine" in out
    assert "not reported" not in out


def test_why_says_nothing_twice_and_expects_no_more_than_the_prompt_holds() -> None:
    decision = Decision("d0", Word.HOME, "home, 130 of 140 tokens expected cached", expected_cached_tokens=130)
    summary = summarise(exchange(decision=decision), {"new": 36})
    console = Console(width=120, highlight=False)
    with console.capture() as caught:
        console.print(render(summary))
    assert "home: d0 because 130 of 140 tokens expected cached" in caught.get()
    assert summary["tokens"]["expected_cached"] == 100  # type: ignore[index]
    assert "computed: new, not sent before in this conversation" in caught.get()


def test_drain_and_undrain(capsys: pytest.CaptureFixture[str]) -> None:
    with running() as (url, control):
        assert main(["drain", "d0", "--carry", "--url", url]) == 0
        said = capsys.readouterr().out
        assert "d0: draining (KV is not carried" in said
        assert "there is no other backend" in said
        assert control.health.state(control.fleet.members["d0"]) == "draining"
        assert main(["undrain", "d0", "--url", url]) == 0
        assert main(["drain", "d9", "--url", url]) == 1
        assert "known are d0, r" in capsys.readouterr().err


def test_a_key_is_taken_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOMEPORT_ADMIN_KEY", "right")
    with running("admin: {key_env: HOMEPORT_ADMIN_KEY}") as (url, _):
        assert main(["status", "--url", url]) == 0
        monkeypatch.setenv("OTHER", "wrong")
        assert main(["status", "--url", url, "--key-env", "OTHER"]) == 1
    assert "Set OTHER" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "ftp://x", "nonsense"])
def test_a_proxy_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert main(["status", "--url", url]) == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "Traceback" not in error
