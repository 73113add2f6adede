"""Calibration gives back the rates that steps were made of, and says how far it can be trusted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers.fake_clock import FakeClock

from millrace.cli import main
from millrace.config import Config, MemoryConfig, ModelConfig, RunConfig
from millrace.engine.cycle import Confirmed
from millrace.errors import MillraceError
from millrace.plan.pacing.step_time import StepRates
from millrace.plan.step import CapturePlan
from millrace.run.facts import RunnerFacts
from millrace.run.shapes.padded import PaddedShapes
from millrace.run.shapes.table import ShapeFacts
from millrace.simulate.calibrate import Case, Measured, cases_of, disk_rate, fit, fit_rates, measure
from millrace.simulate.check import Compared, compare
from millrace.simulate.clock import VirtualClock
from millrace.simulate.priced_runner import PricedRunner
from millrace.simulate.profile import Profile, read_profile, shipped_profiles
from millrace.simulate.real_engine import RealEngine
from millrace.simulate.replica import Replica
from millrace.simulate.requests import SimulatedRequest
from millrace.simulate.settings import SimulationSettings

RATES = StepRates(0.004, 2e-5, 5e-5, 2e-8, 6e-9)
PROFILE = Profile(
    model="a model",
    device="a device",
    source="measured",
    rates=RATES,
    max_running=64,
    token_budget=256,
    max_context=2048,
    kv_tokens=16384,
    kv_token_bytes=1024,
)
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


class PricedEngine:
    """Stands for a real engine; its steps take what the profile says."""

    def __init__(self, noise: float) -> None:
        self.profile = msgspec.structs.replace(PROFILE, noise=noise)
        plan = SimpleNamespace(max_context=PROFILE.max_context, kv_tokens=PROFILE.kv_tokens)
        self.decided = SimpleNamespace(scheduler=SimulationSettings().scheduler(self.profile), plan=plan)
        self._num_made = 0

    def replica(self, on_step: Callable[[Confirmed], None]) -> Replica:
        clock = VirtualClock()
        self._num_made += 1
        runner = PricedRunner(self.profile, clock, max_rows=64, block_bytes=1, seed=self._num_made)
        return Replica(
            self.decided.scheduler,
            runner,
            self.profile.facts(),
            clock=clock,
            sleep=clock.sleep,
            max_context=PROFILE.max_context,
            on_submit=runner.num_output.__setitem__,
            on_step=on_step,
        )


def measured_with(noise: float) -> Measured:
    clock = FakeClock()

    def tick() -> float:
        clock.now += 1.0
        return clock.now

    return measure(PricedEngine(noise), minutes=1.2, clock=tick)  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_rates_of_steps_are_found(noise: float) -> None:
    measured = measured_with(noise)
    found = fit(measured)
    if not noise:
        assert found.rates.column() == pytest.approx(RATES.column(), rel=0.01)
    # A rate that is a small part of every step stays uncertain under noise; what is predicted does not.
    parts = np.array(measured.parts)
    assert parts @ found.rates.column() == pytest.approx(parts @ RATES.column(), rel=0.01 + noise)
    assert found.error == pytest.approx(noise, abs=0.02)
    assert found.noise == pytest.approx(noise, rel=0.3, abs=1e-3)
    assert found.range[1:3] == (256, 64)


def test_disturbed_steps_hardly_change_the_fit() -> None:
    rng = np.random.default_rng(0)
    parts = np.column_stack([np.ones(400), rng.integers(0, 200, 400), rng.integers(0, 64, 400)]).astype(float)
    seconds = parts @ [0.004, 2e-5, 5e-5]
    seconds[::10] *= 4
    assert fit_rates(parts, seconds) == pytest.approx([0.004, 2e-5, 5e-5], rel=0.05)


def test_a_full_disk_is_not_measured_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("millrace.engine.disk.files.OpenFile.write", fail)
    assert disk_rate(4096) == 0.0
    assert "No space left on device" in caplog.text
    assert "disk_gb_per_s" in caplog.text


def test_no_rate_is_negative() -> None:
    parts = np.array([[1.0, count] for count in range(50)])
    assert (fit_rates(parts, 1.0 - 0.01 * parts[:, 1]) > 0).all()


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(MillraceError, match="--minutes"):
        fit(Measured())


def test_a_figure_is_met_within_five_percent_or_the_real_spread() -> None:
    assert Compared("x", 104, 100, 0.0).is_met
    assert not Compared("x", 110, 100, 0.0).is_met
    assert Compared("x", 110, 100, 0.2).is_met
    assert Compared("x", 0, 0, 0.0).is_met
    assert not Compared("x", 1, 0, 0.0).is_met


def test_an_engine_is_warm_before_its_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the first steps of each run compile kernels and capture graphs."""

    class ColdRunner(PricedRunner):
        facts = RunnerFacts(shapes=PaddedShapes(ShapeFacts(64, 256, 32, 16, can_capture=True)))
        left_to_build, captured = 3, list[Any]()

        @property
        def is_built(self) -> bool:  # type: ignore[override]
            return not self.left_to_build

        def build_next(self) -> None:
            self.left_to_build -= 1

        def capture(self, plan: CapturePlan) -> bool:
            self.captured.append(plan.shape)
            return True

    runner = ColdRunner(PROFILE, VirtualClock(), max_rows=64, block_bytes=1)
    scheduler = SimulationSettings().scheduler(PROFILE)
    decided = SimpleNamespace(
        scheduler=scheduler, plan=SimpleNamespace(max_context=2048), spec=SimpleNamespace(vocab_size=99)
    )
    monkeypatch.setattr("millrace.simulate.real_engine.build_runner", lambda config: (decided, runner))
    engine = RealEngine(Config())
    assert runner.is_built
    assert len(runner.captured) == len(set(runner.captured)) > 10
    for _ in range(2):
        assert not engine.replica().warm_next()  # Each run knows what is captured.


