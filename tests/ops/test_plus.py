"""A linear whose product is added to what is there."""

from __future__ import annotations

import pytest
import torch

from millrace.ops.linear.dense import Linear, PlainLinear, TunedLinear


@pytest.mark.parametrize("rows", [1, 3])
def test_by_default_the_product_is_added(rows: int) -> None:
    torch.manual_seed(0)
    linear, x, total = PlainLinear(torch.randn(6, 4), None), torch.randn(rows, 4), torch.randn(rows, 6)
    torch.testing.assert_close(linear.plus(x, total.clone()), linear(x) + total)


def test_a_linear_that_can_adds_in_place() -> None:
    class Adding(PlainLinear):
        def adds(self, rows: int) -> bool:
            return rows == 3

        def add_to(self, x: torch.Tensor, total: torch.Tensor) -> None:
            total.addmm_(x, self.weight.t())

    linear: Linear = Adding(torch.randn(6, 4), None)
    for rows in (2, 3):
        x, total = torch.randn(rows, 4), torch.randn(rows, 6)
        wanted = linear(x) + total
        found = linear.plus(x, total)
        torch.testing.assert_close(found, wanted)
        assert (found is total) == (rows == 3)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 64, 300])
def test_on_a_gpu_the_sum_is_rounded_once(rows: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(384, 512, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
    total = torch.randn(rows, 384, device="cuda", dtype=torch.bfloat16)
    wanted = x.float() @ weight.float().T + total.float()
    torch.testing.assert_close(TunedLinear(weight).plus(x, total).float(), wanted, rtol=2e-2, atol=2e-1)
