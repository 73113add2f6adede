"""Acceptance is counted as it is when served: chains start where the one before ended, not inside it."""

from __future__ import annotations

import numpy as np

from millrace.training.measure import is_start


def test_chains_start_behind_what_the_last_one_gave() -> None:
    has_draft = np.array([[0, 0, 1, 1, 1, 1, 1, 1, 1, 0], [0] * 10, [1] * 10], np.bool_)
    accepted = np.array([[9, 9, 2, 2, 1, 0, 1, 0, 0, 9], [1] * 10, [0] * 10])
    starts = is_start(accepted, has_draft)
    assert np.flatnonzero(starts[0]).tolist() == [2, 5, 6, 8]
    assert not starts[1].any()
    assert starts[2].all()
