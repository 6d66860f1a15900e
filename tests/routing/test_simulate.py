"""The simulator: traces of every kind, rules of every kind, failures, fairness; small and seeded."""

import gzip
import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest

from homeport.cli import main
from homeport_proxy.routing.views import RoutingSettings
from homeport_proxy.simulate.cluster import Cluster, ClusterError, Region, Sessions, load_cluster
from homeport_proxy.simulate.live import block_text, prompt_text
from homeport_proxy.simulate.peers import ONE_CACHE, PEERS
from homeport_proxy.simulate.result import Row, Samples, quantile
from homeport_proxy.simulate.run import Failure, Simulation
from homeport_proxy.simulate.suite import Run, sample, simulate, simulate_all
from homeport_proxy.simulate.traces import TraceError, load, sniff
from homeport_proxy.simulate.workload import Call, Conversation, Lane, Workload
from routing.fairness import quiet_p90_s

BLOCK = 512


def agents(sessions: int = 40, turns: int = 12, head: int = 10) -> Workload:
    """Growing conversations with a shared head, some with a sub-agent."""
    shared = list(range(1, head + 1))
    conversations = []
    for number in range(sessions):
        own = [(number + 1) * 10_000 + index for index in range(400)]
        lane = Lane(f"s{number}")
        for turn in range(turns):
            keys = shared + own[: 20 + 6 * turn]
            lane.calls.append(Call(len(keys) * BLOCK + 100, 60, keys, 4.0 + number % 3))
        lanes = [lane]
        if number % 5 == 0:
            keys = [(number + 1) * 10_000 + 5_000 + index for index in range(30)]
            lanes.append(Lane(f"s{number}/1", [Call(30 * BLOCK, 20, keys, 1.0)], after=3))
        conversations.append(Conversation(f"s{number}", lanes))
    return Workload(conversations, closed=True, block_tokens=BLOCK)


CLUSTER = Cluster(replicas=4, cache_tokens=700_000, sessions=Sessions(spread_s_per_session=1.5))


def row(policy: str, workload: Workload | None = None, cluster: Cluster = CLUSTER, seed: int = 1) -> Row:
    return simulate(workload or agents(), cluster, Run(policy, seed)).row


def test_runs_repeat_and_seeds_differ() -> None:
    assert row("cost") == row("cost")
    assert row("cost", seed=2) != row("cost")


@pytest.mark.parametrize("policy", ["cost", "session", "prefix", "least-tokens", "round-robin", *PEERS, ONE_CACHE])
def test_every_rule_serves_every_request(policy: str) -> None:
    simulation = Simulation(agents(20), CLUSTER, policy, seed=1, whole=True)
    samples = simulation.run()
    assert samples.all
    assert all(sample.ttft_s > 0 for sample in samples.all)
    assert simulation.router.status(simulation.now_s).queued == 0


def test_cost_keeps_the_cache_that_balance_loses() -> None:
    cost, spread, bound = row("cost"), row("round-robin"), row(ONE_CACHE)
    assert cost.hit_ratio is not None
    assert spread.hit_ratio is not None
    assert bound.hit_ratio is not None
    assert cost.hit_ratio > spread.hit_ratio + 0.1
    assert cost.hit_ratio > 0.97 * bound.hit_ratio
    assert cost.ttft_p90_s is not None
    assert spread.ttft_p90_s is not None
    assert cost.ttft_p90_s < 0.6 * spread.ttft_p90_s


def test_a_lost_backend_moves_only_its_own_sessions_and_keeps_the_others_hits() -> None:
    workload = agents(48, 12)
    cluster = Cluster(replicas=8, cache_tokens=900_000, sessions=Sessions(spread_s_per_session=0.5), window=(0, 1))
    whole = Simulation(workload, cluster, "cost", seed=1, whole=True)
    whole.run()
    broken = Simulation(workload, cluster, "cost", seed=1, failures=[Failure("e3", 60.0, 110.0)], whole=True)
    homes_before: dict[str, str | None] = {}
    moved_with_living_home: list[str] = []

    def note(when: float) -> None:
        for conversation in workload.conversations:
            seen = broken.router.session(conversation.name)
            if when < 60:
                homes_before[conversation.name] = seen.home if seen else None
            elif seen and homes_before.get(conversation.name) not in (None, "e3", seen.home):
                moved_with_living_home.append(conversation.name)

    broken.at(59.9, lambda: note(59.9))
    broken.at(120.0, lambda: note(120.0))
    broken.run()
    assert len(broken.samples.all) == len(whole.samples.all)
    assert len(moved_with_living_home) <= 0.02 * 48

    def hits(samples: Samples) -> float:
        minute = [item for item in samples.all if 60 <= item.arrived_s < 120]
        return sum(item.cached_tokens for item in minute) / sum(item.prompt_tokens for item in minute)

    assert hits(broken.samples) >= 0.92 * hits(whole.samples)


