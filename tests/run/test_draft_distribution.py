"""Verified steps keep the target's distribution: chi-square over 100,000 draws, and a wrong rule is found out.

The model is a table: the logits of the next token depend on the last one. Rows run through the real parts: drafts are
placed, every place is drawn by the sampler with its own noise, and drafts that equal the drawn token are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from millrace.config import RunConfig
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.step import Admission, Int32s, StepPlan, exact_shape
from millrace.run.device.device import open_device
from millrace.run.drafting.drafted_rows import DraftedRows, VerifiedStep
from millrace.run.drafting.drafter import DraftAsk, Drafter, DraftGuide
from millrace.run.drafting.drafters import Drafters
from millrace.run.sampling.masks import MaskedRows, Masks
from millrace.run.sampling.sampler import Sampler
from millrace.run.table.request_table import RequestTable

VOCAB, MAX_DRAFTS = 12, 3
LOGITS = np.random.default_rng(0).normal(0.0, 1.2, (VOCAB, VOCAB)).astype(np.float32)
NONE = np.zeros(0, np.int32)
LIMIT = 1.45
"""Chi-square per degree of freedom (over 100 of them) that right rules stay far below."""
Rule = Callable[[Int32s, Int32s, Int32s], Int32s]
"""(drawn tokens, the draft at the place after each or -1, the token before each) -> drawn tokens"""


class Guesses(Drafter):
    """Likely tokens, one after the other: as with a good drafter, many are right."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)
        self.cumulated = np.cumsum(softmax(LOGITS * 1.5), axis=1)

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int32s]:
        return [self.chain(int(ask.tokens[-1]), int(self.rng.integers(0, ask.max_drafts + 1))) for ask in asks]

    def chain(self, token: int, count: int) -> Int32s:
        tokens = []
        for uniform in self.rng.random(count):
            token = min(VOCAB - 1, int(np.searchsorted(self.cumulated[token], uniform)))
            tokens.append(token)
        return np.array(tokens, np.int32)


def refused_after(last: np.ndarray) -> np.ndarray:
    """The grammar: two tokens may not follow a token."""
    return np.stack([(5 * last + 2) % VOCAB, (7 * last + 4) % VOCAB], axis=-1)


class Guide(DraftGuide):
    """Cuts drafts at the first one that the grammar refuses."""

    num_cut = 0

    def guide(self, request_id: int, ask: DraftAsk, drafts: Int32s) -> tuple[Int32s, bool]:
        before = np.concatenate([ask.tokens[-1:], drafts[:-1]])
        refused = np.flatnonzero((refused_after(before)[: len(drafts)] == drafts[:, None]).any(axis=1))
        self.num_cut += len(refused) > 0
        return drafts[: int(refused[0])] if len(refused) else drafts, False


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def target(last: np.ndarray, params: SamplingParams, counts: np.ndarray, *, is_masked: bool) -> np.ndarray:
    """The distribution of the next token by definition: mask, penalties, temperature, then the nucleus."""
    logits = LOGITS[last].astype(np.float64)
    if is_masked:
        np.put_along_axis(logits, refused_after(last), -np.inf, axis=1)
    logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    probabilities = softmax(logits / params.temperature)
    order = np.argsort(-probabilities, axis=1)
    ranked = np.take_along_axis(probabilities, order, axis=1)
    ranked[np.cumsum(ranked, axis=1) - ranked >= params.top_p] = 0.0
    kept = np.zeros_like(probabilities)
    np.put_along_axis(kept, order, ranked, axis=1)
    return kept / kept.sum(axis=1, keepdims=True)


def exact(drawn: Int32s, following: Int32s, before: Int32s) -> Int32s:
    return drawn


def takes_likely_drafts(drawn: Int32s, following: Int32s, before: Int32s) -> Int32s:
    """Wrong: a draft is accepted if the model finds it likely, whatever was drawn."""
    probability = softmax(LOGITS[before])[np.arange(len(before)), np.maximum(following, 0)]
    return np.where((following >= 0) & (probability > 0.15), following, drawn).astype(np.int32)


def chi_square(
    params: SamplingParams, num_rows: int, num_tokens: int, rule: Rule, *, is_masked: bool, place_of_mask: int = 1
) -> float:
    """Chi-square per degree of freedom, over the pairs of a token and the next. `place_of_mask`: 0 to use the masks of
    rows at all their places, which is wrong."""
    table = RequestTable(open_device(RunConfig(device="cpu")), max_rows=num_rows, max_blocks=1)
    sampler = Sampler(table.device, table, max_rows=num_rows, vocab_size=VOCAB)
    guide = Guide()
    drafted = DraftedRows(table, num_rows, Drafters({"ngram": Guesses()}, "ngram"), guide)
    rows, ones = np.arange(num_rows, dtype=np.int32), np.ones(num_rows, np.int32)
    prompt = np.array([1], np.int32)
    admitted = tuple(
        Admission(row, row, prompt, 1, RowParams(params.with_seed(row)), num_tokens + 1) for row in range(num_rows)
    )
    drafts = ones * MAX_DRAFTS
    while True:
        plan = StepPlan(
            0, rows, 0 * rows, ones, ones > 0, NONE, NONE, NONE, exact_shape(ones), admitted, draft_places=drafts,
            masked=ones > 0 if is_masked else None,
        )  # fmt: skip
        admitted = ()
        drafted.leave(plan)
        table.update_host(plan)
        sampler.update(plan)
        drafted.admit(plan)
        step = drafted.expand(plan)
        if not len(step.batch.rows):
            break
        masks = masks_of(table, step, place_of_mask) if is_masked else None
        drawn = draw(sampler, table, drafted, step, masks)
        accepted = drafted.accept(plan, step, rule(drawn, *neighbours(table, step)))
        sampler.count(np.repeat(rows, accepted.counts), torch.from_numpy(accepted.tokens))
    assert drafted.num_accepted > 0.1 * num_rows * num_tokens
    assert not is_masked or guide.num_cut > 0.02 * num_rows * num_tokens
    texts = np.stack([tokens[: num_tokens + 1] for tokens in table.tokens])
    return _statistic(texts, params, is_masked=is_masked)


