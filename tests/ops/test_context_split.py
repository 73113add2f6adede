"""Split KV for prefill: the result equals that of an unsplit context for any division of the keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.gpu_compiler import output_of
from helpers.paged import make_attention_case, make_tiled, rewritten
from helpers.triton_mode import device, interpreted

from millrace.ops.attention import PagedAttention, PlainRows, ReferenceAttention, TiledRows
from millrace.ops.attention.context_rule import MAX_PARTS, context_parts
from millrace.ops.attention.decode_rule import SPLIT_CELLS
from millrace.ops.attention.paged import tiles_of
from millrace.ops.kv.cache import SCALE_BYTES, SCALE_WORDS
from millrace.ops.kv.packed import packed_items
from millrace.ops.triton.attention.prefill import AttentionShape, ContextSplit, SplitWorkspace

HALF = torch.float16 if interpreted else torch.bfloat16
"""Triton's interpreter cannot multiply bfloat16."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
SAME_PACKED = 2e-2
SIZES: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 16, "dtype": HALF}
UNWRITTEN = {"packed": (packed_items, SCALE_WORDS, torch.int16, 0x7FC1), "fp8": (int, SCALE_BYTES, torch.uint8, 255)}
"""By cache format: items per head, items per scale, dtype, and the value of unwritten entries, which reads as NaN."""


def in_format(kv: torch.Tensor, held: str) -> torch.Tensor:
    """The same cache, packed or in FP8; unwritten entries stay unwritten."""
    items, scale, dtype, unwritten = UNWRITTEN[held]
    shape = (*kv.shape[:4], items(kv.shape[4]) + scale)
    return rewritten(kv, torch.full(shape, unwritten, dtype=dtype, device=kv.device))


