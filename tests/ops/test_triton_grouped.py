"""The Triton kernel over grouped weights against their dequantised numbers: every kind of weight, few and many rows."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.gpu_compiler import output_of
from helpers.triton_mode import device, interpreted
from torch import Tensor

from millrace.errors import ModelError
from millrace.ops.linear.grouped import GroupedReference, GroupedTriton
from millrace.ops.linear.grouped_weight import GroupedWeight, join, without_fp8
from millrace.ops.triton.gemm.grouped import GroupedTiles, grouped_product, tile_inputs

# Triton's interpreter multiplies the bits of bfloat16 as integers.
DTYPE = torch.float16 if interpreted else torch.bfloat16
TOLERANCE = 2e-3 if interpreted else 1e-2


def weight_of(kind: str, rows: int = 40, columns: int = 160) -> GroupedWeight:
    torch.manual_seed(len(kind))
    group = {"channel": columns, "nvfp4": 16, "odd_group": 96}.get(kind, 32)
    num_groups = -(-columns // group)
    scales = (torch.rand(rows, num_groups) + 0.1) * 0.02
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    weight = GroupedWeight(codes, scales.half(), columns, group, DTYPE, zero=8)
    zeros = torch.randint(0, 16, (rows, num_groups), dtype=torch.uint8)
    levels = torch.linspace(-1, 1, 16)
    eight = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    changes: dict[str, dict[str, Any]] = {
        "zeros": {"zeros": zeros},
        "offsets": {"offsets": (torch.randn(rows, num_groups) * 0.1).half()},
        "levels": {"levels": levels, "zero": 0},
        "nvfp4": {
            "levels": levels,
            "zero": 0,
            "scales": (scales * 100).to(torch.float8_e4m3fn),
            "output_scales": torch.rand(rows) * 0.1,
        },
        "mxfp4": {
            "levels": levels,
            "zero": 0,
            "scales": torch.randint(118, 124, scales.shape, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        },
        "eight_bits": {"codes": eight, "zero": 128},
        "signed": {"codes": eight.view(torch.int8), "zero": 0},
        "fp8_blocks": {
            "codes": torch.randn(rows, columns).to(torch.float8_e4m3fn),
            "scales": torch.rand(-(-rows // 32), -(-columns // 32)),
            "zero": 0,
            "rows_per_scale": 32,
        },
        "order": {"order": torch.randperm(columns)},
    }
    return replace(weight, **changes.get(kind, {})).to(device)


KINDS = (
    *("plain", "channel", "odd_group", "zeros", "offsets", "levels", "nvfp4", "mxfp4"),
    *("eight_bits", "signed", "fp8_blocks", "order"),
)


def check(found: Tensor, weight: GroupedWeight, x: Tensor, bias: Tensor | None = None) -> None:
    wanted = x.double() @ weight.dequantised().double().T + (0 if bias is None else bias.double())
    error = float((found.double() - wanted).norm() / wanted.norm())
    assert error < TOLERANCE, error


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_weight(kind: str) -> None:
    weight = weight_of(kind)
    x = torch.randn(3, weight.in_features).to(device, DTYPE)
    bias = torch.randn(weight.shape[0]).to(device, DTYPE)
    linear = GroupedTriton(weight, bias)
    check(linear(x), weight, x, bias)
    check(linear.wide(x), weight, x, bias)
    assert linear.wide(x).dtype == torch.float32
    assert linear(x).dtype == DTYPE
    assert linear.num_bytes == weight.num_bytes + bias.nbytes
    check(GroupedReference(weight, bias)(x), weight, x, bias)


@pytest.mark.parametrize("rows", [0, 1, 17, 70])
def test_any_number_of_rows(rows: int) -> None:
    weight = weight_of("zeros", rows=72, columns=288)
    x = torch.randn(rows, weight.in_features).to(device, DTYPE)
    found = GroupedTriton(weight)(x)
    assert found.shape == (rows, 72)
    if rows:
        check(found, weight, x)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_split_sums(split: int) -> None:
    weight = weight_of("plain", columns=224)
    wide = torch.full((5, 320), torch.nan, dtype=DTYPE, device=device)
    x = wide[:, :224].copy_(torch.randn(5, 224))  # what lies behind a row must not be read
    operand = GroupedTriton(weight).operand
    bias = torch.randn(weight.shape[0]).to(device, DTYPE)
    check(grouped_product(x, operand, GroupedTiles(16, 32, 32, split, 4, 2), bias), weight, x, bias)


def test_fixed_tiles_give_a_row_the_same_sums_in_any_batch() -> None:
    weight = weight_of("zeros", columns=320)
    linear = GroupedTriton(weight, is_fixed=True)
    x = torch.randn(40, weight.in_features).to(device, DTYPE)
    assert torch.equal(linear(x)[:3], linear(x[:3]))


def test_tiles_hold_whole_groups_or_lie_in_one() -> None:
    for group in (16, 32, 48, 64, 80, 96, 128, 192, 256):
        tile = tile_inputs(group, 4096)
        assert tile >= 16
        assert tile % group == 0 or group % tile == 0
    assert tile_inputs(4096, 4096) == 128


COMPILE = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from millrace.ops.triton.gemm import grouped

for capability, rows in json.loads(sys.argv[1]):
    tiles = grouped.choose_tiles(rows, 4096, 4096, 128, 264)
    pointers = {"x_ptr": "*bf16", "codes_ptr": "*u8", "scales_ptr": "*fp16", "zeros_ptr": "*u8", "out_ptr": "*bf16"}
    sizes = ("M", "N", "K", "x_stride", "num_groups", "rows_per_scale", "group", "steps", "zero")
    constants = {
        **dict.fromkeys(("levels_ptr", "output_scales_ptr", "offsets_ptr", "bias_ptr")),
        "BM": tiles.m, "BN": tiles.n, "BK": tiles.k, "GROUPS": 1, "SPLIT": 1,
        "FOUR_BITS": True, "EXPONENTS": False, "WHOLE": True, "EARLY": False,
    }
    kernel = grouped._grouped_kernel
    kinds = {**pointers, **dict.fromkeys(sizes, "i32"), **dict.fromkeys(constants, "constexpr")}
    signature = {name: kinds[name] for name in kernel.arg_names}
    places = [kernel.arg_names.index(name) for name in (*pointers, "N", "K", "x_stride")]
    divisible = {(place,): [["tt.divisibility", 16]] for place in places}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    made = compile(ASTSource(kernel, signature, constants, divisible), GPUTarget("cuda", capability, 32), options)
    print("shared", capability, rows, made.metadata.shared)
"""


