"""Tokens that are copied to other positions have the keys that would have been computed there."""

from __future__ import annotations

import pytest
import torch

from millrace.ops.attention.placed import place_tokens, slots_of
from millrace.ops.elementwise.rope import rope, rope_angles
from millrace.ops.kv.cache import SCALE_BYTES, SCALE_INT32, read_kv, write_kv

BLOCK, HEADS, DIM, COUNT = 4, 2, 16, 10
FREQUENCIES = 1.0 / 100 ** (torch.arange(0, 12, 2) / 12)  # Of 12 of the 16 dimensions.


@pytest.mark.parametrize(
    ("items", "dtype", "tolerance"),
    [
        (DIM, torch.float32, 1e-5),
        (DIM, torch.float16, 4e-3),
        (DIM, torch.bfloat16, 0.06),
        (DIM + SCALE_BYTES, torch.int8, 0.06),
        (DIM // 8 + SCALE_INT32, torch.int32, 0.6),
    ],
)
@pytest.mark.parametrize("shift_size", [0.0, 2.0])
def test_placed_tokens_are_as_if_computed_there(
    items: int, dtype: torch.dtype, tolerance: float, shift_size: float
) -> None:
    torch.manual_seed(0)
    kv = torch.zeros((2, 12, HEADS, BLOCK, items), dtype=dtype)
    keys, values = torch.randn(2, COUNT + 2, HEADS, DIM)
    sources, targets = torch.tensor([7, 3, 5]), torch.tensor([2, 9, 1, 4])
    written = slots_of(sources, 0, COUNT + 2, BLOCK)
    own = rope_angles(torch.arange(COUNT + 2), FREQUENCIES, 1.1)
    shift = shift_size * torch.randn(HEADS, DIM) if dtype == torch.int32 else torch.zeros(HEADS, DIM)
    write_kv(torch.stack((rope(keys, own) - shift, values), 1), kv, written.blocks, written.offsets)
    before = kv.clone()
    turn = rope_angles(torch.tensor([37]), FREQUENCIES, 1.0).expand(COUNT, -1)
    moved = slots_of(targets, 3, COUNT, BLOCK)
    place_tokens(kv, sources, 1, moved, turn, shift)

    placed = read_kv(kv, moved.blocks)[:, torch.arange(COUNT), :, moved.offsets]
    there = rope_angles(torch.arange(COUNT + 2) + 37, FREQUENCIES, 1.1)
    expected = torch.stack((rope(keys, there) - shift, values), 1)[1 : COUNT + 1]
    assert (placed - expected).abs().max() < tolerance * (1 + shift_size / 2)
    untouched = torch.tensor([0, 3, 5, 6, 7, 8, 10, 11])
    assert torch.equal(kv[:, untouched], before[:, untouched])
    assert torch.equal(read_kv(kv, targets[:1])[:, :, :, :3], read_kv(before, targets[:1])[:, :, :, :3])
