"""Long prompt chunks through cuDNN's attention equal the reference: alone, after a context, and next to other rows."""

from __future__ import annotations

import pytest
import torch
from helpers.paged import make_batch, make_tiled

from millrace.ops.attention import PagedAttention, ReferenceAttention
from millrace.ops.attention.long_rows import LongRow
from millrace.ops.attention.rows import plain_rows
from millrace.ops.kv.cache import SCALE_BYTES, write_kv

pytestmark = pytest.mark.gpu
HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 64, 16


@pytest.mark.parametrize("context", [0, 16, 300])
@pytest.mark.parametrize("with_other_rows", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_long_row(context: int, with_other_rows: bool, fp8: bool) -> None:
    count = 500
    rows = [(count, context)] + ([(1, 40), (3, 9)] if with_other_rows else [])
    used, blocks = 1, []
    for queries, before in rows:
        needed = -(-(queries + before) // BLOCK)
        blocks.append(list(range(used, used + needed)))
        used += needed
    device = torch.device("cuda")
    given = [([0] * queries, before, own) for (queries, before), own in zip(rows, blocks, strict=True)]
    batch = make_batch(given, BLOCK, device)
    kv = torch.randn(2, used, KV_HEADS, BLOCK, DIM, device=device, dtype=torch.bfloat16)
    fused = torch.randn(len(batch.token_ids), HEADS + 2 * KV_HEADS, DIM, device=device, dtype=torch.bfloat16)
    kv[0][batch.block_ids[0], :, batch.offsets] = fused[:, HEADS : HEADS + KV_HEADS]
    kv[1][batch.block_ids[0], :, batch.offsets] = fused[:, HEADS + KV_HEADS :]
    queries = fused[:, :HEADS]
    if fp8:
        slots = torch.arange(used * BLOCK, device=device)
        narrow = torch.zeros(2, used, KV_HEADS, BLOCK, DIM + SCALE_BYTES, device=device, dtype=torch.uint8)
        write_kv(kv.permute(1, 3, 0, 2, 4).flatten(0, 1), narrow, slots // BLOCK, slots % BLOCK)
        kv = narrow
    reference = ReferenceAttention(HEADS, KV_HEADS, DIM, 0.125)
    plain = plain_rows(batch.rows.of_group(0))
    expected = reference(queries, kv, reference.prepare(plain, BLOCK, None))
    paged = PagedAttention(HEADS, KV_HEADS, DIM, 0.125)
    tiles = torch.tensor([[2, 0]], dtype=torch.int32, device=device) if with_other_rows else None
    tiled = make_tiled(plain, long_rows=(LongRow(0, 0, count, context),), tiles=tiles)
    found = paged(queries, kv, paged.prepare(tiled, BLOCK, None))
    if fp8:  # the step's own keys and values are used before they are rounded to FP8
        assert float((found.float() - expected.float()).norm() / expected.float().norm()) < 2.0**-4
    else:
        torch.testing.assert_close(found.float(), expected.float(), atol=2e-2, rtol=2e-2)
