"""A device that checks instead of computing: each KV slot holds a digest of all tokens up to it.

A step verifies for every token that the row's block table leads to exactly the prefix that the request would have
written if it ran alone. This detects wrong blocks, blocks freed too early, false prefix hits and lost updates.
"""

from __future__ import annotations

import numpy as np

from millrace.plan.step import StepPlan


def digest(parent: int, token: int) -> int:
    return hash((parent, token))


def next_token(state: int, vocab: int) -> int:
    """The toy model: the next token is a function of the whole prefix."""
    return (state >> 7) % vocab


def lone_run(prompt: list[int], max_tokens: int, end_tokens: tuple[int, ...], min_tokens: int, vocab: int):
    """What a request must generate in any batch: (tokens without the end token, reason)."""
    state = 0
    for token in prompt:
        state = digest(state, token)
    out: list[int] = []
    while True:
        token = next_token(state, vocab)
        if token in end_tokens and len(out) >= min_tokens:
            return out, "stop"
        out.append(token)
        if len(out) == max_tokens:
            return out, "length"
        state = digest(state, token)


class ToyDevice:
    def __init__(self, num_blocks: int, block_size: int, max_rows: int, vocab: int) -> None:
        self.block_size = block_size
        self.vocab = vocab
        self.slots: list[int | None] = [None] * ((num_blocks + 1) * block_size)
        self.tables: list[dict[int, int]] = [{} for _ in range(max_rows)]
        self.tokens: list[list[int]] = [[] for _ in range(max_rows)]
        self.fail_on: set[int] = set()
        self.request_of: dict[int, int] = {}

    def run(self, plan: StepPlan) -> np.ndarray:
        for admission in plan.admitted:
            self.tables[admission.row] = {}
            self.tokens[admission.row] = admission.tokens.tolist()
            self.request_of[admission.row] = admission.request_id
        for row, col, block in zip(plan.block_rows, plan.block_cols, plan.block_ids, strict=True):
            assert 0 < block
            self.tables[int(row)][int(col)] = int(block)
        if any(self.request_of[row] in self.fail_on for row in plan.rows.tolist()):
            raise RuntimeError("poison")
        assert len(set(plan.rows.tolist())) == len(plan.rows), "a row twice in one step"
        drawn = []
        for index, row in enumerate(plan.rows.tolist()):
            start, count = int(plan.starts[index]), int(plan.counts[index])
            state = self._read(row, start - 1) if start else 0
            for position in range(start, start + count):
                state = digest(state, self.tokens[row][position])
                self.slots[self._slot(row, position)] = state
            self._check_prefix(row, start + count)
            if plan.samples[index]:
                assert start + count == len(self.tokens[row])
                token = next_token(state, self.vocab)
                self.tokens[row].append(token)
                drawn.append(token)
        return np.asarray(drawn, np.int32)

    def _slot(self, row: int, position: int) -> int:
        return self.tables[row][position // self.block_size] * self.block_size + position % self.block_size

    def _read(self, row: int, position: int) -> int:
        state = self.slots[self._slot(row, position)]
        assert state is not None
        return state

    def _check_prefix(self, row: int, length: int) -> None:
        state = 0
        for position in range(length):
            state = digest(state, self.tokens[row][position])
            assert self._read(row, position) == state, f"row {row} reads the wrong KV at {position}"
