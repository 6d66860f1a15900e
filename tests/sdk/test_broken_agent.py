"""The broken agent of the examples: its four faults named with place and cost, and mended where that is possible."""

from __future__ import annotations

import asyncio
import importlib
import socket
from pathlib import Path
from types import ModuleType

import pytest

from homeport.analysis import Conversation, conversations
from homeport.breaks import Detail, Reason
from homeport.prices import PriceBook
from homeport.record import read
from homeport_engines.emulator import Emulator, EmulatorSettings

EXAMPLES = Path(__file__).parents[2] / "examples"
PRICES = PriceBook({"smollm2": {"input": "0.50", "cache_read": "0.05", "output": "1.50"}}, vendors=False)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("broken_agent")


async def run(example: ModuleType, record: Path, *, stabilise: bool) -> Conversation:
    async with Emulator(EmulatorSettings(time_scale=1000.0, model="smollm2")) as engine:
        await asyncio.to_thread(
            lambda: example.run(f"{engine.url}/v1", "smollm2", record, "agent", stabilise=stabilise, rounds=2)
        )
    with record.open(encoding="utf-8") as lines:
        (conversation,) = conversations(read(lines), PRICES)
    return conversation


async def test_four_faults_are_named_and_two_of_them_mended(example: ModuleType, tmp_path: Path) -> None:
    broken = await run(example, tmp_path / "broken.jsonl", stabilise=False)
    mended = await run(example, tmp_path / "mended.jsonl", stabilise=True)
    found = {(one.reason, one.detail): one for _, one in broken.breaks()}
    assert set(found) == {
        (Reason.SYSTEM_CHANGED, Detail.TIMESTAMP),
        (Reason.TOOLS_REORDERED, None),
        (Reason.HISTORY_TRUNCATED, None),
        (Reason.ARGUMENTS_REENCODED, None),
    }
    pointers = {reason: one.pointer for (reason, _), one in found.items()}
    assert pointers[Reason.SYSTEM_CHANGED] == "/messages/0/content"
    assert pointers[Reason.TOOLS_REORDERED].startswith("/tools/")
    assert pointers[Reason.HISTORY_TRUNCATED] == "/messages/1"
    assert pointers[Reason.ARGUMENTS_REENCODED].endswith("/function/arguments")
    assert all(one.lost_tokens and one.cost_usd for one in found.values())

    assert not {one.reason for _, one in mended.breaks()} & {Reason.SYSTEM_CHANGED, Reason.TOOLS_REORDERED}
    assert broken.report.cached_share is not None
    assert mended.report.cached_share is not None
    assert mended.report.cached_share > broken.report.cached_share + 0.1


def test_without_a_proxy_it_says_so_in_one_line(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as bound:  # bound and not listening: nobody answers, and nobody else can take the port
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        monkeypatch.setattr("sys.argv", ["broken_agent.py", "--base-url", url])
        assert example.main() == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"no proxy at {url}; start one with `make up` or give --engine" in said


def test_progress_where_there_is_no_terminal(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with example.progress("broken", 20) as answered:
        for _ in range(20):
            answered()
    assert capsys.readouterr().err.splitlines() == [f"broken: {count} of 20 requests" for count in (9, 18, 20)]
