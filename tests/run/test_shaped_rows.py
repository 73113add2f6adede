"""Rows with further sampler options: the batched torch code against a plain reference, statistics, and what must not
change a draw: neighbours, batches, preemption."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.sampling_reference import dried, kept, penalised
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from run.test_sampler import SamplerUnderTest

from millrace.errors import ConfigError
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.step import Admission, Release, StepPlan, exact_shape
from millrace.run.sampling.cuts import draw_from
from millrace.run.sampling.processors import load_processor
from millrace.run.sampling.repetition import MAX_MATCH, match_lengths, penalise_recent, penalise_repeats
from millrace.run.sampling.shaped_rows import ShapedRows

VOCAB = 300
CUTS = [
    SamplingParams(typical_p=0.5, seed=1),
    SamplingParams(typical_p=0.9, temperature=1.7, seed=2),
    SamplingParams(top_a=0.3, seed=3),
    SamplingParams(xtc_probability=1.0, xtc_threshold=0.05, seed=4),
    SamplingParams(xtc_probability=0.5, xtc_threshold=0.02, top_k=30, seed=5),
    SamplingParams(xtc_probability=1.0, xtc_threshold=0.0, top_k=10, seed=5),
    SamplingParams(dynatemp_range=0.6, dynatemp_exponent=1.4, temperature=0.9, top_k=40, seed=6),
    SamplingParams(mirostat=2, mirostat_tau=3.0, seed=7),
    SamplingParams(mirostat=1, mirostat_tau=2.0, seed=8),
    SamplingParams(typical_p=0.8, top_a=0.1, min_p=0.01, top_p=0.95, xtc_probability=1.0, seed=9),
    SamplingParams(mirostat=2, mirostat_tau=4.0, top_k=50, temperature=0.6, seed=10),
]


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2.5


def left_by(params: SamplingParams, logits: torch.Tensor, position: int) -> tuple[torch.Tensor, float, bool]:
    """The distribution that the row draws from, its mu, and whether XTC was due."""
    sampler = SamplerUnderTest(vocab=VOCAB, max_rows=2)
    sampler.admit(0, params, tokens=range(position), num_prompt=position)
    seen: dict[str, torch.Tensor] = {}

    def spy(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        seen["left"] = torch.softmax(logits, -1)[0]
        return draw_from(logits, uniforms)

    from millrace.run.sampling import shaped_rows
    from millrace.run.sampling.noise import uniforms

    before, shaped_rows.draw_from = shaped_rows.draw_from, spy
    try:
        sampler.draw(logits, [0], [position])
    finally:
        shaped_rows.draw_from = before
    key = np.array([params.seed], np.uint64) ^ shaped_rows.XTC_KEY
    due = float(uniforms(key, np.array([position], np.uint64))[0]) < params.xtc_probability
    return seen["left"], 2 * params.mirostat_tau, due


@pytest.mark.parametrize("params", CUTS, ids=lambda params: f"seed{params.seed}")
def test_cuts_equal_the_reference(params: SamplingParams) -> None:
    for seed in range(8):
        logits = logits_of(seed)
        left, mu, due = left_by(params, logits, 5 + seed)
        expected = torch.zeros(VOCAB)
        for token, p in kept(logits[0].tolist(), params, xtc=due, mu=mu).items():
            expected[token] = p
        assert ((left > 0) == (expected > 0)).all()
        assert torch.allclose(left, expected, atol=2e-5)


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=90),
    st.sets(st.integers(0, 4), max_size=2),
    st.integers(0, 4),
    st.sampled_from([-1, 0, 5, 40]),
)
def test_dry_equals_the_reference(tokens: list[int], breakers: set[int], allowed: int, last_n: int) -> None:
    params = SamplingParams(dry_multiplier=0.8, dry_base=1.1, dry_allowed_length=allowed, dry_range=last_n)
    logits = torch.linspace(-2, 2, 6)
    is_breaker = torch.zeros(6, dtype=torch.bool)
    is_breaker[list(breakers)] = True
    ours = logits.clone()
    penalise_repeats(ours, torch.tensor(tokens), is_breaker, params)
    assert ours.tolist() == pytest.approx(dried(logits.tolist(), tokens, breakers, params), rel=1e-4)


def test_a_very_long_repetition_has_the_greatest_penalty_and_no_infinity() -> None:
    tokens = torch.zeros(500, dtype=torch.int64)
    assert match_lengths(tokens, torch.zeros(500, dtype=torch.bool)).max() == MAX_MATCH
    logits = torch.zeros(6)
    params = SamplingParams(dry_multiplier=100.0, dry_base=100.0)
    penalise_repeats(logits, tokens, torch.zeros(6, dtype=torch.bool), params)
    assert logits[0] < -1e29
    assert torch.isfinite(logits).all()


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(0, 40), st.sampled_from([-1, 1, 7, 100]))
def test_recent_penalties_equal_the_reference(tokens: list[int], num_prompt: int, last_n: int) -> None:
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.2, repeat_last_n=last_n)
    logits = torch.linspace(-3, 3, 12)
    ours = logits.clone()
    penalise_recent(ours, torch.tensor(tokens), num_prompt, params)
    assert ours.tolist() == pytest.approx(penalised(logits.tolist(), tokens, num_prompt, params), rel=1e-5, abs=1e-6)


def test_penalties_over_everything_equal_those_of_a_long_window() -> None:
    """Two ways to compute the same: counted by token, and from the tokens."""
    tokens, logits = [3, 9, 9, 40, 41, 41], logits_of(3)
    whole = SamplingParams(temperature=0, repetition_penalty=1.7, presence_penalty=1.4, frequency_penalty=0.3)
    windowed = SamplingParams(
        temperature=0, repetition_penalty=1.7, presence_penalty=1.4, frequency_penalty=0.3, repeat_last_n=1000
    )
    drawn = []
    for params in (whole, windowed):
        sampler = SamplerUnderTest(vocab=VOCAB)
        sampler.admit(0, params, tokens, 3)
        drawn.append([int(sampler.draw(logits, [0], [6 + step]).tokens[0]) for step in range(30)])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 3


def test_no_window_means_no_penalty() -> None:
    sampler = SamplerUnderTest(vocab=VOCAB)
    sampler.admit(0, SamplingParams(temperature=0, repetition_penalty=5.0, repeat_last_n=0), list(range(VOCAB)))
    assert not sampler.sampler.row_params.is_shaped[0]
    assert not sampler.sampler.row_params.has_penalties[0]


def test_xtc_happens_as_often_as_asked() -> None:
    logits = torch.full((1, VOCAB), -20.0)
    logits[0, :3] = torch.tensor([3.0, 2.9, 2.8])
    sampler = SamplerUnderTest(vocab=VOCAB)
    sampler.admit(0, SamplingParams(xtc_probability=0.3, xtc_threshold=0.2, seed=5))
    sampler.admit(1, SamplingParams(top_a=1e-6, seed=5))
    counts, plain = np.zeros(3), np.zeros(3)
    for position in range(4000):
        one, other = sampler.draw(logits.repeat(2, 1), [0, 1], [position, position]).tokens.tolist()
        counts[one] += 1
        plain[other] += 1
    probs = torch.softmax(logits[0, :3], -1).numpy()
    expected = 0.7 * probs + 0.3 * np.array([0, 0, 1])
    for found, wanted in ((counts, expected), (plain, probs)):
        deviation = np.abs(found - 4000 * wanted) / np.sqrt(4000 * wanted * (1 - wanted))
        assert deviation.max() < 5


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_reaches_its_surprise(version: int) -> None:
    """With logits that fall like Zipf's law, the surprise of the drawn tokens settles at tau."""
    ranks = torch.arange(1, VOCAB + 1).float()
    logits = (-1.1 * ranks.log())[None]
    tau = 3.0
    sampler = SamplerUnderTest(vocab=VOCAB)
    sampler.admit(0, SamplingParams(mirostat=version, mirostat_tau=tau, mirostat_eta=0.1, seed=3))
    # Mirostat's state, which no draw shows exactly.
    mu = sampler.sampler.shaped.mu[0]
    seen = []
    for position in range(3, 1500):
        sampler.draw(logits, [0], [position])
        at = position % len(mu)
        step = float(mu[at] - mu[(at + 1) % len(mu)]) / 0.1 + tau
        seen.append(step)
    assert np.mean(seen[300:]) == pytest.approx(tau, abs=0.25)


