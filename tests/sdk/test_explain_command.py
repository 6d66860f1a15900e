"""`homeport explain`: a table to send on, JSON for programs, and one readable line for what it cannot read."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from homeport.cli import main
from homeport.record import Record, RecordWriter
from sdk.explaining import chat, edited, grown, usage


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two sessions: one that breaks twice, one that does not."""
    path = tmp_path / "requests.jsonl"
    clock = [chat(system=f"It is 10:0{minute}. Look after the harbour.") for minute in range(2)]
    with RecordWriter(path, text=True) as writer:
        bodies: list[Any] = [clock[0], grown(clock[1]), edited(grown(clock[1]), lambda b: b["tools"].reverse())]
        for number, body in enumerate(bodies):
            writer.write(Record(body=body, session="broken", ts=float(number), usage=usage(0), status=200))
        writer.write(Record(body=chat(), session="sound", usage=usage(0)))
        writer.write(Record(body=grown(chat()), session="sound", usage=usage(3600)))
        writer.write(Record(body=grown(grown(chat())), session="sound", usage=usage(None)))
    return path


def test_the_table(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text('{"smollm2": {"input": 1, "output": 1, "cache_read": 0.1}}')
    assert main(["explain", str(recorded), "--prices", str(prices)]) == 0
    text = capsys.readouterr().out
    broken, sound = text.split("\n\n")
    heading, columns, first, second, to_do, *hints = broken.splitlines()
    assert heading.startswith("Session broken: 3 requests, 0.0% of input cached, $0.0120 spent, $0.0000 saved")
    assert columns.split() == ["turn", "reason", "blame", "where", "byte", "tokens", "cost"]
    assert first.split()[:5] == ["2", "system_changed", "caller", "/messages/0/content", "(timestamp)"]
    assert second.split()[:4] == ["3", "tools_reordered", "caller", "/tools/0"]
    assert "$0.00" in first
    assert to_do.strip() == "What to do:"
    assert [hint.split()[0] for hint in hints] == ["system_changed", "tools_reordered"]
    assert max(map(len, (columns, first, second))) <= 120
    assert "no breaks" in sound
    assert "1 request did not report cached tokens" in sound
    assert "--prices" not in text


def test_the_byte_in_the_table_is_the_breaks_own(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json", str(recorded)]) == 0
    offset = json.loads(capsys.readouterr().out)["breaks"][1]["offset"]
    assert main(["explain", str(recorded)]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "tools_reordered" in line)
    assert row.split()[4] == f"{offset:,}"


def test_without_prices_it_says_how_to_give_them(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(recorded)]) == 0
    text = capsys.readouterr().out
    assert "$" not in text
    assert "cost" not in text.splitlines()[1]
    assert "--prices FILE.json" in text.splitlines()[-1]


def test_json(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json", str(recorded)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [one["session"] for one in said["sessions"]] == ["broken", "sound"]
    assert said["sessions"][1]["cached_share"] == 0.45
    assert [(one["session"], one["turn"], one["reason"]) for one in said["breaks"]] == [
        ("broken", 2, "system_changed"),
        ("broken", 3, "tools_reordered"),
        ("sound", 3, "not_reported"),
    ]
    assert said["breaks"][0]["pointer"] == "/messages/0/content"
    assert said["breaks"][0]["detail"] == "timestamp"
    assert said["breaks"][2]["lost_tokens"] is None


def test_from_stdin(recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(recorded.read_text()))
    assert main(["explain", "-"]) == 0
    assert "Session broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no recorded requests"),
        (b"hello\n", "line 1 is not JSON"),
        (b'{"body": {}}\n{"body": 5}\n', "line 2 is no recorded request"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (None, "cannot read"),
    ],
)
def test_what_it_cannot_read(
    content: bytes | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert main(["explain", str(path)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("homeport: ")
    assert says in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("prices", ["[]", "{", '{"m": {"input": 1}}'])
def test_bad_prices(prices: str, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prices.json").write_text(prices)
    assert main(["explain", str(recorded), "--prices", str(tmp_path / "prices.json")]) == 1
    assert "prices.json" in capsys.readouterr().err


def test_a_reader_that_goes_away(recorded: Path) -> None:
    command = f"{sys.executable} -m homeport.cli explain --json {recorded} | head -c 20 >/dev/null"
    finished = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, timeout=60)
    assert b"Traceback" not in finished.stderr
