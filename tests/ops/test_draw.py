"""Native drawing against the sampler's torch code, which is the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from millrace.config import RunConfig
from millrace.ops.cpp import native
from millrace.ops.head.draw import NativeDraw
from millrace.run.device.device import open_device
from millrace.run.sampling.masks import Masks, apply_masks, words_per_mask
from millrace.run.sampling.noise import uniforms
from millrace.run.sampling.sampler import Sampler
from millrace.run.table.request_table import RequestTable

LIMITS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (0.7, 0, 0.001, 0.0),
    (1.5, 7, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 900, 0.99, 0.0),
    (1.3, 0, 1.0, 0.1),
    (0.9, 40, 0.95, 0.02),
    (2.0, 300, 0.5, 0.0),
]

pytestmark = pytest.mark.skipif(bool(native.native_missing(torch.device("cpu"))), reason="no native kernels here")


def native_sampler(rows: int, vocab: int) -> Sampler:
    """With the limits above and a seed for each row."""
    device = open_device(RunConfig(device="cpu", threads=1))
    sampler = Sampler(device, RequestTable(device, max_rows=rows, max_blocks=1), max_rows=rows, vocab_size=vocab)
    columns = sampler.row_params
    columns.temperature[:], columns.top_k[:], columns.top_p[:], columns.min_p[:] = zip(*LIMITS, strict=True)
    columns.top_k[columns.top_k >= vocab] = 0
    columns.seed[:] = np.arange(rows)
    return sampler


def torch_sampler(rows: int, vocab: int) -> Sampler:
    sampler = native_sampler(rows, vocab)
    # Without the native draw, which cannot be switched off.
    sampler.native_draw = None
    return sampler


@pytest.mark.parametrize("coarse", [False, True], ids=["", "with many equal"])
@pytest.mark.parametrize(("vocab", "spread"), [(1, 1.0), (15, 1.0), (97, 3.0), (1500, 0.1), (1500, 5.0), (5003, 2.0)])
def test_draws_the_same_tokens_as_torch(coarse: bool, vocab: int, spread: float) -> None:
    rows = len(LIMITS)
    sampler = torch_sampler(rows, vocab)
    columns = sampler.row_params
    index, draw = np.arange(rows, dtype=np.int32), NativeDraw()
    generator = torch.Generator().manual_seed(vocab)
    for position in range(40):
        logits = torch.randn(rows, vocab, generator=generator) * spread
        if coarse:
            logits = logits.bfloat16().float()
        positions = np.full(rows, position, np.int32)
        expected = sampler.draw(logits.clone(), index, positions).tokens
        noise = uniforms(columns.seed, positions.astype(np.uint64))
        drawn = draw(logits, columns.temperature, columns.top_k, columns.top_p, columns.min_p, noise)
        assert drawn.tolist() == expected.tolist()


def test_greedy_ties_go_to_the_first_token_and_nan_is_ignored() -> None:
    draw, zero, one = NativeDraw(), np.zeros(1, np.float32), np.ones(1, np.float32)

    def greedy(logits: torch.Tensor) -> int:
        return int(draw(logits[None], zero, np.zeros(1, np.int64), one, zero, np.zeros(1)))

    for vocab in (3, 16, 70):
        logits = torch.zeros(vocab)
        assert greedy(logits) == 0
        logits[vocab - 2 :] = 2.0
        assert greedy(logits) == vocab - 2
        logits[0] = float("nan")
        assert greedy(logits) == vocab - 2
        assert greedy(torch.full((vocab,), -torch.inf)) == 0


def random_masks(draw: np.random.Generator, rows: int, vocab: int) -> Masks:
    """For every other row: a few tokens, most tokens, one token, or all but one."""
    index = np.arange(0, rows, 2)
    shares = draw.choice([0.01, 0.9], len(index))
    allowed = draw.random((len(index), 32 * words_per_mask(vocab))) < shares[:, None]
    allowed[draw.random(len(index)) < 0.3, : vocab // 2] = True  # whole words
    allowed[np.arange(len(index)), draw.integers(0, vocab, len(index))] = True
    return Masks(index, np.packbits(allowed, axis=1, bitorder="little").view(np.uint32))


@pytest.mark.parametrize("vocab", [1, 15, 31, 32, 33, 63, 97, 1500, 5003])
def test_masks_the_same_tokens_as_torch(vocab: int) -> None:
    draw, generator, native_draw = np.random.default_rng(vocab), torch.Generator().manual_seed(vocab), NativeDraw()
    for rows in (1, 2, 9, 40):
        logits, masks = torch.randn(rows, vocab, generator=generator), random_masks(draw, rows, vocab)
        expected = logits.clone()
        apply_masks(expected, masks)
        native_draw.mask(logits, masks.index, masks.bits)
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("vocab", [97, 1500])
def test_draws_the_same_masked_tokens_as_torch(vocab: int) -> None:
    rows = len(LIMITS)
    samplers = torch_sampler(rows, vocab), native_sampler(rows, vocab)
    index, draw = np.arange(rows, dtype=np.int32), np.random.default_rng(vocab)
    generator = torch.Generator().manual_seed(vocab)
    for position in range(40):
        logits, masks = torch.randn(rows, vocab, generator=generator) * 2, random_masks(draw, rows, vocab)
        positions = np.full(rows, position, np.int32)
        expected, drawn = (own.draw(logits.clone(), index, positions, masks).tokens.tolist() for own in samplers)
        assert drawn == expected
        for line, bits in zip(masks.index.tolist(), masks.bits, strict=True):
            assert bits[drawn[line] // 32] >> (drawn[line] % 32) & 1


def test_masks_of_another_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match=r"uint32 \(1, 4\)"):
        NativeDraw().mask(torch.zeros(2, 97), np.zeros(1, np.int64), np.zeros((1, 3), np.uint32))