def test_rows_draw_the_same_alone_and_among_neighbours() -> None:
    many = SamplerUnderTest(vocab=VOCAB)
    logits = logits_of(11, len(CUTS) + 2)
    others = [SamplingParams(temperature=0), SamplingParams(seed=77, top_p=0.8)]
    for row, params in enumerate((*CUTS, *others)):
        many.admit(row, params)
    alone = []
    for row, params in enumerate((*CUTS, *others)):
        sampler = SamplerUnderTest(vocab=VOCAB)
        sampler.admit(row, params)
        alone.append([int(sampler.draw(logits[row : row + 1], [row], [3 + step]).tokens[0]) for step in range(12)])
    rows = list(range(len(CUTS) + 2))
    together = [many.draw(logits, rows, [3 + step] * len(rows)).tokens.tolist() for step in range(12)]
    assert [list(column) for column in zip(*together, strict=True)] == alone


def test_rows_without_options_are_not_touched() -> None:
    params = SamplingParams(seed=5, top_k=20, top_p=0.9, repetition_penalty=1.2)
    sampler = SamplerUnderTest(vocab=VOCAB)
    sampler.admit(0, params)
    assert not sampler.sampler.row_params.is_shaped[0]
    greedy = SamplingParams(temperature=0, typical_p=0.5, mirostat=2, xtc_probability=1.0)
    sampler.admit(1, greedy)
    assert not sampler.sampler.row_params.is_shaped[1]
    logits = logits_of(4, 2)
    assert sampler.draw(logits, [0, 1], [3, 3]).tokens[1] == logits[1].argmax()


