from __future__ import annotations

import numpy as np
import pytest

from millrace.observe.histograms import ITL, NUM_EDGES, SPECS, TTFT, Histograms, percentile, share_within


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


def test_percentiles_and_shares_agree_with_the_values() -> None:
    rng, histograms = np.random.default_rng(0), Histograms()
    values = rng.lognormal(-1.5, 0.7, 5000)
    for value in values:
        histograms.observe(TTFT, 0, float(value))
    counts = histograms.values[TTFT, 0, :-1]
    for share in (0.5, 0.95):
        assert percentile(SPECS[TTFT], counts, share) == pytest.approx(np.quantile(values, share), rel=0.15)
    assert share_within(SPECS[TTFT], counts, 0.5) == (values <= 0.5).sum()
    assert percentile(SPECS[TTFT], counts * 0, 0.5) is None
