"""The sampler against Hugging Face's logits processors and against expected statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from millrace.config import RunConfig
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.step import Admission, StepPlan, exact_shape
from millrace.run.device.device import open_device
from millrace.run.sampling.masks import Masks
from millrace.run.sampling.noise import uniforms
from millrace.run.sampling.sampler import Drawn, Sampler
from millrace.run.table.request_table import RequestTable

VOCAB = 1500


class SamplerUnderTest:
    """A sampler whose rows are admitted directly, as the runner would."""

    def __init__(self, vocab: int = VOCAB, max_rows: int = 64) -> None:
        self.device = open_device(RunConfig(device="cpu", threads=1))
        self.table = RequestTable(self.device, max_rows=max_rows, max_blocks=4)
        self.sampler = Sampler(self.device, self.table, max_rows=max_rows, vocab_size=vocab)

    def admit(self, row: int, params: SamplingParams, tokens=(1, 2, 3), num_prompt=None, ends=()) -> None:
        array = np.asarray(tokens, np.int32)
        admission = Admission(row, row, array, num_prompt or len(array), RowParams(params, tuple(ends)))
        nothing = np.zeros(0, np.int32)
        plan = StepPlan(
            step_no=0,
            rows=nothing,
            starts=nothing,
            counts=nothing,
            samples=np.zeros(0, np.bool_),
            block_rows=nothing,
            block_cols=nothing,
            block_ids=nothing,
            shape=exact_shape(nothing),
            admitted=(admission,),
        )
        self.update(plan)

    def update(self, plan: StepPlan) -> None:
        self.table.update(plan)
        self.sampler.update(plan)

    def draw(self, logits: torch.Tensor, rows, positions) -> Drawn:
        return self.sampler.draw(logits.clone(), np.asarray(rows, np.int32), np.asarray(positions, np.int32))


def support(params: SamplingParams, logits: torch.Tensor, draws: int = 3000) -> torch.Tensor:
    """How often each token is drawn over many positions."""
    sampler = SamplerUnderTest(vocab=logits.shape[-1], max_rows=1)
    sampler.admit(0, params)
    counts = torch.zeros(logits.shape[-1])
    for position in range(draws):
        counts[sampler.draw(logits[None], [0], [position]).tokens] += 1
    return counts


def expected_probs(params: SamplingParams, logits: torch.Tensor) -> torch.Tensor:
    scores = TemperatureLogitsWarper(params.temperature)(None, logits[None])
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return torch.softmax(scores, -1)[0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, seed=2),
        SamplingParams(temperature=1.3, top_k=5, seed=3),
        SamplingParams(temperature=1.0, top_p=0.6, seed=4),
        SamplingParams(temperature=1.0, min_p=0.2, seed=5),
        SamplingParams(temperature=1.5, top_k=12, top_p=0.8, min_p=0.05, seed=6),
    ],
)
def test_draws_follow_the_filtered_distribution(params: SamplingParams) -> None:
    torch.manual_seed(0)
    logits = torch.randn(40) * 2
    counts, probs = support(params, logits), expected_probs(params, logits)
    assert (counts[probs == 0] == 0).all(), "a masked token was drawn"
    sure = probs > 0.02
    deviation = (counts[sure] - 3000 * probs[sure]).abs() / (3000 * probs[sure] * (1 - probs[sure])).sqrt().clamp(1)
    assert deviation.max() < 5


@settings(max_examples=examples(20), deadline=None)
@given(st.floats(0.01, 0.999), st.floats(0.5, 8.0), st.integers(0, 10_000))
def test_the_nucleus_equals_hugging_face_even_when_it_is_wide(top_p: float, spread: float, seed: int) -> None:
    """A flat distribution needs more tokens than the first guess sorts."""
    from millrace.run.sampling.cuts import keep_nucleus

    torch.manual_seed(seed)
    logits = torch.randn(2, VOCAB) * spread / 4
    ours = logits.clone()
    keep_nucleus(ours, torch.tensor([[top_p], [top_p]]))
    theirs = TopPLogitsWarper(top_p)(None, logits)
    differing = (torch.isinf(ours) != torch.isinf(theirs)).sum()
    assert differing <= 2, "more differences than rounding at the bound explains"


def test_greedy_rows_next_to_random_ones_stay_greedy() -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, VOCAB)
    sampler = SamplerUnderTest()
    sampler.admit(0, SamplingParams(temperature=0))
    sampler.admit(1, SamplingParams(temperature=1.0, seed=7))
    sampler.admit(2, SamplingParams(temperature=1e-9))
    tokens = sampler.draw(logits, [0, 1, 2], [3, 3, 3]).tokens
    assert tokens[0] == logits[0].argmax()
    assert tokens[2] == logits[2].argmax()


def test_a_seeded_row_draws_the_same_in_any_batch() -> None:
    torch.manual_seed(2)
    logits = torch.randn(8, VOCAB)
    alone, batched = SamplerUnderTest(), SamplerUnderTest()
    alone.admit(5, SamplingParams(seed=11, top_p=0.9))
    for row in range(8):
        batched.admit(row, SamplingParams(seed=11 if row == 5 else row, top_p=0.9 if row == 5 else 0.5, top_k=row))
    batched.admit(5, SamplingParams(seed=11, top_p=0.9))
    for position in range(40):
        one = alone.draw(logits[5:6], [5], [position]).tokens[0]
        many = batched.draw(logits, list(range(8)), [position] * 8).tokens[5]
        assert one == many


def test_penalties_equal_their_definitions() -> None:
    torch.manual_seed(3)
    logits = torch.randn(1, VOCAB)
    tokens, num_prompt = [3, 9, 9, 40, 41, 41], 3
    params = SamplingParams(temperature=0, repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3)
    sampler = SamplerUnderTest()
    sampler.admit(0, params, tokens, num_prompt)
    changed = logits.clone()
    # The adjusted logits before the draw, which has only tokens.
    sampler.sampler.constrain(changed, np.asarray([0], np.int32), np.asarray([6], np.int32))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens]), logits.clone())
    output = torch.bincount(torch.tensor(tokens[num_prompt:]), minlength=VOCAB)
    expected = expected - 0.3 * output - 0.4 * (output > 0)
    torch.testing.assert_close(changed, expected)


def test_penalties_count_the_tokens_drawn() -> None:
    """With a strong presence penalty a flat model never repeats itself."""
    logits = torch.zeros(1, 20)
    sampler = SamplerUnderTest(vocab=20)
    sampler.admit(0, SamplingParams(temperature=0, presence_penalty=2.0), [0], 1)
    drawn = [int(sampler.draw(logits, [0], [position]).tokens[0]) for position in range(20)]
    assert sorted(drawn) == list(range(20))


def test_logit_bias_can_force_and_forbid() -> None:
    logits = torch.zeros(1, 20)
    logits[0, 4] = 5.0
    sampler = SamplerUnderTest(vocab=20)
    sampler.admit(0, SamplingParams(temperature=0, logit_bias=((4, -100.0), (7, 3.0))))
    assert sampler.draw(logits, [0], [1]).tokens[0] == 7


def test_end_tokens_are_impossible_before_min_tokens() -> None:
    logits = torch.zeros(1, 20)
    logits[0, 6] = 9.0
    sampler = SamplerUnderTest(vocab=20)
    sampler.admit(0, SamplingParams(temperature=0, min_tokens=2), [1, 2, 3], 3, ends=(6,))
    drawn = [int(sampler.draw(logits, [0], [position]).tokens[0]) for position in (3, 4, 5)]
    assert drawn[0] != 6
    assert drawn[1] != 6
    assert drawn[2] == 6


def test_logprobs_are_of_the_raw_logits() -> None:
    torch.manual_seed(4)
    logits = torch.randn(2, VOCAB)
    sampler = SamplerUnderTest()
    sampler.admit(0, SamplingParams(temperature=0))
    sampler.admit(1, SamplingParams(temperature=0.1, seed=3, logprobs=4, logit_bias=((17, 50.0),)))
    drawn = sampler.draw(logits, [0, 1], [3, 3])
    assert drawn.logprob_index.tolist() == [1]
    assert drawn.logprobs is not None
    reference = torch.log_softmax(logits[1], -1)
    assert drawn.tokens[1] == 17
    torch.testing.assert_close(drawn.logprobs.logprobs[0], reference[17])
    assert drawn.logprobs.top_ids[0].tolist() == reference.topk(4).indices.tolist()
    assert int(drawn.logprobs.ranks[0]) == int((reference > reference[17]).sum()) + 1


def test_noise_is_uniform_and_stateless() -> None:
    seeds = np.arange(20_000, dtype=np.uint64)
    values = uniforms(seeds, np.full(20_000, 5, np.uint64))
    assert 0 <= values.min()
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.01
    histogram, _ = np.histogram(values, bins=20, range=(0, 1))
    assert histogram.min() > 850
    again = uniforms(seeds[77:78], np.asarray([5], np.uint64))
    assert again[0] == values[77]
    by_position = uniforms(np.full(20_000, 3, np.uint64), seeds)
    assert abs(np.corrcoef(values, by_position)[0, 1]) < 0.03


def bits_of(allowed: list[list[int]], vocab: int) -> np.ndarray:
    """Mask lines in which these tokens are allowed."""
    bits = np.zeros((len(allowed), -(-vocab // 32)), np.uint32)
    for line, tokens in enumerate(allowed):
        for token in tokens:
            bits[line, token // 32] |= np.uint32(1 << (token % 32))
    return bits


def test_a_masked_row_draws_only_allowed_tokens() -> None:
    torch.manual_seed(6)
    logits = torch.randn(4, 75) * 3
    sampler = SamplerUnderTest(vocab=75)
    sampler.admit(0, SamplingParams(temperature=0))
    sampler.admit(1, SamplingParams(temperature=2.0, seed=4))
    sampler.admit(2, SamplingParams(temperature=0, logit_bias=((3, 100.0), (70, 1.0)), logprobs=1))
    sampler.admit(3, SamplingParams(temperature=0, min_tokens=9, presence_penalty=2.0), ends=(64,))
    masks = Masks(np.array([1, 2, 3]), bits_of([[5, 31, 32, 74], [69, 70], [0, 64]], 75))
    rows, positions = np.arange(4, dtype=np.int32), np.full(4, 4, np.int32)
    seen = set()
    for position in range(4, 40):
        drawn = sampler.sampler.draw(logits.clone(), rows, positions * 0 + position, masks)
        tokens = drawn.tokens.tolist()
        assert tokens[0] == logits[0].argmax()
        assert tokens[2] == (70 if logits[2, 70] + 1 > logits[2, 69] else 69)
        assert position >= 12 or tokens[3] == 0
        seen.add(tokens[1])
        assert drawn.logprobs is not None
        torch.testing.assert_close(drawn.logprobs.logprobs[0], torch.log_softmax(logits[2], -1)[tokens[2]])
    assert len(seen) > 1
    assert seen <= {5, 31, 32, 74}
