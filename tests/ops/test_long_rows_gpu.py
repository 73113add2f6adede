"""Long prefills through the library's attention: as the reference, alone, after a context, and beside other rows."""

from __future__ import annotations

import pytest
import torch
from helpers.paged import make_batch

from millrace.ops.attention import PagedAttention, ReferenceAttention
from millrace.ops.attention.long_rows import LongRow

pytestmark = pytest.mark.gpu
HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 64, 16


@pytest.mark.parametrize("context", [0, 16, 300])
@pytest.mark.parametrize("beside", [False, True])
def test_long_row(context: int, beside: bool) -> None:
    count = 500
    rows = [(count, context)] + ([(1, 40), (3, 9)] if beside else [])
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
    kv[0][batch.slots // BLOCK, :, batch.slots % BLOCK] = fused[:, HEADS : HEADS + KV_HEADS]
    kv[1][batch.slots // BLOCK, :, batch.slots % BLOCK] = fused[:, HEADS + KV_HEADS :]
    queries = fused[:, :HEADS]
    reference = ReferenceAttention(HEADS, KV_HEADS, DIM, 0.125)
    expected = reference(queries, kv, reference.prepare(batch, BLOCK, None))
    paged = PagedAttention(HEADS, KV_HEADS, DIM, 0.125)
    batch.table_rows = torch.arange(len(rows), dtype=torch.int32, device=device)
    batch.long_rows = (LongRow(0, 0, count, context),)
    batch.tiles = torch.tensor([[2, 0]], dtype=torch.int32, device=device) if beside else None
    found = paged(queries, kv, paged.prepare(batch, BLOCK, None))
    torch.testing.assert_close(found.float(), expected.float(), atol=2e-2, rtol=2e-2)
