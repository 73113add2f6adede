"""`bad_words` and `allowed_token_ids` in the draw: against plain NumPy, and what must not change a draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from run.test_sampler import SamplerUnderTest

from millrace.config import RunConfig
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.step import Admission, Release, StepPlan, exact_shape
from millrace.run.device.device import open_device
from millrace.run.sampling.token_limits import bad_words_of, forbidden_tokens

VOCAB = 12
DEVICE = open_device(RunConfig(device="cpu", threads=1))
Sequences = tuple[tuple[int, ...], ...]


def limited(
    logits: np.ndarray, output: Sequence[int], words: Sequences, ends: Sequence[int], allowed: Sequence[int] | None
) -> np.ndarray:
    """The definition of docs/api/samplers.md, token by token."""
    before = logits.copy()
    if allowed is not None:
        before[[token for token in range(len(before)) if token not in allowed]] = -np.inf
    after = before.copy()
    for *prefix, last in words:
        begin = len(output) - len(prefix)
        if last not in ends and begin >= 0 and list(output[begin:]) == prefix:
            after[last] = -np.inf
    return after if np.isfinite(after).any() else before


ids = st.integers(0, 3)
word_lists = st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), min_size=1, max_size=6).map(tuple)


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(ids, max_size=6), word_lists, st.sets(ids, max_size=1), st.none() | st.sets(ids, min_size=1))
def test_equals_the_reference(output: list[int], words: Sequences, ends: set[int], allowed: set[int] | None) -> None:
    params = SamplingParams(
        bad_words=("x",), bad_word_ids=words, allowed_token_ids=None if allowed is None else tuple(allowed)
    )
    row = RowParams(params, tuple(ends))
    logits = np.linspace(3, -3, 5, dtype=np.float32)
    ours = torch.from_numpy(logits.copy())
    forbidden, bad = forbidden_tokens(row, DEVICE, 5), bad_words_of(row, DEVICE, 5)
    if forbidden is not None:
        ours.masked_fill_(forbidden, -torch.inf)
    if bad is not None:
        bad.forbid(ours, torch.tensor(output, dtype=torch.int64))
    assert ours.numpy().tolist() == limited(logits, output, words, list(ends), allowed and sorted(allowed)).tolist()


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


WORDS = {"bad_words": ("x",), "bad_word_ids": ((4,), (1, 2), (7, 7, 7), (3, 5, 1))}
KINDS = (
    SamplingParams(temperature=0, **WORDS),
    SamplingParams(seed=3, temperature=1.5, **WORDS),
    SamplingParams(seed=4, allowed_token_ids=(1, 2, 3, 5, 7), temperature=2.0, **WORDS),
    SamplingParams(temperature=0, allowed_token_ids=(0, 9, 11)),
    SamplingParams(seed=5, allowed_token_ids=(2, 8), top_p=0.9, logit_bias=((2, -100.0), (8, -100.0), (0, 100.0))),
)


@pytest.mark.parametrize("params", KINDS, ids=range(len(KINDS)))
def test_no_drawn_token_is_forbidden(params: SamplingParams) -> None:
    sampler = SamplerUnderTest(vocab=VOCAB)
    sampler.admit(0, params, tokens=(7, 7, 1), num_prompt=3)
    assert sampler.sampler.row_params.is_shaped[0]
    output: list[int] = []
    for step in range(200):
        logits = logits_of(step)
        left = limited(logits[0].numpy(), output, params.bad_word_ids or (), (), params.allowed_token_ids)
        token = int(sampler.draw(logits, [0], [3 + step]).tokens[0])
        assert np.isfinite(left[token])
        if params.temperature == 0:
            assert token == left.argmax()
        output.append(token)
    assert len(set(output)) > 1


def test_the_prompt_is_no_prefix_and_an_end_token_is_never_forbidden() -> None:
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, 2], logits[0, 4] = 3.0, 2.0
    sampler = SamplerUnderTest(vocab=VOCAB)
    params = SamplingParams(temperature=0, bad_words=("x",), bad_word_ids=((1, 2), (2, 2), (4,)))
    sampler.admit(0, params, tokens=(5, 1))
    assert [int(sampler.draw(logits, [0], [2 + step]).tokens[0]) for step in range(2)] == [2, 0]
    sampler.admit(1, params, tokens=(5, 1), ends=(4,))
    assert [int(sampler.draw(logits, [1], [2 + step]).tokens[0]) for step in range(2)] == [2, 4]


def test_rows_draw_the_same_alone_and_among_neighbours() -> None:
    kinds = (*KINDS, SamplingParams(temperature=0), SamplingParams(seed=77, top_p=0.8))
    rows = list(range(len(kinds)))
    logits = logits_of(11, len(kinds))
    many = SamplerUnderTest(vocab=VOCAB)
    alone = []
    for row, params in enumerate(kinds):
        many.admit(row, params)
        one = SamplerUnderTest(vocab=VOCAB)
        one.admit(row, params)
        alone.append([int(one.draw(logits[row : row + 1], [row], [3 + step]).tokens[0]) for step in range(12)])
    together = [many.draw(logits, rows, [3 + step] * len(rows)).tokens.tolist() for step in range(12)]
    assert [list(column) for column in zip(*together, strict=True)] == alone
    plain = SamplerUnderTest(vocab=VOCAB)
    plain.admit(5, kinds[5])
    assert int(plain.draw(logits[5:6], [5], [3]).tokens[0]) == int(logits[5].argmax()) == alone[5][0]


def _plan(admitted: tuple[Admission, ...] = (), released: tuple[Release, ...] = ()) -> StepPlan:
    none = np.zeros(0, np.int32)
    return StepPlan(0, none, none, none, np.zeros(0, np.bool_), none, none, none, exact_shape(none), admitted, released)


@pytest.mark.parametrize("params", KINDS[:3], ids=range(3))
def test_preemption_changes_nothing(params: SamplingParams) -> None:
    def run(preempt_at: int | None) -> list[int]:
        sampler, row, tokens = SamplerUnderTest(vocab=VOCAB), 0, [1, 2, 3]

        def admit() -> None:
            admission = Admission(row, 42, np.array(tokens, np.int32), 3, RowParams(params), limit=30)
            sampler.sampler.update(_plan((admission,)))

        admit()
        for step in range(20):
            if step == preempt_at:
                sampler.sampler.update(_plan(released=(Release(row, 42, "preempted"),)))
                row = 5
                admit()
            tokens.append(int(sampler.draw(logits_of(step), [row], [len(tokens)]).tokens[0]))
        return tokens

    assert run(None) == run(7) == run(19)
