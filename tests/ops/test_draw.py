"""Native drawing against the sampler's torch code, which is the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from millrace.config import RunConfig
from millrace.ops.cpp import native
from millrace.ops.head.draw import NativeDraw
from millrace.run.device.device import open_device
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


def torch_sampler(rows: int, vocab: int) -> Sampler:
    device = open_device(RunConfig(device="cpu", threads=1))
    sampler = Sampler(device, RequestTable(device, max_rows=rows, max_blocks=1), max_rows=rows, vocab_size=vocab)
    sampler._draw_native = None
    return sampler


@pytest.mark.parametrize("coarse", [False, True], ids=["", "with many equal"])
@pytest.mark.parametrize(("vocab", "spread"), [(1, 1.0), (15, 1.0), (97, 3.0), (1500, 0.1), (1500, 5.0), (5003, 2.0)])
def test_draws_the_same_tokens_as_torch(coarse: bool, vocab: int, spread: float) -> None:
    rows = len(LIMITS)
    sampler = torch_sampler(rows, vocab)
    sampler.temperature[:], sampler.top_k[:], sampler.top_p[:], sampler.min_p[:] = zip(*LIMITS, strict=True)
    sampler.top_k[sampler.top_k >= vocab] = 0
    sampler.seed[:] = np.arange(rows)
    index, draw = np.arange(rows, dtype=np.int32), NativeDraw()
    generator = torch.Generator().manual_seed(vocab)
    for position in range(40):
        logits = torch.randn(rows, vocab, generator=generator) * spread
        if coarse:
            logits = logits.bfloat16().float()
        positions = np.full(rows, position, np.int32)
        expected = sampler.draw(logits.clone(), index, positions).tokens
        noise = uniforms(sampler.seed, positions.astype(np.uint64))
        drawn = draw(logits, sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p, noise)
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
