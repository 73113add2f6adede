"""W8A8 on a GPU: rows rounded to INT8, products of integers."""

from __future__ import annotations

import pytest
import torch
from helpers.triton_mode import device, interpreted

from millrace.models.formats.compressed_tensors import are_int8
from millrace.ops.linear.grouped_weight import GroupedWeight
from millrace.ops.linear.int8_products import Int8Products, multiplies_int8
from millrace.ops.linear.packed_codes import make_packed
from millrace.ops.triton.gemm.int8_rows import round_rows

DTYPE = torch.float16 if interpreted else torch.bfloat16


def weight_of(outputs: int = 40, inputs: int = 160) -> GroupedWeight:
    codes = torch.randint(1, 256, (outputs, inputs), dtype=torch.uint8, device=device)
    scales = (torch.rand(outputs, 1, device=device) * 0.01).to(DTYPE)
    return GroupedWeight(codes, scales, inputs, inputs, DTYPE, zero=128, int8_inputs=True)


@pytest.mark.parametrize("rows", [0, 1, 17, 65, 131])
def test_products(rows: int) -> None:
    weight, bias = weight_of(), torch.randn(40, device=device).to(DTYPE)
    linear = make_packed(weight, bias)
    assert isinstance(linear, Int8Products)
    assert linear.num_bytes == weight.num_bytes + bias.nbytes
    x = torch.randn(rows, 160, device=device).to(DTYPE)
    wanted = x.double() @ weight.dequantised().double().T + bias.double()
    found = linear(x)
    assert found.dtype == DTYPE
    assert linear.wide(x).dtype == torch.float32
    assert found.shape == (rows, 40)
    if rows:
        assert float((linear.wide(x).double() - wanted).norm() / wanted.norm()) < 0.02


def test_rows_are_rounded_to_the_nearest_integer() -> None:
    x = torch.randn(5, 70, device=device).to(DTYPE)
    x[2] = 0
    values, scales = round_rows(x)
    wide = x.float()
    assert float((values * scales[:, None] - wide).abs().max()) <= 0.5001 * float(scales.max())
    assert values[2].abs().sum() == 0
    assert torch.equal(values.abs().amax(1).cpu(), torch.tensor([127, 127, 0, 127, 127], dtype=torch.int8))


def test_other_weights_are_not_multiplied_as_integers() -> None:
    plain = GroupedWeight(weight_of().codes, weight_of().scales, 160, 160, DTYPE, zero=128)
    assert not multiplies_int8(plain)


@pytest.mark.parametrize(
    ("activations", "found"),
    [
        (None, False),
        ({"num_bits": 8, "type": "int", "dynamic": True}, True),
        ({"num_bits": 8, "type": "int", "symmetric": False}, False),
        ({"num_bits": 8, "type": "float"}, False),
        ({"num_bits": 4, "type": "int"}, False),
    ],
)
def test_what_a_checkpoint_says_about_activations(activations: dict[str, object] | None, found: bool) -> None:
    assert are_int8(activations) is found
