"""Recorded requests: written with and without text, read back tolerantly, faults named by line."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeport.analysis import conversations
from homeport.breaks import Reason
from homeport.explain import explain
from homeport.record import Record, RecordError, RecordWriter, read, to_line, without_secrets
from homeport.redaction import BLOCK_CHARS, expand, is_redacted, local_key, redact
from sdk.explaining import chat, edited, grown, messages, usage

KEY = bytes(range(32))


def lines(path: Path) -> list[Record]:
    with path.open(encoding="utf-8") as file:
        return list(read(file, name=path.name))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    record = Record(
        body=chat(),
        ts=1.5,
        session="s",
        parent="p",
        url="http://127.0.0.1/v1/chat/completions",
        headers={"user-agent": "test"},
        status=200,
        response_headers={"x-homeport-backend": "d0"},
        usage=usage(10),
        ttft_s=0.25,
        model="smollm2",
        elapsed_s=2.0,
    )
    with RecordWriter(tmp_path / "r.jsonl", text=True) as writer:
        writer.write(record)
        writer.write(Record(body={"prompt": "ü \ud800"}))
    first, second = lines(tmp_path / "r.jsonl")
    assert first == record
    assert second.body == {"prompt": "ü \ud800"}
    assert stat.S_IMODE(os.stat(tmp_path / "r.jsonl").st_mode) == 0o600
    parsed = json.loads((tmp_path / "r.jsonl").read_text().splitlines()[0])
    assert list(parsed)[:10] == [
        "ts", "session", "parent", "url", "headers", "body", "status", "response_headers", "usage", "ttft_s",
    ]  # fmt: skip


def test_secrets_are_not_recorded() -> None:
    kept = without_secrets(
        {
            "Authorization": "Bearer x",
            "X-Api-Key": "x",
            "Cookie": "x",
            "x-my-token": "x",
            "X-Session-Affinity": "hp-1",
            "fireworks-cached-prompt-tokens": "5",
            "x-ratelimit-remaining-tokens": "9",
        }
    )
    assert kept == {
        "x-session-affinity": "hp-1",
        "fireworks-cached-prompt-tokens": "5",
        "x-ratelimit-remaining-tokens": "9",
    }
    line = to_line(Record(body={}, headers={"authorization": "Bearer abc"}, response_headers={"set-cookie": "abc"}))
    assert "abc" not in line


class TestWithoutText:
    def test_no_long_string_is_left_and_names_and_counts_are(self) -> None:
        record = json.loads(to_line(Record(body=chat(model="Qwen/Qwen3-30B-A3B-Instruct-2507")), KEY))
        left = _strings(record["body"])
        assert max(map(len, left)) <= 24
        assert {"user", "read", "function"} <= set(left)
        assert record["model"] == "Qwen/Qwen3-30B-A3B-Instruct-2507"
        assert next(iter(read([json.dumps(record)]))).request_body["model"] == "Qwen/Qwen3-30B-A3B-Instruct-2507"

    def test_the_place_is_still_found(self, tmp_path: Path) -> None:
        long = chat(system="a" * 2000 + "It is 10:00." + "b" * 2000)
        later = grown(chat(system="a" * 2000 + "It is 11:00." + "b" * 2000))
        with RecordWriter(tmp_path / "r.jsonl", key=KEY) as writer:
            for body in (long, later):
                writer.write(Record(body=body, session="s"))
        (conversation,) = conversations(lines(tmp_path / "r.jsonl"))
        ((turn, found),) = conversation.breaks()
        (plain,) = explain(long, later)
        assert (turn.number, found.reason, found.pointer) == (2, Reason.SYSTEM_CHANGED, "/messages/0/content")
        assert 0 <= plain.offset - found.offset < BLOCK_CHARS
        assert abs((found.lost_tokens or 0) - (plain.lost_tokens or 0)) <= BLOCK_CHARS // 4

    def test_a_continuation_stays_one(self) -> None:
        for body in (chat(), messages()):
            assert explain(redact(body, KEY), redact(grown(body), KEY)) == []  # type: ignore[arg-type]

    def test_digests_cannot_be_compared_between_machines(self) -> None:
        assert redact("x" * 30, KEY) != redact("x" * 30, KEY[::-1])

    @settings(deadline=None)
    @given(st.text(max_size=900))
    def test_digests_agree_up_to_where_the_texts_do(self, text: str) -> None:
        for changed in (0, len(text) // 2):
            other = text[:changed] + "\x00" + text[changed + 1 :]
            one, two = redact("=" * 30 + text, KEY), redact("=" * 30 + other, KEY)
            assert isinstance(one, dict)
            assert isinstance(two, dict)
            same = (30 + changed) // BLOCK_CHARS
            first, second = one["$blocks"], two["$blocks"]
            assert isinstance(first, list)
            assert isinstance(second, list)
            assert first[:same] == second[:same]
            if text[changed : changed + 1] != "\x00":
                assert all(a != b for a, b in zip(first[same:], second[same:], strict=False))

    @pytest.mark.parametrize(
        "value",
        [{"$blocks": ["x"]}, {"$blocks": "x", "chars": 3}, {"$blocks": [], "chars": 9}, {"$blocks": [1], "chars": 1}],
    )
    def test_what_only_looks_like_digests_is_left_alone(self, value: Any) -> None:
        assert not is_redacted(value)
        assert expand(value) == value


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [
        text for name, member in (value.items() if isinstance(value, dict) else enumerate(members))
        for text in _strings(member)
        if name != "$blocks"
    ]  # fmt: skip


class TestKey:
    def test_made_once_and_private(self, tmp_path: Path) -> None:
        path = tmp_path / "data" / "redaction.key"
        key = local_key(path)
        assert local_key(path) == key
        assert len(key) == 32
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert [one.name for one in path.parent.iterdir()] == ["redaction.key"]

    def test_processes_that_start_together_agree(self, tmp_path: Path) -> None:
        program = "from homeport.redaction import *; print(local_key().hex())"
        environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path)}
        started = [
            subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
            for _ in range(3)
        ]
        assert len({one.communicate(timeout=60)[0] for one in started}) == 1

    def test_a_broken_key_is_not_used(self, tmp_path: Path) -> None:
        (tmp_path / "k").write_bytes(b"short")
        with pytest.raises(ValueError, match="remove it"):
            local_key(tmp_path / "k")


class TestReading:
    def test_only_a_body_is_required(self) -> None:
        (record,) = read(['{"body": {}, "unknown": 5}\n', "\n", "  \n"])
        assert record == Record(body={})

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ("nonsense\n", "requests.jsonl, line 2 is not JSON"),
            ("[1]\n", "line 2 is no recorded request"),
            ('{"ts": 1}\n', "an object `body`"),
            ('{"body": []}\n', "an object `body`"),
            ('{"body": {}, "ts": "now"}\n', "line 2: `ts` must be a number, not 'now'"),
            ('{"body": {}, "session": 5}\n', "`session` must be text"),
            ('{"body": {}, "usage": 5}\n', "`usage` must be an object"),
            ('{"body": {}, "headers": []}\n', "`headers` must be an object"),
        ],
    )
    def test_a_fault_is_named(self, line: str, says: str) -> None:
        with pytest.raises(RecordError, match="line 2") as raised:
            list(read(['{"body": {}}\n', line], name="requests.jsonl"))
        assert says in str(raised.value)

    def test_a_last_line_that_breaks_off_is_passed_over(self) -> None:
        assert len(list(read(['{"body": {}}\n', '{"body": {"mo']))) == 1
        assert len(list(read(['{"body": {}}\n', '{"body": {}}']))) == 2


class TestWriting:
    def test_several_processes_write_one_file(self, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        program = """