def test_two_legs_cut_the_gaps_between_tokens() -> None:
    split = CLUSTER.model_copy(update={"prefill_replicas": 3, "decode_replicas": 1})
    together, apart = row("cost"), row("cost", cluster=split)
    assert together.itl_p99_s is not None
    assert apart.itl_p99_s is not None
    assert apart.itl_p99_s < 0.7 * together.itl_p99_s


@pytest.mark.parametrize(
    "worse", [{"noise": 0.3}, {"uneven": 0.3}, {"noise": 0.3, "uneven": 0.3}, {"session_ids": False}]
)
def test_worse_conditions_leave_the_policy_standing(worse: dict[str, object]) -> None:
    hit_ratio, plain = (row("cost", cluster=CLUSTER.model_copy(update=more)).hit_ratio for more in (worse, {}))
    assert hit_ratio is not None
    assert plain is not None
    assert hit_ratio > 0.95 * plain


def test_engines_are_uneven_for_good_and_noise_is_each_prefills() -> None:
    def speeds(**changes: float) -> set[float]:
        engines = Simulation(agents(2), CLUSTER.model_copy(update=changes), "cost").engines.values()
        return {engine.rates.tokens_per_s for engine in engines}

    assert speeds(noise=0.3) == {CLUSTER.prefill.tokens_per_s}
    uneven = speeds(uneven=0.3)
    assert len(uneven) == CLUSTER.replicas
    assert all(abs(speed / CLUSTER.prefill.tokens_per_s - 1) <= 0.3 for speed in uneven)


def test_an_index_from_events_a_second_old_does_as_well() -> None:
    plain = row("cost")
    for lag_s in (0.0, 1.0):
        late = row("cost", cluster=CLUSTER.model_copy(update={"index": "exact", "telemetry_lag_s": lag_s}))
        assert late.hit_ratio is not None
        assert plain.hit_ratio is not None
        assert late.hit_ratio > 0.97 * plain.hit_ratio


def test_the_round_trip_keeps_requests_in_their_region() -> None:
    def crossing(rtt_ms: float) -> float:
        regions = {name: Region(replicas=2, share=share, rtt_ms=rtt_ms) for name, share in (("a", 65), ("b", 35))}
        found = row("cost", cluster=CLUSTER.model_copy(update={"regions": regions})).cross_region_ratio
        assert found is not None
        return found

    assert crossing(1) > 0.3
    assert crossing(5_000) < 0.1


def test_processes_give_the_same_lines_in_order() -> None:
    runs = [Run("cost", 0), Run("sglang", 0), Run("cost", 1)]
    workload = agents(12)
    assert [done.row for done in simulate_all(workload, CLUSTER, runs, jobs=2)] == [
        simulate(workload, CLUSTER, run).row for run in runs
    ]


def test_samples_of_a_workload_are_seeded() -> None:
    workload = agents(30)
    names = [conversation.name for conversation in sample(workload, 7, 3).conversations]
    assert names == [conversation.name for conversation in sample(workload, 7, 3).conversations]
    assert len(names) == 7
    assert sample(workload, 99, 3) is workload


BLOCK_LINE = {
    "session": "a",
    "block_size": 64,
    "tool_tokens": 1024,
    "system_tokens": 0,
    "requests": [
        {"t": 0, "lane": 0, "in": 2100, "out": 50, "think": 0.0, "api": 2, "blocks": [[1, 32]]},
        {"t": 5, "lane": 0, "in": 3200, "out": 50, "think": 3.0, "api": 2, "blocks": [[1, 32], [40, 17]]},
        {"t": 3, "lane": 1, "in": 1100, "out": 50, "think": None, "api": 2, "blocks": [[90, 17]]},
    ],
}