def states_of(step: VerifiedStep) -> tuple[Int32s, Int32s]:
    """Row and position of the token before each draw."""
    places = np.arange(step.draws.sum()) - np.repeat(np.cumsum(step.draws) - step.draws, step.draws)
    return np.repeat(step.batch.rows, step.draws), (np.repeat(step.batch.starts, step.draws) + places).astype(np.int32)


def masks_of(table: RequestTable, step: VerifiedStep, place_of_mask: int) -> Masks:
    """The masks of all rows at all places, as the engine gives them."""
    drafts = [own.tolist() for own in step.drafts]
    asked = MaskedRows(np.arange(step.num_drawing), np.arange(step.num_drawing), drafts)
    lines = {row: int(start) for row, start in zip(step.batch.rows.tolist(), step.batch.starts.tolist(), strict=True)}
    words = []
    for row, own in enumerate(drafts):
        for place in range(1 + len(own)):
            last = table.tokens[row][lines[row] + place * place_of_mask] if row in lines else 0
            words.append(0xFFFFFFFF - sum(1 << token for token in set(refused_after(np.int64(last)).tolist())))
    return step.state_masks(asked.masks(np.array(words, np.uint32)[:, None]))


def draw(
    sampler: Sampler, table: RequestTable, drafted: DraftedRows, step: VerifiedStep, masks: Masks | None
) -> Int32s:
    rows, at = states_of(step)
    last = np.array([table.tokens[row][place] for row, place in zip(rows.tolist(), at.tolist(), strict=True)])
    logits = torch.from_numpy(LOGITS[last])
    return sampler.draw(logits, rows, at + 1, masks, drafted.before(step)).tokens.numpy().astype(np.int32)


def neighbours(table: RequestTable, step: VerifiedStep) -> tuple[Int32s, Int32s]:
    """For each draw the draft that it verifies, -1 for a row's last, and the token before it."""
    rows, at = states_of(step)
    pairs = list(zip(rows.tolist(), at.tolist(), strict=True))
    is_last = np.append(rows[1:] != rows[:-1], True)
    following = [
        -1 if last else int(table.tokens[row][place + 1]) for (row, place), last in zip(pairs, is_last, strict=True)
    ]
    return np.array(following, np.int32), np.array([table.tokens[row][place] for row, place in pairs], np.int32)


def _statistic(texts: np.ndarray, params: SamplingParams, *, is_masked: bool) -> float:
    observed, expected = np.zeros((2, VOCAB, VOCAB))
    counts = np.zeros((len(texts), VOCAB))
    for at in range(1, texts.shape[1]):
        last, token = texts[:, at - 1], texts[:, at]
        np.add.at(expected, last, target(last, params, counts, is_masked=is_masked))
        np.add.at(observed, (last, token), 1)
        counts[np.arange(len(texts)), token] += 1
    if observed[expected == 0].any():
        return float("inf")  # A token outside the nucleus or the mask.
    is_used = expected > 5
    chi = ((observed - expected)[is_used] ** 2 / expected[is_used]).sum()
    return float(chi / (is_used.sum() - VOCAB))


@pytest.mark.parametrize(
    ("params", "num_rows", "num_tokens", "is_masked"),
    [
        (SamplingParams(temperature=1.0, top_p=0.9), 2000, 50, False),
        (SamplingParams(temperature=0.8, top_p=0.95), 500, 40, True),
        (SamplingParams(temperature=1.0, frequency_penalty=0.4), 300, 30, True),
        (SamplingParams(temperature=1.0, frequency_penalty=0.4, presence_penalty=0.3), 300, 30, False),
    ],
)
def test_the_distribution_is_that_of_the_target(
    params: SamplingParams, num_rows: int, num_tokens: int, is_masked: bool
) -> None:
    assert chi_square(params, num_rows, num_tokens, exact, is_masked=is_masked) < LIMIT


def test_a_wrong_rule_of_acceptance_is_found_out() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9)
    assert chi_square(params, 500, 40, exact, is_masked=False) < LIMIT
    assert chi_square(params, 500, 40, takes_likely_drafts, is_masked=False) > 3 * LIMIT


def test_masks_of_another_place_are_found_out() -> None:
    params = SamplingParams(temperature=1.0)
    assert chi_square(params, 300, 30, exact, is_masked=True) < LIMIT
    assert chi_square(params, 300, 30, exact, is_masked=True, place_of_mask=0) > 3 * LIMIT
