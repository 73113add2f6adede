"""A step's packet against the plan it was written from, padded and exact."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from millrace.ops.attention.context_rule import context_parts
from millrace.ops.attention.decode_rule import LIST_COLUMNS, SHARED_UNIT
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.step import ALL_LINEARS, QKV_ALONE, Admission, Int32s, Int64s, StepPlan, StepShape, exact_shape
from millrace.run.device.device import CpuDevice
from millrace.run.packet.layout import ALIGN, PacketLayout
from millrace.run.packet.step_packet import PacketWriter
from millrace.run.sampling.draw_plan import NO_MASK, DrawPlan
from millrace.run.shapes.keys import ShapeKey
from millrace.run.shapes.table import ShapeFacts, ShapeTable
from millrace.run.table.request_table import ON_DEVICE, RequestTable

MAX_ROWS, BLOCK, PER_TILE, VOCAB = 24, 16, 8, 1000
PARTS = tuple(context_parts(tiles, 8) for tiles in range(1, 9))
NOTHING = np.zeros(0, np.int32)


def a_plan(rng: np.random.Generator, num_rows: int, longest: int, table: RequestTable) -> StepPlan:
    """Rows whose tokens come from the host, from the device, or from both."""
    rows = rng.permutation(MAX_ROWS)[:num_rows].astype(np.int32)
    least = min(longest, 1 + num_rows % 2)
    counts = np.sort(rng.integers(least, longest + 1, num_rows)).astype(np.int32)
    starts = rng.integers(0, 50, num_rows).astype(np.int32)
    admitted = []
    for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
        known = int(rng.choice([0, start, start + count - 1, start + count, start + count + 9]))
        tokens = rng.integers(0, VOCAB, known).astype(np.int32)
        admitted.append(Admission(row, row, tokens, known, RowParams(SamplingParams())))
    blocks = int(rng.integers(0, 9))
    plan = StepPlan(
        step_no=0, rows=rows, starts=starts, counts=counts,
        samples=rng.random(num_rows) < 0.7,
        block_rows=rng.integers(0, MAX_ROWS, blocks).astype(np.int32),
        block_cols=rng.integers(0, 4, blocks).astype(np.int32),
        block_ids=rng.integers(1, 99, blocks).astype(np.int32),
        shape=exact_shape(counts), admitted=tuple(admitted), shared_blocks=int(rng.integers(0, 40)),
    )  # fmt: skip
    table.update_host(plan)
    return plan


def some_draws(rng: np.random.Generator, plan: StepPlan) -> DrawPlan:
    """One head group or two, some tokens of the full one masked."""
    due = np.flatnonzero(plan.samples)
    is_full = rng.random(len(due)) < rng.choice([0.0, 0.5, 1.0])
    masked = np.flatnonzero(is_full & (rng.random(len(due)) < 0.5))
    none = np.zeros(0, np.int64)
    return DrawPlan(
        due, np.flatnonzero(is_full), np.flatnonzero(~is_full), masked, none, none.astype(np.int32), none, True
    )


def check_heads(layout: PacketLayout, packet: Int32s, plan: StepPlan, draws: DrawPlan, last: Int64s) -> None:
    """Each group's head, of whatever size, reads its own rows and padding."""
    ends, middle = plan.starts + plan.counts, layout.middle
    for tokens, backwards in ((draws.full, True), (draws.greedy, False)):
        rows, padding = draws.due[tokens], [-1] * (MAX_ROWS - len(tokens))
        part = slice(middle - MAX_ROWS, middle) if backwards else slice(middle, middle + MAX_ROWS)
        own = slice(middle - len(rows), middle) if backwards else slice(middle, middle + len(rows))
        wanted = plan.rows[rows].tolist()
        assert layout.sample_rows.of(packet)[part].tolist() == (padding + wanted if backwards else wanted + padding)
        assert layout.sample_states.of(packet)[own].tolist() == last[rows].tolist()
        assert layout.sample_positions.of(packet)[own].tolist() == ends[rows].tolist()
        assert layout.sample_index.of(packet)[own].tolist() == tokens.tolist()
    states = layout.sample_states.of(packet)
    assert ((states >= 0) & (states < layout.shape.tokens)).all(), "the body gathers padding too"
    lines = [draws.masked.tolist().index(token) if token in draws.masked else NO_MASK for token in draws.full.tolist()]
    assert layout.mask_lines.of(packet).tolist() == [NO_MASK] * (middle - len(lines)) + lines