@pytest.mark.live
def test_the_kernel_compiles_for_every_generation_within_its_shared_memory() -> None:
    limits = {80: 163, 86: 99, 89: 99, 90: 227}
    cases = [(capability, rows) for capability in limits for rows in (1, 256)]
    output = output_of(COMPILE, json.dumps(cases))
    found = [tuple(map(int, line.split()[1:])) for line in output.splitlines() if line.startswith("shared")]
    assert [case[:2] for case in found] == cases, output
    for capability, rows, shared in found:
        assert shared <= limits[capability] * 1024, (capability, rows, shared)


@pytest.mark.parametrize("kind", ["fp8_blocks", "nvfp4", "plain"])
def test_gpus_without_fp8_read_the_same_numbers_from_a_table(kind: str) -> None:
    weight = weight_of(kind)
    plain = without_fp8(weight)
    assert torch.float8_e4m3fn not in (plain.codes.dtype, plain.scales.dtype)
    assert torch.equal(plain.dequantised(), weight.dequantised())
    x = torch.randn(3, weight.in_features).to(device, DTYPE)
    check(GroupedTriton(plain)(x), weight, x)


def test_groups_that_no_tile_holds_are_refused() -> None:
    weight = replace(weight_of("plain"), group=20)
    with pytest.raises(ModelError, match="groups of 20 inputs"):
        GroupedTriton(weight)


def test_parts_are_joined_if_only_codes_and_scales_differ() -> None:
    first, second = weight_of("zeros"), weight_of("zeros", rows=24)
    joined = join([first, second])
    assert isinstance(joined, GroupedWeight)
    assert torch.equal(joined.dequantised(), torch.cat([first.dequantised(), second.dequantised()]))
    assert isinstance(join([first, weight_of("plain")]), tuple)
    assert isinstance(join([weight_of("order"), weight_of("plain")]), tuple)
    blocks = [weight_of("fp8_blocks"), weight_of("fp8_blocks", rows=24)]
    joined = join(blocks)
    assert isinstance(joined, GroupedWeight)
    assert torch.equal(joined.dequantised(), torch.cat([part.dequantised() for part in blocks]))
