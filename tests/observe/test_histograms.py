from __future__ import annotations

import numpy as np
import pytest

from millrace.observe.histograms import ITL, NUM_EDGES, SPECS, TTFT, Histograms, share_within, values_of
from millrace.observe.sketch import Sketch


def test_every_histogram_has_ascending_edges_and_the_common_size() -> None:
    for spec in SPECS:
        assert len(spec.edges) == NUM_EDGES, spec.name
        assert list(spec.edges) == sorted(set(spec.edges)), spec.name


def test_gaps_of_several_classes_are_counted_and_summed_apart() -> None:
    histograms = Histograms()
    histograms.observe_gaps(np.array([0.003, 0.003, 0.05]), np.array([0, 2, 2], np.int32))
    histograms.observe_gaps(np.array([0.003]), np.array([2], np.int32))
    counts = histograms.values[ITL]
    place = int(np.searchsorted(SPECS[ITL].edges, 0.003))
    assert counts[:, :-1].sum(axis=1).tolist() == [1, 0, 3]
    assert counts[2, place] == 2
    assert counts[:, -1] == pytest.approx([0.003, 0, 0.056])


def test_values_survive_the_wire() -> None:
    histograms = Histograms()
    histograms.observe(TTFT, 1, 0.3)
    assert (Histograms(histograms.tobytes()).values == histograms.values).all()


def test_shares_within_a_limit_agree_with_the_values() -> None:
    rng, histograms = np.random.default_rng(0), Histograms()
    values = rng.lognormal(-1.5, 0.7, 5000)
    for value in values:
        histograms.observe(TTFT, 0, float(value))
    assert share_within(SPECS[TTFT], histograms.values[TTFT, 0, :-1], 0.5) == (values <= 0.5).sum()


def test_a_report_has_the_values_since_the_one_before() -> None:
    histograms = Histograms()
    histograms.observe(TTFT, 1, 1.164)
    histograms.observe(TTFT, 2, 0.3)
    histograms.observe_gaps(np.array([0.02]), np.array([1], np.int32), np.array([7]))
    sketch = Sketch(histograms.take_sketch())
    assert [column.tolist() for column in values_of(sketch, TTFT)] == [[0.3, 1.164], [1, 1]]
    assert [column.tolist() for column in values_of(sketch, ITL)] == [[0.02], [7]]
    assert histograms.take_sketch() == b""
