"""N-gram drafts, and which of them a verified step accepts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from millrace.params.rows import DEFAULT_ROW_PARAMS
from millrace.plan.step import Admission, StepPlan, exact_shape
from millrace.run.device.device import CpuDevice
from millrace.run.drafting.drafted_rows import DraftedRows
from millrace.run.drafting.drafter import DraftAsk, Drafter
from millrace.run.drafting.drafters import Drafters
from millrace.run.drafting.ngram import propose_ngram
from millrace.run.table.request_table import RequestTable

NONE = np.zeros(0, np.int32)


def drafts(history: list[int], count: int) -> list[int]:
    return propose_ngram(np.array(history, np.int32), count).tolist()


def test_the_latest_and_longest_match_is_continued() -> None:
    assert drafts([1, 2, 3, 4, 9, 1, 2, 3], 3) == [4, 9, 1]
    assert drafts([1, 2, 3, 4, 7, 2, 3, 5, 1, 2, 3], 1) == [4], "three tokens match earlier than two"
    assert drafts([2, 3, 4, 2, 3, 5, 8, 2, 3], 2) == [5, 8], "of equal lengths the latest"
    assert drafts([6, 6, 6, 6], 3) == [6], "the continuation ends where the text ends"
    assert drafts([1, 2, 3], 3) == []
    assert drafts([1, 2, 1], 3) == []
    assert drafts([5], 3) == []
    assert drafts([1, 2, 3, 1, 2, 3], 0) == []


@pytest.mark.parametrize("seed", range(20))
def test_drafts_follow_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        history = [rng.randrange(4) for _ in range(rng.randrange(1, 30))]
        count = rng.randrange(0, 5)
        expected: list[int] = []
        for length in (3, 2):
            starts = [at for at in range(len(history) - length) if history[at : at + length] == history[-length:]]
            if starts:
                expected = history[starts[-1] + length :][:count]
                break
        assert drafts(history, count) == expected


def plan_of(
    rows: list[int], starts: list[int], places: list[int] | None, admitted: tuple[Admission, ...] = ()
) -> StepPlan:
    ones = np.ones(len(rows), np.int32)
    return StepPlan(
        0,
        np.array(rows, np.int32),
        np.array(starts, np.int32),
        ones,
        ones.astype(np.bool_),
        NONE,
        NONE,
        NONE,
        exact_shape(ones),
        admitted,
        draft_places=None if places is None else np.array(places, np.int32),
    )


@pytest.mark.parametrize("seed", range(30))
def test_any_drafts_give_the_tokens_of_a_run_without(seed: int) -> None:
    """The model: the next token is a function of all tokens before it. Drafts are right or wrong at random."""
    rng = random.Random(seed)

    def next_token(tokens: list[int]) -> int:
        return hash(tuple(tokens)) % 7

    class Guesses(Drafter):
        def propose(self, asks: Sequence[DraftAsk]) -> list[Any]:
            return [self.guess(ask.tokens.tolist(), ask.max_drafts) for ask in asks]

        def guess(self, tokens: list[int], count: int) -> Any:
            guessed: list[int] = []
            for _ in range(rng.randrange(0, count + 1)):
                guess = next_token(tokens + guessed)
                guessed.append(guess if rng.random() < 0.7 else (guess + 1) % 7)
            return np.array(guessed, np.int32)

    table, prompts = RequestTable(CpuDevice(1), max_rows=3, max_blocks=1), [[1, 2, 3], [4], [5, 6]]
    limits = [40, 23, 31]
    rows = DraftedRows(table, 3, Drafters({"ngram": Guesses()}, "ngram"))
    admitted = tuple(
        Admission(row, row, np.array(prompt, np.int32), len(prompt), DEFAULT_ROW_PARAMS, limits[row])
        for row, prompt in enumerate(prompts)
    )
    outputs: list[list[int]] = [[], [], []]
    first = True
    for _ in range(60):
        plan = plan_of([0, 1, 2], [0, 0, 0], [rng.randrange(0, 5) for _ in range(3)], admitted if first else ())
        rows.leave(plan)
        table.update_host(plan)
        rows.admit(plan)
        first = False
        step = rows.expand(plan)
        drawn: list[int] = []
        for row, start, count in zip(step.batch.rows, step.batch.starts, step.batch.counts, strict=True):
            known = prompts[row] + outputs[row]
            assert start == len(known) - 1
            assert table.tokens[row][: len(known)].tolist() == known
            seen = table.tokens[row][: start + count].tolist()
            drawn += [next_token(seen[: start + 1 + place]) for place in range(count)]
        accepted = rows.accept(plan, step, np.array(drawn, np.int32))
        at = 0
        for row, count in enumerate(accepted.counts.tolist()):
            outputs[row] += accepted.tokens[at : at + count].tolist()
            at += count
    for prompt, output, limit in zip(prompts, outputs, limits, strict=True):
        known = list(prompt)
        while len(known) < limit:
            known.append(next_token(known))
        assert prompt + output == known
    assert rows.num_accepted > 10
