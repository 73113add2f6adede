"""The four-bit KV cache on a GPU: its kernels write and read what the reference does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.gpu_compiler import output_of
from helpers.paged import make_attention_case, make_tiled, rewritten
from helpers.triton_mode import device, interpreted

from millrace.ops.attention import PagedAttention, ReferenceAttention
from millrace.ops.attention.qkv import TorchPrepareQkv
from millrace.ops.kv.cache import SCALE_INT32, four_bit_parts, read_kv
from millrace.ops.kv.four_bits import from_four_bits
from millrace.ops.triton.attention.context_split import ContextSplit
from millrace.ops.triton.attention.long_rows import contiguous_kv
from millrace.ops.triton.attention.prefill import AttentionShape, PagedRows, PrefillTuning, SplitWorkspace, prefill
from millrace.ops.triton.attention.qkv import PrepareQkvKernel

HALF = torch.float16 if interpreted else torch.bfloat16
SAME = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Tolerance between two versions that read the same cache."""


def empty(kv: torch.Tensor) -> torch.Tensor:
    """A cache for the same tokens, every byte 255: 15 as a number, NaN as a scale."""
    return torch.full((*kv.shape[:4], kv.shape[4] // 8 + SCALE_INT32), -1, dtype=torch.int32, device=kv.device)


def narrowed(kv: torch.Tensor) -> torch.Tensor:
    """The same cache in four bits; unwritten entries stay unwritten."""
    return rewritten(kv, empty(kv))


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary", "norm"), [(32, 32, True), (64, 32, False), (80, 80, False), (96, 32, True), (64, 0, False)]
)
def test_the_kernel_writes_the_same_as_the_reference(head_dim: int, rotary: int, norm: bool, shifted: bool) -> None:
    torch.manual_seed(2)
    heads, kv_heads, tokens = 3, 2, 5
    weights = [torch.rand(head_dim, device=device) + 0.5 if norm else None for _ in range(2)]
    sizes = (
        heads,
        kv_heads,
        head_dim,
        1e-6,
        *weights,
        torch.randn(kv_heads, head_dim, device=device) * 50 if shifted else None,
    )
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=device)
    qkv[1] = 0.0
    qkv[:, heads * head_dim + 5] *= 30
    angles = torch.randn(tokens, rotary // 2, device=device)
    rows = torch.cat((angles.cos(), angles.sin()), 1) if rotary else None
    slots = torch.tensor([5, 16, 17, 40, 63], device=device)
    blocks, offsets = slots // 16, slots % 16
    wide = torch.zeros((2, 4, kv_heads, 16, head_dim), device=device)
    caches, queries = [empty(wide), empty(wide)], []
    for version, kv in zip((TorchPrepareQkv, PrepareQkvKernel), caches, strict=True):
        queries.append(version(*sizes)(qkv.clone(), rows, kv, blocks, offsets))
    torch.testing.assert_close(queries[0], queries[1])
    assert torch.equal((caches[0] != -1).any(-1), (caches[1] != -1).any(-1))
    written = [tuple(part[:, blocks, :, offsets] for part in four_bit_parts(kv)) for kv in caches]
    assert torch.equal(written[0][0][:, 1], written[1][0][:, 1])  # values are copied, keys may differ in their last bit
    assert torch.equal(written[0][1][:, 1], written[1][1][:, 1])
    step = written[0][1][..., :1].float()
    one, two = (from_four_bits(*parts) for parts in written)
    assert ((one - two).abs() <= step * 1.2 + one.abs() / 100).all()
    assert float(((one - two).abs() > step / 8).float().mean()) < 0.01


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "float32": {"dtype": torch.float32},
    "one head of keys": {"heads": 3, "kv_heads": 1, "head_dim": 64},
    "head of 80": {"head_dim": 80},
    "odd block": {"block_size": 3},
    "window and softcap": {"window": 20, "softcap": 5.0},
}


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_paged_attention_equals_the_reference(name: str, tiled: bool) -> None:
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 32, "block_size": 16, "dtype": HALF, **CASES[name]}
    window, softcap = sizes.pop("window", None), sizes.pop("softcap", None)
    rows = [(1, 70), (1, 33), (5, 40), (33, 33)]
    queries, kv, batch = make_attention_case(rows, device=device, **sizes)
    arguments = (sizes["heads"], sizes["kv_heads"], sizes["head_dim"], 0.3, softcap)
    narrow = narrowed(kv)
    sinks = torch.randn(sizes["heads"], device=device) if name == "plain" else None

    def attend(version: Any, cache: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = version(queries, cache, version.prepare(batch, cache.shape[3], window, "int4"), sinks)
        return result.float()

    expected = attend(ReferenceAttention(*arguments), narrow)
    found = attend(PagedAttention(*arguments, tile_decode_rows=tiled), narrow)
    tolerance = SAME[sizes["dtype"]]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_a_shared_prefix() -> None:
    shared = 128
    lengths = [shared + 1, shared + 40]
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 32, "block_size": 16, "dtype": HALF}
    queries, kv, batch = make_attention_case([(1, length) for length in lengths], device=device, **sizes)
    batch.block_tables[1, : shared // 16] = batch.block_tables[0, : shared // 16]
    narrow = narrowed(kv)
    reference = ReferenceAttention(4, 2, 32, 0.3)
    expected = reference(queries, narrow, reference.prepare(batch, 16, None))
    tiled = make_tiled(batch, shared_len=torch.tensor([shared], dtype=torch.int32, device=device))
    paged = PagedAttention(4, 2, 32, 0.3)
    found = paged(queries, narrow, paged.prepare(tiled, 16, None))
    torch.testing.assert_close(found.float(), expected.float(), atol=SAME[HALF], rtol=SAME[HALF])


def test_rows_with_several_queries_and_a_split_context() -> None:
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 32, "block_size": 16, "dtype": HALF}
    queries, kv, batch = make_attention_case([(4, 150), (4, 30)], device=device, **sizes)
    narrow, shape = narrowed(kv), AttentionShape(4, 2, 32, 0.3)
    reference, paged = ReferenceAttention(4, 2, 32, 0.3), PagedAttention(4, 2, 32, 0.3)
    expected = reference(queries, narrow, reference.prepare(batch, 16, None)).float()
    tiled = make_tiled(batch, queries_per_row=4)
    drafts = paged(queries, narrow, paged.prepare(tiled, 16, None, "int4"))
    torch.testing.assert_close(drafts.float(), expected, atol=SAME[HALF], rtol=SAME[HALF])
    rows = PagedRows(batch.query_starts, batch.seq_lens, tiled.table_rows, batch.block_tables)
    out, tiles = torch.empty_like(drafts), torch.tensor([[0, 0], [1, 0]], dtype=torch.int32, device=device)
    split = ContextSplit(3, SplitWorkspace(512, shape, queries.device))
    prefill(queries, narrow, out, tiles, rows, shape, PrefillTuning(block_m=32, tile=32), split=split)
    torch.testing.assert_close(out.float(), expected, atol=SAME[HALF], rtol=SAME[HALF])


