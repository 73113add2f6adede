"""The benchmark of drafts: its requests, its speed-up with an interval, and its picture."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from millrace.bench.http.speculating import STREAMS, WORKLOADS, Point, messages_of, plot_svg
from millrace.commands.bench_speculate import _workloads
from millrace.terminal.parser import UsageError


def test_copy_heavy_work_begins_the_answer() -> None:
    for workload in WORKLOADS:
        for number in range(-3, 20):
            messages = messages_of(workload, number)
            assert (messages[-1]["role"] == "assistant") == (workload != "chat")


def test_workloads_are_chosen_by_name() -> None:
    assert _workloads("") == WORKLOADS
    assert _workloads("chat,edit,chat") == ("chat", "edit")
    with pytest.raises(UsageError, match="--workloads names 'chess'; it must be some of edit, quote"):
        _workloads("chat,chess")


def test_the_speed_up_has_an_interval() -> None:
    ratio = Point("edit", 1, (10.0, 11.0, 9.0), (20.0, 23.0, 17.0)).speed_up
    assert 1.9 < ratio.value < 2.1
    assert ratio.low < ratio.value < ratio.high < 2.5


def test_the_picture_is_a_drawing_of_every_point() -> None:
    points = [Point(work, streams, (1.0, 1.1), (2.0, 2.1)) for work in WORKLOADS for streams in STREAMS]
    drawing = ElementTree.fromstring(plot_svg(points))
    assert sum(element.tag.endswith("circle") for element in drawing) == len(points)
