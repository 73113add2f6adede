"""The gated product for many rows: equals the separate ops on a GPU, and compiles on any machine."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from helpers.gpu_compiler import output_of
from helpers.triton_mode import device, interpreted
from torch import Tensor

from millrace.ops.base.activation_kind import Activation
from millrace.ops.elementwise.activation import gated_reference, make_torch
from millrace.ops.linear.dense import PlainLinear
from millrace.ops.linear.gated import TunedGatedLinear
from millrace.ops.triton.gemm import choice as gemm_choice
from millrace.ops.tuning.load import ANY_ROWS, entries_by_rows, read, read_product_table

TILES = ((128, 128), (256, 64))
COMPILE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource
from millrace.ops.triton.gemm import gated_many as module, operand_ring

kernel = module.gated_many_kernel
for rows, outputs in json.loads(sys.argv[1]):
    blocks = {"x_desc": (rows, 64), "w_desc": (outputs, 64), "out_desc": (rows, outputs)}
    constants = {"BLOCK_M": rows, "BLOCK_N": outputs, "BLOCK_K": 64, "STAGES": 4, "GROUP": 16, "GELU": False,
                 "FETCHING_REGISTERS": 24}
    signature = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
    for name, block in blocks.items():
        signature[name] = f"tensordesc<bf16{list(block)},{operand_ring._layout(*block)!r}>"
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, places)
    built = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    instruction = f"wgmma.mma_async.sync.aligned.m64n{2 * outputs}k16"
    print("wide", instruction in built.asm["ptx"], built.metadata.shared <= 227 << 10)
"""


@pytest.mark.live
def test_the_kernel_compiles_to_the_warpgroup_instruction() -> None:
    pytest.importorskip("triton.experimental.gluon")
    assert output_of(COMPILE, json.dumps(TILES)).splitlines()[: len(TILES)] == ["wide True True"] * len(TILES)


def test_every_entry_is_a_tile_that_fits() -> None:
    unmeasured = entries_by_rows(read("h200", "gemm")["gated_many_unmeasured"]["tiles"])
    for entries in (*read_product_table("h200", "gemm", "gated_many").values(), unmeasured):
        assert max(entries) == ANY_ROWS, "the last entry covers any number of rows"
        assert set(entries.values()) <= {None, *TILES}


def test_without_a_gpu_there_is_no_table() -> None:
    if not interpreted:
        pytest.skip("there is a GPU")
    weight = torch.zeros(28672, 4096, dtype=torch.bfloat16)
    assert gemm_choice.measured_many(weight, None, "silu").of(8192) is None


def operands(rows: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows * outputs + inputs)
    x = torch.randn(rows, inputs, device=device).bfloat16()
    return x, (torch.randn(2 * outputs, inputs, device=device) * inputs**-0.5).bfloat16()


def check(got: Tensor, x: Tensor, weight: Tensor, activation: Activation) -> None:
    wanted = gated_reference(x.float() @ weight.float().T, activation)
    assert got.shape == wanted.shape
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), wanted, rtol=1e-2, atol=1e-2)
    assert (got.float() - wanted).norm() < 3e-3 * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [(128, 128), (256, 64)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [
        (1, 64, 64),
        (127, 136, 72),
        (128, 128, 64),
        (1000, 3072, 1024),
        (2049, 520, 576),
        (1024, 14336, 4096),
        (8200, 8, 8),
    ],
)
def test_the_kernel_equals_the_separate_ops(
    rows: int, outputs: int, inputs: int, activation: Activation, tile: tuple[int, int]
) -> None:
    from millrace.ops.triton.gemm.gated_many import gated_many

    x, weight = operands(rows, outputs, inputs)
    check(gated_many(x, weight, activation, tile), x, weight, activation)


@pytest.mark.gpu
def test_repeated_results_are_equal_and_x_may_have_any_alignment() -> None:
    from millrace.ops.triton.gemm.gated_many import gated_many

    x, weight = operands(300, 264, 128)
    padded = torch.full((300, 129), 9.0, dtype=torch.bfloat16, device=device)
    padded[:, 1:] = x
    check(gated_many(padded[:, 1:], weight, "silu", (128, 128)), x, weight, "silu")
    first = gated_many(x, weight, "silu", (128, 128))
    for _ in range(20):
        assert torch.equal(gated_many(x, weight, "silu", (128, 128)), first)
    assert gated_many(x[:0], weight, "silu", (128, 128)).shape == (0, 264)


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_op_uses_the_kernel_where_it_is_supported(has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from millrace.ops.triton.gemm import gated_many as module

    x, weight = operands(2048, 3072, 1024)
    bias = torch.randn(6144, device=device).bfloat16() if has_bias else None
    calls: list[int] = []
    kernel = module.gated_many

    def counted(x: Tensor, *rest: Any) -> Tensor:
        calls.append(x.shape[0])
        return kernel(x, *rest)

    monkeypatch.setattr(module, "gated_many", counted)
    layer = TunedGatedLinear(weight, bias, "silu", PlainLinear, make_torch("silu"))
    for rows in (256, 1408, 2048):
        sums = torch.nn.functional.linear(x[:rows].float(), weight.float(), None if bias is None else bias.float())
        torch.testing.assert_close(layer(x[:rows]).float(), gated_reference(sums, "silu"), rtol=2e-2, atol=2e-2)
    assert calls == ([] if has_bias else [1408, 2048])
