"""The request table owns the tokens of its rows: it shares no array with a plan, and everybody reads the same ones."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from helpers.plan_contents import contents

from millrace.params.rows import DEFAULT_ROW_PARAMS, RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.step import Admission, Appended, Int32s, Release, StepPlan, exact_shape
from millrace.run.device.device import CpuDevice
from millrace.run.sampling.sampler import Sampler
from millrace.run.table.inputs import host_tokens
from millrace.run.table.request_table import ON_DEVICE, RequestTable

NONE = np.zeros(0, np.int32)
VOCAB = 50


def new_table(max_rows: int = 4) -> RequestTable:
    return RequestTable(CpuDevice(1), max_rows=max_rows, max_blocks=4)


def tokens_of(*tokens: int) -> Int32s:
    return np.array(tokens, np.int32)


def plan_of(
    admitted: tuple[Admission, ...] = (),
    appended: tuple[Appended, ...] = (),
    released: tuple[Release, ...] = (),
    rows: Int32s = NONE,
    starts: Int32s = NONE,
    counts: Int32s = NONE,
) -> StepPlan:
    samples = np.ones(len(rows), np.bool_)
    shape = exact_shape(counts)
    return StepPlan(0, rows, starts, counts, samples, NONE, NONE, NONE, shape, admitted, released, appended)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("start", [2, 5, 6, 9])
def test_appended_tokens_never_reach_the_plans_that_brought_others(start: int, is_frozen: bool) -> None:
    """As with a request that is admitted again after a preemption. A decoded plan's arrays cannot be written at all."""
    given = tokens_of(1, 2, 3, 4, 5, 6)
    given.flags.writeable = not is_frozen
    first = plan_of((Admission(1, 7, given, 3, DEFAULT_ROW_PARAMS, limit=12),))
    table, before = new_table(), contents(first)
    table.update_host(first)
    table.update_host(plan_of(appended=(Appended(1, start, tokens_of(40, 41)),)))
    assert contents(first) == before
    assert table.tokens[1][start : start + 2].tolist() == [40, 41]
    assert (table.known[1], table.num_admitted[1]) == (start + 2, start + 2)
    assert table.known_tokens(1)[: min(start, 6)].tolist() == [1, 2, 3, 4, 5, 6][:start]


def test_a_step_reads_from_the_host_only_what_is_known_there() -> None:
    table = new_table()
    table.update_host(plan_of((Admission(2, 7, tokens_of(1, 2, 3), 3, DEFAULT_ROW_PARAMS, limit=20),)))
    rows, counts = tokens_of(2), tokens_of(3)
    for start, expected in ((0, [1, 2, 3]), (1, [2, 3, ON_DEVICE]), (3, [ON_DEVICE] * 3)):
        step = plan_of(rows=rows, starts=tokens_of(start), counts=counts)
        assert host_tokens(step, table, tokens_of(0, 3)).tolist() == expected


def test_a_row_that_was_released_holds_nothing() -> None:
    table = new_table()
    table.update_host(plan_of((Admission(0, 7, tokens_of(1, 2), 2, DEFAULT_ROW_PARAMS, limit=9, num_computed=1),)))
    assert (table.known[0], table.computed[0], table.limit[0]) == (2, 1, 9)
    table.update_host(plan_of(released=(Release(0, 7, "stop"),)))
    assert (table.known[0], table.computed[0], table.limit[0], len(table.tokens[0])) == (0, 0, 0, 0)


def test_a_row_given_away_in_one_plan_holds_the_newcomer() -> None:
    table = new_table()
    table.update_host(plan_of((Admission(0, 7, tokens_of(1, 2), 2, DEFAULT_ROW_PARAMS, limit=9),)))
    newcomer = Admission(0, 8, tokens_of(3), 1, DEFAULT_ROW_PARAMS, limit=5)
    table.update_host(plan_of((newcomer,), released=(Release(0, 7, "stop"),)))
    assert table.known_tokens(0).tolist() == [3]


def test_any_order_of_calls_gives_the_tokens_of_a_list() -> None:
    rng, table = random.Random(5), new_table(3)
    texts: list[list[int]] = [[], [], []]
    for _ in range(400):
        row = rng.randrange(3)
        new = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))]
        if not texts[row] or rng.random() < 0.1:
            texts[row] = list(new)
            table.admit(Admission(row, 1, np.array(new, np.int32), len(new), DEFAULT_ROW_PARAMS, rng.choice([0, 500])))
        elif rng.random() < 0.1:
            texts[row] = []
            table.release(row)
        elif len(texts[row]) + 1 < len(table.tokens[row]) and rng.random() < 0.5:
            texts[row].append(new[0])
            table.append_each(tokens_of(row), tokens_of(new[0]))
        else:
            table.append(row, len(texts[row]), np.array(new, np.int32))
            texts[row] += new
        assert [table.known_tokens(one).tolist() for one in range(3)] == texts


def test_draws_that_depend_on_a_rows_tokens_read_the_table() -> None:
    """Tokens drawn for rows whose options read them are in the table; those of other rows are not asked for."""
    table = new_table()
    sampler = Sampler(CpuDevice(1), table, max_rows=4, vocab_size=VOCAB)
    params = (SamplingParams(temperature=0, dry_multiplier=1.0), SamplingParams(temperature=0))
    plan = plan_of(tuple(Admission(row, row, tokens_of(1, 2), 2, RowParams(one), 9) for row, one in enumerate(params)))
    table.update_host(plan)
    sampler.update(plan)
    logits = torch.zeros((2, VOCAB))
    logits[:, 33] = 1.0
    sampler.draw(logits.clone(), tokens_of(0, 1), tokens_of(2, 2))
    assert table.known_tokens(0).tolist() == [1, 2, 33]
    assert table.text(0, 3).tolist() == [1, 2, 33]
    assert table.known_tokens(1).tolist() == [1, 2]
    table.append(0, 2, tokens_of(21))
    assert table.text(0, 3).tolist() == [1, 2, 21], "there is no second copy"


class MemoryOfItsOwn(CpuDevice):
    """Keeps texts apart from the host's tokens, as a GPU does."""

    kind = "cuda"


def test_texts_in_a_devices_own_memory_are_those_of_the_host() -> None:
    rng = random.Random(8)
    tables = [RequestTable(device(1), max_rows=4, max_blocks=4) for device in (CpuDevice, MemoryOfItsOwn)]
    lengths: dict[int, int] = {}
    """Of rows with a text."""
    for step in range(300):
        row, known = rng.randrange(4), tokens_of(*(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))))
        if rng.random() < 0.15:
            admission = Admission(row, step, known, len(known), DEFAULT_ROW_PARAMS, rng.choice([0, len(known) + 9]))
            has_text = rng.random() < 0.8
            for table in tables:
                table.update_host(plan_of((admission,), released=(Release(row, step - 1, "preempted"),)))
                if has_text:
                    table.keep_text(admission)
            lengths.pop(row, None)
            if has_text:
                lengths[row] = len(known)
        # All rows draw; those without a text are not kept.
        rows, drawn = tokens_of(0, 1, 2, 3), torch.tensor([rng.randrange(VOCAB) for _ in range(4)])
        positions = tokens_of(*(lengths.get(one, 3) for one in range(4)))
        for table in tables:
            table.append_drawn(rows, positions, drawn)
        lengths = {one: length + 1 for one, length in lengths.items()}
        for one, length in lengths.items():
            texts = [table.text(one, length) for table in tables]
            assert texts[0].dtype == texts[1].dtype == torch.int64
            assert texts[0].tolist() == texts[1].tolist()
            assert texts[0][-1] == drawn[one]