def _plan(admitted: tuple[Admission, ...] = (), released: tuple[Release, ...] = ()) -> StepPlan:
    none = np.zeros(0, np.int32)
    return StepPlan(0, none, none, none, np.zeros(0, np.bool_), none, none, none, exact_shape(none), admitted, released)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(mirostat=2, mirostat_tau=2.0, mirostat_eta=0.5, seed=1),
        SamplingParams(dry_multiplier=2.0, dry_allowed_length=1, dry_breaker_ids=(7,), seed=2),
        SamplingParams(repetition_penalty=1.5, repeat_last_n=4, seed=3),
    ],
    ids=["mirostat", "dry", "window"],
)
def test_preemption_changes_nothing(params: SamplingParams) -> None:
    logits = logits_of(9, 20)

    def admission(row: int, tokens: list[int]) -> Admission:
        return Admission(row, 42, np.array(tokens, np.int32), 3, RowParams(params), limit=30)

    def run(preempt_at: int | None) -> list[int]:
        sampler, row, tokens = SamplerUnderTest(vocab=VOCAB), 0, [1, 2, 3]
        sampler.update(_plan((admission(row, tokens),)))
        for step in range(20):
            if step == preempt_at:
                # A step in flight draws once more; its token is lost and drawn again after the preemption.
                sampler.draw(logits[step : step + 1], [row], [len(tokens)])
                sampler.update(_plan(released=(Release(row, 42, "preempted"),)))
                row = 5
                sampler.update(_plan((admission(row, tokens),)))
            tokens.append(int(sampler.draw(logits[step : step + 1], [row], [len(tokens)]).tokens[0]))
        return tokens

    assert run(None) == run(7) == run(19)


def test_preempted_requests_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from millrace.run.sampling import shaped_rows

    monkeypatch.setattr(shaped_rows, "MAX_PREEMPTED", 3)
    sampler = SamplerUnderTest(vocab=VOCAB)
    # Only the memory shows that ended requests are forgotten.
    rows: ShapedRows = sampler.sampler.shaped
    for request in range(9):
        admission = Admission(0, request, np.array([1], np.int32), 1, RowParams(SamplingParams(mirostat=2)))
        sampler.update(_plan((admission,)))
        sampler.update(_plan(released=(Release(0, request, "preempted"),)))
    assert list(rows.preempted) == [6, 7, 8]
    assert not rows.rows
    assert math.isclose(float(rows.preempted[8][0]), 10.0)


def only_even(token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A logits processor: never the last token again, and never an odd one."""
    logits = logits.clone()
    logits[1::2] = -torch.inf
    logits[token_ids[-1]] = -torch.inf
    return logits


def test_logits_processors_by_name() -> None:
    sampler = SamplerUnderTest(vocab=VOCAB)
    sampler.admit(0, SamplingParams(logits_processors=("run.test_shaped_rows.only_even",), temperature=0))
    logits = logits_of(2)
    drawn = [int(sampler.draw(logits, [0], [3 + step]).tokens[0]) for step in range(6)]
    assert all(token % 2 == 0 for token in drawn)
    assert all(one != other for one, other in zip(drawn, drawn[1:], strict=False))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_processor("run.test_shaped_rows.nothing")