def write(path: Path, lines: list[object]) -> Path:
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_block_traces_share_heads_and_only_heads(tmp_path: Path) -> None:
    other = {**BLOCK_LINE, "session": "b"}
    workload = load(write(tmp_path / "t.jsonl.gz", [BLOCK_LINE, other]))
    first, second = workload.conversations
    assert [len(call.keys) for call in first.lanes[0].calls] == [4, 6]
    assert first.lanes[0].calls[1].keys[:4] == first.lanes[0].calls[0].keys
    assert first.lanes[0].calls[0].keys[:2] == second.lanes[0].calls[0].keys[:2]
    assert not set(first.lanes[0].calls[0].keys[2:]) & set(second.lanes[0].calls[0].keys)
    assert [lane.after for lane in first.lanes] == [None, 0]
    assert first.lanes[1].calls[0].wait_s == 1.0
    doubled = load(tmp_path / "t.jsonl.gz", copies=2)
    assert len(doubled.conversations) == 4
    assert doubled.conversations[0].lanes[0].calls[0].keys[3] != doubled.conversations[1].lanes[0].calls[0].keys[3]


def test_mooncake_sessions_come_from_hash_chains(tmp_path: Path) -> None:
    lines: list[object] = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 900, "input_length": 1100, "output_length": 5, "hash_ids": [0, 7, 8]},
        {"timestamp": 2000, "input_length": 2100, "output_length": 5, "hash_ids": [0, 1, 9, 10, 11]},
    ]
    workload = load(write(tmp_path / "m.jsonl", lines))
    assert not workload.closed
    assert [[call.wait_s for call in c.lanes[0].calls] for c in workload.conversations] == [[0.0, 2.0], [0.9]]
    assert simulate(workload, Cluster(window=(0, 1)), Run("cost", 0)).row.requests == 3


def test_text_traces_become_blocks(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "word " * 2000}]
    for number in range(4):
        turns += [
            {"role": "user", "content": f"question {number} " + "more " * 300},
            {"role": "assistant", "content": "answer"},
        ]
    messages = write(tmp_path / "c.jsonl", [{"session_id": "x", "messages": turns}])
    workload = load(messages, block_tokens=128)
    calls = workload.conversations[0].lanes[0].calls
    assert len(calls) == 4
    assert all(list(late.keys[: len(early.keys)]) == list(early.keys) for early, late in pairwise(calls))
    recorded = [
        {
            "ts": 10.0 * n,
            "session": "y",
            "body": {"messages": turns[: 2 + 2 * n]},
            "ttft_s": 1.0,
            "usage": {"input_tokens": 4000 + 500 * n},
        }
        for n in range(3)
    ]
    workload = load(write(tmp_path / "r.jsonl", list(recorded)), block_tokens=128)
    calls = workload.conversations[0].lanes[0].calls
    assert [call.prompt_tokens for call in calls] == [4000, 4500, 5000]
    assert [call.wait_s for call in calls] == [2.0, 9.0, 9.0]
    blocks = [
        {"body": {"messages": [{"role": "user", "content": {"$blocks": ["aa"] * n, "chars": 256 * n}}]}, "session": "z"}
        for n in (16, 24)
    ]
    calls = load(write(tmp_path / "d.jsonl", list(blocks)), block_tokens=128).conversations[0].lanes[0].calls
    assert calls[1].keys[: len(calls[0].keys)] == calls[0].keys
    assert len(calls[0].keys) >= 7


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "empty"),
        ([{"x": 1}], "not a trace"),
        ([{"hash_ids": [1]}], "line 1"),
        ([BLOCK_LINE, {"session": 4}], "line 2"),
        ([{**BLOCK_LINE, "block_size": 100}], "block_tokens"),
    ],
)
def test_bad_traces_are_named(tmp_path: Path, lines: list[object], says: str) -> None:
    path = write(tmp_path / "bad.jsonl", lines)
    with pytest.raises(TraceError, match=says):
        load(path)


def test_recorded_requests_that_were_refused_are_no_traffic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def recorded(ts: float, status: int | None) -> dict[str, object]:
        body = {"messages": [{"role": "user", "content": "hello"}]}
        return {
            "session": "a",
            "ts": ts,
            "elapsed_s": 1.0,
            "url": "/v1/chat/completions",
            "body": body,
            "status": status,
        }

    answers = [recorded(0, 200), recorded(2, 404), recorded(4, 503), recorded(6, 200), recorded(9, None)]
    path = write(tmp_path / "r.jsonl", list(answers))
    workload = load(path)
    waits = [call.wait_s for call in workload.conversations[0].lanes[0].calls]
    assert (waits, workload.left_out) == ([2.0, 5.0, 2.0], 2)
    assert main(["replay", str(path), "--jobs", "1", "--json"]) == 0
    captured = capsys.readouterr()
    assert "homeport: left out 2 recorded requests answered with an error\n" in captured.err
    assert len(json.loads(captured.out)) == 1
    with pytest.raises(TraceError, match="all in it were answered with an error"):
        load(write(tmp_path / "refused.jsonl", list(answers[1:3])))


