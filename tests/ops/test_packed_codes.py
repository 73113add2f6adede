"""Products with packed 4-bit codes: the layout by its definition on any machine, the kernels on a GPU; they compile
without one."""

from __future__ import annotations

import pytest
import torch
from helpers.gpu_compiler import output_of
from helpers.triton_mode import device, interpreted

from millrace.ops.linear.grouped import GroupedTriton
from millrace.ops.linear.grouped_weight import GroupedWeight
from millrace.ops.linear.packed_codes import PackedCodesLinear, can_pack, make_packed, packed
from millrace.ops.triton.grouped.layout import dequantise

SIZES = ((96, 256, 32), (208, 512, 64), (80, 896, 896), (512, 4096, 128), (16, 64, 64))
COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource
from millrace.ops.triton.gemm import operand_ring
from millrace.ops.triton.grouped import few_rows, many_rows


def built(kernel, constants, given, capability, warps):
    signature = {name: given.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, places)
    return compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


for capability in (80, 86, 89, 90):
    constants = {"WARPS": 4, "AHEAD": 2, "TILES": 2, "COLUMNS": 2, "SHARED": 2, "SCALED": False, "HAS_BIAS": True,
                 "HALF": capability == 86, "EARLY": capability == 90}
    kind = "*fp16" if capability == 86 else "*bf16"
    given = {"x_ptr": "*i32", "words_ptr": "*i32", "records_ptr": "*i32", "bias_ptr": kind, "out_ptr": kind}
    made = built(few_rows.few_rows_kernel, constants, given, capability, 4)
    print("few", capability, "mma.sync.aligned.m16n8k16" in made.asm["ptx"], made.metadata.shared <= 48 << 10)
for rows, outputs, split in ((64, 64, True), (256, 128, False)):
    constants = {"ROWS": rows, "COLUMNS": outputs, "STAGES": 4, "HAS_BIAS": True, "HALF": False, "SPLIT": split,
                 "SHARED": 2, "FETCHING_REGISTERS": 24}
    given = {
        "x_desc": f"tensordesc<bf16[{rows}, 64],{operand_ring._layout(rows, 64)!r}>",
        "words_desc": f"tensordesc<i32[{outputs // 16}, 128],{many_rows._words_layout()!r}>",
        "records_ptr": "*i32", "bias_ptr": "*bf16", "out_ptr": "*bf16", "partial_ptr": "*fp32", "counter_ptr": "*i32",
    }
    made = built(many_rows.many_rows_kernel, constants, given, 90, outputs // 16)
    instruction = f"wgmma.mma_async.sync.aligned.m64n{rows}k16"
    print("many", rows, instruction in made.asm["ptx"], made.metadata.shared <= 227 << 10)
"""


def weight_of(outputs: int, inputs: int, group: int, dtype: torch.dtype, zeros: bool = True) -> GroupedWeight:
    torch.manual_seed(outputs + inputs)
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    scales = (torch.rand(outputs, inputs // group) * 0.02 + 0.001).to(dtype)
    points = torch.randint(0, 17, scales.shape, dtype=torch.uint8) if zeros else None
    return GroupedWeight(codes, scales, inputs, group, dtype, zero=8, zeros=points).to(device)


@pytest.mark.parametrize(("outputs", "inputs", "group"), SIZES)
def test_a_code_lies_where_the_layout_says(outputs: int, inputs: int, group: int) -> None:
    weight = weight_of(outputs, inputs, group, torch.float16)
    words, records = packed(weight).words.cpu(), packed(weight).records.cpu()
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), dim=2).flatten(1).cpu()
    assert weight.zeros is not None
    for n, k in zip(torch.randint(0, outputs, (200,)).tolist(), torch.randint(0, inputs, (200,)).tolist(), strict=True):
        tile, g, r = n // 16, n % 8, n % 16 // 8
        a, t, b, h, e = k % 64 // 32, k % 32 // 8, k % 8 // 4, k % 4 // 2, k % 2
        word = int(words[tile, k // 64 * 128 + g * 16 + t * 4 + 2 * a + b])
        assert (word >> (16 * e + 8 * h + 4 * r)) & 15 == codes[n, k]
        record = records[tile, k // group, g * 2 + r].reshape(1).view(torch.float16)
        assert record[0] == weight.scales[n, k // group]
        assert record[1] == -1024 - int(weight.zeros[n, k // group])


@pytest.mark.parametrize(("outputs", "inputs", "group"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dequantised_codes_are_the_reference(outputs: int, inputs: int, group: int, dtype: torch.dtype) -> None:
    if interpreted and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter rounds bfloat16 towards zero")
    weight = weight_of(outputs, inputs, group, dtype)
    assert torch.equal(dequantise(packed(weight)), weight.dequantised().to(dtype))


def test_packed_codes_take_the_bytes_of_the_checkpoint_and_little_more() -> None:
    weight = weight_of(512, 4096, 128, torch.float16)
    extra = weight.scales.numel()  # a zero point takes two bytes in a record, one in the checkpoint
    assert packed(weight).num_bytes == weight.num_bytes + extra


def test_what_the_kernels_cannot_read_goes_to_another_version() -> None:
    weight = weight_of(64, 480, 96, torch.float16)
    assert not can_pack(weight)
    assert isinstance(make_packed(weight), GroupedTriton)


@pytest.mark.live
def test_the_kernels_compile_for_gpus_since_ampere() -> None:
    pytest.importorskip("triton.experimental.gluon")
    wanted = [
        *(f"few {capability} True True" for capability in (80, 86, 89, 90)),
        "many 64 True True",
        "many 256 True True",
    ]
    assert output_of(COMPILE).splitlines()[: len(wanted)] == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [*SIZES, (6144, 4096, 128), (512, 14336, 128)])
def test_products_equal_the_dequantised_weight(outputs: int, inputs: int, group: int, dtype: torch.dtype) -> None:
    weight = weight_of(outputs, inputs, group, dtype, zeros=group != 64)
    bias = torch.randn(outputs, device=device).to(dtype)
    linear = PackedCodesLinear(weight, bias)
    dense = weight.dequantised().to(dtype).double()
    for rows in (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 100, 256, 300, 1100):
        x = torch.randn(rows, inputs, device=device).to(dtype)
        wanted = x.double() @ dense.T + bias.double()
        for got in (linear.wide(x), linear(x)):  # some kernels round the weight to the model's dtype, some do not
            error = ((got.double() - wanted).norm() / wanted.norm()).item()
            assert error < 4e-3, f"{rows} rows: {error}"
    assert not linear.counters.any()  # zero between launches, or the next split product is wrong


@pytest.mark.gpu
def test_inputs_in_the_order_of_their_size_are_found() -> None:
    plain = weight_of(256, 512, 128, torch.bfloat16)
    order = torch.randperm(512, device=device)
    weight = GroupedWeight(plain.codes, plain.scales, 512, 128, plain.dtype, zeros=plain.zeros, order=order)
    x = torch.randn(5, 512, device=device).bfloat16()
    wanted = x.float() @ weight.dequantised().bfloat16().float().T
    torch.testing.assert_close(PackedCodesLinear(weight).wide(x), wanted, rtol=1e-2, atol=1e-2)
