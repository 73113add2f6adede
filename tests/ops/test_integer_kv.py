"""The int8 and int4 KV caches: their precision, and that every kernel writes and reads it as defined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.paged import make_attention_case, make_rows
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millrace.ops.attention import BatchedAttention, NativeAttention, ReferenceAttention
from millrace.ops.attention.qkv import NativePrepareQkv, TorchPrepareQkv
from millrace.ops.cpp import native
from millrace.ops.elementwise.rope import rope_angles
from millrace.ops.kv.cache import SCALE_BYTES, SCALE_INT32, four_bit_parts, int8_parts, read_kv, write_kv
from millrace.ops.kv.four_bits import from_four_bits, rotate, rotation_size

needs_native = pytest.mark.skipif(bool(native.native_missing(torch.device("cpu"))), reason="no native kernels here")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def empty(shape: tuple[int, ...], kind: str = "int8") -> Tensor:
    """Every byte is 255: -1 as an item, NaN as a scale."""
    if kind == "int4":
        return torch.full((*shape[:4], shape[4] // 8 + SCALE_INT32), -1, dtype=torch.int32)
    return torch.full((*shape[:4], shape[4] + SCALE_BYTES), -1, dtype=torch.int8)


def to_integers(kv: Tensor, kind: str = "int8") -> Tensor:
    """A plain cache, whose unused slots are NaN, converted."""
    narrow = empty(tuple(kv.shape), kind)
    block_ids, offsets = (~kv[0, :, 0, :, 0].isnan()).nonzero(as_tuple=True)
    write_kv(kv[:, block_ids, :, offsets], narrow, block_ids, offsets)
    return narrow


def test_an_item_is_off_by_at_most_half_a_step() -> None:
    torch.manual_seed(0)
    kv = empty((2, 4, 3, 8, 32))
    keys_values = torch.randn(20, 2, 3, 32) * torch.rand(20, 2, 3, 1).mul(8).exp()
    places = torch.randperm(3 * 8)[:20] + 8
    write_kv(keys_values, kv, places // 8, places % 8)
    found = read_kv(kv, torch.arange(4))[:, places // 8, :, places % 8]
    step = keys_values.abs().amax(-1, keepdim=True) / 127
    assert ((found - keys_values).abs() <= step * 0.501).all()
    assert torch.equal(found.abs().amax(-1) > 0, torch.ones(20, 2, 3, dtype=torch.bool))


def test_zeros_stay_zeros_and_layout_is_as_documented() -> None:
    kv = empty((2, 3, 2, 4, 16))
    write_kv(torch.zeros(1, 2, 2, 16), kv, torch.tensor([1]), torch.tensor([2]))
    items, scales = int8_parts(kv)
    assert not items[:, 1, :, 2].any()
    assert (scales[:, 1, :, 2] == 1).all()
    assert torch.equal(kv[1, 1, 0].flatten()[32:48], items[1, 1, 0, 2])
    assert torch.equal(kv[1, 1, 0].flatten()[64 + 8 : 64 + 12].view(torch.float32)[0], scales[1, 1, 0, 2])


@pytest.mark.parametrize("head_dim", [16, 64, 96])
def test_a_four_bit_number_is_off_by_at_most_half_a_step_of_its_rotated_key(head_dim: int) -> None:
    torch.manual_seed(0)
    kv = empty((2, 4, 3, 8, head_dim), "int4")
    keys_values = torch.randn(20, 2, 3, head_dim) + 3
    keys_values[:, 0, :, 5] *= 30  # a channel that is much larger than all others
    places = torch.randperm(3 * 8)[:20] + 8
    write_kv(keys_values, kv, places // 8, places % 8)
    found = read_kv(kv, torch.arange(4))[:, places // 8, :, places % 8]
    written = keys_values.transpose(0, 1)
    for side, (got, wanted) in enumerate(zip(found.transpose(0, 1), written, strict=True)):
        own, own_found = (rotate(wanted), rotate(got)) if side == 0 else (wanted, got)
        step = (own.amax(-1, keepdim=True) - own.amin(-1, keepdim=True)) / 15
        # Scale and lowest number are rounded to bfloat16.
        bound = step * 0.54 + own.abs().amax(-1, keepdim=True) / 256
        assert ((own_found - own).abs() <= bound).all()
    twice = rotate(rotate(written))
    torch.testing.assert_close(twice / rotation_size(head_dim), written)


def test_four_bits_are_laid_out_as_documented() -> None:
    kv = empty((2, 3, 2, 4, 32), "int4")
    values = torch.arange(32.0).remainder(16) * 0.5 - 2
    write_kv(torch.stack((torch.zeros(2, 32), values.expand(2, 32)))[None], kv, torch.tensor([1]), torch.tensor([2]))
    head = kv[1, 1, 0].flatten()
    own = head[2 * 4 : 3 * 4].view(torch.uint8)
    assert own.tolist() == [low | (low + 8) << 4 for low in range(8)] * 2
    assert head[4 * 4 + 2 :][:1].view(torch.bfloat16).tolist() == [0.5, -2.0]
    assert torch.equal(read_kv(kv, torch.tensor([1]))[:, 0, 1, 2], torch.stack((torch.zeros(32), values)))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "rotary", "shift"), [(64, 64, 0), (80, 32, 50), (128, 0, 0), (128, 128, 50)])
def test_native_write_of_four_bits_equals_the_reference(
    dtype: torch.dtype, head_dim: int, rotary: int, shift: int
) -> None:
    torch.manual_seed(1)
    qkv = torch.randn(37, (6 + 4) * head_dim).to(dtype)
    qkv[3] = 0
    angles = rope_angles(torch.arange(37), 1.0 / 10000 ** torch.linspace(0, 1, rotary // 2), 1.0) if rotary else None
    places = torch.randperm(5 * 16)[:37] + 16
    caches = [empty((2, 7, 2, 16, head_dim), "int4") for _ in range(2)]
    shifts = torch.randn(2, head_dim) * shift
    for version, kv in zip((TorchPrepareQkv, NativePrepareQkv), caches, strict=True):
        prepare = version(6, 2, head_dim, 1e-6, None, None, shifts if shift else None)
        prepare(qkv.clone(), angles, kv, places // 16, places % 16)
    written = [tuple(part[:, places // 16, :, places % 16] for part in four_bit_parts(kv)) for kv in caches]
    assert torch.equal(written[0][0][:, 1], written[1][0][:, 1])  # values are copied, keys may differ in their last bit
    assert torch.equal(written[0][1][:, 1], written[1][1][:, 1])
    wide = [from_four_bits(*one) for one in written]
    step = written[0][1][..., :1].float()
    off = (wide[0] - wide[1]).abs()
    assert (off <= step * 1.2 + wide[0].abs() / 100).all()
    assert float((off > step / 8).float().mean()) < 0.01


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (80, 32), (128, 0)])
@pytest.mark.parametrize("norms", [False, True])
def test_native_write_equals_the_reference(dtype: torch.dtype, head_dim: int, rotary: int, norms: bool) -> None:
    torch.manual_seed(1)
    weights = (torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5) if norms else (None, None)
    qkv = torch.randn(37, (6 + 4) * head_dim).to(dtype)
    angles = rope_angles(torch.arange(37), 1.0 / 10000 ** torch.linspace(0, 1, rotary // 2), 1.0) if rotary else None
    places = torch.randperm(5 * 16)[:37] + 16
    caches = [empty((2, 7, 2, 16, head_dim)) for _ in range(2)]
    for version, kv in zip((TorchPrepareQkv, NativePrepareQkv), caches, strict=True):
        version(6, 2, head_dim, 1e-6, *weights)(qkv.clone(), angles, kv, places // 16, places % 16)
    blocks, offsets = places // 16, places % 16
    (items, scales), (expected_items, expected_scales) = (int8_parts(kv) for kv in reversed(caches))
    difference = (items[:, blocks, :, offsets].int() - expected_items[:, blocks, :, offsets].int()).abs()
    assert int(difference.max()) <= 1
    assert float((difference > 0).float().mean()) < 0.01  # a key that differs in its last bit may round differently
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(scales, expected_scales, rtol=tolerance, atol=0, equal_nan=True)
    values = qkv.view(37, 10, head_dim)[:, 8:].float()
    assert torch.equal(scales[1][blocks, :, offsets], values.abs().amax(-1) / 127)


@needs_native
@settings(max_examples=examples(20))
@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=6),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 5, 8, 17]),
    head_dim=st.sampled_from([16, 48, 64, 80, 128, 256]),
    block_size=st.sampled_from([1, 3, 16, 32, 100]),
    window=st.sampled_from([None, 1, 7, 64, 65]),
    softcap=st.sampled_from([None, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kind=st.sampled_from(["int8", "int4"]),
    seed=st.integers(0, 1000),
)
def test_attention_agrees_with_the_reference(
    rows: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    kind: str,
    seed: int,
) -> None:
    sizes: dict[str, Any] = {"heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": head_dim}
    lengths = [(queries, queries + before) for queries, before in rows]
    queries, kv, batch = make_attention_case(lengths, block_size=block_size, dtype=dtype, seed=seed, **sizes)
    arguments = (kv_heads * group, kv_heads, head_dim, head_dim**-0.5, softcap)
    narrow = to_integers(kv, kind)

    def attend(version: Any) -> Tensor:
        result: Tensor = version(queries, narrow, version.prepare(batch, block_size, window))
        return result.float()

    expected, tolerance = attend(ReferenceAttention(*arguments)), TOLERANCE[dtype]
    for version in (NativeAttention, BatchedAttention):
        torch.testing.assert_close(attend(version(*arguments)), expected, atol=tolerance, rtol=tolerance)


@needs_native
@pytest.mark.parametrize("scale", [0.01, 0.2, 40.0])
def test_error_is_smaller_than_with_int8_queries(scale: float) -> None:
    """Queries and weights are not rounded to eight bits; only keys and values are."""
    queries, kv, batch = make_attention_case(
        [(1, 900), (30, 300)], heads=9, kv_heads=3, head_dim=64, block_size=16, dtype=torch.bfloat16
    )
    kv *= torch.rand(kv.shape[:4]).mul(6).exp()[..., None].to(kv.dtype)
    narrow = to_integers(kv)
    found, expected = (
        version(queries, narrow, version.prepare(batch, 16, None)).float()
        for version in (NativeAttention(9, 3, 64, scale), ReferenceAttention(9, 3, 64, scale))
    )
    error = (found - expected).norm() / expected.norm()
    assert float(error) < 4e-3


@needs_native
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_result_depends_only_on_the_query(
    kind: str, dtype: torch.dtype, softcap: float | None, window: int | None
) -> None:
    """Bit-identical in one chunk, token by token, in a batch, and with another block size."""
    attention, length = NativeAttention(6, 2, 48, 0.2, softcap), 150
    queries, kv, batch = make_attention_case(
        [(length, length)], heads=6, kv_heads=2, head_dim=48, block_size=16, dtype=dtype
    )
    narrow = to_integers(kv, kind)
    whole = attention(queries, narrow, attention.prepare(batch, 16, window))
    table = batch.block_tables[0].tolist()
    for first, count in ((0, 1), (63, 2), (64, 1), (100, 37), (149, 1), (5, 145)):
        rows = make_rows([([0] * count, first, table)], 16)
        found = attention(queries[first : first + count], narrow, attention.prepare(rows, 16, window))
        assert torch.equal(found, whole[first : first + count])
    mixed = make_rows([([0] * 9, 20, table), *[([0], 149, table)] * 7, ([0] * 30, 60, table)], 16)
    together = torch.cat((queries[20:29], *[queries[149:]] * 7, queries[60:90]))
    expected = torch.cat((whole[20:29], *[whole[149:]] * 7, whole[60:90]))
    assert torch.equal(attention(together, narrow, attention.prepare(mixed, 16, window)), expected)
    flat = kv[:, table].transpose(2, 3).flatten(1, 2)[:, :length]
    other = torch.full((2, 60, 2, 3, 48), float("nan"), dtype=dtype)
    other[:, 1:51] = flat.view(2, 50, 3, 2, 48).transpose(2, 3)
    rows = make_rows([([0] * length, 0, list(range(1, 51)))], 3)
    assert torch.equal(attention(queries, to_integers(other, kind), attention.prepare(rows, 3, window)), whole)
