"""`ops/recurrent/recurrence.py` on a GPU: one program per row, head and block of values, whose part of the state stays
in registers over all tokens of the row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.base.state_rows import StateRows

VALUES = 32
"""Values per program."""


@triton.jit
def _recurrence_kernel(
    q, k, v, decay, beta, states, out, query_starts, starts, table_rows, groups, heads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PLACES: tl.constexpr, HAS_DELTA: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    group = head // (heads // groups)
    key, value = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    has_key, has_value = key < KEYS, value < VALUES
    inside = has_key[:, None] & has_value[None, :]
    first = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - first
    start = tl.load(starts + row)
    states += tl.load(table_rows + row).to(tl.int64) * PLACES * heads * KEYS * VALUES
    offsets = (head * KEYS + key[:, None]) * VALUES + value[None, :]
    size = heads * KEYS * VALUES
    begun = start + tl.zeros_like(value) > 0
    state = tl.load(states + (start % PLACES) * size + offsets, mask=inside & begun[None, :], other=0.0)
    for at in range(first, first + count):
        keys = tl.load(k + (at * groups + group) * KEYS + key, mask=has_key, other=0.0)
        queries = tl.load(q + (at * groups + group) * KEYS + key, mask=has_key, other=0.0)
        taken = tl.load(v + (at * heads + head) * VALUES + value, mask=has_value, other=0.0)
        state = state * tl.load(decay + at * heads + head)
        if HAS_DELTA:
            seen = tl.sum(state * keys[:, None], 0)
            taken = tl.load(beta + at * heads + head) * (taken - seen)
        state = state + keys[:, None] * taken[None, :]
        result = tl.sum(state * queries[:, None], 0)
        tl.store(out + (at * heads + head) * VALUES + value, result, mask=has_value)
        done = at - first + 1
        if done > count - PLACES:
            tl.store(states + ((start + done) % PLACES) * size + offsets, state, mask=inside)


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, states: Tensor, rows: StateRows
) -> Tensor:
    (_, groups, keys), (_, heads, values) = q.shape, v.shape
    out = torch.empty_like(v)
    width = min(VALUES, triton.next_power_of_2(values))
    _recurrence_kernel[len(rows.starts), heads, triton.cdiv(values, width)](
        q, k, v, decay, decay if beta is None else beta, states, out, rows.query_starts, rows.starts, rows.table_rows,
        groups, heads, KEYS=keys, VALUES=values, PLACES=states.shape[1], HAS_DELTA=beta is not None,
        BLOCK_K=triton.next_power_of_2(keys), BLOCK_V=width, num_warps=4,
    )  # fmt: skip
    return out
