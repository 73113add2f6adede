"""Blocks of FP8 on a GPU: groups of inputs rounded to FP8, products of FP8."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.triton_mode import device, interpreted

from millrace.ops.base.quantised import FP8
from millrace.ops.linear.fp8_groups import MANY_ROWS, Fp8Groups, multiplies_fp8
from millrace.ops.linear.grouped_weight import GroupedWeight
from millrace.ops.linear.packed_codes import make_packed
from millrace.ops.triton.gemm.fp8_groups import choose_tiles, multiply, round_groups

DTYPE = torch.float16 if interpreted else torch.bfloat16


def weight_of(outputs: int = 140, inputs: int = 300) -> GroupedWeight:
    torch.manual_seed(0)
    codes = torch.randn(outputs, inputs, device=device).to(FP8)
    scales = torch.rand(-(-outputs // 128), -(-inputs // 128), device=device) * 0.01
    return GroupedWeight(codes, scales, inputs, 128, DTYPE, rows_per_scale=128)


@pytest.mark.parametrize("rows", [0, 1, 17, 40, 130])
def test_products(rows: int) -> None:
    weight, bias = weight_of(), torch.randn(140, device=device).to(DTYPE)
    linear = make_packed(weight, bias)
    assert isinstance(linear, Fp8Groups)
    assert linear.num_bytes == weight.num_bytes + bias.nbytes
    x = torch.randn(rows, 300, device=device).to(DTYPE)
    values, scales = round_groups(x)
    rounded = values.double() * scales.double().repeat_interleave(128, dim=1)[:, :300]
    if not interpreted:  # The interpreter rounds some numbers up to half of what they are.
        assert (rounded - x.double()).abs().le(x.double().abs() / 16 + 0.01).all()
    wanted = rounded @ weight.dequantised().double().T + bias.double()
    assert linear(x).dtype == DTYPE
    torch.testing.assert_close(linear.wide(x).double(), wanted, rtol=1e-2, atol=1e-2)


def test_few_rows_share_the_inputs_between_programs() -> None:
    weight = weight_of(70, 1100)
    x = torch.randn(3, 1100, device=device).to(DTYPE)
    tiles = choose_tiles(3, 70, 1100, programs=64)
    assert tiles.split > 1
    counters = torch.zeros(tiles.count(3, 70), dtype=torch.int32, device=device)
    found, again = (multiply(x, weight.codes, weight.scales, 128, tiles, counters) for _ in range(2))
    assert torch.equal(found, again)
    assert not counters.any()
    whole = multiply(x, weight.codes, weight.scales, 128, replace(tiles, split=1), counters)
    torch.testing.assert_close(found, whole, rtol=1e-2, atol=1e-2)


def test_a_group_of_zeros_stays_zero() -> None:
    x = torch.zeros(2, 256, device=device, dtype=DTYPE)
    x[1, 200] = 3.0
    values, scales = round_groups(x)
    assert torch.equal((values.float() * scales.repeat_interleave(128, dim=1)).to(DTYPE), x)


def test_other_weights_are_not_multiplied_so() -> None:
    weight = weight_of()
    assert multiplies_fp8(weight)
    assert not multiplies_fp8(replace(weight, group=64))
    assert not multiplies_fp8(replace(weight, rows_per_scale=1))


def test_scales_may_lie_by_group() -> None:
    x = torch.randn(5, 300, device=device).to(DTYPE)
    (values, scales), (same, by_group) = round_groups(x), round_groups(x, rows_side_by_side=True)
    assert torch.equal(values.float(), same.float())
    assert torch.equal(scales, by_group)
    assert by_group.stride() == (1, 5)


@pytest.mark.gpu
def test_many_rows_give_the_products_of_few() -> None:
    weight, bias = weight_of(256, 512), torch.randn(256, device=device).to(DTYPE)
    linear = Fp8Groups(weight, bias)
    for rows in (MANY_ROWS - 1, MANY_ROWS, MANY_ROWS + 1, 3 * MANY_ROWS):
        x = torch.randn(rows, 512, device=device).to(DTYPE)
        few = torch.cat([linear(part) for part in x.split(13)])
        torch.testing.assert_close(linear(x), few, rtol=2e-2, atol=2e-2)
