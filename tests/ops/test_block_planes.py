"""GGUF weights in planes of codes: the layout by its definition on any machine, the kernels on a GPU; they compile
without one."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T
from helpers.gpu_compiler import output_of
from helpers.stored_blocks import random_blocks
from helpers.triton_mode import device

from millrace.models.formats.gguf import weight_of_blocks
from millrace.ops.linear.block_planes import PlanesLinear, in_planes, kind_of
from millrace.ops.linear.block_weight import BlocksTriton, BlockWeight
from millrace.ops.linear.grouped_weight import GroupedWeight
from millrace.ops.linear.packed_codes import make_packed
from millrace.ops.triton.blocks.plane_rows import rows_of_planes
from millrace.ops.triton.blocks.planes import (
    BYTES,
    FLOAT,
    FP8,
    HALF,
    KINDS,
    PAIR,
    POWER,
    SIGNED,
    SIX,
    PlanesWeight,
    pack,
)

COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource
from millrace.ops.triton.blocks import few_rows
from millrace.ops.triton.blocks.instructions import REGISTERS, numbers_code
from millrace.ops.triton.blocks.plane_rows import rows_of_planes
from millrace.ops.triton.blocks.planes import KINDS


def built(kernel, constants, given, capability):
    signature = {name: given.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, places)
    return compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})


for capability, name in ((80, "Q4_K"), (86, "Q6_K"), (89, "IQ4_XS"), (90, "Q8_0")):
    made, kind = KINDS[name], "f16" if capability == 86 else "bf16"
    shared = {"SCALES": made.scales, "UPPER": made.upper, "NUMBERS": numbers_code(made, kind), "WARPS": 4,
              "OFFSET": made.offset, "REGISTERS": REGISTERS[min(1, made.upper)], "HALF": kind == "f16"}
    upper = {0: "*i32", 1: "*u8", 2: "*i16", 4: "*i32"}[made.upper]
    given = {"x_ptr": "*i32", "lower_ptr": "*i32", "upper_ptr": upper, "factors_ptr": "*i16",
             "scales_ptr": ("*i16", "*i32", "*i32", "*u8", "*i32")[made.scales]}
    given["bias_ptr"] = given["out_ptr"] = "*fp16" if kind == "f16" else "*bf16"
    few = {"AHEAD": 4, "COLUMNS": 1, "HAS_BIAS": True, "EARLY": capability == 90}
    product = built(few_rows.few_planes_kernel, shared | few, given, capability)
    whole = built(few_rows.dequantise_kernel, shared, given | {"out_ptr": "*i32"}, capability)
    fits = max(product.metadata.shared, whole.metadata.shared) <= 48 << 10
    print(name, capability, "mma.sync.aligned.m16n8k16" in product.asm["ptx"], fits)
"""