@pytest.mark.parametrize("head_dim", [32, 80])
def test_gathered_keys_and_values_are_widened(head_dim: int) -> None:
    sizes: dict[str, Any] = {"heads": 2, "kv_heads": 2, "head_dim": head_dim, "block_size": 16, "dtype": HALF}
    _, kv, batch = make_attention_case([(1, 70)], device=device, **sizes)
    narrow = narrowed(kv)
    one = torch.zeros(1, dtype=torch.int32, device=device)
    rows = PagedRows(batch.query_starts, batch.seq_lens, one, batch.block_tables)
    found = contiguous_kv(narrow, rows, 0, 69, AttentionShape(2, 2, head_dim, 1.0), torch.float32)
    expected = read_kv(narrow, batch.block_tables[0].long()).permute(0, 2, 1, 3, 4).flatten(2, 3)[:, :, :69]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


COMPILE = """
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton._C.libtriton import ir
from triton.compiler import ASTSource, make_backend
from millrace.ops.triton.attention import decode, long_rows, prefill, qkv

SIZES = {
    "KV_HEADS": 8, "D": 128, "DP": 128, "PART": 64, "BS": 16, "ITEMS": 64, "HEAD_ITEMS": 16 * 68, "FORMAT": "int4",
    "GROUP": 4, "CAP": 0.0, "WIDE": False, "PRECISION": "tf32", "DTYPE": tl.bfloat16, "WINDOW": 0, "EARLY": True,
    "STAGES": 3, "TILE": 64,
}
DECODE = {
    "QUERIES": 1, "OWN": 1, "GP": 16, "GJ": 4, "SWAP": False, "LISTED": False, "ALL_SINGLE": True, "PARTS": 4,
    "SHARED_PARTS": 0, "NO_WEIGHT": 1e30, **dict.fromkeys(("sinks_ptr", "listed_ptr", "shared_len_ptr")),
    **dict.fromkeys(("shared_partial_ptr", "shared_lse_ptr")),
}
PREFILL = {"BLOCK_M": 128, "SPLIT": True, "sinks_ptr": None}
QKV = {"HEADS": 32, "HALF": 64, "HP": 64, "REST": 0, "RP": 1, "BLOCK_H": 8, "NORM": True, "MOST": 448.0, "ROTATE": True}
QKV["SHIFT"] = True
FLOATS = ("softmax_scale", "eps")
POINTERS = {
    **dict.fromkeys(("q_ptr", "out_ptr", "qkv_ptr"), "*bf16"), **dict.fromkeys(("k_ptr", "v_ptr", "kv_ptr"), "*u8"),
    **dict.fromkeys(("angles_ptr", "partial_ptr", "lse_ptr", "q_norm_ptr", "k_norm_ptr", "shift_ptr"), "*fp32"),
    **dict.fromkeys(("blocks_ptr", "offsets_ptr"), "*i64"),
    **dict.fromkeys(("tiles", "query_starts", "seq_lens", "table_rows", "tables", "arrivals_ptr"), "*i32"),
    **dict.fromkeys(("k_scales_ptr", "v_scales_ptr", "scales_ptr", "shared_len_ptr"), "*i32"),
}
for kernel, own in (
    (decode._decode_kernel, DECODE), (prefill._prefill_kernel, PREFILL), (prefill._shared_kernel, PREFILL),
    (qkv._qkv_kernel, QKV), (long_rows._contiguous_kernel, {"BLOCK": 64}),
):
    constants = {name: value for name, value in {**SIZES, "PARTS": 4, **own}.items() if name in kernel.arg_names}
    kinds = {**POINTERS, **dict.fromkeys(FLOATS, "fp32"), **dict.fromkeys(constants, "constexpr")}
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    context, target = ir.context(), GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({})
    helpers = backend.get_codegen_implementation(options), backend.get_module_map()
    ASTSource(kernel, signature, constants).make_ir(target, options, *helpers, context)
    print("accepted")
"""


@pytest.mark.live
def test_the_compiler_accepts_the_kernels() -> None:
    """As Triton's language; the interpreter also takes what the compiler does not."""
    output = output_of(COMPILE)
    assert output.count("accepted") == 5, output
