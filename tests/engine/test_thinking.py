"""The end of reasoning is forced after so many tokens, and only then."""

from __future__ import annotations

import numpy as np

from millrace.engine.thinking import ThinkingLimits
from millrace.params.grammar import ThinkingLimit

START, END = 40, 41


def is_forced(limits: ThinkingLimits) -> bool:
    masks = np.full((1, 2), 0xFFFFFFFF, np.uint32)
    limits.restrict([7], masks, [()])
    forced = masks.tolist() == [[0, 1 << (END - 32)]]
    assert forced or masks.tolist() == [[0xFFFFFFFF] * 2]
    assert limits.must_end(7) == forced
    return forced


def opened(max_tokens: int, *, is_open: bool) -> ThinkingLimits:
    limits = ThinkingLimits()
    limits.open(7, ThinkingLimit(max_tokens, START, END, is_open))
    return limits


def test_the_end_is_forced_once() -> None:
    limits = opened(2, is_open=True)
    told = []
    for token in (1, 2, END, 3, 4, 5):
        told.append(is_forced(limits))
        limits.consume([7], [token])
    assert told == [False, False, True, False, False, False]


def test_reasoning_that_ends_by_itself_is_left_alone() -> None:
    limits = opened(3, is_open=True)
    for token in (1, END, 2, 3, 4, 5):
        assert not is_forced(limits)
        limits.consume([7], [token])


def test_tokens_count_from_the_start_marker() -> None:
    limits = opened(1, is_open=False)
    for token in (9, START, 1):
        assert not is_forced(limits)
        limits.consume([7], [token])
    assert is_forced(limits)


def test_an_answer_without_reasoning_is_not_touched() -> None:
    limits = opened(1, is_open=False)
    for token in (1, 2, 3, 4, START, 5, 6):
        limits.consume([7], [token])
        assert not is_forced(limits)


def test_closed_and_unknown_requests() -> None:
    limits = opened(0, is_open=True)
    assert is_forced(limits)
    limits.close(7)
    limits.close(8)
    assert not is_forced(limits)


def test_the_end_is_forced_after_drafts_too() -> None:
    limits = opened(2, is_open=True)
    masks = np.full((6, 2), 0xFFFFFFFF, np.uint32)
    limits.restrict([3, 7], masks, [(5,), (1, 2, END)])
    assert [row for row, mask in enumerate(masks.tolist()) if mask == [0, 1 << (END - 32)]] == [4]
    assert not is_forced(limits)
