"""A matrix for each head: the versions for a GPU give the products of the reference."""

from __future__ import annotations

import pytest
import torch
from helpers.triton_mode import device, interpreted

from millrace.ops.linear.dense import PlainLinear
from millrace.ops.linear.per_head import BatchedPerHead, LoopPerHead

DTYPE = torch.float32 if interpreted else torch.bfloat16


@pytest.mark.parametrize("rows", [0, 1, 4, 5])
@pytest.mark.parametrize(("outputs", "inputs"), [(512, 128), (128, 512), (40, 24)])
def test_products_are_those_of_the_reference(rows: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, outputs, inputs, device=device, dtype=DTYPE)
    x = torch.randn(rows, 3, inputs + 16, device=device, dtype=DTYPE)[..., :inputs]
    wanted = LoopPerHead(weight, PlainLinear)(x) if rows else x.new_empty(0, 3, outputs)
    found = BatchedPerHead(weight, PlainLinear)(x)
    torch.testing.assert_close(found, wanted, rtol=1e-2 if DTYPE == torch.bfloat16 else 1e-4, atol=1e-1)
