"""DeviceSampler against Sampler, its reference, for all kinds of rows together."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from helpers.quick_interpreter import quick_interpreter
from helpers.triton_mode import device, interpreted

from millrace.config import RunConfig
from millrace.errors import RequestFailed
from millrace.ops.triton.sampling.draw import Cut, MaskLines
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.step import Admission, Release, StepPlan, exact_shape
from millrace.run.device.device import open_device
from millrace.run.sampling.device_sampler import DeviceSampler
from millrace.run.sampling.draw_plan import DrawPlan, Variant
from millrace.run.sampling.masks import Masks, apply_masks, words_per_mask
from millrace.run.sampling.noise import uniforms
from millrace.run.sampling.sampler import Sampler
from millrace.run.table.request_table import RequestTable

SMALL = Cut(tile=1024, group=8, capacity=128, groups_wanted=16)
NOTHING = np.zeros(0, np.int32)


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    if not interpreted:
        yield
        return
    with quick_interpreter():
        yield


def plan_of(admitted: list[Admission], released: list[Release] | None = None) -> StepPlan:
    return StepPlan(
        step_no=0, rows=NOTHING, starts=NOTHING, counts=NOTHING, samples=np.zeros(0, np.bool_),
 block_rows=NOTHING, block_cols=NOTHING, block_ids=NOTHING, shape=exact_shape(NOTHING),
        admitted=tuple(admitted), released=tuple(released or ()),
    )  # fmt: skip


class Pair:
    """Both samplers with the same rows."""

    def __init__(self, vocab: int, max_rows: int = 16, cut: Cut | None = None) -> None:
        self.vocab, self.max_rows = vocab, max_rows
        self.host = open_device(RunConfig(device="cpu", threads=1))
        self.place = open_device(RunConfig(device=device.type, threads=1))
        self.table = RequestTable(self.host, max_rows=max_rows, max_blocks=2)
        self.reference = Sampler(self.host, self.table, max_rows=max_rows, vocab_size=vocab)
        self.device_table = RequestTable(self.place, max_rows=max_rows, max_blocks=2)
        self.device_table.last_tokens.fill_(-5)
        self.ours = DeviceSampler(self.place, self.device_table, max_rows=max_rows, vocab_size=vocab, cut=cut)

    def admit(self, *admissions: Admission) -> None:
        plan = plan_of(list(admissions))
        self.table.update(plan)
        self.reference.update(plan)
        self.device_table.update_host(plan)
        self.ours.admit(plan)

    def expect(
        self, logits: torch.Tensor, rows: list[int], positions: list[int], masks: Masks | None = None
    ) -> list[int]:
        own = logits.to(torch.float32, copy=True)  # `draw` changes it
        drawn = self.reference.draw(own, np.array(rows, np.int32), np.array(positions, np.int32), masks)
        return drawn.tokens.tolist()

    def draw(
        self,
        logits: torch.Tensor,
        rows: list[int],
        positions: list[int],
        variant: Variant = "full",
        masks: Masks | None = None,
    ) -> list[int]:
        """Draws with our sampler. `self.left` holds the logits as it left them."""
        due, at = (torch.tensor(values, dtype=torch.int32, device=device) for values in (rows, positions))
        self.left = logits.clone().to(device)
        out = torch.full((len(rows),), -9, dtype=torch.int64, device=device)
        lines = None
        if masks is not None:
            bits = torch.from_numpy(masks.bits.view(np.int32)).to(device)
            of_row = torch.full((len(rows),), -1, dtype=torch.int32, device=device)
            of_row[torch.from_numpy(masks.index).to(device)] = torch.arange(len(bits), dtype=torch.int32, device=device)
            lines = MaskLines(of_row, torch.tensor([bits.data_ptr()], device=device))
        self.ours.draw(self.left, due, at, out, variant, masks=lines)
        for row, token in zip(rows, out.tolist(), strict=True):
            assert row < 0 or self.device_table.last_tokens[row] == token
        return out.tolist()


def admission(row: int, params: SamplingParams, tokens=(1, 2, 3), num_prompt: int = 0, ends=()) -> Admission:
    array = np.asarray(tokens, np.int32)
    return Admission(row, row, array, num_prompt or len(array), RowParams(params, tuple(ends)))


def could_draw(adjusted: np.ndarray, params: SamplingParams, noise: float, token: int) -> bool:
    """True if rounding at a bound explains this token: checked in float64 with the bounds moved either way."""
    for nudge in (0.0, 1e-5, -1e-5):
        scaled = adjusted / params.temperature
        if 0 < params.top_k < len(scaled):
            scaled[scaled < np.sort(scaled)[-params.top_k] - abs(nudge)] = -np.inf
        if params.min_p > 0:
            scaled[scaled < scaled.max() + np.log(params.min_p) - nudge] = -np.inf
        probs = np.exp(scaled - scaled.max())
        probs /= probs.sum()
        if params.top_p < 1:
            order = np.sort(probs)[::-1]
            needed = int((np.cumsum(order) - order < params.top_p + nudge).sum())
            probs[probs < order[max(needed, 1) - 1] * (1 - 1e-6)] = 0
        through = np.cumsum(probs) / probs.sum()
        if probs[token] > 0 and through[token] - probs[token] - 1e-5 <= noise <= through[token] + 1e-5:
            return True
    return False


def some_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    def one_of(*values: float) -> float:
        return float(rng.choice(values))

    return SamplingParams(
        temperature=one_of(0, 1e-4, 0.3, 1, 1.7, 100),
        top_k=int(one_of(0, 0, 1, 5, 40, 400)),
        top_p=one_of(1, 1, 0.999, 0.9, 0.5, 1e-6),
        min_p=one_of(0, 0, 0.05, 1),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        repetition_penalty=one_of(1, 1, 1.3),
        presence_penalty=one_of(0, 0, 0.5),
        frequency_penalty=one_of(0, 0, -0.3),
        logit_bias=tuple((int(rng.integers(vocab)), float(rng.normal() * 5)) for _ in range(int(one_of(0, 0, 0, 4)))),
        min_tokens=int(one_of(0, 0, 6)),
        logprobs=None if rng.random() < 0.5 else 2,
    )


@pytest.mark.parametrize(
    ("vocab", "dtype", "cut", "spread"),
    [
        (50, torch.float32, None, 2.0),
        (333, torch.bfloat16, SMALL, 1.0),
        (1000, torch.float32, SMALL, 4.0),
        (3000, torch.bfloat16, SMALL, 0.4),
        (3000, torch.float32, SMALL, 2.0),
        (49_152, torch.bfloat16, None, 2.5),
    ],
)
def test_tokens_equal_those_of_the_reference(vocab: int, dtype: torch.dtype, cut: Cut | None, spread: float) -> None:
    rng = np.random.default_rng(vocab + int(10 * spread))
    count = 8
    pair = Pair(vocab, cut=cut)
    specs = [some_params(rng, vocab) for _ in range(count)]
    rows = rng.permutation(16)[:count].tolist()
    pair.admit(
        *(admission(row, spec, rng.integers(0, vocab, 12), 8, rng.integers(0, vocab, 3).tolist())
          for row, spec in zip(rows, specs, strict=True))
    )  # fmt: skip
    for step in range(2 if interpreted else 30):
        logits = torch.from_numpy(rng.normal(size=(count, vocab)) * spread).to(dtype)
        positions = [12 + 3 * step] * count
        adjusted = logits.to(torch.float32, copy=True)
        # The adjusted logits before the draw, which has only tokens.
        pair.reference.constrain(adjusted, np.array(rows, np.int32), np.array(positions, np.int32))
        expected, drawn = pair.expect(logits, rows, positions), pair.draw(logits, rows, positions)
        for at, spec in enumerate(specs):
            if spec.logprobs is not None:
                assert (pair.left[at].cpu() == logits[at]).all(), "raw logits are wanted for log-probabilities"
            if drawn[at] != expected[at]:
                noise = uniforms(np.array([spec.seed], np.uint64), np.array(positions[:1], np.uint64))[0]
                assert spec.temperature > 0, spec
                assert could_draw(adjusted[at].double().numpy(), spec, float(noise), drawn[at]), (spec, expected[at])
                return  # penalty counts may differ from here on


@pytest.mark.parametrize(("vocab", "dtype"), [(50, torch.float32), (1000, torch.bfloat16), (3001, torch.float32)])
def test_masked_tokens_equal_those_of_the_reference(vocab: int, dtype: torch.dtype) -> None:
    """Masks before bias, minimum length and penalties; some rows have one, and few or many tokens are allowed."""
    rng = np.random.default_rng(vocab)
    count = 8
    pair = Pair(vocab, cut=SMALL)
    specs = [msgspec.structs.replace(some_params(rng, vocab), logprobs=None) for _ in range(count)]
    specs[0] = SamplingParams(temperature=0)
    pair.admit(
        *(admission(row, spec, rng.integers(0, vocab, 12), 8, rng.integers(0, vocab, 3).tolist())
          for row, spec in enumerate(specs))
    )  # fmt: skip
    rows, positions = list(range(count)), [12] * count
    for _ in range(2 if interpreted else 20):
        logits = torch.from_numpy(rng.normal(size=(count, vocab)) * 3).to(dtype)
        index = np.flatnonzero(rng.random(count) < 0.7)
        allowed = rng.random((len(index), 32 * words_per_mask(vocab))) < rng.choice([0.005, 0.5, 0.99], (len(index), 1))
        allowed[:, rng.integers(vocab)] = True
        bits = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
        masks = Masks(index, bits)
        adjusted = logits.to(torch.float32, copy=True)
        apply_masks(adjusted, masks)
        for line, at in enumerate(index.tolist()):
            assert torch.isinf(adjusted[at]).tolist() == (~allowed[line, :vocab]).tolist()
        pair.reference.constrain(adjusted, np.array(rows, np.int32), np.array(positions, np.int32))
        drawn, expected = pair.draw(logits, rows, positions, masks=masks), pair.expect(logits, rows, positions, masks)
        for at, spec in enumerate(specs):
            if drawn[at] != expected[at]:
                noise = uniforms(np.array([spec.seed], np.uint64), np.array(positions[:1], np.uint64))[0]
                assert spec.temperature > 0, spec
                assert could_draw(adjusted[at].double().numpy(), spec, float(noise), drawn[at]), (spec, expected[at])
                return  # penalty counts may differ from here on


def test_a_masked_row_with_logprobs_keeps_its_raw_logits() -> None:
    """Its buffer is allocated at its first masked draw, also if it was admitted long before."""
    pair = Pair(70)
    pair.admit(
        admission(4, SamplingParams(temperature=0, logprobs=2)), admission(5, SamplingParams(temperature=0, logprobs=0))
    )
    logits = torch.randn(2, 70)
    bits = np.zeros((1, 3), np.uint32)
    bits[0, 1] = 1 << 7
    due, none = np.array([0, 1]), np.zeros(0, np.int64)
    draws = DrawPlan(due, due, none, np.array([1]), due, np.array([2, 0], np.int32), none, is_reusable=False)
    for _ in range(2):
        pair.ours.keep_raw_logits(np.array([4, 5], np.int32), draws)
        assert pair.draw(logits, [4, 5], [9, 9], masks=Masks(np.array([1]), bits)) == [int(logits[0].argmax()), 39]
        assert (pair.left.cpu() == logits).all()
    pair.ours.admit(plan_of([], [Release(5, 5, "stop")]))
    pair.admit(admission(5, SamplingParams(temperature=0)))
    assert pair.draw(logits[1:], [5], [9], masks=Masks(np.array([0]), bits)) == [39]
    assert torch.isinf(pair.left).sum() == 69


def test_extreme_parameters() -> None:
    vocab = 300
    pair = Pair(vocab, cut=SMALL)
    torch.manual_seed(5)
    logits = torch.randn(6, vocab) * 3
    logits[4] = -torch.inf
    logits[4, 211] = -40.0
    greatest = logits.argmax(-1).tolist()
    pair.admit(
        admission(0, SamplingParams(temperature=2.0, top_k=1, seed=1)),
        admission(1, SamplingParams(temperature=2.0, top_p=1e-9, seed=2)),
        admission(2, SamplingParams(temperature=2.0, min_p=1.0, seed=3)),
        admission(3, SamplingParams(temperature=1e-4, seed=4)),
        admission(4, SamplingParams(temperature=100.0, top_k=17, seed=5)),
        admission(5, SamplingParams(temperature=1.0, top_k=vocab + 9, top_p=0.4, seed=6)),
    )
    for position in (3, 4):
        drawn = pair.draw(logits, list(range(6)), [position] * 6)
        assert drawn[:4] == greatest[:4]
        assert drawn[4] == 211
        assert drawn == pair.expect(logits.clone(), list(range(6)), [position] * 6)


def test_padding_is_untouched() -> None:
    pair = Pair(200, cut=SMALL)
    pair.admit(admission(2, SamplingParams(temperature=1.0, seed=1)), admission(3, SamplingParams(temperature=0)))
    logits = torch.randn(5, 200)
    for variant in ("greedy", "full"):
        pair.device_table.last_tokens.fill_(-5)
        drawn = pair.draw(logits, [-1, 3, -1, 2, -1], [9] * 5, variant)
        assert [drawn[0], drawn[2], drawn[4]] == [-9, -9, -9]
        last = pair.device_table.last_tokens.tolist()
        assert [row for row, token in enumerate(last) if token != -5] == [2, 3]
        assert drawn[1] == logits[1].argmax()


def test_the_padding_of_a_wide_head_is_never_drawn() -> None:
    pair = Pair(200, cut=SMALL)
    pair.admit(
        admission(0, SamplingParams(temperature=0)), admission(1, SamplingParams(temperature=1.0, top_k=3, seed=1))
    )
    logits = torch.full((2, 256), 50.0)
    logits[:, :200] = torch.randn(2, 200)
    for variant in ("greedy", "full"):
        assert max(pair.draw(logits, [0, 1], [3, 3], variant)) < 200


def test_a_token_does_not_depend_on_the_batch() -> None:
    vocab = 700
    rng = np.random.default_rng(8)
    alone, batched = Pair(vocab, cut=SMALL), Pair(vocab, cut=SMALL)
    spec = SamplingParams(temperature=1.3, top_p=0.95, seed=77, presence_penalty=0.2)
    alone.admit(admission(3, spec))
    batched.admit(*(admission(row, spec if row == 9 else some_params(rng, vocab)) for row in (1, 9, 4)))
    for position in range(3, 6):
        logits = torch.from_numpy(rng.normal(size=(3, vocab)) * 2).float()
        together = batched.draw(logits, [1, 9, 4], [position] * 3)
        assert alone.draw(logits[1:2], [3], [position]) == [together[1]]


def test_draws_follow_the_distribution_over_seeds() -> None:
    draws = 96 if interpreted else 4096
    pair = Pair(5, max_rows=draws)
    logits = torch.tensor([0.1, 1.0, -0.5, 0.7, -torch.inf])
    pair.admit(*(admission(row, SamplingParams(temperature=0.8, seed=row * 7919), [1]) for row in range(draws)))
    drawn = pair.draw(logits.expand(draws, 5).contiguous(), list(range(draws)), [1] * draws)
    seen = np.bincount(drawn, minlength=5)
    wanted = torch.softmax(logits / 0.8, -1).numpy() * draws
    assert seen[4] == 0
    assert ((seen[:4] - wanted[:4]) ** 2 / wanted[:4]).sum() < 16.27  # chi-square, 3 degrees of freedom, p = 0.001


def test_penalties_count_tokens_drawn_on_the_device() -> None:
    pair = Pair(40)
    spec = SamplingParams(temperature=0, frequency_penalty=0.6, presence_penalty=0.3, repetition_penalty=1.1)
    pair.admit(admission(6, spec, [1, 2, 2, 30], num_prompt=2))
    logits = torch.linspace(3.0, 2.0, 40)[None]
    drawn = [pair.draw(logits, [6], [position])[0] for position in range(4, 16)]
    assert len(set(drawn)) > 6
    assert drawn == [pair.expect(logits.clone(), [6], [position])[0] for position in range(4, 16)]
    resumed = Pair(40)
    resumed.admit(admission(0, spec, [1, 2, 2, 30, *drawn[:7]], num_prompt=2))
    assert resumed.draw(logits, [0], [11])[0] == drawn[7]


def test_end_tokens_are_masked_before_the_minimum_length() -> None:
    pair = Pair(60)
    plain = SamplingParams(temperature=0, min_tokens=4)
    scored = SamplingParams(temperature=0, min_tokens=4, logprobs=3)
    pair.admit(
        admission(0, plain, ends=[7, 8]),
        admission(1, scored, ends=[7, 8]),
        admission(2, SamplingParams(temperature=0), ends=[7]),
    )
    logits = torch.zeros(3, 60)
    logits[:, 7], logits[:, 8], logits[:, 40] = 5.0, 4.0, 3.0
    assert pair.draw(logits, [0, 1, 2], [6] * 3) == [40, 40, 7]
    assert (pair.left[1:].cpu() == logits[1:]).all()
    assert pair.draw(logits, [0, 1, 2], [7] * 3) == [7, 7, 7]


def test_bias_adds_up_over_repeated_tokens() -> None:
    pair = Pair(60)
    pair.admit(admission(0, SamplingParams(temperature=0, logit_bias=((5, 2.0), (9, 2.5), (5, 1.0)))))
    assert pair.draw(torch.zeros(1, 60), [0], [3]) == [5]


def test_admission_is_one_upload_and_resets_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(50)
    uploads: list[int] = []
    upload = pair.place.upload
    monkeypatch.setattr(pair.place, "upload", lambda array: (uploads.append(array.nbytes), upload(array))[1])
    pair.ours.admit(plan_of([], [Release(3, 3, "stop")]))
    assert uploads == []
    pair.admit(*(admission(row, SamplingParams(temperature=0)) for row in range(16)))
    assert uploads == [16 * 128]
    busy = SamplingParams(temperature=0, frequency_penalty=2.0, logit_bias=((4, 9.0),))
    pair.admit(admission(3, busy, [4, 4, 4, 4, 4, 4, 4], num_prompt=1))
    pair.ours.admit(plan_of([], [Release(3, 3, "stop")]))
    logits = torch.zeros(1, 50)
    logits[0, 4] = 1.0
    pair.admit(admission(3, SamplingParams(temperature=0)), admission(8, busy, [2]))
    assert pair.draw(logits, [3], [3], "full") == [4]
    assert pair.draw(logits, [8], [1]) == [4]


def test_a_token_outside_the_vocabulary_is_refused_before_it_reaches_the_device() -> None:
    pair = Pair(50)
    with pytest.raises(RequestFailed, match="Token id 50 is outside"):
        pair.ours.admit(plan_of([admission(0, SamplingParams(logit_bias=((50, 1.0),)))]))
    with pytest.raises(RequestFailed, match="Token id 99 is outside"):
        pair.ours.admit(plan_of([admission(0, SamplingParams(presence_penalty=1.0), [1, 99])]))
    with pytest.raises(RequestFailed, match="200 end tokens"):
        pair.ours.admit(plan_of([admission(0, SamplingParams(min_tokens=1), ends=range(200))]))


def test_shaped_rows_are_drawn_from_the_adjusted_logits() -> None:
    """Bias, minimum length, mask and log-probabilities together with options that torch ops draw after the graph."""
    vocab = 120
    both = Pair(vocab)
    kinds = [
        SamplingParams(dry_multiplier=2.0, dry_allowed_length=1, dry_breaker_ids=(9,), logit_bias=((5, 3.0),), seed=1),
        SamplingParams(mirostat=2, mirostat_tau=2.0, min_tokens=50, seed=2),
        SamplingParams(typical_p=0.7, xtc_probability=0.5, logprobs=1, seed=3),
        SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.5, repeat_last_n=4),
        SamplingParams(bad_words=("x",), bad_word_ids=((4,), (7,), (1, 2)), allowed_token_ids=(1, 2, 4, 7), seed=4),
        SamplingParams(temperature=0, allowed_token_ids=(3, 90), min_tokens=3, logit_bias=((5, 50.0),)),
    ]
    both.admit(*(admission(row, params, tokens=(5, 6, 5, 6), ends=(7,)) for row, params in enumerate(kinds)))
    rows = list(range(len(kinds)))
    rng = np.random.default_rng(4)
    for step in range(12):
        logits = torch.from_numpy(rng.normal(0, 2, (len(rows), vocab))).float()
        positions = [4 + step] * len(rows)
        wanted = both.expect(logits, rows, positions)
        both.draw(logits, rows, positions)
        drawn = both.ours.draw_shaped(np.array(rows, np.int32), np.array(positions, np.int32))
        assert drawn.tolist() == wanted
        assert both.device_table.last_tokens[: len(rows)].tolist() == wanted
        assert wanted[4] in (1, 2, 7)
        assert wanted[5] in (3, 90)
        assert both.left[2].tolist() == logits[2].tolist()  # log-probabilities are those of the raw logits
