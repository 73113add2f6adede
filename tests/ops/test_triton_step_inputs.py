"""Step input kernels against NumPy: single tokens, chunks, block-table updates, row records, and table lookups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.triton_mode import device, interpreted

from millrace.ops.elementwise.rope import rope_angles
from millrace.ops.triton.row_records import ROW_WORD
from millrace.ops.triton.step_inputs import TokenTables, Updates, gather

ROWS, WIDTH, BLOCK, VOCAB, HIDDEN, ROTARY, ALIGN, WORDS = 9, 12, 4, 50, 24, 12, 16, 16
HALF = torch.float16 if interpreted else torch.bfloat16  # the interpreter rounds to bfloat16 differently


def tensor(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=dtype).to(device)


def make_updates(triples: list[tuple[int, int, int]], records: np.ndarray) -> Updates:
    start = -(-3 * len(triples) // ALIGN) * ALIGN
    words = np.full(start + records.size + 3, -(2**30), np.int64)
    words[: 3 * len(triples)] = np.asarray(triples).reshape(-1)
    words[start : start + records.size] = records.reshape(-1)
    columns = torch.zeros((ROWS, WORDS), dtype=torch.int32, device=device)
    return Updates(tensor(words), tensor([len(triples)]), tensor([len(records)]), columns, ALIGN)


def make_tables(ropes: int, scale: float) -> TokenTables:
    frequencies = torch.rand(ropes, ROTARY // 2, device=device)
    positions = torch.arange(WIDTH * BLOCK, device=device)
    angles = torch.stack([rope_angles(positions, one, 1.1) for one in frequencies]) if ropes else None
    return TokenTables(torch.randn(VOCAB, HIDDEN).to(device, HALF), scale, angles)


@pytest.mark.parametrize(("ropes", "groups"), [(0, 1), (1, 1), (2, 1), (1, 3)])
@pytest.mark.parametrize("counts", [[1] * 5, [3, 1, 7, 1]], ids=["single", "chunks"])
@pytest.mark.parametrize("num_updates", [0, 3, 300])
def test_inputs_of_a_step(counts: list[int], ropes: int, groups: int, num_updates: int) -> None:
    draw = np.random.default_rng(num_updates + ropes)
    n, tokens = len(counts), sum(counts)
    rows = draw.permutation(ROWS)[:n]
    starts = draw.integers(0, WIDTH * BLOCK - max(counts), n)
    tables = draw.integers(1, 1000, (groups, ROWS, WIDTH))
    places = draw.permutation(tables.size)[: min(num_updates, tables.size)]
    triples = [(int(place // WIDTH), int(place % WIDTH), int(draw.integers(1000, 2000))) for place in places]
    records = draw.integers(0, 1000, (2, WORDS))
    records[:, ROW_WORD] = [4, 7]
    given = draw.integers(-1, VOCAB, tokens)
    last = draw.integers(0, VOCAB, ROWS)
    updates, looked_up = make_updates(triples, records), make_tables(ropes, 1.0 if ropes == 1 else 3.0)
    on_device = tensor(tables)
    outs = [torch.full((tokens,), -1, dtype=torch.int64, device=device) for _ in range(3)]
    block_ids = torch.full((groups, tokens + 2), -1, dtype=torch.int64, device=device)
    single = max(counts) == 1
    embedded, angles = gather(
        tokens_in=tensor(given),
        token_rows=None if single else tensor(np.repeat(np.arange(n), counts)),
        table_rows=tensor(rows),
        starts=tensor(starts),
        query_starts=tensor(np.concatenate([[0], np.cumsum(counts)])),
        last_tokens=tensor(last, torch.int64),
        tables=on_device,
        updates=updates,
        block_size=BLOCK,
        looked_up=looked_up,
        token_ids=outs[0],
        positions=outs[1],
        block_ids=block_ids[:, :tokens],
        offsets=outs[2],
    )
    for row, column, block in triples:
        tables[row // ROWS, row % ROWS, column] = block
    row_of = np.repeat(rows, counts)
    positions = np.concatenate([start + np.arange(count) for start, count in zip(starts, counts, strict=True)])
    ids = np.where(given < 0, last[row_of], given)
    for found, wanted in zip(outs, (ids, positions, positions % BLOCK), strict=True):
        assert found.tolist() == wanted.tolist()
    assert block_ids[:, :tokens].tolist() == tables[:, row_of, positions // BLOCK].tolist()
    assert block_ids[:, tokens:].eq(-1).all()
    assert on_device.tolist() == tables.tolist()
    assert updates.columns[[4, 7]].tolist() == records.tolist()
    assert not bool(updates.columns[[0, 1, 2, 3, 5, 6, 8]].any())
    assert looked_up.embedding is not None
    assert torch.equal(embedded, looked_up.embedding[outs[0]] * looked_up.embedding_scale)
    if looked_up.angles is None:
        assert angles is None
    else:
        assert torch.equal(angles, looked_up.angles[:, outs[1]])


def test_no_lookup_without_tables() -> None:
    outs = {
        name: torch.full(shape, -1, dtype=torch.int64, device=device)
        for name, shape in {"token_ids": (1,), "positions": (1,), "block_ids": (1, 1), "offsets": (1,)}.items()
    }
    found = gather(
        tokens_in=tensor([7]),
        token_rows=None,
        table_rows=tensor([0]),
        starts=tensor([5]),
        query_starts=tensor([0, 1]),
        last_tokens=tensor([0], torch.int64),
        tables=tensor([[[3, 9]]]),
        updates=make_updates([], np.zeros((0, WORDS), np.int64)),
        block_size=BLOCK,
        looked_up=TokenTables(None, 1.0, None),
        **outs,
    )
    assert found == (None, None)
    assert [int(out) for out in outs.values()] == [7, 5, 9, 1]
