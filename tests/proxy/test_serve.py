"""`homeport serve` as a process: the test of a file, reload by signal, a graceful stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from homeport.cli import main
from proxy.control_kit import engine, serving
from proxy.test_workers import TalkingEngine


def config_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "homeport.yaml"
    path.write_text(text)
    return str(path)


BACKENDS = "regions: {r: {backends: [{name: d0, url: 'http://127.0.0.1:1'}]}}\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BACKENDS + "listen: 0.0.0.0:8080", "add tenants, listen on 127.0.0.1, or give --insecure"),
        (BACKENDS + "helth: {}", "did you mean 'health'"),
        (BACKENDS + "admin: {key_env: NO_SUCH_KEY}", "NO_SUCH_KEY is not set"),
        (BACKENDS.replace("name: d0,", "name: d0, role: prefill,"), "d0: role prefill without kv_transfer"),
    ],
)
def test_a_file_that_cannot_be_served_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    assert main(["serve", "-t", "-c", config_file(tmp_path, text)]) == 1
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


def test_every_fault_has_a_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = config_file(tmp_path, BACKENDS + "helth: {}\nlissen: 1")
    assert main(["serve", "-c", file]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(": ")[0] for line in lines] == [f"homeport: {file}: {key}" for key in ("helth", "lissen")]


def test_a_busy_port_is_told_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        file = config_file(tmp_path, BACKENDS + f"listen: {address}")
        command = [Path(sys.prefix) / "bin" / "homeport", "serve", "-c", file]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == f"homeport: cannot listen on {address}: address already in use; choose another port with --port"


def test_a_good_file_ends_with_0_and_opens_nothing(tmp_path: Path) -> None:
    text = BACKENDS + "listen: 0.0.0.0:8080\nledger: {path: ledger.sqlite}"
    assert main(["serve", "-t", "--insecure", "-c", config_file(tmp_path, text)]) == 0
    assert not (tmp_path / "ledger.sqlite").exists()


@pytest.mark.parametrize("workers", ["0", "x", "-1", "257"])
def test_a_number_of_workers_that_is_none_is_bad_usage(workers: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "-c", "x", "--workers", workers])
    assert caught.value.code == 2


async def test_reload_by_signal_and_graceful_stop(tmp_path: Path) -> None:
    talking = TalkingEngine()
    async with serving(talking.app()) as url, engine() as second:
        talking.hold = asyncio.Event()
        text = (
            f"listen: 127.0.0.1:0\nregions: {{r: {{backends: [{{name: d0, url: '{url}'}}]}}}}\nlog: {{level: error}}\n"
        )
        file = config_file(tmp_path, text)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "homeport.cli", "serve", "-c", file), stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        async with asyncio.timeout(60):
            assert (await process.stderr.readline()).decode() == "homeport: starting; asking 1 backend\n"
            line = (await process.stderr.readline()).decode()
        base = line.split()[-1]
        async with aiohttp.ClientSession() as http:

            async def status() -> dict[str, object]:
                async with http.get(f"{base}/homeport/v1/status") as answer:
                    return json.loads(await answer.text())

            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
            chat = asyncio.create_task(_post(http, f"{base}/v1/chat/completions", body))
            async with asyncio.timeout(20):
                while not talking.chats:  # noqa: ASYNC110 - the engine has no event for it
                    await asyncio.sleep(0.01)
            # the very same second: only the signal can tell that the file changed
            stamp = Path(file).stat().st_mtime_ns  # noqa: ASYNC240
            config_file(tmp_path, text.replace("}]}}", f"}}, {{name: d1, url: '{second.url}'}}]}}}}"))
            os.utime(file, ns=(stamp, stamp))
            process.send_signal(signal.SIGHUP)
            async with asyncio.timeout(20):
                while "d1" not in json.dumps(await status()):  # noqa: ASYNC110 - another process reloads
                    await asyncio.sleep(0.02)
            assert not chat.done(), "a reload drops no request"
            process.terminate()
            talking.hold.set()
            assert (await chat)["choices"], "a stop lets it finish"
        assert await process.wait() == 0


async def _post(http: aiohttp.ClientSession, url: str, body: object) -> dict[str, object]:
    async with http.post(url, json=body) as answer:
        assert answer.status == 200
        return json.loads(await answer.text())
