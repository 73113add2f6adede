"""The engine's scheduler under a virtual clock: what steps cost, when tokens come, and that equal runs are equal."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from millrace.cli import main
from millrace.engine.cycle import Cycle
from millrace.errors import ConfigError, MillraceError
from millrace.load.lengths import Lengths
from millrace.plan.pacing.step_time import Floats, StepRates
from millrace.plan.step import NO_EPOCH, StepPlan
from millrace.simulate.priced_runner import PricedRunner
from millrace.simulate.profile import Profile
from millrace.simulate.requests import Generated, SimulatedRequest, read_requests
from millrace.simulate.settings import SimulationSettings
from millrace.simulate.simulation import Fleet, Simulated, simulate

STEP_S, TOKEN_S, ROW_S = 0.01, 0.0001, 0.001
PROFILE = Profile(
    model="a model",
    device="a device",
    source="measured",
    rates=StepRates(STEP_S, TOKEN_S, ROW_S, 1e-12, 1e-15),
    steps_in_flight=1,
    max_running=8,
    token_budget=256,
    max_context=4096,
    kv_tokens=8192,
    kv_token_bytes=1024,
    copy_bytes_per_s=1e9,
)
GENERATED = Generated(
    rate=4.0, seconds=30.0, prompt=Lengths("lognormal", 200, 0.8), output=Lengths("lognormal", 40, 0.7), seed=3
)

DISK = ",kv_disk_gib=1,disk_gb_per_s="


def run(requests: list[SimulatedRequest], text: str = "", profile: Profile = PROFILE) -> Simulated:
    return simulate(requests, profile, SimulationSettings().changed(text))


def test_a_lone_request_takes_what_its_steps_cost() -> None:
    done = run([SimulatedRequest(5.0, 100, 11)])
    (record,) = done.outcome.records
    assert record.ttft_s == pytest.approx(STEP_S + 100 * TOKEN_S, rel=1e-3)
    assert record.e2e_s - record.ttft_s == pytest.approx(10 * (STEP_S + ROW_S), rel=1e-3)
    assert record.gaps_s == pytest.approx([STEP_S + ROW_S] * 10, rel=1e-3)
    assert record.output_tokens == 11


def test_host_time_is_hidden_with_two_steps_in_flight() -> None:
    slow_host = msgspec.structs.replace(PROFILE, host_s=0.005)
    one = run([SimulatedRequest(0.0, 10, 101)], profile=slow_host).outcome.records[0].tpot_s
    two = run([SimulatedRequest(0.0, 10, 101)], profile=msgspec.structs.replace(slow_host, steps_in_flight=2))
    assert one == pytest.approx(STEP_S + ROW_S + 0.005, rel=0.01)
    assert two.outcome.records[0].tpot_s == pytest.approx(STEP_S + ROW_S, rel=0.01)


def test_a_prompt_beyond_the_budget_takes_several_steps() -> None:
    done = run([SimulatedRequest(0.0, 600, 1)])
    assert done.counts.steps == 3
    assert done.outcome.records[0].ttft_s == pytest.approx(3 * STEP_S + 600 * TOKEN_S, rel=1e-3)


def test_equal_runs_are_equal_and_another_seed_is_another_run() -> None:
    noisy = msgspec.structs.replace(PROFILE, noise=0.1)
    settings = SimulationSettings(drafts=3, replicas=2)
    runs = [simulate(GENERATED.requests(), noisy, settings, seed=seed) for seed in (1, 1, 2)]
    reports = [json.dumps([one.outcome.summary(), str(one.lives), str(one.counts)]) for one in runs]
    assert reports[0] == reports[1] != reports[2]


@pytest.mark.live
def test_processes_that_share_the_replicas_change_nothing() -> None:
    noisy = msgspec.structs.replace(PROFILE, noise=0.1)
    settings = SimulationSettings().changed(
        "replicas=3,routing=prefix,fault_at=8,fault_s=6,kv_tokens=3072,max_tokens=2000"
    )
    requests = replace(GENERATED, prefix_tokens=512, num_prefixes=6).requests()
    one, two = (simulate(requests, noisy, settings, seed=1, num_processes=count) for count in (1, 2))
    assert one.counts == two.counts
    assert str(one.lives) == str(two.lives)  # NaN is not equal to itself.
    assert one.outcome.summary() == two.outcome.summary()
    assert one.timelines == two.timelines


@pytest.mark.live
@pytest.mark.parametrize("already_ended", [False, True])
def test_a_process_that_dies_ends_the_simulation_with_a_sentence(already_ended: bool) -> None:
    fleet = Fleet(PROFILE, SimulationSettings(replicas=2), seed=0, num_processes=2)
    process = fleet.elsewhere[1].process
    process.kill()  # as the kernel does when memory runs out
    if already_ended:  # else it may end before the call is sent, or after
        process.join(60)
    with pytest.raises(MillraceError, match="lack of memory"):
        fleet.run_until(1.0)
    fleet.close()


def test_nothing_reads_or_sleeps_on_the_real_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> float:
        raise AssertionError("the real clock")

    for name in ("sleep", "monotonic", "time", "perf_counter"):
        monkeypatch.setattr(time, name, refuse)
    requests = replace(GENERATED, prefix_tokens=512, num_prefixes=6, output=Lengths("lognormal", 100, 1.0)).requests()
    done = run(requests, "kv_tokens=3072,kv_host_gib=1,max_tokens=2000")
    monkeypatch.undo()
    assert done.counts.preemptions > 0
    assert done.counts.loaded_tokens > 0
    assert not done.outcome.summary()["failed"]


def test_repeated_steps_are_priced_as_if_each_were_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    by_context = msgspec.structs.replace(PROFILE, rates=StepRates(STEP_S, TOKEN_S, ROW_S, 1e-5, 1e-9))
    quick = run(GENERATED.requests(), profile=by_context)
    parts_of = PricedRunner.parts_of

    def looked_at(runner: PricedRunner, plan: StepPlan) -> Floats:
        runner.epoch = NO_EPOCH
        return parts_of(runner, plan)

    monkeypatch.setattr(PricedRunner, "parts_of", looked_at)
    assert run(GENERATED.requests(), profile=by_context).lives == quick.lives


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"steps_in_flight": 1}, "replicas=2"),
        ({"slow_step_s": 0.03}, "replicas=2,routing=round-robin"),
        ({"step_ms": 40.0}, "max_tokens=2000"),
        ({}, "kv_tokens=4096,kv_host_gib=1,max_tokens=2000"),
        ({"range": (1.0, 8192.0, 6.0, 2000.0, 1e8)}, "batching=static"),
    ],
)
def test_many_steps_at_once_give_what_one_after_the_other_gives(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], text: str
) -> None:
    profile = msgspec.structs.replace(PROFILE, noise=0.03, rates=StepRates(STEP_S, TOKEN_S, ROW_S, 1e-5, 1e-9))
    profile = msgspec.structs.replace(profile, **changes)
    requests = replace(GENERATED, rate=1.5, seconds=8.0, prefix_tokens=1024, num_prefixes=3).requests()
    at_once = run(requests, text, profile=profile)
    turns, advance = [0], Cycle.advance

    def counted(cycle: Cycle) -> bool:
        turns[0] += 1
        return advance(cycle)

    monkeypatch.setattr(Cycle, "advance", counted)
    assert run(requests, text, profile=profile) == at_once
    num_turns, turns[0] = turns[0], 0
    monkeypatch.setattr(Cycle, "advance_repeated", lambda *arguments: None)
    assert run(requests, text, profile=profile) == at_once
    assert num_turns < turns[0]


def test_equal_blocks_are_hits_and_the_cache_can_be_off() -> None:
    blocks = tuple(range(4))
    requests = [SimulatedRequest(float(at), 3 * 512 + 100, 4, blocks) for at in range(3)]
    assert run(requests).counts.cached_tokens == 2 * 3 * 512
    assert run(requests, "prefix_cache=off").counts.cached_tokens == 0
    others = [replace(one, blocks=tuple(10 * at + block for block in blocks)) for at, one in enumerate(requests)]
    assert run(others).counts.cached_tokens == 0


def test_the_host_tier_brings_evicted_prefixes_back() -> None:
    """Two prefixes that do not fit in the pool together, in turns."""
    requests = [SimulatedRequest(2.0 * at, 3600, 2, tuple(100 * (at % 3) + b for b in range(8))) for at in range(12)]
    without, with_tier = run(requests), run(requests, "kv_host_gib=1")
    assert with_tier.counts.loaded_tokens > 0
    assert with_tier.counts.cached_tokens > without.counts.cached_tokens
    assert with_tier.outcome.values("ttft").mean() < without.outcome.values("ttft").mean()


def test_a_disk_brings_back_what_host_memory_evicted() -> None:
    """Six prefixes that do not fit in the pool and in host memory together, in turns."""
    requests = [SimulatedRequest(3.0 * at, 3600, 2, tuple(100 * (at % 6) + b for b in range(8))) for at in range(24)]
    host = "kv_host_gib=0.008"
    without, slow, fast = (run(requests, host + disk) for disk in ("", DISK + "1e-4", DISK + "1"))
    assert fast.counts.disk_tokens > 0
    assert fast.counts.cached_tokens > 2 * without.counts.cached_tokens
    assert fast.outcome.values("ttft").mean() < without.outcome.values("ttft").mean()
    assert slow.counts.disk_tokens < fast.counts.disk_tokens, "a slow disk is not read where computing is faster"
    with pytest.raises(ConfigError, match="disk_gb_per_s"):
        run(requests, host + ",kv_disk_gib=1")


def test_drafts_give_the_tokens_that_acceptance_promises() -> None:
    requests = [SimulatedRequest(0.0, 10, 2001)]
    plain, drafted = run(requests), run(requests, "drafts=3,acceptance=0.5")
    assert drafted.outcome.records[0].output_tokens == 2001
    # 1 + 0.5 + 0.25 + 0.125 tokens per step, in steps of four places.
    assert 2000 / drafted.counts.steps == pytest.approx(1.875, rel=0.05)
    assert plain.counts.steps == 2001
    assert run(requests, "drafts=3,acceptance=1").counts.steps == 1 + 500


def test_answers_may_end_before_their_limit() -> None:
    done = run([SimulatedRequest(0.0, 50, 20), SimulatedRequest(0.1, 50, 30)], "max_tokens=500")
    assert [life.reason for life in done.lives] == ["stop", "stop"]
    assert [life.num_output for life in done.lives] == [20, 30]


def test_static_batching_and_policies_change_what_happens() -> None:
    requests = replace(GENERATED, rate=12.0).requests()
    base = run(requests)
    assert run(requests, "batching=static").outcome.values("ttft").mean() > base.outcome.values("ttft").mean()
    assert run(requests, "policy=shortest").lives != base.lives


def test_urgent_classes_wait_less() -> None:
    requests = replace(GENERATED, rate=14.0, classes=(0.3, 0.4, 0.3)).requests()
    done = run(requests)
    waits = [
        np.mean([life.first_at - life.request.at_s for life in done.lives if life.request.priority == priority])
        for priority in range(3)
    ]
    assert waits[0] < waits[1] < waits[2]


def test_replicas_share_the_work_and_prefixes_stay_together() -> None:
    requests = replace(GENERATED, rate=10.0, prefix_tokens=1024, num_prefixes=7).requests()
    one, two = run(requests), run(requests, "replicas=3,routing=round-robin")
    by_prefix = run(requests, "replicas=3,routing=prefix")
    assert two.outcome.values("ttft").mean() < one.outcome.values("ttft").mean()
    assert by_prefix.counts.cached_tokens > two.counts.cached_tokens
    assert {life.replica for life in by_prefix.lives} == {0, 1, 2}


def test_requests_of_a_replica_that_dies_go_on_elsewhere_with_the_tokens_they_had() -> None:
    requests = [SimulatedRequest(0.1 * at, 50, 200) for at in range(8)]
    settled = run(requests, "replicas=2,routing=round-robin")
    broken = run(requests, "replicas=2,routing=round-robin,fault_at=2,fault_s=60")
    assert [life.reason for life in broken.lives] == ["length"] * 8
    assert [life.num_output for life in broken.lives] == [200] * 8
    assert {life.replica for life in broken.lives} == {1}
    assert [len(record.gaps_s) for record in broken.outcome.records] == [199] * 8
    assert [life.first_at for life in broken.lives] == [life.first_at for life in settled.lives]
    moved = [record for record, life in zip(broken.outcome.records, settled.lives, strict=True) if life.replica == 0]
    assert all(sum(record.gaps_s) == pytest.approx(record.e2e_s - record.ttft_s) for record in moved)
    back = run([*requests, SimulatedRequest(30.0, 50, 5)], "replicas=2,routing=least-tokens,fault_at=2,fault_s=5")
    assert len(back.timelines) == 3


def test_a_smaller_kv_format_holds_more_and_classes_are_drawn() -> None:
    requests = replace(GENERATED, rate=8.0, seconds=5.0).requests()
    full, small = run(requests, "kv_tokens=0"), run(requests, "kv_dtype=fp8")
    assert max(small.timelines[0].kv_share) < max(full.timelines[0].kv_share)
    assert {life.request.priority for life in run(requests, "classes=1:1:1").lives} == {0, 1, 2}


def test_what_does_not_fit_fails_with_a_reason_and_the_rest_goes_on() -> None:
    done = run([SimulatedRequest(0.0, 5000, 5), SimulatedRequest(0.0, 100, 5)])
    assert [bool(record.error) for record in done.outcome.records] == [True, False]
    assert "5000 tokens" in done.outcome.records[0].error
    late = run([SimulatedRequest(0.0, 100, 2000)], "deadline_s=1")
    assert late.lives[0].reason == "deadline"


def test_time_outside_the_measured_range_is_counted() -> None:
    small = msgspec.structs.replace(PROFILE, range=(1.0, 100.0, 4.0, 1e4, 1e5))
    assert run([SimulatedRequest(0.0, 60, 5)], profile=small).counts.outside_share == 0
    assert 0 < run([SimulatedRequest(0.0, 200, 5)], profile=small).counts.outside_share < 1


def test_an_audit_log_is_a_trace(tmp_path: Path) -> None:
    lines = [
        {"time": f"2026-01-01T00:00:{10 + at:02}.000+00:00", "request_id": str(at), "seconds": 2.0, "tenant": "a"}
        | {"prompt_tokens": 10 + at, "output_tokens": tokens}
        for at, tokens in ((5, 7), (0, 3), (6, None))
    ]
    file = tmp_path / "audit.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    found = read_requests(file, speed=2.0)
    assert [(one.at_s, one.num_prompt, one.num_output, one.tenant) for one in found] == [
        (0, 10, 3, "a"),
        (2.5, 15, 7, "a"),
    ]


@pytest.mark.parametrize("text", ["polcy=fcfs", "policy=best", "drafts=x", "drafts=16", "acceptance=2", "replicas=0"])
def test_wrong_settings_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match=text.split("=", maxsplit=1)[0]):
        SimulationSettings().changed(text)


def test_the_command_prints_a_table_and_writes_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0.0,100,5\n1.0,200,9\n")
    arguments = ["simulate", str(trace), "--profile", "h200-8b", "--what-if", "policy=shortest", "--interval"]
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    assert main([*arguments, "--json", str(first), "--html", str(tmp_path / "a.html")]) == 0
    shown = capsys.readouterr().out
    assert "policy=shortest" in shown
    assert "if slower" in shown
    assert main([*arguments, "--json", str(second)]) == 0
    assert first.read_bytes() == second.read_bytes()
    assert json.loads(first.read_text())["variants"][0]["summary"]["requests"] == 2
    assert "<svg" in (tmp_path / "a.html").read_text()


def test_the_command_refuses_what_it_cannot_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = msgspec.structs.replace(PROFILE, range=(1.0, 10.0, 1.0, 10.0, 10.0))
    file = tmp_path / "small.json"
    file.write_bytes(msgspec.json.encode(small))
    for arguments, reason in (
        (["--profile", "h200-8b"], "--rate"),
        (["--rate", "1", "--profile", "nothing"], "h200-8b"),
        (["--rate", "1", "--seconds", "5", "--profile", str(file)], "--extrapolate"),
    ):
        assert main(["simulate", *arguments]) == 2
        assert reason in capsys.readouterr().err
