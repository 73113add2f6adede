from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from millrace.cli import main
from millrace.commands.figures.cost import report_lines, usd_text
from millrace.link.engine_stats import AdapterStats, EngineStats, TenantFigures
from millrace.observe.cost.fit import changes, fit
from millrace.observe.cost.report import cost_report
from millrace.observe.history import FrontCounts, Sample

STEP_S, PREFILL_S, DECODE_S = 0.004, 30e-6, 200e-6


def samples(seconds: int = 120) -> list[Sample]:
    """A server whose steps cost exactly this; a third of the time it is idle."""
    rng, found = np.random.default_rng(3), []
    stats = msgspec.structs.replace(
        EngineStats(*[0] * 13),
        tenants=(TenantFigures("acme", requests=9, prompt_tokens=1000, output_tokens=500),),
        adapters=AdapterStats(
            *[0] * 5, each=(TenantFigures("pirate", requests=3, prompt_tokens=500, output_tokens=250),)
        ),
    )
    for second in range(seconds):
        if second % 3:
            steps, prefill, decode = int(rng.integers(20, 60)), int(rng.integers(0, 9000)), int(rng.integers(100, 900))
            stats = msgspec.structs.replace(
                stats,
                step_no=stats.step_no + steps,
                prefill_tokens=stats.prefill_tokens + prefill,
                decode_tokens=stats.decode_tokens + decode,
                device_seconds=stats.device_seconds + STEP_S * steps + PREFILL_S * prefill + DECODE_S * decode,
            )
        found.append(Sample(float(second), stats, FrontCounts()))
    return found


def test_the_parts_of_step_time_are_recovered() -> None:
    costs = fit(changes(samples()))
    assert costs is not None
    assert costs.step_s == pytest.approx(STEP_S, rel=1e-6)
    assert costs.prefill_token_s == pytest.approx(PREFILL_S, rel=1e-6)
    assert costs.decode_token_s == pytest.approx(DECODE_S, rel=1e-6)
    low, high = costs.intervals["decode_token_s"]
    assert low <= DECODE_S * 1.001
    assert high >= DECODE_S * 0.999


def test_without_a_price_there_are_no_dollars() -> None:
    lines = report_lines(cost_report(samples(), None, 0.0))
    assert any("has no price" in line for line in lines)
    assert any("%" in line for line in lines[3:])
    assert not any("$" in line for line in lines)


def test_dollars_have_three_digits() -> None:
    assert [usd_text(value) for value in (1234.5, 12.345, 0.0123456, 0.00000123456, 0.0)] == [
        *("1234", "12.3", "0.0123", "0.00000123", "0")
    ]
    lines = report_lines(cost_report(samples(), None, 3.6))
    assert any(line.startswith("at $3.6/h, $ per million") for line in lines)
    assert max(map(len, lines[:6])) <= 80


def test_all_money_goes_somewhere() -> None:
    report = cost_report(samples(), None, 3.6)
    assert sum(item["share"] for item in report["items"]) == pytest.approx(1.0, rel=1e-3)
    assert sum(item["usd_per_hour"] for item in report["items"]) == pytest.approx(3.6, rel=1e-3)
    assert len(report["largest_items"]) == 3
    usd = report["usd_per_million"]
    assert usd["output"]["busy"] > usd["input"]["busy"] > 0
    assert usd["output"]["all_in"] == pytest.approx(usd["output"]["busy"] / report["utilisation"])
    assert [one["tenant"] for one in report["tenants"]] == ["acme"]
    assert cost_report(samples(), None, 3.6, "another")["tenants"] == []


def test_adapters_have_costs_which_operators_see() -> None:
    report = cost_report(samples(), None, 3.6)
    [adapter], [tenant] = report["adapters"], report["tenants"]
    assert adapter["adapter"] == "pirate"
    assert tenant["usd"] == pytest.approx(2 * adapter["usd"])
    assert any(line.endswith("adapter pirate, 3 requests") for line in report_lines(report))
    assert cost_report(samples(), None, 3.6, "acme")["adapters"] == []
    del report["adapters"]
    assert report_lines(report), "a server of an earlier version"


@pytest.mark.parametrize("num_models", [1, 2, 5])
def test_models_of_one_machine_pay_its_price_together(num_models: int) -> None:
    """Two or three leave the device idle at times; five use it several at once."""
    models = [samples() for _ in range(num_models)]
    paid = 0.0
    for index, own in enumerate(models):
        report = cost_report(own, None, 3.6, beside=models[:index] + models[index + 1 :])
        assert sum(item["share"] for item in report["items"]) == pytest.approx(1.0, rel=1e-3)
        last, usd = own[-1].stats, report["usd_per_million"]
        assert last is not None
        paid += (last.prefill_tokens * usd["input"]["all_in"] + last.decode_tokens * usd["output"]["all_in"]) / 1e6
        assert usd["output"]["busy"] <= usd["output"]["all_in"]
    assert paid == pytest.approx(3.6 * 119 / 3600, rel=1e-3)


def test_without_work_there_is_no_price() -> None:
    assert cost_report([], None, 1.0)["usd_per_million"] is None
    assert "note" in cost_report(samples(3), None, 1.0)


def test_bills_per_tenant_and_day(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def line(day: int, tenant: str, status: int, prompt: int | None, cached: int | None, output: int | None) -> str:
        record = {"time": f"2026-11-{day}T10:00:00.000+00:00", "tenant": tenant, "status": status}
        return json.dumps({**record, "prompt_tokens": prompt, "cached_tokens": cached, "output_tokens": output})

    log = tmp_path / "audit.jsonl"
    log.write_text(
        "\n".join(
            [
                line(10, "a", 200, 100, 40, 10),
                line(10, "a", 500, 50, 0, 5),
                line(11, "a", 200, 1, 0, 1),
                line(10, "b", 200, 10, 0, 10),
                line(10, "b", 404, None, None, None),
            ]
        )
    )
    prices = ["--usd-input", "1000000", "--usd-cached", "100000", "--usd-output", "2000000"]
    assert main(["cost", "--bill", str(log), *prices]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["day"], row["tenant"], row["requests"], row["failed"]) for row in rows] == [
        ("2026-11-10", "a", "2", "1"),
        ("2026-11-10", "b", "1", "0"),
        ("2026-11-11", "a", "1", "0"),
    ]
    assert float(rows[0]["usd"]) == 110 + 4 + 30
    log.write_text("not a record\n")
    assert main(["cost", "--bill", str(log)]) == 1
