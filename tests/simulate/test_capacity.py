"""The cheapest plan, and settings found by search."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from millrace.cli import main
from millrace.errors import ConfigError
from millrace.fleet.settings import read_fleet_file
from millrace.load.lengths import Lengths
from millrace.observe import model_figures
from millrace.observe.slo.objective import parse_objective
from millrace.plan.pacing.step_time import StepRates
from millrace.simulate.planning.capacity import (
    Bought,
    Machine,
    Sized,
    api_table,
    bought,
    fleet_toml,
    read_prices,
    simulate_share,
    size,
    smallest_met,
)
from millrace.simulate.planning.rightsize import workload_of_server
from millrace.simulate.planning.tune import config_toml, tune
from millrace.simulate.profile import Profile, read_profile, write_profile
from millrace.simulate.requests import Generated, SimulatedRequest
from millrace.simulate.settings import SimulationSettings

PROFILE = Profile(
    model="a model",
    device="a device",
    source="measured",
    rates=StepRates(0.02, 0.0002, 0.002, 1e-9, 1e-12),
    error=0.1,
    max_running=16,
    token_budget=512,
    max_context=4096,
    kv_tokens=16384,
    kv_token_bytes=1024,
)
LOAD = Generated(rate=6.0, seconds=10.0, prompt=Lengths("lognormal", 150, 0.5), output=Lengths("lognormal", 30, 0.5))
OBJECTIVES = (parse_objective("ttft p95 < 500 ms"),)


def write_prices(tmp_path: Path) -> Path:
    write_profile(PROFILE, tmp_path / "slow.json")
    write_profile(PROFILE.scaled(0.25), tmp_path / "fast.json")
    file = tmp_path / "prices.toml"
    file.write_text(
        "".join(
            f'[[machine]]\nname = "{name}"\nprofile = "{tmp_path / name}.json"\ndollars_per_hour = {price}\n'
            for name, price in (("slow", 1.0), ("fast", 9.0))
        )
    )
    return file


def test_the_fewest_replicas_meet_the_objectives_and_one_less_does_not(tmp_path: Path) -> None:
    machine = read_prices(write_prices(tmp_path)).machine[0]
    requests = replace(LOAD, rate=16.0).requests()
    found = size(machine, requests, OBJECTIVES)
    assert found.low is not None
    assert found.replicas is not None
    assert found.high is not None
    assert 1 < found.replicas
    assert found.low <= found.replicas <= found.high

    def meets(count: int) -> bool:
        done = simulate_share(requests, PROFILE, SimulationSettings(), count, OBJECTIVES, 0)
        return done.outcome.meets(OBJECTIVES[0])

    assert meets(found.replicas)
    assert not meets(found.replicas - 1)
    assert found.dollars_per_hour == found.high


def test_an_objective_that_no_number_meets_has_no_plan(tmp_path: Path) -> None:
    machine = msgspec.structs.replace(read_prices(write_prices(tmp_path)).machine[0], max_replicas=2)
    found = size(machine, LOAD.requests(), (parse_objective("ttft p95 < 1 ms"),))
    assert found.replicas is None
    assert found.dollars_per_hour == float("inf")


@pytest.mark.parametrize("least", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("start", [1, 5, 64])
def test_the_search_finds_the_least(least: int, start: int) -> None:
    tried: list[int] = []

    def is_met(count: int) -> bool:
        tried.append(count)
        return count >= least

    assert smallest_met(is_met, start, 64) == least
    assert len(tried) == len(set(tried))


def test_a_large_fleet_is_simulated_by_a_share_with_the_same_load() -> None:
    requests = replace(LOAD, rate=80.0).requests()
    done = simulate_share(requests, PROFILE, SimulationSettings(), 32, OBJECTIVES, 0)
    assert len(done.timelines) == 8
    assert len(done.outcome.records) == pytest.approx(len(requests) / 4, rel=0.2)


def test_the_plan_is_a_valid_fleet_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices, out, page = write_prices(tmp_path), tmp_path / "fleet.toml", tmp_path / "plan.html"
    arguments = ["--rate", "6", "--seconds", "8", "--prompt", "150", "--output", "30", "--prices", str(prices)]
    code = main(["capacity", *arguments, "--slo", "ttft p95 < 500 ms", "--out", str(out), "--html", str(page)])
    assert code == 0
    assert "The cheapest plan is" in capsys.readouterr().out
    fleet = read_fleet_file(out)
    assert {one.model for one in fleet.replicas} == {"a model"}
    assert fleet.gateway == {"policy": "least-tokens"}
    assert "<svg" in page.read_text()
    assert main(["capacity", *arguments, "--slo", "ttft p95 < 1 ms"]) == 1


def test_a_wrong_price_list_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text('[[machine]]\nname = "x"\nprofile = "h200-8b"\ndollars_per_hour = 0\n')
    with pytest.raises(ConfigError, match="price"):
        read_prices(file)
    file.write_text('[[machine]]\nname = "x"\n')
    with pytest.raises(ConfigError, match="profile"):
        read_prices(file)


def test_settings_of_a_machine_reach_the_fleet_file(tmp_path: Path) -> None:
    file = read_prices(write_prices(tmp_path)).machine[0].profile
    machine = Machine("x", file, 1.0, settings="policy=shortest,kv_tokens=8192")
    found = size(machine, LOAD.requests(), (parse_objective("ttft p50 < 60 s"),))
    (serve,) = tomllib.loads(fleet_toml(found, OBJECTIVES))["serve"]
    assert serve["args"] == ["--policy", "shortest", "--kv-tokens", "8192"]


def test_a_plan_of_a_thousand_replicas_is_a_fleet_file(tmp_path: Path) -> None:
    machine = Machine("x", "h200-8b", 2.0, spot_dollars_per_hour=0.5, spot_share=0.5, spot_lost=0.1)
    found = Sized(machine, read_profile("h200-8b"), 990, 950, 1000, ())
    counts = found.bought
    assert counts is not None
    assert counts.on_demand + counts.spot - -(-counts.spot // 10) >= 1000
    assert found.dollars_per_hour == 2.0 * counts.on_demand + 0.5 * counts.spot < 2000
    out = tmp_path / "fleet.toml"
    out.write_text(fleet_toml(found, OBJECTIVES))
    assert len(read_fleet_file(out).replicas) == counts.on_demand + counts.spot


def test_spot_machines_that_cost_more_are_not_bought() -> None:
    assert bought(Machine("x", "p", 1.0, spot_dollars_per_hour=0.99, spot_share=0.5, spot_lost=0.5), 10).spot == 0
    assert bought(Machine("x", "p", 1.0), 10) == Bought(10, 0, 10.0)


def test_a_running_servers_metrics_become_a_workload() -> None:
    def page(count: int) -> dict[str, float]:
        return {
            'millrace_sequences_total{priority="batch"}': 2.0 * count,
            'millrace_sequences_total{priority="standard"}': 4.0 * count,
            "millrace_request_prompt_tokens_total": 900.0 * count,
            "millrace_request_output_tokens_total": 180.0 * count,
            "millrace_request_cached_tokens_total": 300.0 * count,
        }

    found = workload_of_server(page(10), page(110), 100.0, simulated_s=2000.0)
    requests = found.requests()
    assert found.rate == 6.0
    assert found.prefix_tokens == 50
    assert np.mean([one.num_prompt for one in requests]) == pytest.approx(150, rel=0.05)
    assert np.mean([one.num_output for one in requests]) == pytest.approx(30, rel=0.05)
    with pytest.raises(ConfigError, match="No request ended"):
        workload_of_server(page(10), page(10), 100.0, simulated_s=20.0)


def test_the_metrics_that_a_workload_is_made_of_exist() -> None:
    source = (Path(model_figures.__file__)).read_text(encoding="utf-8")
    for name in ("sequences", "request_prompt_tokens", "request_output_tokens", "request_cached_tokens"):
        assert f'"millrace_{name}"' in source


def test_the_price_of_an_api_is_compared(tmp_path: Path) -> None:
    file = write_prices(tmp_path)
    api = 'name = "other"\ndollars_per_million_prompt = 1.0\ndollars_per_million_output = 2.0\n'
    file.write_text(file.read_text() + "[[api]]\n" + api)
    prices = read_prices(file)
    found = Sized(prices.machine[0], PROFILE, 2, 2, 2, ())
    requests = [SimulatedRequest(0.0, 500_000, 1), SimulatedRequest(1800.0, 500_000, 1_000_000)]
    shown = api_table(found, prices.api, requests)
    assert "6.00 $/hour, 3.00 times the plan" in shown


def test_tuning_finds_what_helps_and_keeps_what_does_not() -> None:
    """One row at a time is far too few for this load."""
    requests = replace(LOAD, rate=3.0, seconds=10.0).requests()
    choose: Callable[[str], SimulationSettings] = SimulationSettings().changed
    first, best = tune(requests, PROFILE, choose("max_running=1"), OBJECTIVES)
    assert best.score > first.score
    assert int(dict(best.changes)["max_running"]) > 1
    written = tomllib.loads(config_toml(best, first, "a load"))
    assert written["plan"]["max_running"] == int(dict(best.changes)["max_running"])
    assert tune(requests[:1], PROFILE, choose(""), OBJECTIVES)[1].changes == ()
