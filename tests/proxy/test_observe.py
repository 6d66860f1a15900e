"""What is written down: the log, recorded requests, the decision log, spans; and never text or keys where not asked."""

from __future__ import annotations

import io
import json
import logging
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from homeport import record
from homeport_proxy import config as cfg
from homeport_proxy.account import Account, BytesPerToken, RequestLog
from homeport_proxy.control import Control
from homeport_proxy.observe import logs
from homeport_proxy.observe.logs import AccessLog
from homeport_proxy.observe.metrics import Metrics
from homeport_proxy.observe.prometheus import Counter, Histogram
from homeport_proxy.observe.recording import Recorder
from homeport_proxy.observe.writer import BackgroundWriter
from proxy.test_admin import exchange

SECRET = "the quick brown fox jumps over the lazy dog again and again"
DOCUMENT = {"model": "m", "messages": [{"role": "user", "content": SECRET}]}


def a_config(text: str = "", base: Path | None = None) -> cfg.Config:
    return cfg.parse(f"regions: {{r: {{backends: [{{name: d0, url: 'http://127.0.0.1:1'}}]}}}}\n{text}", base=base)


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_request_is_one_line_without_text_or_keys(form: str) -> None:
    out = io.StringIO()
    log = AccessLog(a_config(f"log: {{format: {form}}}").log, out)
    log(exchange(document=DOCUMENT), {"new": 36})
    log.flush()
    (line,) = out.getvalue().splitlines()
    assert "r1" in line
    assert "d0" in line
    assert "secret" not in line
    assert "quick" not in line
    if form == "json":
        assert json.loads(line)["cached_tokens"] == 64


def test_the_log_level_silences_the_request_log() -> None:
    out = io.StringIO()
    log = AccessLog(a_config("log: {level: warning}").log, out)
    log(exchange(), {})
    log.flush()
    assert out.getvalue() == ""


def test_other_lines_are_json_as_well() -> None:
    out = io.StringIO()
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        logs.configure(a_config().log, out)
        try:
            raise ValueError("oh")
        except ValueError:
            logging.getLogger("x").exception("what %s", "happened")
    finally:
        root.handlers[:], root.level = before, level
    line = json.loads(out.getvalue())
    assert (line["level"], line["message"]) == ("error", "what happened")
    assert "ValueError: oh" in line["traceback"]


@pytest.mark.parametrize("text", [False, True])
def test_requests_are_recorded_with_text_only_when_asked(tmp_path: Path, text: bool) -> None:
    file = tmp_path / "r.jsonl"
    recorder = Recorder(a_config(f"record: {{file: r.jsonl, text: {str(text).lower()}}}", tmp_path).record)
    recorder(exchange(document=DOCUMENT))
    recorder(exchange(api="embeddings", document=DOCUMENT))
    recorder.close()
    lines = file.read_text().splitlines()
    assert len(lines) == 1
    assert (SECRET in lines[0]) is text
    assert "secret" not in lines[0].replace(SECRET, ""), "keys never"
    (read,) = record.read(lines)
    usage = read.parsed_usage()
    assert (read.session, read.status, usage and usage.cached_tokens) == ("5e551017", 200, 64)
    assert read.response_headers["x-homeport-backend"] == "d0"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(cfg.ConfigError, match=r"record\.file"):
        Recorder(a_config("record: {file: /proc/nowhere/x}").record)
    with pytest.raises(cfg.ConfigError, match=r"ledger\.path"):
        Account(a_config("ledger: {path: /proc/nowhere/x}"), Metrics(), lambda _: False)
    with pytest.raises(cfg.ConfigError, match=r"decisions\.file"):
        Control(a_config(f"decisions: {{file: {tmp_path}}}"))


