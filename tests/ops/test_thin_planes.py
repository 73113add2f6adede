"""Q2_K and Q3_K in planes of codes: the layout and the instructions by their definitions on any machine, the kernels on
a GPU; they compile without one."""

from __future__ import annotations

import re

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T
from helpers.gpu_compiler import output_of
from helpers.stored_blocks import random_blocks
from helpers.triton_mode import device

from millrace.ops.linear.block_weight import BlockWeight, ThinPlanesLinear, is_thin
from millrace.ops.linear.packed_codes import make_packed
from millrace.ops.triton.blocks.thin_instructions import numbers_code
from millrace.ops.triton.blocks.thin_planes import KINDS, ThinWeight, pack

COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource
from millrace.ops.triton.blocks import thin_rows


def built(kernel, constants, given, capability):
    signature = {name: given.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, places)
    return compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})


for capability, upper in ((80, True), (86, False), (89, True), (90, False)):
    half = capability == 86
    shared = {"UPPER": upper, "NUMBERS": thin_rows.numbers_code(upper, half), "WARPS": 4,
              "REGISTERS": thin_rows.REGISTERS[upper], "HALF": half}
    given = {"x_ptr": "*i32", "lower_ptr": "*i16", "upper_ptr": "*u8" if upper else "*i16",
             "scales_ptr": "*i16" if upper else "*u8", "heads_ptr": "*i16" if upper else "*i32"}
    given["bias_ptr"] = given["out_ptr"] = "*fp16" if half else "*bf16"
    few = {"COLUMNS": 1, "HAS_BIAS": True, "EARLY": capability == 90}
    product = built(thin_rows.thin_rows_kernel, shared | few, given, capability)
    whole = built(thin_rows.thin_values_kernel, shared, given | {"out_ptr": "*i32"}, capability)
    fits = max(product.metadata.shared, whole.metadata.shared) <= 48 << 10
    print(capability, "mma.sync.aligned.m16n8k16" in product.asm["ptx"], fits)