def test_broken_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(b"no gzip")
    with pytest.raises(TraceError):
        sniff(path)
    path.write_bytes(gzip.compress(b"{}" * 999)[:12] + b"no deflate")
    with pytest.raises(TraceError):
        sniff(path)
    with pytest.raises(TraceError) as caught:
        load(tmp_path / "missing.jsonl")
    assert str(caught.value) == f"{tmp_path}/missing.jsonl: No such file or directory"
    path = tmp_path / "y.jsonl"
    path.write_text("{nope\n")
    with pytest.raises(TraceError, match="line 1"):
        load(path)


def test_a_cluster_file_reads_with_defaults_and_names_its_faults(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("{replicas: 3, prefill: {tokens_per_s: 1000}, window: [0.1, 0.9]}")
    cluster = load_cluster(path)
    assert (cluster.replicas, cluster.prefill.tokens_per_s, cluster.cache_tokens) == (3, 1000, 2_600_000)
    for text, says in [
        ("{replicas: 0}", "replicas"),
        ("{prefill: {speed: 1}}", "prefill.speed"),
        ("{window: [0.9, 0.1]}", "window"),
        ("{prefill_replicas: 2}", "decode_replicas"),
        ("[1]", "mapping"),
        ("{a: [", "not YAML: line 1"),
        ("{replicas: 8, replicas: 9}", "stands twice"),
        ("replicas: 8\nregions: {a: {backends: []}}", "this is a proxy configuration; a cluster file looks like {"),
    ]:
        path.write_text(text)
        with pytest.raises(ClusterError, match=says):
            load_cluster(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ClusterError, match="not UTF-8"):
        load_cluster(path)
    with pytest.raises(ClusterError):
        load_cluster(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{replica: 8}", "replica: unknown key; did you mean 'replicas'?"),
        ("{prefill: {token_per_s: 1}}", "prefill.token_per_s: unknown key; did you mean 'tokens_per_s'?"),
        ("{replicas: eight}", "replicas: must be a valid integer, unable to parse string as an integer (got 'eight')"),
        (
            "{prefill_replicas: 2}",
            "file: prefill_replicas and decode_replicas go together: give both or neither",
        ),
        ("{regions: {a: {replicas: 2, shares: 1}}}", "regions.a.shares: unknown key; did you mean 'share'?"),
    ],
)
def test_faults_of_a_cluster_file_are_told_as_those_of_a_configuration(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError) as caught:
        load_cluster(path)
    assert str(caught.value) == f"{path}: {says}"


def test_a_line_of_json_has_the_agreed_fields() -> None:
    assert list(asdict(row("cost"))) == [
        "policy",
        "seed",
        "requests",
        "hit_ratio",
        "ttft_p50_s",
        "ttft_p90_s",
        "ttft_p99_s",
        "itl_p99_s",
        "moved_ratio",
        "cross_region_ratio",
    ]
    empty = Samples().row("cost", 0)
    assert empty.requests == 0
    assert empty.hit_ratio is None
    assert empty.ttft_p90_s is None


def test_quantiles_are_linear() -> None:
    assert quantile([], 0.5) is None
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.9) == pytest.approx(9.0)


def test_block_text_is_fixed_and_prompts_share_it() -> None:
    assert block_text(7, 20) == block_text(7, 20) != block_text(8, 20)
    short = prompt_text(Call(1100, 5, (1, 2), 0.0), 512, 4)
    longer = prompt_text(Call(1700, 5, (1, 2, 3), 0.0), 512, 4)
    shared = len(block_text(1, 128)) * 2
    assert short[:shared] == longer[:shared]
    assert short[shared:] != longer[shared : len(short)]


def test_a_flooding_tenant_does_not_raise_anothers_wait() -> None:
    alone = quiet_p90_s(flood=False, settings=RoutingSettings())
    flooded = quiet_p90_s(flood=True, settings=RoutingSettings())
    assert flooded <= 1.3 * alone


def test_the_documented_cluster_file_is_the_default(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "routing.md").read_text()
    documented = text.split("```yaml\nreplicas", 1)[1].split("```", 1)[0]
    file = tmp_path / "cluster.yaml"
    file.write_text("replicas" + documented)
    assert load_cluster(file) == Cluster()
    assert all(f"{name}:" in documented for name in Cluster.model_fields if name != "replicas")