def with_own_keys(queries: torch.Tensor, kv: torch.Tensor, rows: PlainRows) -> torch.Tensor:
    """The queries as a view of a projection that also holds the keys and values of the step's own tokens."""
    block_size, parts = kv.shape[3], []
    for row, length in enumerate(rows.seq_lens_host):
        count = rows.query_starts_host[row + 1] - rows.query_starts_host[row]
        positions = torch.arange(length - count, length, device=kv.device)
        blocks = rows.block_tables[row].long()[positions // block_size]
        parts.append(kv[:, blocks, :, positions % block_size].flatten(1, 2).to(queries.dtype))
    return torch.cat((queries, torch.cat(parts)), 1)[:, : queries.shape[1]]


def split(attention: PagedAttention, rows: PlainRows, parts: int, spare_tiles: int = 2) -> TiledRows:
    """What the packet of a split bucket contains: tiles of all queries, and some empty tiles."""
    tiles = tiles_of(rows.query_starts_host, attention.queries_per_tile, every_row=True) + [(-1, -1)] * spare_tiles
    on_device = torch.tensor(tiles, dtype=torch.int32, device=device)
    return make_tiled(rows, tiles=on_device, has_decode_rows=False, context_parts=parts)


def compare(rows: list[tuple[int, int]], parts: int, held: str = "plain", **changes: Any) -> None:
    """Rows are (new tokens, tokens before them). The workspace is full of NaN before it is used."""
    sizes = {**SIZES, **changes}
    softcap, scale = sizes.pop("softcap", None), sizes.pop("scale", 0.3)
    sinks = torch.linspace(-1, 5, sizes["heads"], device=device) if sizes.pop("has_sinks", False) else None
    queries, kv, batch = make_attention_case([(new, known + new) for new, known in rows], device=device, **sizes)
    tolerance = TOLERANCE[sizes["dtype"]]
    if held == "packed":
        tolerance, kv = SAME_PACKED, torch.where(kv.isnan(), kv, kv.bfloat16().to(kv.dtype))
    cache = kv if held == "plain" else in_format(kv, held)
    arguments = (sizes["heads"], sizes["kv_heads"], sizes["head_dim"], scale, softcap)
    reference, paged = ReferenceAttention(*arguments), PagedAttention(*arguments)
    read = kv if held == "packed" else cache
    expected = reference(queries, read, reference.prepare(batch, sizes["block_size"], None), sinks).float()
    tiled = split(paged, batch, parts)
    # Shared by all layers of a device, and reachable through none of them.
    workspace = paged.split_workspace(torch.device(device))
    workspace.partial.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    queries = with_own_keys(queries, kv, batch) if held == "packed" else queries
    found = paged(queries, cache, paged.prepare(tiled, sizes["block_size"], None), sinks).float()
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert not workspace.lse[: len(queries) * sizes["heads"] * parts].isnan().any(), "a part was not written"


FORMATS = {"plain": {}, "fp8": {}, "packed": {"head_dim": 64, "dtype": torch.float32 if interpreted else HALF}}


@pytest.mark.parametrize("held", FORMATS)
@pytest.mark.parametrize("known", [0, 1, 16, 63, 64, 127, 333])
def test_contexts_of_any_length(known: int, held: str) -> None:
    """Also contexts too short for every part to have keys."""
    compare([(7, known)], 4, held, **FORMATS[held])


@pytest.mark.parametrize("held", FORMATS)
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_several_rows_of_several_tiles(parts: int, held: str) -> None:
    """A row with a context, a row without, and a single query, as in padding."""
    compare([(40, 190), (5, 0), (1, 130)], parts, held, **FORMATS[held])


@pytest.mark.parametrize("held", FORMATS)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_query_heads_per_kv_head(group: int, held: str) -> None:
    compare([(9, 150)], 4, held, **{**FORMATS[held], "heads": group, "kv_heads": 1})


@pytest.mark.parametrize("held", FORMATS)
@pytest.mark.parametrize("block_size", [3, 32])
def test_block_sizes(block_size: int, held: str) -> None:
    compare([(9, 121)], 4, held, **{**FORMATS[held], "block_size": block_size})


@pytest.mark.parametrize("head_dim", [80, 128, 256])
def test_head_sizes(head_dim: int) -> None:
    compare([(9, 121)], 4, head_dim=head_dim)


def test_float32_softcap_and_large_scores() -> None:
    compare([(9, 150)], 4, dtype=torch.float32)
    compare([(9, 150)], 4, softcap=5.0, scale=2.0)
    compare([(9, 150)], 4, scale=40.0)


@pytest.mark.parametrize("held", FORMATS)
def test_one_part_has_the_sinks(held: str) -> None:
    compare([(9, 150), (3, 0)], 4, held, **FORMATS[held], has_sinks=True)


def test_windows_and_steps_beyond_the_workspace_are_refused() -> None:
    shape = AttentionShape(4, 2, 16, 0.3)
    one = ContextSplit(4, SplitWorkspace(4, shape, torch.device("cpu")))
    one.check(4, shape, 0)
    with pytest.raises(ValueError, match="window"):
        one.check(4, shape, 20)
    with pytest.raises(ValueError, match="do not fit"):
        one.check(5, shape, 0)


@pytest.mark.parametrize("heads", [(32, 8), (32, 32), (32, 4), (28, 4), (9, 3), (16, 1), (200, 1)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_number_of_parts_gives_about_one_wave_and_fits_the_workspace(heads: tuple[int, int], head_dim: int) -> None:
    shape = AttentionShape(*heads, head_dim, 0.1)
    per_tile = PagedAttention(*heads, head_dim, 0.1).queries_per_tile
    workspace = SplitWorkspace(SPLIT_CELLS, shape, torch.device("meta"))
    for tokens in (16, 32, 64, 128, 256):
        tiles = -(-tokens // per_tile)
        parts = context_parts(tiles, shape.num_kv_heads)
        assert 1 <= parts <= MAX_PARTS
        assert parts == 1 or tiles * shape.num_kv_heads * parts <= 132
        if parts > 1:
            ContextSplit(parts, workspace).check(tokens, shape, 0)


def test_the_number_of_parts_falls_with_the_number_of_tiles() -> None:
    assert [context_parts(tiles, 8) for tiles in (1, 2, 4, 8, 16)] == [8, 8, 4, 2, 1]


COMPILE = """
import sys
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from millrace.ops.triton.attention.prefill import _prefill_kernel
from millrace.ops.triton.attention.context_split import _join_parts_kernel

def build(kernel, warps, constants, kinds):
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": warps, "launch_pdl": True}
    return compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32), options=options)

heads = {"KV_HEADS": 8, "GROUP": 4, "D": 128, "DP": 128, "EARLY": True}
floats = {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "sinks_ptr": "*fp32"}
kinds = floats | {"q_ptr": "*bf16", "out_ptr": "*bf16", "k_ptr": "*i16", "v_ptr": "*i16", "softmax_scale": "fp32"}
kinds |= {name: "i32" for name in ("q_stride", "table_stride", "block_stride", "parts")}
packed = {"PART": 32, "BS": 16, "ITEMS": 32, "HEAD_ITEMS": 1536, "FORMAT": "packed"}
tuning = {"BLOCK_M": 128, "TILE": 64, "STAGES": 3, "WINDOW": 0, "CAP": 0.0, "WIDE": True, "PRECISION": "tf32",
          "DTYPE": tl.bfloat16, "SPLIT": True}
built = build(_prefill_kernel, 8, heads | packed | tuning, kinds)
print("wide", "wgmma.mma_async" in built.asm["ptx"], built.metadata.shared <= 227 << 10)
join = build(_join_parts_kernel, 1, heads | {"GJ": 4, "WIDTH": 128, "PARTS": 8}, kinds)
print("waits", "griddepcontrol.wait" in join.asm["ptx"] and "griddepcontrol.wait" in built.asm["ptx"])
"""


@pytest.mark.live
def test_both_kernels_compile_for_a_gpu() -> None:
    assert "wide True True\nwaits True" in output_of(COMPILE)


@pytest.mark.gpu
@pytest.mark.parametrize("held", FORMATS)
def test_real_sizes(held: str) -> None:
    real = {"heads": 32, "kv_heads": 8, "head_dim": 128, "scale": 0.09, "dtype": torch.bfloat16}
    compare([(64, 2048)], 8, held, **real)
    compare([(50, 2000), (14, 0)], 8, held, **real)
    compare([(100, 4100), (28, 600)], 4, held, **real)
    compare([(256, 513)], 2, held, **real)
