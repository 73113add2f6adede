"""The load generator against a real front: what it sends, what it measures, how it judges."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.served import wait_until
from serve.front_under_test import Front, endless, running_front

from millrace.cli import main
from millrace.errors import ConfigError
from millrace.load.arrivals import arrival_times
from millrace.load.client import Endpoint, probe
from millrace.load.lengths import parse_lengths
from millrace.load.processes import Pattern, run_load
from millrace.load.records import Outcome, Record
from millrace.load.report import table
from millrace.load.server_side import bottleneck
from millrace.load.sources import read_dataset, read_schemas, read_trace
from millrace.load.sweep import Point, find_highest_rate
from millrace.load.workload import Workload, WorkloadSettings
from millrace.observe.slo.objective import parse_objective

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(endless, step_s=0.002) as running:
        yield running


def settings(**changes: object) -> WorkloadSettings:
    given = {"prompt": parse_lengths("20", "--prompt"), "output": parse_lengths("5", "--output"), **changes}
    return WorkloadSettings(**given)  # type: ignore[arg-type]


def load(front: Front, pattern: Pattern, num_processes: int = 1, **changes: object) -> list[Record]:
    async def run() -> list[Record]:
        endpoint = await probe(Endpoint(front.url, ""))
        return await run_load(endpoint, pattern, Workload(settings(**changes)), num_processes)

    return asyncio.run(run())


def test_open_loop_sends_at_intended_times(front: Front) -> None:
    times = tuple(0.01 * number for number in range(30))
    records = load(front, Pattern(1.0, times=times))
    assert [record.intended_s for record in records] == pytest.approx(list(times))
    assert not [record.error for record in records if record.error]
    assert all(record.output_tokens == 5 and len(record.gaps_s) == 4 for record in records)
    assert all(0 < record.ttft_s < record.e2e_s for record in records)


def test_several_processes_share_the_work(front: Front) -> None:
    records = load(front, Pattern(1.0, times=tuple(0.02 * number for number in range(10))), num_processes=2)
    assert sorted(record.number for record in records) == list(range(10))
    assert not any(record.error for record in records)


def test_closed_loop_keeps_its_clients_busy_and_turns_follow_each_other(front: Front) -> None:
    before = len(front.engine.received)
    records = load(front, Pattern(0.5, concurrency=3), turns=2)
    assert len(records) >= 6
    assert {record.turn for record in records} == {0, 1}
    assert len(front.engine.received) - before >= len(records)
    ends = {(r.number, r.turn): r.intended_s + r.e2e_s for r in records}
    assert all(r.intended_s >= ends[r.number, 0] - 0.001 for r in records if r.turn == 1)


def test_a_closed_loop_does_not_hammer_a_server_that_is_gone() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    records = asyncio.run(run_load(Endpoint(url, "gone"), Pattern(1.0, concurrency=2), Workload(settings())))
    assert all(record.error for record in records)
    assert 2 <= len(records) <= 10, "each client pauses 0.1 s, 0.2 s, 0.4 s …"


def test_latency_counts_from_the_intended_time(front: Front) -> None:
    """A server that stalls is charged with the whole delay of requests that were due meanwhile."""
    wanted = len(front.engine.received) + 3

    def resume_once_all_wait() -> None:
        wait_until(lambda: len(front.engine.received) == wanted, "all requests wait")
        front.call(front.engine.resume)

    front.call(lambda: setattr(front.engine, "paused", True))
    resuming = threading.Thread(target=resume_once_all_wait)
    resuming.start()
    records = load_without_probe(front, Pattern(1.0, times=(0.0, 0.1, 0.2)))
    resuming.join()
    assert [record.ttft_s + record.intended_s >= 0.2 for record in records] == [True] * 3


def load_without_probe(front: Front, pattern: Pattern) -> list[Record]:
    return asyncio.run(run_load(Endpoint(front.url, "null-model"), pattern, Workload(settings())))


def test_failures_are_named_and_counted_against_objectives(front: Front) -> None:
    endpoint = Endpoint(front.url, "no-such-model")
    records = asyncio.run(run_load(endpoint, Pattern(1.0, times=(0.0, 0.01)), Workload(settings())))
    assert all(record.error.startswith("HTTP 404: ") for record in records)
    outcome = Outcome(records, 1.0, (parse_objective("ttft p50 < 10 s"),))
    assert outcome.summary()["failed"] == 2
    assert not outcome.meets(outcome.objectives[0])


def test_the_command_writes_reports_that_can_be_compared(
    front: Front, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    common = ["load", "--url", front.url, "--seconds", "0.4", "--warmup", "0", "--rate", "40", "--output", "4"]
    for file in files:
        assert main([*common, "--slo", "ttft p95 < 60 s", "--json", str(file), "--html", str(tmp_path / "r.html")]) == 0
    assert main(["load", "--compare", *map(str, files)]) == 0
    printed = capsys.readouterr().out
    assert "met    ttft p95 < 60 s" in printed
    assert "verdict" in printed
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") >= 4
    assert "http://127.0.0.1" in page
    assert json.loads(files[0].read_text())["summary"]["failed"] == 0


def test_a_run_without_measured_requests_says_so(
    front: Front, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def only_in_warm_up(*_: object) -> list[Record]:
        return [Record(0, 0, 0.05)]

    monkeypatch.setattr("millrace.load.processes.run_load", only_in_warm_up)
    options = ["--concurrency", "1", "--warmup", "0.1", "--seconds", "0.2"]
    assert main(["load", "--url", front.url, *options]) == 2
    assert "still waited for those of the warm-up. Set --seconds to more than 0.2." in capsys.readouterr().err


def test_a_trace_is_replayed_and_its_rate_counts_over_its_own_time(
    front: Front, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, report = tmp_path / "trace.csv", tmp_path / "a.json"
    rows = [f"{100 + 0.4 * number},{20 + number},3" for number in range(5)]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    common = ["load", "--url", front.url, "--trace", str(file), "--speed", "4", "--json", str(report)]
    assert main([*common, "--warmup", "0"]) == 0
    summary = json.loads(report.read_text())["summary"]
    assert (summary["requests"], summary["failed"], summary["seconds"]) == (5, 0, pytest.approx(0.5))
    assert summary["requests_per_s"]["value"] == pytest.approx(10)
    assert summary["output_tokens_per_s"]["value"] == pytest.approx(30)
    assert main([*common, "--warmup", "0", "--seconds", "0.25"]) == 0
    assert "The first 3 of the trace's 5 requests are due within 0.25 s" in capsys.readouterr().err
    assert main([*common, "--warmup", "2"]) == 2
    assert "all of it warm-up" in capsys.readouterr().err


def test_a_sweep_says_that_no_rate_meets_the_objectives(front: Front, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rate", "40", "--seconds", "0.1", "--warmup", "0", "--output", "4", "--slo", "ttft p95 < 1 us"]
    assert main(["load", "--url", front.url, "--sweep", *options]) == 1
    printed = capsys.readouterr().out
    assert printed.count("missed  goodput") == 7
    assert "No rate met the objectives." in printed


def test_unusable_options_are_refused(front: Front, capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        (["--rate", "1", "--concurrency", "2"], "exclude each other"),
        (["--sweep"], "needs at least one objective"),
        (["--rate", "0"], "above 0"),
        (["--prompt", "normal:3"], "--prompt is 'normal:3'"),
        (["--slo", "ttft < 3"], "is not of the form"),
    ):
        assert main(["load", "--url", front.url, *options]) == 2
        assert words in capsys.readouterr().err


# ── without a server ──────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("gamma", 3.0)])
def test_arrivals_have_the_rate_and_the_burstiness(kind: str, cv: float) -> None:
    times = arrival_times(kind, 50.0, 400.0, np.random.default_rng(1), burstiness=3.0)  # type: ignore[arg-type]
    gaps = np.diff(times)
    assert len(times) / 400 == pytest.approx(50, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_traces_of_both_forms(tmp_path: Path) -> None:
    azure, mooncake = tmp_path / "a.csv", tmp_path / "m.jsonl"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,9"
    )
    mooncake.write_text(
        '{"timestamp": 500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 7, 9]}\n'
        '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 7, 8]}\n'
    )
    first, second = read_trace(azure)
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579, abs=1e-4)
    one, other = (Workload(settings()).traced(n, traced, 2.0) for n, traced in enumerate(read_trace(mooncake)))
    assert other.at_s == 0.25
    shared = len(one.turns[0]) - len(one.turns[0].partition("request 0")[2]) - len("request 0")
    assert one.turns[0][:shared] == other.turns[0][:shared]
    assert shared > 2 * 512
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.5+00:00,1,2\n2024-05-10 00:00:02.009930+00:00,3,4"
    )
    assert read_trace(azure)[1].at_s == pytest.approx(1.50993)
    azure.write_text("TIMESTAMP,Tokens\n1,2\n")
    with pytest.raises(ConfigError, match="cannot be understood"):
        read_trace(azure)


def test_data_sets_of_several_forms(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(
        '{"question": "a?"}\n{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]}\n'
        '{"conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "x"},'
        ' {"from": "human", "value": "d"}]}\n'
    )
    assert [one.turns for one in read_dataset(file)] == [("a?",), ("b",), ("c", "d")]
    request = Workload(settings(dataset=tuple(read_dataset(file)), turns=3)).request(2, 0.0)
    assert request.turns == ("c", "d")
    (tmp_path / "s.json").write_text('{"schema": {"type": "object"}}')
    assert read_schemas(tmp_path / "s.json") == [{"type": "object"}]


def test_requests_are_the_same_in_every_process_and_share_prefixes() -> None:
    given = settings(prefix_tokens=50, num_prefixes=2, prompt=parse_lengths("uniform:5:90", "p"))
    workload = Workload(given)
    assert workload.request(3, 0.0) == Workload(given).request(3, 0.0)
    assert workload.request(0, 0.0).system == workload.request(2, 0.0).system != workload.request(1, 0.0).system


def test_the_sweep_finds_the_knee() -> None:
    async def measure(rate: float) -> Point:
        return Point(rate, Outcome([], 1.0), rate <= 11.0, "device")

    sweep = asyncio.run(find_highest_rate(measure, 1.0, precision=0.05))
    assert sweep.best is not None
    assert sweep.knee is not None
    assert 10.4 < sweep.best.rate <= 11.0 < sweep.knee.rate <= 11.6


def test_bottlenecks_are_named() -> None:
    quiet = {"plan": [0.1], "launch": [0.1], "device": [20.0], "apply": [0.1]}
    series = {
        "kv_share": {"used": [0.2]}, "waiting": [0.0], "step_ms": quiet, "rows_per_step": [8.0], "steps_per_s": [49.0],
        "refused_per_s": [0.0], "preemptions_per_s": [0.0], "prefill_tokens_per_step": [1.0],
        "decode_tokens_per_step": [8.0], "event_loop_lag_ms": [0.1],
    }  # fmt: skip
    stats = {"series": series, "now": {"rows_free": 4}}
    assert "decode (memory bandwidth)" in bottleneck(stats, 0.1, 50.0)
    assert "this client" in bottleneck(stats, 400.0, 50.0)
    assert "KV memory" in bottleneck({**stats, "series": {**series, "kv_share": {"used": [0.97]}}}, 0.1, 50.0)
    assert "host code" in bottleneck({**stats, "series": {**series, "step_ms": {**quiet, "plan": [40.0]}}}, 0.1, 50.0)


def test_a_few_long_steps_do_not_make_a_device_busy() -> None:
    step_ms = {"plan": [0.1, 0.1, None], "launch": [0.1, 0.1, None], "device": [400.0, 10.0, None]}
    series = {
        "kv_share": {"used": [0.2]}, "waiting": [0.0], "step_ms": {**step_ms, "apply": step_ms["plan"]},
        "rows_per_step": [1.0, 2.0, None], "steps_per_s": [1.0, 29.0, 0.0], "refused_per_s": [0.0],
        "preemptions_per_s": [0.0], "prefill_tokens_per_step": [100.0, 0.0, None],
        "decode_tokens_per_step": [0.0, 2.0, None], "event_loop_lag_ms": [0.1],
    }  # fmt: skip
    assert "none was saturated: the device was busy 23%" in bottleneck({"series": series, "now": {}}, 0.1, 50.0)


def test_an_objective_about_errors_is_the_share_of_failed_requests() -> None:
    records = [Record(number, 0, 0.0, error="" if number else "500") for number in range(10)]
    outcome = Outcome(records, 1.0, (parse_objective("errors < 10%"), parse_objective("errors < 9%")))
    assert outcome.summary()["objectives"] == {"errors < 10%": True, "errors < 9%": False}
    assert outcome.goodput == 9


def test_goodput_wants_every_objective() -> None:
    objectives = (parse_objective("ttft p95 < 500 ms"), parse_objective("itl p99 < 50 ms"))
    good = Record(0, 0, 0.0, ttft_s=0.4, e2e_s=1.0, gaps_s=[0.01], output_tokens=2)
    slow = Record(1, 0, 0.0, ttft_s=0.6, e2e_s=1.0, gaps_s=[0.01], output_tokens=2)
    jerky = Record(2, 0, 0.0, ttft_s=0.1, e2e_s=1.0, gaps_s=[0.2], output_tokens=2)
    assert [one.is_good(objectives) for one in (good, slow, jerky)] == [True, False, False]
    assert Outcome([good, slow, jerky], 2.0, objectives).goodput == 0.5


def test_the_table_fits_80_columns() -> None:
    rate = {"value": 123456.78, "interval": [123400.12, 123500.34]}
    times = dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), 123456.7)
    summary = {
        "requests": 100000,
        "seconds": 3600.0,
        "failed": 0,
        "objectives": {},
        "errors": {},
        **dict.fromkeys(("requests_per_s", "goodput_per_s", "input_tokens_per_s", "output_tokens_per_s"), rate),
        **{f"{name}_ms": {**times, "p95_interval": [57.1, 123456.7]} for name in ("ttft", "itl", "tpot", "e2e")},
    }
    lines = table(summary).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].endswith("123457   57.1 to 123457")