"""


def weight_of(kind: str, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[BlockWeight, torch.Tensor]:
    """The weight, and what gguf-py says that it holds."""
    blocks = random_blocks(kind, outputs, inputs, 3)
    with np.errstate(all="ignore"):
        values = torch.from_numpy(gguf.quants.dequantize(blocks, T[kind]))
    return BlockWeight(kind, torch.from_numpy(blocks), inputs, dtype), values


def value_at(weight: ThinWeight, n: int, k: int) -> float:
    """By the layout's definition."""
    tile, g, r = n // 16, n % 8, n % 16 // 8
    a, t, b, h, e = k % 64 // 32, k % 32 // 8, k % 8 // 4, k % 4 // 2, k % 2
    place, i, block = k // 64 * 128 + g * 16 + t * 4 + 2 * a + b, 2 * h + r, k // 64
    code = (int(weight.lower[tile, place]) >> (8 * e + 2 * i)) & 3
    pair = 2 * g + r
    head = weight.heads[tile, k // 256, pair : pair + 1].contiguous().view(torch.float16).tolist()
    if weight.kind == "Q2_K":
        both = int(weight.scales[tile, block, t // 2, g, 2 * a + r])
        return float(head[0] * (both & 15) * code - head[1] * (both >> 4))
    code |= ((int(weight.upper[tile, place]) >> (4 * e + i)) & 1) << 2
    words = [int(word) & 0xFFFF for word in weight.scales[tile, k // 256, :, t // 2, pair]]
    fields = words[block % 4] & 0xFFF if block % 4 < 3 else sum((words[w] >> 12) << (4 * w) for w in range(3))
    return float(head[0] * (((fields >> (6 * a)) & 63) - 32) * (code - 4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_lies_where_the_layout_says(kind: str) -> None:
    weight, values = weight_of(kind, 48, 512, torch.bfloat16)
    planes = pack(kind, weight.blocks, 512, weight.dtype)
    assert planes.num_bytes == weight.num_bytes
    for n, k in zip(torch.randint(0, 48, (60,)).tolist(), torch.randint(0, 512, (60,)).tolist(), strict=True):
        assert value_at(planes, n, k) == pytest.approx(float(values[n, k]), rel=1e-5, abs=1e-7)


def run_ptx(code: str, inputs: list[int], dtype: torch.dtype) -> list[int]:
    """The output registers of a piece of PTX, with the instructions that `numbers_code` has."""
    found: dict[str, int] = {f"${16 + place}": value for place, value in enumerate(inputs)}

    def number(name: str) -> int:
        return int(name, 0) if name[0].isdigit() else found[name]

    def halves(word: int) -> torch.Tensor:
        parts = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16)
        return parts.view(dtype).double()

    for line in re.findall(r"(?:mov|shr|shl|prmt|lop3|fma)[^;]*;", code):
        name, _, rest = line.rstrip(";").partition(" ")
        out, *operands = (part.strip() for part in rest.split(","))
        values = [number(operand) for operand in operands]
        if name.startswith("fma"):
            sums = halves(values[0]) * halves(values[1]) + halves(values[2])
            low, high = (int(part) & 0xFFFF for part in sums.to(dtype).view(torch.int16))
            found[out] = low | (high << 16)
        elif name == "prmt.b32":
            found[out] = ((values[0] >> (16 if values[2] == 0x3232 else 0)) & 0xFFFF) * 0x10001
        elif name == "lop3.b32":
            assert values[3] == 0xEA
            found[out] = (values[0] & values[1]) | values[2]
        else:
            found[out] = {"mov": lambda v: v[0], "shr": lambda v: v[0] >> v[1], "shl": lambda v: v[0] << v[1]}[
                name.split(".")[0]
            ](values) & 0xFFFFFFFF
    return [found[f"${place}"] for place in range(16)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_upper", [False, True])
def test_the_instructions_make_numbers_of_codes(has_upper: bool, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(7)
    codes = torch.randint(0, 8 if has_upper else 4, (4, 2, 4), generator=draw)  # [j, e, i]
    scales, least = torch.rand(4, generator=draw).to(dtype), torch.rand(4, generator=draw).to(dtype)

    def fields(bits: torch.Tensor, size: int) -> list[int]:
        return [sum(int(bits[j, e, i]) << (16 * e + size * i) for e in range(2) for i in range(4)) for j in range(4)]

    halves = torch.stack((scales, least), 1).view(torch.int16).int() & 0xFFFF
    records = [int(low) | (int(high) << 16) for low, high in halves]
    inputs = [*fields(codes & 3, 2), *(fields(codes >> 2, 1) if has_upper else ()), *records]
    out = run_ptx(numbers_code(has_upper, dtype == torch.float16), inputs, dtype)
    for j in range(4):
        for i in range(4):
            record = 2 * (j // 2) + i % 2
            middle = codes[j, :, i] - (4 if has_upper else 2)
            wanted = (middle.double() * scales[record].double() + least[record].double()).to(dtype)
            found = torch.tensor([out[4 * i + j] & 0xFFFF, out[4 * i + j] >> 16]).to(torch.int16).view(dtype)
            assert torch.equal(found, wanted)


def test_other_kinds_and_sizes_go_to_another_version() -> None:
    for kind, outputs, inputs, dtype in (
        ("Q4_K", 32, 512, torch.bfloat16),
        ("Q2_K", 24, 512, torch.bfloat16),
        ("Q3_K", 32, 512, torch.float32),
    ):
        assert not is_thin(weight_of(kind, outputs, inputs, dtype)[0])


@pytest.mark.live
def test_the_kernels_compile_for_gpus_since_ampere() -> None:
    pytest.importorskip("triton.experimental.gluon")
    wanted = [f"{capability} True True" for capability in (80, 86, 89, 90)]
    output = output_of(COMPILE)
    assert output.splitlines()[: len(wanted)] == wanted, output


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_products_equal_the_dequantised_weight(kind: str, dtype: torch.dtype) -> None:
    for outputs, inputs in ((48, 256), (80, 768), (512, 4096), (96, 14336)):
        weight, values = weight_of(kind, outputs, inputs, dtype)
        bias = torch.randn(outputs, device=device).to(dtype)
        linear = make_packed(weight.to(device), bias)
        assert isinstance(linear, ThinPlanesLinear)
        assert linear.num_bytes == weight.num_bytes + bias.nbytes
        for rows in (0, 1, 2, 7, 9, 16, 31, 33, 64, 100):
            x = torch.randn(rows, inputs, device=device).to(dtype)
            wanted = x.double() @ values.to(device).double().T + bias.double()
            for got in (linear.wide(x), linear(x)):
                assert got.shape == wanted.shape
                if rows:
                    assert float((got.double() - wanted).norm() / wanted.norm()) < 6e-3