def test_a_slow_disk_drops_and_says_so() -> None:
    gate, begun = threading.Event(), threading.Event()
    written: list[int | str] = []

    def write(item: int) -> None:
        begun.set()
        gate.wait(20)
        written.append(item)

    writer = BackgroundWriter("test", write, lambda: written.append("finished"), max_pending=2)
    writer.put(0)
    assert begun.wait(20)
    for item in range(1, 6):
        writer.put(item)
    assert writer.degraded("log") == ["log: 3 dropped, the disk is too slow"]
    gate.set()
    writer.close()
    assert written == [0, 1, 2, "finished"]


def test_a_failing_disk_is_told_and_may_recover() -> None:
    failing = [True]

    def write(_: int) -> None:
        if failing[0]:
            raise OSError("no space left")

    writer = BackgroundWriter("test", write, lambda: None)
    writer.put(1)
    writer.close()
    assert writer.degraded("log") == ["log: OSError: no space left"]
    failing[0] = False
    again = BackgroundWriter("test", write, lambda: None)
    again.put(1)
    again.close()
    assert again.degraded("log") == []


def test_spans_follow_the_clients_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    from homeport_proxy.observe.tracing import Tracing

    parent = "4bf92f3577b34da6a3ce929d0e0e4736"
    made = exchange(document=DOCUMENT, headers={"traceparent": f"00-{parent}-00f067aa0ba902b7-01"})
    Tracing()(made, {})
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans["POST chat"]
    assert f"{root.context.trace_id:032x}" == parent
    assert {name: span.parent.span_id for name, span in spans.items() if name != "POST chat"} == {
        "queue": root.context.span_id,
        "serve d0": root.context.span_id,
    }
    assert root.end_time - root.start_time == pytest.approx(0.9e9, rel=1e-6)
    assert root.attributes["gen_ai.usage.cache_read.input_tokens"] == 64
    assert SECRET not in str([dict(span.attributes or {}) for span in spans.values()])


# counting


def test_the_request_log_is_bounded() -> None:
    log = RequestLog(kept=3)
    for i in range(10):
        log.add(exchange(f"r{i}", document=DOCUMENT), {})
    assert [summary["request_id"] for summary in log.latest(99)] == ["r9", "r8", "r7"]
    assert log.get("r1") is None
    assert SECRET not in str(log.latest(99))


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**5)), max_size=50))
def test_bytes_per_token_stay_sane_whatever_is_reported(reports: list[tuple[int, int]]) -> None:
    ratio = BytesPerToken()
    for body_bytes, tokens in reports:
        ratio.learn("m", body_bytes, tokens)
    assert 0.25 <= 10_000 / ratio.tokens("m", 10_000) <= 65


def test_bytes_per_token_are_learned_per_model() -> None:
    ratio = BytesPerToken()
    for _ in range(60):
        ratio.learn("terse", 2000, 1000)
    assert ratio.tokens("terse", 4000) == pytest.approx(2000, rel=0.02)
    assert ratio.tokens("other", 4000) == 1000


@given(st.lists(st.floats(0, 2000, allow_nan=False), max_size=60))
def test_a_histogram_reads_as_prometheus_reads_it(values: list[float]) -> None:
    histogram = Histogram("h", "text", (0.1, 1.0, 60.0))
    for value in values:
        histogram.observe(value)
    (family,) = text_string_to_metric_families("".join(f"{line}\n" for line in histogram.lines()))
    samples = {(s.name, s.labels.get("le")): s.value for s in family.samples}
    for bound, text in ((0.1, "0.1"), (1.0, "1"), (60.0, "60")):
        assert samples["h_bucket", text] == sum(value <= bound for value in values)
    assert samples["h_bucket", "+Inf"] == samples["h_count", None] == len(values)
    assert samples["h_sum", None] == pytest.approx(sum(values))


@given(st.text(max_size=30))
def test_label_values_survive_any_text(value: str) -> None:
    counter = Counter("c_total", "text", ("name",))
    counter.add(3, (value,))
    text = "".join(f"{line}\n" for line in counter.lines())
    (family,) = text_string_to_metric_families(text)
    assert [(s.labels["name"], s.value) for s in family.samples] == [(value, 3.0)]
