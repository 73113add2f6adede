"""Kernels over stored weights compile for GPUs since Ampere, within their shared memory."""

from __future__ import annotations

import pytest
from helpers.gpu_compiler import output_of

LIMITS = {80: 163, 86: 99, 89: 99, 90: 227}
"""KiB of shared memory of one program, by compute capability."""
COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from millrace.ops.triton.blocks import product
from millrace.ops.triton.blocks.decode import KINDS
from millrace.ops.triton.gemm import int8_rows
from millrace.ops.triton.moe import stored_experts as experts

FOURS = ("N", "K", "row_bytes", "x_stride")


def made(kernel, pointers, constants, capability, tiles):
    kinds = {**pointers, **dict.fromkeys(constants, "constexpr")}
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    places = [kernel.arg_names.index(name) for name in (*pointers, *FOURS) if name in kernel.arg_names]
    aligned = {(place,): [["tt.divisibility", 16]] for place in places}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return compile(ASTSource(kernel, signature, constants, aligned), GPUTarget("cuda", capability, 32), options)


def block_constants(name):
    kind = KINDS[name]
    return {"KIND": kind.code, "ITEMS": kind.items, "BYTES": kind.num_bytes, "GROUP": kind.group}


def report(case, capability, compiled):
    print("shared", case, capability, compiled.metadata.shared)


for capability in map(int, sys.argv[1:]):
    for name, rows in (("Q4_K", 1), ("Q5_K", 16), ("Q6_K", 64), ("IQ4_XS", 1), ("IQ2_XS", 16), ("IQ1_M", 64)):
        tiles = product.choose_tiles(rows, 4096, 4096, 264)
        pointers = {"x_ptr": "*bf16", "blocks_ptr": "*u8", "table_ptr": "*i8", "out_ptr": "*bf16"}
        sizes = {"BM": tiles.m, "BN": tiles.n, "BK": product.DEPTH, "SPLIT": 1, "EARLY": False, "bias_ptr": None}
        report(name, capability, made(
            product._product_kernel, pointers, {**block_constants(name), **sizes}, capability, tiles
        ))
    for rows in (1, 100, 1000):
        tiles = int8_rows.choose_tiles(rows, 4096, 4096, capability >= 90)
        pointers = {"x_ptr": "*i8", "w_ptr": "*i8", "out_ptr": "*bf16"}
        pointers |= {"x_scales_ptr": "*fp32", "w_scales_ptr": "*bf16"}
        sizes = {"BM": tiles.m, "BN": tiles.n, "BK": tiles.k, "TOGETHER": tiles.together, "WHOLE": True}
        sizes["FEW"] = tiles.is_few
        report(f"int8-{rows}", capability, made(
            int8_rows._int8_kernel, pointers, {**sizes, "EARLY": False, "bias_ptr": None}, capability, tiles
        ))
    for case, slots in (("Q5_K", 8), ("int4", 8), ("int4", 2048), ("fp8", 2048)):
        tiles = experts.choose_tiles(slots, 8)
        codes = {"fp8": "*fp8e4nv" if capability >= 89 else "*u8", "Q5_K": "*u8", "int4": "*u8"}[case]
        pointers = {"x_ptr": "*bf16", "codes_ptr": codes, "out_ptr": "*bf16", "counts_ptr": "*i32", "table_ptr": "*i32"}
        absent = ["zeros_ptr", "output_scales_ptr", "offsets_ptr", "bias_ptr"]
        if case == "Q5_K":
            pointers["levels_ptr"] = "*i8"
            absent.append("scales_ptr")
        else:
            pointers["scales_ptr"] = "*bf16"
            if case == "fp8" and capability < 89:
                pointers["levels_ptr"] = "*fp32"
            else:
                absent.append("levels_ptr")
        kinds = block_constants(case) if case == "Q5_K" else dict.fromkeys(("KIND", "ITEMS", "BYTES", "GROUP"), 0)
        sizes = {
            "EXPERTS": 8, "EXPERT_BLOCK": 8, "SLOTS_PER_ROW": 2, "BM": tiles.rows, "BN": tiles.columns, "BK": 128,
            "GROUPS": 1, "FOUR_BITS": case == "int4", "EXPONENTS": False,
        }
        report(f"experts-{case}", capability, made(
            experts._experts_kernel, pointers, {**kinds, **sizes, **dict.fromkeys(absent)}, capability, tiles
        ))
"""


@pytest.mark.live
def test_kernels_compile_within_shared_memory() -> None:
    output = output_of(COMPILE, *LIMITS)
    found = [line.split()[1:] for line in output.splitlines() if line.startswith("shared")]
    assert len(found) == 13 * len(LIMITS), output
    for case, capability, shared in found:
        assert int(shared) <= LIMITS[int(capability)] * 1024, (case, capability, shared)
