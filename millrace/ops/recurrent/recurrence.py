"""A linear recurrence over the tokens of a row: each head has a matrix S that decays, takes in a key and a value, and
is read by a query. Gated delta nets and Mamba2 are both of this form.

    S = decay · S;  u = beta · (v - S^T k) with the delta rule, else v;  S = S + k u^T;  out = S^T q

`make()` gives (q, k [T, groups, dk], v [T, heads, dv], decay [T, heads], beta [T, heads] or None, states
[rows, places, heads, dk, dv], StateRows) -> [T, heads, dv]. All float32 and contiguous. Head h has the query and key of
group h // (heads / groups). Beta None: no delta rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.ops.base.state_rows import StateRows, kept_from
from millrace.ops.base.version import Version
from millrace.ops.cpp.native import native, native_missing
from millrace.ops.triton import triton_missing


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, states: Tensor, rows: StateRows
) -> Tensor:
    """The reference: token after token."""
    num_places, shared = states.shape[1], v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(shared, 1), k.repeat_interleave(shared, 1)
    out = torch.empty_like(v)
    columns = (rows.query_starts.tolist(), rows.starts.tolist(), rows.table_rows.tolist())
    for first, end, start, row in zip(columns[0], columns[0][1:], columns[1], columns[2], strict=False):
        if first == end:
            continue
        state = states[row, start % num_places].clone() if start else torch.zeros_like(states[row, 0])
        for at in range(first, end):
            state *= decay[at, :, None, None]
            taken = v[at]
            if beta is not None:
                taken = beta[at, :, None] * (taken - (state * k[at, :, :, None]).sum(1))
            state += k[at, :, :, None] * taken[:, None]
            out[at] = (state * q[at, :, :, None]).sum(1)
            if at - first >= kept_from(start, end - first, num_places):
                states[row, (start + at - first + 1) % num_places] = state
    return out


def native_recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, states: Tensor, rows: StateRows
) -> Tensor:
    """C++ (cpp/recurrent.cpp)."""
    out = torch.empty_like(v)
    native().without_gil.recurrence(
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), decay.data_ptr(), 0 if beta is None else beta.data_ptr()),
        *(states.data_ptr(), out.data_ptr()),
        *(rows.query_starts.data_ptr(), rows.starts.data_ptr(), rows.table_rows.data_ptr()),
        *(len(rows.starts), q.shape[1], v.shape[1], q.shape[2], v.shape[2], states.shape[1]),
    )
    return out


def _make_triton() -> object:
    from millrace.ops.triton.recurrent.recurrence import recurrence as triton_recurrence  # local: imports Triton

    return triton_recurrence


VERSIONS = (
    Version(
        op="recurrence",
        name="triton",
        make=_make_triton,
        when="one program per row, head and block of values, token after token; the best on a GPU",
        devices=("cuda",),
        invariant_on=("cuda",),
        missing=triton_missing,
    ),
    Version(
        op="recurrence",
        name="native",
        make=lambda: native_recurrence,
        when="C++ over rows and heads, token after token; the best on a CPU",
        devices=("cpu",),
        invariant_on=("cpu",),
        missing=native_missing,
    ),
    Version(
        op="recurrence",
        name="torch",
        make=lambda: recurrence,
        when="the reference, token after token",
        devices=("cpu",),
        invariant_on=("cpu",),
    ),
)