def weight_of(kind: str, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[BlockWeight, torch.Tensor]:
    """The weight, and what gguf-py says that it holds."""
    blocks = random_blocks(kind, outputs, inputs, 3)
    with np.errstate(all="ignore"):
        values = torch.from_numpy(gguf.quants.dequantize(blocks, T[kind]))
    return BlockWeight(kind, torch.from_numpy(blocks), inputs, dtype), values


def value_at(weight: PlanesWeight, n: int, k: int) -> float:
    """By the layout's definition."""
    made, tile, g, r = weight.kind, n // 16, n % 8, n % 16 // 8
    a, t, b, h, e = k % 64 // 32, k % 32 // 8, k % 8 // 4, k % 4 // 2, k % 2
    place, i = k // 64 * 128 + g * 16 + t * 4 + 2 * a + b, 2 * h + r
    code = (int(weight.lower[tile, place]) >> (16 * e + 4 * i)) & 15
    if weight.upper is not None:
        apart = {1: 4, 2: 8, 4: 16}[made.upper]
        upper = (int(weight.upper[tile, place]) >> (apart * e + made.upper * i)) & ((1 << made.upper) - 1)
        code |= upper << 4
    pair = 2 * g + r
    if made.scales == HALF:
        scale, least = weight.scales[tile, k // 32, pair].view(torch.float16).item(), 0.0
    elif made.scales == PAIR:
        scale, least = weight.scales[tile, k // 32, pair : pair + 1].contiguous().view(torch.float16).tolist()
    elif made.scales == SIGNED:
        words, group = [int(word) & 0xFFFFFFFF for word in weight.scales[tile, k // 256, :, pair]], k % 256 // 32
        six = ((words[1] >> (4 * group)) & 15) | (((words[0] >> (16 + 2 * group)) & 3) << 4)
        header = weight.scales[tile, k // 256, 0, pair : pair + 1].contiguous().view(torch.float16).tolist()
        scale, least = header[0] * (six - 32), 0.0
    elif made.scales == POWER:
        scale, least = 2.0 ** (int(weight.scales[tile, k // 32, pair]) - 127), 0.0
    elif made.scales == FLOAT:
        scale, least = float(weight.scales[tile, k // 64, pair]), 0.0
    elif made.scales == FP8:
        assert weight.factors is not None
        factor = weight.scales[tile, k // 64, t // 2, g, 2 * a + r].view(torch.float8_e4m3fn).float()
        scale, least = float(factor) * float(weight.factors[tile, pair]), 0.0
    elif made.scales == BYTES:
        assert weight.factors is not None
        whole = weight.factors[tile, k // 256, pair].view(torch.float16).item()
        scale, least = whole * (int(weight.scales[tile, k // 64, t // 2, g, 2 * a + r]) - 128), 0.0
    else:
        words = [int(word) & 0xFFFFFFFF for word in weight.scales[tile, k // 256, :, pair]]
        block = k % 256 // 64
        fields = words[1 + block] if block < 3 else sum((words[1 + w] >> 24) << (8 * w) for w in range(3))
        fields = (fields >> (12 * a)) & 0xFFF
        header = weight.scales[tile, k // 256, 0, pair : pair + 1].contiguous().view(torch.float16).tolist()
        scale, least = header[0] * (fields & 63), -header[1] * (fields >> 6)
    if made.levels is not None:
        return scale * made.levels[code]
    return scale * code + least if made.scales in (PAIR, SIX) else scale * (code - made.offset)


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_lies_where_the_layout_says(kind: str) -> None:
    weight, values = weight_of(kind, 48, 512, torch.bfloat16)
    planes = pack(kind, weight.blocks, 512, weight.dtype)
    assert planes.num_bytes == weight.num_bytes
    for n, k in zip(torch.randint(0, 48, (60,)).tolist(), torch.randint(0, 512, (60,)).tolist(), strict=True):
        assert value_at(planes, n, k) == pytest.approx(float(values[n, k]), rel=1e-5, abs=1e-7)


def levels_weight(form: str, outputs: int, inputs: int, dtype: torch.dtype) -> GroupedWeight:
    """A weight with 16 levels, as MXFP4, NF4 and NVFP4 have them."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, generator=generator)
    group = {"MXFP4": 32, "NF4": 64, "NVFP4": 16}[form]
    scales = torch.rand(outputs, inputs // group, generator=generator) + 0.5
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = torch.cat((levels, -levels)) if form != "NF4" else torch.linspace(-1, 1, 16)
    output_scales = None
    if form == "MXFP4":
        scales = torch.randint(118, 128, scales.shape, dtype=torch.uint8, generator=generator)
        scales = scales.view(torch.float8_e8m0fnu)
    elif form == "NVFP4":
        scales, output_scales = (scales * 200).to(torch.float8_e4m3fn), torch.rand(outputs, generator=generator) * 1e-3
    return GroupedWeight(codes, scales, inputs, group, dtype, levels=levels, output_scales=output_scales)


@pytest.mark.parametrize("form", ["MXFP4", "NF4", "NVFP4"])
def test_a_level_lies_where_the_layout_says(form: str) -> None:
    weight = levels_weight(form, 48, 512, torch.bfloat16)
    planes, values = in_planes(weight), weight.dequantised()
    assert planes.num_bytes == weight.num_bytes
    for n, k in zip(torch.randint(0, 48, (60,)).tolist(), torch.randint(0, 512, (60,)).tolist(), strict=True):
        assert value_at(planes, n, k) == pytest.approx(float(values[n, k]), rel=1e-5, abs=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["MXFP4", "NF4", "NVFP4"])
def test_products_with_levels_equal_the_dequantised_weight(form: str, dtype: torch.dtype) -> None:
    for outputs, inputs in ((48, 256), (80, 768), (512, 4096), (96, 14336)):
        weight = levels_weight(form, outputs, inputs, dtype).to(device)
        linear = make_packed(weight)
        assert isinstance(linear, PlanesLinear)
        for rows in (1, 7, 9, 31, 64, 100):
            x = torch.randn(rows, inputs, device=device).to(dtype)
            wanted = x.double() @ weight.dequantised().double().T
            assert float((linear.wide(x).double() - wanted).norm() / wanted.norm()) < 6e-3


PLAIN = [name for name, kind in KINDS.items() if kind.levels is None]


@pytest.mark.parametrize("kind", PLAIN)
def test_rows_are_looked_up_in_planes(kind: str) -> None:
    weight, values = weight_of(kind, 48, 512, torch.float32)
    planes = pack(kind, weight.blocks.to(device), 512, weight.dtype)
    ids = torch.tensor([47, 0, 9, 9, 31, 16])
    found = rows_of_planes(planes, ids.to(device)).cpu()
    torch.testing.assert_close(found, values[ids], rtol=1e-5, atol=1e-7)
    assert rows_of_planes(planes, ids[:0].to(device)).shape == (0, 512)


def test_what_the_planes_do_not_take_goes_to_another_version() -> None:
    for kind, outputs, inputs in (("Q4_K", 24, 512), ("Q8_0", 16, 96), ("IQ2_XS", 32, 256)):
        weight = weight_of_blocks(
            kind, torch.from_numpy(random_blocks(kind, outputs, inputs, 0)), inputs, torch.float16
        )
        assert kind_of(weight) is None
    other = make_packed(weight)
    assert isinstance(other, BlocksTriton)


@pytest.mark.live
def test_the_kernels_compile_for_gpus_since_ampere() -> None:
    pytest.importorskip("triton.experimental.gluon")
    wanted = [
        f"{name} {capability} True True"
        for capability, name in ((80, "Q4_K"), (86, "Q6_K"), (89, "IQ4_XS"), (90, "Q8_0"))
    ]
    assert output_of(COMPILE).splitlines()[: len(wanted)] == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_products_equal_the_dequantised_weight(kind: str, dtype: torch.dtype) -> None:
    for outputs, inputs in ((48, 256), (80, 768), (512, 4096), (96, 14336)):
        blocks = torch.from_numpy(random_blocks(kind, outputs, inputs, 5))
        with np.errstate(all="ignore"):
            dense = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), T[kind])).to(device).double()
        weight = weight_of_blocks(kind, blocks.to(device), inputs, dtype)
        if not isinstance(weight, BlockWeight) and kind not in ("Q8_0", "IQ4_NL"):
            weight = BlockWeight(kind, blocks.to(device), inputs, dtype)
        bias = torch.randn(outputs, device=device).to(dtype)
        linear = PlanesLinear(weight, bias)
        assert linear.num_bytes == blocks.nbytes + bias.nbytes
        for rows in (0, 1, 2, 7, 9, 16, 31, 33, 64, 100):
            x = torch.randn(rows, inputs, device=device).to(dtype)
            wanted = x.double() @ dense.T + bias.double()
            for got in (linear.wide(x), linear(x)):
                assert got.shape == wanted.shape
                if rows:
                    assert float((got.double() - wanted).norm() / wanted.norm()) < 6e-3
