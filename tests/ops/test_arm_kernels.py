"""The kernels for ARM, compiled with a cross-compiler and run under qemu, against the references in torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.cross.kernels import EmulatedKernels, build, missing_tools
from helpers.paged import make_attention_case
from helpers.stored_blocks import dequantised, random_blocks

from millrace.ops.attention import ReferenceAttention
from millrace.ops.cpp.native import DTYPES, KV_DTYPES
from millrace.ops.cpp.targets import TARGETS
from millrace.ops.elementwise import activation, norm
from millrace.ops.kv.cache import SCALE_BYTES, write_kv
from millrace.ops.linear.stored import FORMATS, ORDERS, as_kernels_read, round_to_int8

pytestmark = [pytest.mark.live, pytest.mark.skipif(bool(missing_tools()), reason=missing_tools())]

BY_NAME = {target.name: target for target in TARGETS}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 5e-3}
PLAIN = [torch.float32, torch.bfloat16]
KINDS = list({code: kind for kind, code in FORMATS.items()}.values())
"""A kind for each code of the kernels."""


@pytest.fixture(scope="module")
def base_kernels(request: pytest.FixtureRequest) -> Iterator[EmulatedKernels]:
    """All kernels, on a processor with dot products and no further instructions."""
    folder = request.config.cache.mkdir("arm-kernels")
    with EmulatedKernels(*build(BY_NAME["armv8.2"], folder), "neoverse-n1") as emulated:
        yield emulated


@pytest.fixture(scope="module")
def matrix_kernels(request: pytest.FixtureRequest) -> Iterator[EmulatedKernels]:
    """The kernels that use matrix products of integers and instructions for bfloat16."""
    folder = request.config.cache.mkdir("arm-kernels")
    built = build(BY_NAME["armv8.6"], folder, only=("linear", "quantised", "int8", "pool.cpp"))
    with EmulatedKernels(*built, "max") as emulated:
        yield emulated


@pytest.fixture(params=["base_kernels", "matrix_kernels"])
def kernels(request: pytest.FixtureRequest) -> EmulatedKernels:
    found: EmulatedKernels = request.getfixturevalue(request.param)
    return found


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


def stored_layer(
    kernels: EmulatedKernels, kind: str, outputs: int, inputs: int, dtype: torch.dtype, order: str
) -> tuple[int, torch.Tensor]:
    """A layer over a random quantised weight, packed by the kernels, and its dequantised weight."""
    blocks = random_blocks(kind, outputs, inputs)
    packed = torch.empty(kernels.call("quantised_bytes", FORMATS[kind], outputs, inputs), dtype=torch.uint8)
    code = ORDERS[order]  # type: ignore[index]
    read = torch.from_numpy(as_kernels_read(kind, blocks))
    kernels.call("quantised_pack", FORMATS[kind], code, read, packed, outputs, inputs)
    desc = kernels.linear_desc([(FORMATS[kind], outputs, packed)], inputs, DTYPES[dtype], order=code)
    return desc, dequantised(kind, blocks, inputs, dtype)


@pytest.mark.parametrize("dtype", PLAIN)
def test_linear(kernels: EmulatedKernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for outputs, inputs in ((64, 256), (33, 100), (1, 31)):
        weight, bias = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype), torch.randn(outputs)
        padded = kernels.call("padded_inputs", DTYPES[dtype], inputs)
        packed = torch.zeros(-(-outputs // 32) * 32 * padded, dtype=dtype)
        kernels.call("pack", DTYPES[dtype], weight, packed, outputs, inputs)
        desc = kernels.linear_desc([(DTYPES[dtype], outputs, packed)], inputs, DTYPES[dtype], bias)
        x = torch.randn(17, inputs).to(dtype)
        everything = kernels.linear(desc, x, outputs)
        close(everything, (x.float() @ weight.float().T + bias).to(dtype))
        for rows in (1, 2, 4, 5, 12, 13):  # the same whatever the batch
            assert torch.equal(kernels.linear(desc, x[:rows], outputs), everything[:rows]), rows


@pytest.mark.parametrize("kind", KINDS)
def test_stored_weights_unpacked(kernels: EmulatedKernels, kind: str) -> None:
    torch.manual_seed(0)
    for dtype in PLAIN:
        desc, weight = stored_layer(kernels, kind, 45, 512, dtype, "tiles")
        x, rows = torch.randn(5, 512).to(dtype), torch.empty(3, 512, dtype=dtype)
        # Errors relative to the sum of magnitudes: a sum may be close to zero.
        found, expected = kernels.linear(desc, x, 45), x.double() @ weight.double().T
        assert ((found - expected).abs() / (x.double().abs() @ weight.double().abs().T)).max() < ROUNDING[dtype]
        ids = torch.tensor([44, 0, 17])
        assert kernels.take_rows(desc, ids, rows) == -1
        assert torch.equal(rows, weight[ids])


@pytest.mark.parametrize("kind", KINDS)
def test_stored_weights_as_integers(kernels: EmulatedKernels, kind: str) -> None:
    for outputs, inputs in ((64, 256), (33, 512)):
        desc, weight = stored_layer(kernels, kind, outputs, inputs, torch.float32, "dot")
        x = torch.randn(29, inputs)
        x[3, 32:64] = 0
        everything = kernels.linear(desc, x, outputs)
        rounded = round_to_int8(x).double()
        expected, scale = rounded @ weight.double().T, rounded.abs() @ weight.double().abs().T
        assert ((everything - expected).abs() / scale.clamp(min=1e-30)).max() < 1e-5
        for first, rows in ((7, 1), (9, 2), (4, 3), (5, 4), (6, 8), (3, 12), (8, 13)):  # the same whatever the batch
            assert torch.equal(kernels.linear(desc, x[first : first + rows], outputs), everything[first : first + rows])
        taken = torch.empty(2, inputs)
        kernels.take_rows(desc, torch.tensor([32, 1]), taken)
        assert torch.equal(taken, weight[[32, 1]])


def test_what_is_not_finite_reaches_the_outputs_of_its_row_only(kernels: EmulatedKernels) -> None:
    desc, _ = stored_layer(kernels, "Q4_1", 40, 256, torch.float32, "dot")
    x = torch.randn(13, 256)
    expected = kernels.linear(desc, x, 40)
    for value in (float("nan"), float("inf"), -float("inf")):
        spoilt = x.clone()
        spoilt[5, 77] = value
        found = kernels.linear(desc, spoilt, 40)
        assert not found[5].isfinite().any()
        assert torch.equal(found[:5], expected[:5])


@pytest.mark.parametrize("dtype", PLAIN)
def test_norm_and_activation(base_kernels: EmulatedKernels, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, residual, weight = torch.randn(7, 77).to(dtype), torch.randn(7, 77).to(dtype), torch.randn(77)
    out, total = torch.empty_like(x), torch.empty_like(x)
    base_kernels.call("norm", DTYPES[dtype], x, residual, weight, out, total, 7, 77, 1e-5)
    expected, expected_total = norm.add_rms_norm(x, residual, weight, 1e-5)
    close(out, expected)
    assert torch.equal(total, expected_total)
    gate_up, gated = torch.randn(7, 2 * 51).to(dtype) * 3, torch.empty(7, 51, dtype=dtype)
    for kind, code in activation.ACTIVATION_CODES.items():
        base_kernels.call("gated", DTYPES[dtype], code, gate_up, gated, 7, 51)
        close(gated, activation.gated_reference(gate_up, kind))


@pytest.mark.parametrize("kv_kind", ["plain", "int8", "float16"])
@pytest.mark.parametrize("dtype", PLAIN)
def test_attention(base_kernels: EmulatedKernels, dtype: torch.dtype, kv_kind: str) -> None:
    heads, kv_heads, head_dim, block_size = 6, 2, 20, 7
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    case = make_attention_case([(1, 40), (13, 30), (1, 1), (5, 90)], dtype=dtype, **sizes)
    queries, kv, rows = case[0].contiguous(), case[1], case[2]
    if kv_kind == "int8":
        narrow = torch.full((*kv.shape[:4], head_dim + SCALE_BYTES), -1, dtype=torch.int8)
        block_ids, offsets = (~kv[0, :, 0, :, 0].isnan()).nonzero(as_tuple=True)
        write_kv(kv[:, block_ids, :, offsets], narrow, block_ids, offsets)
        kv = narrow
    if kv_kind == "float16":
        if dtype != torch.float32:
            pytest.skip("float16 KV is for float32 models")
        kv = kv.to(torch.float16)
    reference = ReferenceAttention(heads, kv_heads, head_dim, 0.3)
    for window in (0, 9):
        out = torch.empty(len(queries), heads * head_dim, dtype=dtype)
        base_kernels.call(
            *("attention", DTYPES[dtype], KV_DTYPES[kv.dtype], queries, heads * head_dim, kv, out),
            *(rows.query_starts, rows.seq_lens, rows.block_tables, len(rows.seq_lens), rows.block_tables.shape[1]),
            *(heads, kv_heads, head_dim, kv.shape[1], block_size, window, 0.3, 0.0),
        )
        close(out, reference(queries, kv, reference.prepare(rows, block_size, window or None)))


def test_float16_cache_write(base_kernels: EmulatedKernels) -> None:
    torch.manual_seed(0)
    numbers = torch.randn(5, 3, 80) * torch.rand(5, 3, 80).mul(40).sub(25).exp2()
    numbers[0, 2, :4] = torch.tensor([1e6, -1e6, 65519.0, float("nan")])
    places = torch.tensor([3, 17, 20, 31, 9])
    found = torch.zeros(2, 2, 1, 16, 80, dtype=torch.float16)
    base_kernels.call(
        *("prepare_qkv", DTYPES[torch.float32], KV_DTYPES[torch.float16], numbers.clone(), 0, 0, 0, 0, found),
        *(places // 16, places % 16, 5, 1, 1, 80, 0, 2, 16, 1e-6),
    )
    expected = torch.zeros_like(found)
    write_kv(numbers[:, 1:, None], expected, places // 16, places % 16)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