def test_many_rows_and_contexts_are_measured() -> None:
    large = msgspec.structs.replace(
        PROFILE, max_running=1024, token_budget=8192, mixed_budget=2048, max_context=131072, kv_tokens=1_000_000
    )

    def cases(profile: Profile) -> list[Case]:
        plan = SimpleNamespace(max_context=profile.max_context, kv_tokens=profile.kv_tokens)
        decided = SimpleNamespace(scheduler=SimulationSettings().scheduler(profile), plan=plan)
        return cases_of(SimpleNamespace(decided=decided))  # type: ignore[arg-type]

    assert max(case.num_rows for case in cases(large)) == 256
    assert max(case.num_rows * case.num_prompt for case in cases(large)) == 256 * 1024
    for profile in (PROFILE, large):
        for case in cases(profile):
            assert case.num_rows <= profile.max_running
            assert case.num_rows * (case.num_prompt + case.num_output) <= profile.kv_tokens


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles_are_read_and_could_be_of_a_machine(name: str) -> None:
    profile = read_profile(name)
    assert min(profile.rates.column()) > 0
    # 16 bits for each of 8 billion weights, and the FLOPs of a pair: faster than an H200 can be, a unit is wrong.
    assert 16e9 / 4.8e12 < profile.rates.step_s < 0.1
    assert profile.rates.prompt_token_s > 16e9 / 990e12
    assert profile.rates.pair_s > 4 * 4096 * 32 / 990e12


@pytest.fixture
def tiny_model(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY))
    return f"random:{file}"


def test_the_real_engine_runs_what_was_simulated(tiny_model: str) -> None:
    """Times differ, counts do not: hits, preemptions and tokens follow from the same scheduler."""
    config = Config(
        model=ModelConfig(source=tiny_model),
        memory=MemoryConfig(kv_tokens=1024),
        run=RunConfig(threads=1, device="cpu"),
    )
    engine = RealEngine(config)
    try:
        requests = [SimulatedRequest(0.0, 40, 8, prefix_tokens=32)] * 3
        rows = {row.name: row for row in compare(engine, PROFILE, requests, num_runs=2)}
        done = engine.run(requests)
    finally:
        engine.close()
    assert [record.output_tokens for record in done.outcome.records] == [8, 8, 8]
    for name in ("hit share %", "preemptions"):
        assert rows[name].ratio == 1, name
    assert rows["hit share %"].real > 0
    assert rows["ttft p50 ms"].real > 0


def test_the_command_measures_writes_and_checks(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tiny.json"
    arguments = ["calibrate", tiny_model, "--device", "cpu", "--threads", "1", "--kv-tokens", "2048"]
    code = main(
        [*arguments, "--minutes", "0.05", "--out", str(out), "--check", "5:30:5", "--seconds", "1", "--runs", "1"]
    )
    shown = capsys.readouterr()
    assert code in (0, 1), shown.err  # 1: the machine was too noisy for the check.
    assert "error of held-out steps" in shown.out
    assert "ttft p99" in shown.out
    profile = read_profile(str(out))
    assert profile.source == "measured"
    assert profile.range is not None
    assert min(profile.rates.column()) > 0
