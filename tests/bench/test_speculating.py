"""The benchmark of drafts: its requests, its speed-up with an interval, and its picture."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

from millrace.bench.http.paired import half_width, paired_ratio
from millrace.bench.http.speculating import STREAMS, WORKLOADS, Point, Side, SpeculateBench, messages_of, plot_svg
from millrace.commands.benchmarks.bench_speculate import chosen_workloads
from millrace.terminal.parser import UsageError


def test_copy_heavy_work_begins_the_answer() -> None:
    for workload in WORKLOADS:
        for number in range(-3, 20):
            messages = messages_of(workload, number)
            assert (messages[-1]["role"] == "assistant") == (workload != "chat")


def test_workloads_are_chosen_by_name() -> None:
    assert chosen_workloads("") == WORKLOADS
    assert chosen_workloads("chat,edit,chat") == ("chat", "edit")
    with pytest.raises(UsageError, match="--workloads names 'chess'; it must be some of edit, quote"):
        chosen_workloads("chat,chess")


def sides(*rates: float) -> tuple[Side, ...]:
    return tuple(Side(rate, 1 / rate) for rate in rates)


def test_the_speed_up_has_an_interval() -> None:
    point = Point("edit", 1, sides(10.0, 11.0, 9.0), sides(20.0, 23.0, 17.0))
    ratio, cpu = point.speed_up, point.cpu_ratio
    assert 1.9 < ratio.value < 2.1
    assert ratio.low < ratio.value < ratio.high < 2.5
    assert cpu.value == pytest.approx(1 / ratio.value), "more tokens per second, less time per token"
    assert half_width(ratio) == pytest.approx(ratio.high / ratio.value - 1)


def test_a_few_disturbed_rounds_do_not_decide() -> None:
    rng = np.random.default_rng(2)
    off, on = 100 * np.exp(0.02 * rng.standard_normal((2, 30)))
    on[:4] /= 3
    ratio = paired_ratio(on.tolist(), off.tolist())
    assert abs(ratio.value - 1) < 0.02
    assert ratio.low < 1 < ratio.high
    assert half_width(ratio) < 0.03


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(4)
    held = 0
    for _ in range(400):
        off, on = np.exp(0.05 * rng.standard_normal((2, 20)))
        ratio = paired_ratio(on.tolist(), off.tolist())
        held += ratio.low < 1 < ratio.high
    assert 360 < held < 396


def test_a_point_ends_when_its_interval_is_narrow_or_its_time_is_over() -> None:
    bench = SpeculateBench((), ())
    narrow = Point("chat", 1, sides(*[10.0] * 16), sides(*[10.0] * 16))
    wide = Point("chat", 1, sides(*[10.0] * 5), sides(9.0, 12.0, 8.0, 11.0, 10.0))
    few = Point("chat", 1, sides(10.0, 10.0), sides(10.0, 10.0))
    # The public entry measures servers for minutes.
    assert bench.is_done(narrow, 5.0, 60.0)
    assert not bench.is_done(wide, 5.0, 60.0)
    assert bench.is_done(wide, 55.0, 60.0), "no round fits any more"
    assert not bench.is_done(few, 55.0, 60.0)
    assert SpeculateBench((), (), rounds=2).is_done(few, 5.0, 60.0)


def test_the_picture_is_a_drawing_of_every_point() -> None:
    points = [Point(work, streams, sides(1.0, 1.1), sides(2.0, 2.1)) for work in WORKLOADS for streams in STREAMS]
    drawing = ElementTree.fromstring(plot_svg(points))
    assert sum(element.tag.endswith("circle") for element in drawing) == len(points)
