"""The decision log replays to the same decisions; shadow policies decide on paper."""

import argparse
from pathlib import Path

import pytest

from homeport.cli import CommandError
from homeport_proxy.commands import replay as command
from homeport_proxy.routing.decide import decide
from homeport_proxy.routing.decisions import DecisionLogError, dump, parse, replay, same
from homeport_proxy.routing.views import RoutingSettings
from routing.routing_kit import Fleet, request, spec


def busy_fleet(**settings: object) -> Fleet:
    """A fleet that has seen everything: words of all kinds."""
    specs = [spec("p0", "prefill"), spec("d0", "decode"), spec("d1", "decode"), spec("m0"), spec("m1")]
    fleet = Fleet(*specs, settings=RoutingSettings(**settings))  # type: ignore[arg-type]
    for number in range(120):
        name = f"s{number % 9}"
        if number % 17 == 5:
            fleet.router.set_state("m0", "down" if number % 2 else "up", fleet.now_s)
        if number == 60:
            fleet.router.set_places([one for one in specs if one.name != "m1"])
        kind = "side" if number % 11 == 0 else "main"
        ticket = fleet.router.arrive(request(name, 10 + number, kind=kind), fleet.now_s)
        fleet.router.due(fleet.now_s)
        if number % 7 == 0 and ticket.decision is not None:
            fleet.router.again(ticket, frozenset({ticket.decision.place}), fleet.now_s)
        fleet.now_s += 0.3
        if number % 3:
            fleet.end(ticket, cached=100)
    return fleet


@pytest.mark.parametrize("policy", ["cost", "session", "prefix", "least-tokens", "round-robin"])
def test_a_log_replays_to_the_same_decisions(policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = busy_fleet(policy=policy)
    assert len(fleet.records) >= 120
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(b"".join(dump(record) for record in fleet.records))
    with path.open("rb") as file:
        for written, read in zip(fleet.records, parse(file), strict=True):
            assert dump(read) == dump(written)
            assert same(read, replay(read))
    assert command.run(argparse.Namespace(decisions=path)) == 0
    assert f"{len(fleet.records)} decisions" in capsys.readouterr().out


def test_a_changed_log_is_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = busy_fleet()
    line = dump(fleet.records[0])
    place = fleet.records[0].decision.place
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(line.replace(f'"decision":{{"place":"{place}"'.encode(), b'"decision":{"place":"elsewhere"'))
    assert command.run(argparse.Namespace(decisions=path)) == 1
    assert "recorded elsewhere" in capsys.readouterr().err


def test_a_broken_log_is_named() -> None:
    with pytest.raises(DecisionLogError, match="line 2"):
        list(parse([b"\n", b'{"ts_s": "x"}\n']))


@pytest.mark.parametrize("text", ['{"body": {"messages": []}}\n', "regions:\n  a: {}\n", "\x00\x01", "[1]"])
def test_what_is_no_log_is_told_from_a_log_with_a_broken_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(text)
    with pytest.raises(CommandError) as caught:
        command.run(argparse.Namespace(decisions=path))
    assert str(caught.value).startswith(f"{path} is no decision log (line 1: ")
    assert str(caught.value).endswith("); the proxy writes one under `decisions: {file: PATH}`")
    path.write_bytes(dump(busy_fleet().records[0]) + text.encode())
    with pytest.raises(CommandError, match=r"requests\.jsonl, line 2: "):
        command.run(argparse.Namespace(decisions=path))


def test_deciding_changes_nothing_and_repeats() -> None:
    fleet = busy_fleet()
    record = fleet.records[-1]
    before = [place.copy() for place in record.places]
    first = decide(record.request, record.places, record.ts_s, 1, record.settings)
    second = decide(record.request, record.places, record.ts_s, 1, record.settings)
    assert first == second
    assert before == list(record.places)


def test_shadow_policies_report_and_do_not_decide() -> None:
    plain = busy_fleet()
    shadowed = busy_fleet(shadow=("round-robin", "least-tokens"))
    assert [r.decision.place for r in plain.records] == [r.decision.place for r in shadowed.records]
    report = shadowed.router.status(0.0).shadows
    assert set(report) == {"round-robin", "least-tokens"}
    for shadow in report.values():
        assert 0 < shadow.agreed < shadow.decisions
        assert shadow.saved_s is not None
        assert shadow.saved_s < 0  # the cost policy would not have chosen otherwise by its own prices
    with pytest.raises(ValueError, match="unknown policy"):
        Fleet(spec("d0"), settings=RoutingSettings(shadow=("wishful",)))
