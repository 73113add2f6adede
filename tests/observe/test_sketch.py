"""The sketch of latencies, held to NumPy's percentiles of the same values."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from millrace.observe.sketch import ACCURACY, MAX_EXACT, Sketch, quantile, rounded

SHARES = (0.0, 0.01, 0.5, 0.9, 0.95, 0.99, 1.0)
values_in_s = st.floats(1e-6, 1e4) | st.just(0.0)


def sketch_of(values: list[float], line: int = 0) -> Sketch:
    sketch = Sketch()
    sketch.add(np.full(len(values), line), np.array(values))
    return sketch


def measured(values: list[float], share: float) -> float:
    """The percentile that is one of the values."""
    return float(np.quantile(values, share, method="inverted_cdf"))


@given(st.lists(values_in_s, min_size=1, max_size=MAX_EXACT))
def test_percentiles_of_few_values_are_exact(values: list[float]) -> None:
    found = sketch_of(values).of(0, 0)
    assert [quantile(*found, share) for share in SHARES] == [measured(values, share) for share in SHARES]


@given(st.lists(st.lists(values_in_s, max_size=300), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_percentiles_of_merged_sketches_are_within_one_percent_in_any_order(parts: list[list[float]], random) -> None:  # type: ignore[no-untyped-def]
    everything = [value for part in parts for value in part]
    sketches = [Sketch(sketch_of(part).tobytes()) for part in parts]
    random.shuffle(sketches)
    merged = Sketch()
    for sketch in sketches:
        merged.merge(sketch)
        merged.of(0, 0)
    values, counts = merged.of(0, 0)
    assert counts.sum() == len(everything)
    for share in SHARES if everything else ():
        exact, found = measured(everything, share), quantile(values, counts, share)
        assert found is not None
        assert abs(found - exact) <= ACCURACY * exact * (1 + 1e-9)


@given(st.lists(values_in_s, min_size=1, max_size=500))
def test_a_rounded_value_is_not_rounded_again(values: list[float]) -> None:
    once = rounded(np.array(values))
    assert np.allclose(rounded(once), once, rtol=1e-12, atol=0)


def test_lines_are_kept_apart_and_only_long_ones_are_rounded() -> None:
    sketch = sketch_of([0.123456789], line=1)
    sketch.add(np.zeros(1000, np.int64), np.linspace(0.5, 2, 1000), np.full(1000, 3))
    assert sketch.of(1, 1)[0].tolist() == [0.123456789]
    values, counts = sketch.of(0, 0)
    assert len(values) <= MAX_EXACT
    assert counts.sum() == 3000
    assert sketch.of(0, 1)[1].sum() == 3001


def test_what_was_taken_is_gone() -> None:
    sketch = sketch_of([1.0, 1.0, 2.0])
    assert sketch.take().of(0, 0)[1].tolist() == [2, 1]
    assert sketch.tobytes() == b""
    assert quantile(*sketch.of(0, 0), 0.5) is None
