"""A packet written from a template equals, word for word, the packet written from the plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.ops.attention.decode_rule import LIST_COLUMNS
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.step import Admission, Int32s, StepPlan, StepShape, exact_shape
from millrace.run.device.device import CpuDevice
from millrace.run.packet import decode_rows
from millrace.run.packet.layout import PacketLayout, Section
from millrace.run.packet.step_packet import PacketWriter
from millrace.run.sampling.draw_plan import DrawPlan
from millrace.run.shapes.table import ShapeFacts, ShapeTable
from millrace.run.table.request_table import RequestTable

MAX_ROWS, BLOCK = 40, 16
SIZES = {"max_rows": MAX_ROWS, "queries_per_tile": 8}
RECORD_WORDS = 32
LENGTHS = [1, 2, 30, 500, 1020, 1023, 3000, 20_000, 65_531, 65_533, 65_534, 65_535, 90_000]


def draws_of(is_full: np.ndarray) -> DrawPlan:
    """All rows draw, these in the full group."""
    none = np.zeros(0, np.int64)
    due = np.arange(len(is_full))
    return DrawPlan(
        due, np.flatnonzero(is_full), np.flatnonzero(~is_full), none, none, none.astype(np.int32), none, True
    )


class Decoding:
    """Decode rows that come and go; each step is written by a writer with a template and by a new one."""

    def __init__(self, seed: int, tile_decode_rows: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.shapes = ShapeTable(
            ShapeFacts(token_budget=1024, block_size=BLOCK, tile_decode_rows=tile_decode_rows, **SIZES)
        )
        self.writer = PacketWriter(self.shapes)
        self.table = RequestTable(CpuDevice(1), max_rows=MAX_ROWS + 1, max_blocks=8)
        # Few distinct lengths: equal rows are as likely as one much longer than the rest.
        self.choice = self.rng.choice(LENGTHS, self.rng.integers(1, 5))
        self.rows: dict[int, int] = {}
        """Positions of their next tokens."""
        self.buffers = [np.full(6000, 777, np.int32) for _ in range(4)]
        self.num_steps = self.num_repeated = self.num_cut = self.num_grouped = self.epoch = 0
        self.draws = draws_of(np.zeros(0, np.bool_))

    def join(self) -> tuple[Admission, ...]:
        free = [row for row in range(MAX_ROWS) if row not in self.rows]
        admitted = []
        for row in self.rng.permutation(free)[: self.rng.integers(1, 25)].tolist():
            length = int(self.rng.choice(self.choice))
            self.rows[row] = length - 1
            # The last prompt token may be computed in this step, and then comes from the host.
            tokens = np.arange(length - self.rng.integers(0, 2), dtype=np.int32)
            admitted.append(Admission(row, row, tokens, len(tokens), RowParams(SamplingParams())))
        return tuple(admitted)

    def leave(self) -> None:
        for row in self.rng.permutation(list(self.rows))[: self.rng.integers(1, 4)].tolist():
            del self.rows[row]

    def step(self) -> None:
        event = self.rng.random()
        admitted = self.join() if not self.rows or (event < 0.08 and len(self.rows) < MAX_ROWS) else ()
        if 0.9 < event < 0.95:
            self.leave()
        if event > 0.97:
            self.pad()
        repeats = self.num_steps > 0 and not admitted and not 0.9 < event < 0.95
        self.epoch += not repeats
        if self.rows:
            self.send(self.plan(admitted), repeats)
            self.rows = {row: start + 1 for row, start in self.rows.items()}

    def plan(self, admitted: tuple[Admission, ...]) -> StepPlan:
        rows, starts = (np.array(list(column), np.int32) for column in (self.rows.keys(), self.rows.values()))
        ones, blocks = np.ones_like(rows), int(self.rng.integers(0, 5))
        block_rows, block_cols, block_ids = self.rng.integers(1, 99, (3, blocks)).astype(np.int32)
        return StepPlan(
            step_no=0, rows=rows, starts=starts, counts=ones, samples=ones > 0,
 block_rows=block_rows, block_cols=block_cols, block_ids=block_ids,
            shape=exact_shape(ones), admitted=admitted, epoch=self.epoch,
            shared_blocks=int(self.rng.choice([0, 40], p=[0.9, 0.1])),
        )  # fmt: skip

    def pad(self) -> None:
        """Write a step that is all padding, as used to capture graphs."""
        self.writer.write(None, self.table, self.shapes.decode(len(self.rows) or 1), self.buffers[0])

    def send(self, plan: StepPlan, repeats: bool) -> None:
        self.table.update_host(plan)
        shares_prefix = plan.shared_blocks > 0 and not self.writer.tile_decode_rows
        shape = self.shapes.decode(len(plan.rows), key=self.shapes.sharing if shares_prefix else self.shapes.plain)
        records = self.rng.integers(0, 99, (len(plan.admitted), RECORD_WORDS)).astype(np.int32)
        packet, expected = self.buffers[self.num_steps % 4], np.full(6000, 555, np.int32)
        if not repeats or self.rng.random() < 0.05:
            self.draws = draws_of(self.rng.random(len(plan.rows)) < self.rng.choice([0.0, 0.3, 1.0]))
        draws = self.draws
        self.num_grouped += repeats and draws.order is not None
        used = self.writer.write(plan, self.table, shape, packet, draws, records, self.num_steps)
        forgetful = PacketWriter(self.shapes)
        assert used == forgetful.write(plan, self.table, shape, expected, draws, records, self.num_steps)
        self.compare(forgetful.layout(shape), packet, expected, used)
        self.num_steps += 1
        self.num_repeated += repeats

    def compare(self, layout: PacketLayout, packet: Int32s, expected: Int32s, used: int) -> None:
        for name, section in vars(layout).items():
            if isinstance(section, Section) and name != "decode_rows":
                assert section.of(packet).tolist() == section.of(expected).tolist(), name
        if layout.decode_rows.length:
            found, wanted = (layout.decode_rows.of(words).reshape(LIST_COLUMNS, -1) for words in (packet, expected))
            is_listed = wanted[2] > 0
            assert found[2].tolist() == wanted[2].tolist()
            assert found[:, is_listed].tolist() == wanted[:, is_listed].tolist()
            assert found[3:].tolist() == wanted[3:].tolist()
            self.num_cut += bool((wanted[4] > 1).any())
        # The padding between the updates and the aligned records is not read.
        num_updates, at = 3 * int(layout.num_updates.of(expected)[0]), layout.updates_start
        assert packet[at : at + num_updates].tolist() == expected[at : at + num_updates].tolist()
        size = RECORD_WORDS * int(layout.num_records.of(expected)[0])
        assert packet[used - size : used].tolist() == expected[used - size : used].tolist()


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_a_repeated_packet_equals_the_one_written_from_the_plan(seed: int, tile_decode_rows: bool) -> None:
    decoding = Decoding(seed, tile_decode_rows)
    for _ in range(40):
        decoding.step()


def test_the_steps_above_do_repeat_and_have_split_rows() -> None:
    repeated = cut = grouped = 0
    for seed in range(20):
        decoding = Decoding(seed, tile_decode_rows=False)
        for _ in range(40):
            decoding.step()
        repeated += decoding.num_repeated
        cut += decoding.num_cut
        grouped += decoding.num_grouped
    assert grouped > 50
    assert repeated > 300
    assert 30 < cut < 700


def test_a_template_is_used_only_for_repeated_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are sorted once while the steps repeat."""
    sorted_times: list[int] = []
    argsort = np.argsort

    def counted(values: np.ndarray, **options: str) -> np.ndarray:
        sorted_times.append(1)
        return argsort(values, **options)

    monkeypatch.setattr(decode_rows.np, "argsort", counted)
    writer = PacketWriter(ShapeTable(ShapeFacts(token_budget=1024, block_size=BLOCK, **SIZES)))
    table = RequestTable(CpuDevice(1), max_rows=MAX_ROWS + 1, max_blocks=8)
    shape, packet = StepShape("decode", 16, 16), np.zeros(6000, np.int32)
    rows, none = np.arange(10, dtype=np.int32), np.zeros(0, np.int32)
    ones = np.ones_like(rows)
    plan = StepPlan(
        step_no=0, rows=rows, starts=500 + rows, counts=ones, samples=ones > 0,
 block_rows=none, block_cols=none, block_ids=none, shape=exact_shape(ones),
    )  # fmt: skip
    draws = draws_of(rows > 99)
    for step, epoch in enumerate([1, 1, 1, 2, 2]):
        moved = replace(plan, starts=plan.starts + step, epoch=epoch)
        writer.write(moved, table, shape, packet, draws)
    assert len(sorted_times) == 2
    writer.write(moved, table, shape, packet, draws_of(rows > 5))
    assert len(sorted_times) == 3, "other head groups, another packet"
