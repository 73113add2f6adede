"""Suffix drafts: the longest match is continued, as far as is likely to be right, from text of the scope only."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.step import Admission
from millrace.run.drafting.drafter import DraftAsk, RowProgress
from millrace.run.drafting.suffix import MAX_SCOPE_TOKENS, MAX_SCOPES, SuffixDrafter
from millrace.run.drafting.text_index import TextIndex


def ids(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def admit(drafter: SuffixDrafter, row: int, prompt: list[int], scope: str = "") -> None:
    drafter.admit(Admission(row, row, ids(prompt), len(prompt), RowParams(SamplingParams(), (), scope), 10_000))


def propose(drafter: SuffixDrafter, row: int, tokens: list[int], count: int = 4, least: float = 0.0) -> list[int]:
    return drafter.propose([DraftAsk(row, ids(tokens), 0, count, least)])[0].tolist()


@pytest.mark.parametrize("seed", range(10))
def test_the_longest_and_latest_match_is_found(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        text = [rng.randrange(3) for _ in range(rng.randrange(0, 40))]
        tail = text if rng.random() < 0.5 else [rng.randrange(3) for _ in range(rng.randrange(0, 20))]
        best: tuple[int, int] | None = None
        for position in range(1, len(text)):
            length = 0
            while length < min(position, len(tail)) and text[position - 1 - length] == tail[-1 - length]:
                length += 1
            if length >= 2 and (best is None or length >= best[1]):
                best = position, length
        index, length = TextIndex(), 0
        while length < len(text):
            length = min(len(text), length + rng.choice((1, 2, 7, 30)))
            index.extend(ids(text[:length]))
        found = index.find(ids(text), ids(tail))
        assert (None if found is None else (found.position, found.length)) == best


def test_a_long_text_may_be_indexed_at_once_or_in_parts() -> None:
    text = np.random.default_rng(1).integers(0, 40, 3000).astype(np.int32)
    whole, parts = TextIndex(), TextIndex()
    whole.extend(text)
    for end in (1, 2, 9, 255, 256, 257, 300, *range(301, 320), 1500, 3000):
        parts.extend(text[:end])
    for end in range(100, 3000, 97):
        tail = np.concatenate([text[end - 5 : end], text[:2]])[: 3 + end % 3]
        found = whole.find(text, tail)
        assert found == parts.find(text, tail)
        assert found is not None
        assert (text[found.position - found.length : found.position] == tail[-found.length :]).all()


def test_a_match_is_followed_and_survives_one_changed_token() -> None:
    drafter, code = SuffixDrafter(), list(range(100, 140))
    admit(drafter, 0, [*code, 7, 8])
    tokens = [*code, 7, 8, *code[:12]]
    assert propose(drafter, 0, tokens) == code[12:16]
    drafter.confirm([RowProgress(0, ids([*tokens, *code[12:16], code[16]]), 5, 4, 4)])
    tokens += code[12:17]
    assert propose(drafter, 0, tokens) == code[17:21]
    drafter.confirm([RowProgress(0, ids([*tokens, 9]), 1, 4, 0)])
    tokens.append(9)
    assert propose(drafter, 0, tokens) == code[18:22], "the match goes on behind the changed token"


def test_a_phrase_that_repeats_is_continued_beyond_the_end_of_the_text() -> None:
    drafter = SuffixDrafter()
    admit(drafter, 0, [1])
    assert propose(drafter, 0, [9, 1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_drafts_follow_the_length_of_the_match_and_past_success() -> None:
    drafter = SuffixDrafter()
    admit(drafter, 0, [1])
    short, long = [5, 6, 7, 8, 9, 5, 6], [*range(50, 90), *range(50, 82)]
    admit(drafter, 1, [1])
    assert len(propose(drafter, 0, short, 7, 0.3)) == 1
    assert len(propose(drafter, 0, short, 7, 0.06)) == 3, "drafts that are right make the match longer"
    assert len(propose(drafter, 1, long, 7, 0.3)) == 7
    for _ in range(60):
        admit(drafter, 0, [1])
        assert propose(drafter, 0, long, 7)
        drafter.confirm([RowProgress(0, ids([*long, 1]), 1, 7, 0)])
    admit(drafter, 0, [1])
    assert propose(drafter, 0, long, 7, 0.3) == [], "such drafts were never accepted"


def test_a_single_token_is_continued_if_that_is_likely_enough() -> None:
    drafter = SuffixDrafter()
    for row in (0, 1):
        admit(drafter, row, [1])
    rare, common = [4, 5, 6, 7, 5], [5, 9, 4, 5, 6, 7, 5]
    assert propose(drafter, 0, rare, 1, 0.2) == [6]
    assert propose(drafter, 1, common, 1, 0.2) == [], "it occurs at several places"
    assert propose(drafter, 1, common, 1, 0.05) == [6]
    drafter.confirm([RowProgress(1, ids([*common, 6]), 1, 1, 1)])
    assert propose(drafter, 1, [*common, 6], 1, 0.3) == [7], "two tokens are equal now"


def test_a_row_whose_drafts_fail_has_fewer_of_them() -> None:
    drafter, text = SuffixDrafter(), [*range(50, 90), *range(50, 60)]
    for row in (0, 1):
        admit(drafter, row, [1])
    tokens = list(text)
    for _ in range(4):
        assert propose(drafter, 0, tokens, 7)
        tokens += [3, *range(50, 60)]
        drafter.confirm([RowProgress(0, ids(tokens), 11, 7, 0)])
    assert len(propose(drafter, 0, tokens, 7, 0.4)) < len(propose(drafter, 1, tokens, 7, 0.4))


def test_recent_answers_serve_their_own_scope_only() -> None:
    drafter, answer = SuffixDrafter(), list(range(200, 230))
    admit(drafter, 0, [1, 2], "a")
    drafter.release(0, ids([1, 2, *answer]), has_ended=True)
    for row, scope in enumerate(("a", "b", "")):
        admit(drafter, row, [3], scope)
    tokens = [3, *answer[:5]]
    assert propose(drafter, 0, tokens) == answer[5:9]
    assert propose(drafter, 1, tokens) == propose(drafter, 2, tokens) == []
    admit(drafter, 1, [1, 2], "b")
    drafter.release(1, ids([1, 2, *answer]), has_ended=False)
    admit(drafter, 2, [3], "b")
    assert propose(drafter, 2, tokens) == [], "a preempted request has no answer yet"


def test_memory_is_bounded() -> None:
    drafter = SuffixDrafter()
    for number in range(3 * MAX_SCOPES):
        admit(drafter, 0, [1], f"tenant {number}")
        drafter.release(0, ids(range(MAX_SCOPE_TOKENS + 100)), has_ended=True)
    # Only the memory shows that old texts were dropped.
    assert len(drafter.recent) == MAX_SCOPES
    assert all(len(recent.tokens) <= MAX_SCOPE_TOKENS for recent in drafter.recent.values())
    assert not drafter.rows
