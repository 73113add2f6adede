"""A step log becomes a timeline with reasons, and a workload for the simulator."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from millrace.cli import main
from millrace.errors import ConfigError
from millrace.plan.pacing.step_time import StepRates
from millrace.run.ranks.recorder import RecordedRunner, RunnerSetup, StepRecorder
from millrace.run.step_log import StepLog
from millrace.simulate.clock import VirtualClock
from millrace.simulate.priced_runner import PricedRunner
from millrace.simulate.profile import Profile, write_profile
from millrace.simulate.replay import replay, table
from millrace.simulate.replica import Replica
from millrace.simulate.requests import SimulatedRequest
from millrace.simulate.settings import SimulationSettings

PROFILE = Profile(
    model="a model",
    device="a device",
    source="measured",
    rates=StepRates(0.01, 0.0001, 0.001, 1e-12, 1e-15),
    steps_in_flight=1,
    max_running=8,
    token_budget=256,
    max_context=4096,
    kv_tokens=2048,
    kv_token_bytes=1024,
)
SETUP = RunnerSetup(
    model="a model",
    dtype="float32",
    quantization="none",
    seed=0,
    deterministic=False,
    kv_dtype="full",
    speculate="off",
    num_blocks=128,
    block_size=16,
    max_rows=8,
    max_context=4096,
    token_budget=256,
    host_slots=0,
    max_copied=1,
)
REQUESTS = [SimulatedRequest(0.0, 50, 9), SimulatedRequest(0.0, 900, 4), SimulatedRequest(0.0, 300, 20)]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of an engine that ran three requests."""
    file, clock = tmp_path / "steps.log", VirtualClock()
    runner = PricedRunner(PROFILE, clock, max_rows=8, block_bytes=1)
    logged = RecordedRunner(runner, StepRecorder(StepLog(file), SETUP))
    replica = Replica(
        SimulationSettings().scheduler(PROFILE),
        logged,
        PROFILE.facts(),
        clock=clock,
        sleep=clock.sleep,
        max_context=4096,
        on_submit=runner.num_output.__setitem__,
    )
    for number, request in enumerate(REQUESTS):
        replica.submit(number, request)
    replica.run_until(math.inf)
    return file


def test_requests_and_their_times_are_found(log: Path) -> None:
    found = replay(log, PROFILE)
    lengths = {number: (one.num_prompt, one.num_output) for number, one in found.requests.items()}
    assert lengths == {number: (one.num_prompt, one.num_output) for number, one in enumerate(REQUESTS)}
    assert [(one.num_prompt, one.num_output) for one in found.workload()] == list(lengths.values())
    first = found.requests[0]
    assert first.num_steps == 1
    assert first.ttft_s == pytest.approx(0.01 + 256 * 0.0001, rel=0.05)  # A step of a full budget.
    assert found.requests[1].num_steps > 3


def test_late_requests_are_explained(log: Path) -> None:
    found = replay(log, PROFILE)
    shown = table(found, limit_s=0.05)
    assert "request 1:" in shown
    assert "900 prompt tokens" in shown
    assert "request 0:" not in shown


def test_the_command_writes_a_page_and_compares(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_profile(PROFILE, tmp_path / "p.json")
    page = tmp_path / "page.html"
    arguments = [str(log), "--profile", str(tmp_path / "p.json"), "--what-if", "token_budget=64", "--html", str(page)]
    assert main(["replay", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "as logged" in shown
    assert "token_budget=64" in shown
    assert page.read_text().count("<svg") > 4


def test_what_is_no_step_log_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("nothing")
    with pytest.raises(ConfigError, match="no step log"):
        replay(file, PROFILE)