import sys
from homeport.record import Record, RecordWriter
with RecordWriter(sys.argv[1], text=True) as writer:
    for number in range(200):
        writer.write(Record(body={"prompt": sys.argv[2] * 5000}, ts=number))
"""
        started = [subprocess.Popen([sys.executable, "-c", program, str(path), name]) for name in "ab"]
        assert [one.wait(timeout=60) for one in started] == [0, 0]
        found = lines(path)
        assert len(found) == 400
        assert {str(record.body["prompt"])[0] for record in found} == {"a", "b"}

    def test_a_full_file_is_put_aside(self, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        with RecordWriter(path, text=True, max_bytes=2000) as writer:
            for number in range(20):
                writer.write(Record(body={"prompt": "x" * 200}, ts=float(number)))
        assert path.stat().st_size < 3000
        assert (tmp_path / "r.jsonl.1").stat().st_size < 3000
        assert lines(path)[-1].ts == 19.0

    def test_a_file_that_was_moved_away_is_begun_anew(self, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        with RecordWriter(path, text=True) as writer:
            writer.write(Record(body={}, ts=1.0))
            path.rename(tmp_path / "moved")
            writer.write(Record(body={}, ts=2.0))
        assert [one.ts for one in lines(path)] == [2.0]
        with pytest.raises(ValueError, match="closed"):
            writer.write(Record(body={}))


class TestConversations:
    def test_sessions_side_requests_and_refusals(self) -> None:
        title = {
            "model": "smollm2",
            "messages": [{"role": "system", "content": "Find a title."}, *chat()["messages"][1:]],
        }
        records = [
            Record(body=chat(), session="a"),
            Record(body=chat(), session="b"),
            Record(body=title, session="a"),
            Record(body=grown(chat(), question="..."), session="a", headers={"x-homeport-kind": "side"}),
            Record(body=chat(model="other"), session="a", status=429),
            Record(body=grown(chat()), session="a", status=200),
            Record(body=edited(chat(), lambda b: b["tools"].reverse()), session="b"),
        ]
        first, second = conversations(records)
        assert (first.session, len(first.turns), first.side_requests, first.refused_requests) == ("a", 2, 2, 1)
        assert list(first.breaks()) == []
        assert [(turn.number, one.reason) for turn, one in second.breaks()] == [(2, Reason.TOOLS_REORDERED)]

    def test_without_a_session_headers_tell_and_agents_are_apart(self) -> None:
        main = {"x-claude-code-session-id": "s"}
        records = [
            Record(body=chat(), headers=main),
            Record(body=messages(), headers={**main, "x-claude-code-agent-id": "helper"}),
            Record(body=grown(chat()), headers=main),
        ]
        assert [(one.session, len(one.turns)) for one in conversations(records)] == [("s", 2), ("s/helper", 1)]

    def test_the_pause_counts_from_the_end_of_the_answer_before(self) -> None:
        body = messages()
        body["messages"][-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        unread = {"input_tokens": 4000, "cache_read_input_tokens": 0, "output_tokens": 1}
        for elapsed_s, reason in ((20.0, Reason.EVICTED), (1.0, Reason.EXPIRED)):
            records = [
                Record(body=body, ts=1000.0, elapsed_s=elapsed_s),
                Record(body=grown(body), ts=1310.0, usage=unread),
            ]
            (conversation,) = conversations(records)
            assert [one.reason for _, one in conversation.breaks()] == [reason]
