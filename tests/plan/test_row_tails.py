"""Tokens move from a row's tail to the history of its request in whole blocks, and none is lost or moved twice."""

from __future__ import annotations

import random

import numpy as np
import pytest

from millrace.plan.request import Request
from millrace.plan.rows.rows import TAIL_BLOCKS, Rows


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_tokens_are_kept_in_order(block_size: int) -> None:
    rng = random.Random(block_size)
    rows = Rows(2, block_size)
    known: dict[int, list[int]] = {}
    for number in range(2):
        prompt = [rng.randrange(1000) for _ in range(rng.randrange(1, 20))]
        request = Request(id=number, prompt=np.array(prompt, np.int32), max_tokens=1000)
        request.history = bytearray(request.prompt.data)
        known[rows.admit(request, [[]])] = prompt
    for _ in range(3 * TAIL_BLOCKS * block_size + 5):
        drawn = np.array([rng.randrange(1000) for _ in known], np.int32)
        table_rows = np.array(list(known))
        rows.append(table_rows, rows.known_host[table_rows], drawn)
        for row, token in zip(known, drawn.tolist(), strict=True):
            known[row].append(token)
            if rng.random() < 0.02:
                rows.fold(row)
                assert len(rows.request(row).history) // 4 == len(known[row]) // block_size * block_size
            assert rows.tokens(row).tolist() == known[row]
    row, tokens = known.popitem()
    request, _ = rows.release(row, None)
    assert np.frombuffer(request.history, np.int32).tolist() == tokens


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_tails_of_rows_that_come_and_go_are_folded_in_time(block_size: int) -> None:
    """Each call appends to some of the rows; rows leave, and others begin, with tails of any length."""
    rng = random.Random(block_size)
    rows = Rows(4, block_size)
    known: dict[int, list[int]] = {}
    for number in range(12 * TAIL_BLOCKS * block_size):
        if len(known) < 4 and rng.random() < 0.1:
            prompt = [rng.randrange(1000) for _ in range(rng.randrange(1, 3 * TAIL_BLOCKS * block_size))]
            request = Request(id=number, prompt=np.array(prompt, np.int32), max_tokens=100_000)
            request.history = bytearray(request.prompt.data)
            known[rows.admit(request, [[]])] = prompt
        chosen = [row for row in known if rng.random() < 0.9]
        table_rows, drawn = np.array(chosen, np.int64), [rng.randrange(1000) for _ in chosen]
        rows.append(table_rows, rows.known_host[table_rows], np.array(drawn, np.int32))
        for row, token in zip(chosen, drawn, strict=True):
            known[row].append(token)
        for row in list(known):
            assert rows.tokens(row).tolist() == known[row]
            if rng.random() < 0.005:
                request, _ = rows.release(row, None)
                assert np.frombuffer(request.history, np.int32).tolist() == known.pop(row)