def check(writer: PacketWriter, plan: StepPlan, table: RequestTable, shape: StepShape) -> None:
    layout, key, packet = writer.layout(shape), writer.layout(shape).key, np.full(20_000, 777, np.int32)
    records = np.arange(3 * 32, dtype=np.int32).reshape(3, 32)
    draws = some_draws(np.random.default_rng(plan.num_tokens), plan)
    used = writer.write(plan, table, shape, packet, draws, records, mask_address=3 << 40)
    assert layout.mask_address.of(packet).view(np.int64)[0] == 3 << 40
    num_rows, ends, total = len(plan.rows), plan.starts + plan.counts, plan.num_tokens
    padding = shape.tokens - total
    lengths = [*plan.counts.tolist(), *([1] * padding if shape.kind == "decode" else [padding])]
    lengths += [0] * (shape.rows - len(lengths))
    lengths = lengths[: shape.rows]
    assert layout.query_starts.of(packet).tolist() == [0, *np.cumsum(lengths).tolist()]
    assert layout.table_rows.of(packet).tolist() == plan.rows.tolist() + [MAX_ROWS] * (shape.rows - num_rows)
    assert layout.starts.of(packet).tolist() == plan.starts.tolist() + [0] * (shape.rows - num_rows)
    assert layout.seq_lens.of(packet).tolist() == ends.tolist() + [length or 1 for length in lengths[num_rows:]]
    if shape.kind != "decode":
        assert layout.token_rows.of(packet).tolist() == np.repeat(np.arange(shape.rows), lengths).tolist()
    tokens = []
    for row, start, count in zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True):
        given = table.known_tokens(row)[start : start + count].tolist()
        tokens += given + [ON_DEVICE] * (count - len(given))
    assert layout.tokens_in.of(packet).tolist() == tokens + [0] * padding
    tiles = [
        [row, first]
        for row, length in enumerate(lengths)
        if length > (0 if writer.tile_decode_rows or not key.has_decode_rows else 1)
        and (not key.long_from or length < key.long_from)
        for first in range(0, length, PER_TILE)
    ]
    if layout.tiles.length:
        listed, most = tiles if shape.kind == "decode" else tiles[::-1], layout.tiles.length // 2
        assert layout.tiles.of(packet).reshape(-1, 2).tolist() == listed + [[-1, -1]] * (most - len(tiles))
    if layout.decode_rows.length:
        columns = layout.decode_rows.of(packet).reshape(LIST_COLUMNS, -1)
        single = [row for row, length in enumerate(lengths) if length == 1]
        listed = columns[:, columns[2] > 0]
        seq_lens = layout.seq_lens.of(packet)
        assert sorted(listed[0].tolist()) == layout.query_starts.of(packet)[single].tolist()
        assert sorted(listed[1].tolist()) == sorted(layout.table_rows.of(packet)[single].tolist())
        assert listed[2].tolist() == sorted(seq_lens[single].tolist(), reverse=True)
    last = np.arange(num_rows) if key.last_only else np.cumsum(plan.counts) - 1
    if key.last_only:
        assert layout.last_tokens.of(packet).tolist() == (np.cumsum(lengths) - 1).tolist()
    check_heads(layout, packet, plan, draws, last)
    assert layout.shared_len.of(packet)[0] == plan.shared_blocks * BLOCK // SHARED_UNIT * SHARED_UNIT
    count = len(plan.block_ids)
    assert layout.num_updates.of(packet)[0] == count
    updates = packet[layout.updates_start :][: 3 * count].reshape(-1, 3)
    assert updates.tolist() == np.stack([plan.block_rows, plan.block_cols, plan.block_ids], 1).tolist()
    at = layout.updates_start + -(-3 * count // ALIGN) * ALIGN
    assert layout.num_records.of(packet)[0] == 3
    assert packet[at : at + records.size].tolist() == records.flatten().tolist()
    assert used == at + records.size
    assert (packet[used:] == 777).all()


@pytest.mark.parametrize("tile_decode_rows", [False, True])
@pytest.mark.parametrize("longest", [1, 3, 40])
def test_a_packet_matches_its_plan(longest: int, tile_decode_rows: bool) -> None:
    rng = np.random.default_rng(longest + tile_decode_rows)
    shapes = ShapeTable(ShapeFacts(MAX_ROWS, 1024, PER_TILE, BLOCK, tile_decode_rows))
    with_tiles, with_long_rows = len(shapes.keys), len(shapes.keys) + 1
    shapes.keys += [ShapeKey(is_tiled=True), ShapeKey(is_tiled=True, long_from=5, last_only=True)]
    writer = PacketWriter(shapes)
    for num_rows in (1, 2, 7, 8, 9, 20, 24):
        table = RequestTable(CpuDevice(1), max_rows=MAX_ROWS + 1, max_blocks=8)
        plan = a_plan(rng, num_rows, longest, table)
        if longest == 1:
            check(writer, plan, table, shapes.decode(num_rows))
            continue
        for key in (with_tiles, with_long_rows):
            check(writer, plan, table, StepShape("exact", plan.num_tokens, num_rows, key=key))
        has_decode_rows = bool(plan.counts.min() == 1)
        padded = shapes.mixed(
            plan.num_tokens, num_rows, shapes.num_tiles(plan.counts.tolist()), has_decode_rows=has_decode_rows
        )
        assert padded is not None
        check(writer, plan, table, padded)


def test_a_padding_only_step_and_one_that_does_not_fit() -> None:
    shapes = ShapeTable(ShapeFacts(MAX_ROWS, 1024, PER_TILE, BLOCK))
    writer = PacketWriter(shapes)
    table = RequestTable(CpuDevice(1), max_rows=MAX_ROWS + 1, max_blocks=8)
    packet = np.full(4096, 777, np.int32)
    layout = writer.layout(shape := StepShape("exact", 16, 5, key=shapes.exact(16, 5, is_tiled=True).key))
    assert writer.write(None, table, shape, packet, drawn_start=36) == layout.updates_start
    assert layout.drawn_start.of(packet)[0] == 36
    assert layout.query_starts.of(packet).tolist() == [0, 16, 16, 16, 16, 16]
    assert layout.seq_lens.of(packet).tolist() == [16, 1, 1, 1, 1]
    assert layout.num_records.of(packet)[0] == layout.num_updates.of(packet)[0] == 0
    with pytest.raises(ValueError, match="row records do not fit"):
        writer.write(None, table, shape, packet[: layout.updates_start + 8], records=np.zeros((1, 32), np.int32))


def test_few_tokens_after_a_long_context_use_split_kv() -> None:
    """Prompts without a long context, steps with decode rows and steps with many rows do not."""
    sizes = {"max_rows": 64, "token_budget": 8192, "queries_per_tile": 32, "block_size": BLOCK}
    plain, shapes = (ShapeTable(ShapeFacts(**sizes, max_parts=parts)) for parts in ((), PARTS))
    assert {shape.tokens: shapes.key_of(shape).parts for shape in shapes.all_split()} == {
        16: 8,
        32: 8,
        64: 8,
        128: 4,
        256: 2,
    }

    def plain_key(shape: StepShape) -> int:
        return plain.keys.index(shapes.key_of(shape))

    assert [replace(shape, key=plain_key(shape)) for shape in shapes.all_mixed()] == plain.all_mixed()
    for tokens in (9, 64, 200, 256, 257, 2000):
        tiles = -(-tokens // 32)
        short = shapes.mixed(tokens, 1, tiles, has_decode_rows=False)
        assert short is not None
        assert plain.mixed(tokens, 1, tiles, has_decode_rows=False) == replace(short, key=plain_key(short))
        assert shapes.split(short, 511) is None
        long = shapes.split(short, 512)
        assert (long is not None) == (tokens <= 256)
        if long is not None:
            assert long in shapes.all_split()
            assert replace(shapes.key_of(long), parts=1) == shapes.key_of(short)
    for rows, has_decode_rows in ((1, True), (4, False), (20, False)):
        found = shapes.mixed(100, rows, 24, has_decode_rows=has_decode_rows)
        assert found is not None
        assert shapes.split(found, 4000) is None
    assert not plain.all_split()
    tiled = ShapeTable(ShapeFacts(**sizes, tile_decode_rows=True, max_parts=PARTS))
    assert not tiled.all_split()
    found = tiled.mixed(64, 1, 2, has_decode_rows=False)
    assert found is not None
    assert tiled.split(found, 4000) is None


@pytest.mark.parametrize(("token_budget", "max_rows"), [(8192, 512), (8192, 256), (700, 96), (40, 6), (16, 16)])
def test_every_step_that_the_budget_allows_has_a_shape(token_budget: int, max_rows: int) -> None:
    shapes = ShapeTable(ShapeFacts(max_rows, token_budget, PER_TILE, BLOCK))
    for num_decode_rows in sorted({0, 1, 5, 31, 32, 100, max_rows - 1}):
        if num_decode_rows >= max_rows:
            continue
        for chunk in (2, token_budget // 2, token_budget):
            tokens, tiles = num_decode_rows + chunk, -(-chunk // PER_TILE)
            shape = shapes.mixed(tokens, num_decode_rows + 1, tiles, has_decode_rows=num_decode_rows > 0)
            assert shape is not None
            assert shape.tokens >= tokens
            assert shape.tokens <= token_budget + max_rows
            assert shape.rows > num_decode_rows + 1 or shape.tokens == tokens
            assert shape in shapes.all_mixed()


def test_a_packet_names_the_adapter_slot_of_each_token() -> None:
    """Of every place and every chunk; padding and steps without adapters have none."""
    rng, table = np.random.default_rng(4), RequestTable(CpuDevice(1), max_rows=MAX_ROWS + 1, max_blocks=8)
    facts = ShapeFacts(MAX_ROWS, 1024, PER_TILE, BLOCK, takes_adapters=True)
    shape_table = ShapeTable(facts)
    writer, mixed = PacketWriter(shape_table), shape_table.mixed(32, 3, 8)
    assert mixed is not None
    plan = a_plan(rng, 3, 5, table)
    table.adapters[plan.rows] = own = np.array([2, 0, 7], np.int32)
    chunks, packet = own.repeat(plan.counts).tolist(), np.full(20_000, 777, np.int32)
    shapes = {
        shape_table.with_adapters(mixed, ALL_LINEARS): [*chunks, *[0] * (32 - len(chunks))],
        shape_table.with_adapters(shape_table.decode(3, places=2), ALL_LINEARS): [2, 2, 0, 0, 7, 7, 0, 0],
        shape_table.with_adapters(shape_table.decode(3), QKV_ALONE): [2, 0, 7, 0],
        shape_table.decode(3): [],
    }
    for shape, wanted in shapes.items():
        counts = np.ones(3, np.int32) if shape.kind == "decode" else plan.counts
        writer.write(replace(plan, counts=counts), table, shape, packet)
        assert writer.layout(shape).slots.of(packet).tolist() == wanted
        writer.write(None, table, shape, packet)
        assert not writer.layout(shape).slots.of(packet).any()
