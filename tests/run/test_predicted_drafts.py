"""Drafts from a prediction: they continue it from where the answer has got to."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.run.drafting.prediction import propose_predicted

PREDICTION = np.array([1, 2, 3, 9, 1, 2, 3, 4, 5, 6, 7], np.int32)


@pytest.mark.parametrize(
    ("output", "drafts"),
    [
        ([], [1, 2, 3]),
        ([1], [2, 3, 9]),
        ([8], []),
        ([8, 1, 2, 3], [9, 1, 2]),
        ([1, 2, 3], [9, 1, 2]),
        ([8, 9, 1, 2, 3], [4, 5, 6]),
        ([1, 2, 3, 9, 8, 5, 6], [7]),
        ([8, 8, 6, 7], []),
    ],
)
def test_the_place_with_most_equal_tokens_before_it_is_continued(output: list[int], drafts: list[int]) -> None:
    assert propose_predicted(PREDICTION, np.array(output, np.int32), 3).tolist() == drafts


def test_a_long_prediction_of_one_token_is_cheap() -> None:
    ones = np.ones(100_000, np.int32)
    assert propose_predicted(ones, ones[:50], 7).tolist() == [1] * 7
