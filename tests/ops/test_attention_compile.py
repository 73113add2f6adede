"""Latent attention and the products of adapters compile for GPUs since Ampere, within their shared memory."""

from __future__ import annotations

import pytest
from helpers.gpu_compiler import output_of

from millrace.ops.base.capability import has_large_shared_memory

LIMITS = {80: 163, 86: 99, 89: 99}
"""KiB of shared memory of one program, by compute capability."""
COMPILE = """
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from millrace.ops.base.capability import has_large_shared_memory
from millrace.ops.triton import lora
from millrace.ops.triton.attention import latent


def made(name, kernel, pointers, constants, capability, warps):
    kinds = {**pointers, **dict.fromkeys(constants, "constexpr")}
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    places = [kernel.arg_names.index(name) for name, kind in pointers.items() if kind[0] == "*"]
    places += [place for place, name in enumerate(kernel.arg_names) if name.endswith(("stride", "features"))]
    aligned = {(place,): [["tt.divisibility", 16]] for place in places}
    built = compile(
        ASTSource(kernel, signature, constants, aligned), GPUTarget("cuda", capability, 32), {"num_warps": warps}
    )
    print("shared", name, capability, built.metadata.shared)


for capability in (80, 86, 89):
    is_large = has_large_shared_memory(divmod(capability, 10))
    shape = latent.LatentShape(128, 512, 64, 0.1)
    pointers = dict.fromkeys(("q_ptr", "kv_ptr", "out_ptr"), "*bf16") | {"softmax_scale": "fp32"}
    pointers |= dict.fromkeys(("tiles", "query_starts", "seq_lens", "table_rows", "tables"), "*i32")
    made("latent", latent._latent_kernel, pointers, {
        "HEADS": 128, "GROUP": shape.group, "QUERIES": shape.queries_per_tile, "BLOCK_M": latent.MAX_VECTORS,
        "RANK": 512, "RANK_P": 512, "ROPE": 64, "ROPE_P": 64, "BS": 16, "TILE": latent.tile_size(True, is_large),
        "PRECISION": "tf32", "DTYPE": tl.bfloat16, "STAGES": 2, "SPLIT": False, "EARLY": False,
        "partial_ptr": None, "lse_ptr": None,
    }, capability, 8)
tables = dict.fromkeys(("a_table", "b_table"), "*i64") | {"ranks": "*i32", "slots": "*i32", "low": "*fp32"}
shared = {"PARTS": lora.PARTS, "WIDTH": lora.PARTS * lora.MAX_RANK, "BLOCK_R": lora.BLOCK_R, "EARLY": False}
tiles = shared | {"BLOCK_M": lora.TILE, "PRECISION": "tf32"}
for kernel, constants, capabilities in (
    (lora._shrink_tiles, tiles | {"BLOCK_K": lora.TILE_INPUTS}, (80, 89)),
    (lora._expand_tiles, tiles | {"BLOCK_N": lora.TILE_OUTPUTS}, (80, 86)),
):
    pointers = {**tables, "x": "*bf16", "out": "*bf16", "scales": "*fp32"}
    pointers = {name: kind for name, kind in pointers.items() if name in kernel.arg_names}
    for capability in capabilities:
        made("lora", kernel, pointers, constants, capability, 4)
"""


@pytest.mark.live
def test_kernels_compile_within_shared_memory() -> None:
    output = output_of(COMPILE)
    found = [line.split()[1:] for line in output.splitlines() if line.startswith("shared")]
    assert len(found) == 7, output
    for case, capability, shared in found:
        assert int(shared) <= LIMITS[int(capability)] * 1024, (case, capability, shared)


def test_which_gpus_have_large_shared_memory() -> None:
    assert [has_large_shared_memory(found) for found in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))] == [
        *(True, False, False),
        *(True, True, False),
    ]
