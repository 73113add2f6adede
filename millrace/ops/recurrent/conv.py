"""A causal convolution over the tokens of a row, channel by channel, then SiLU if `has_silu`. Its state: the inputs
before the next.

`make(has_silu=True)` gives (x [T, C], weight float32 [C, K], bias float32 [C] or None, states [rows, places, C, K - 1],
StateRows) -> [T, C] in x's dtype. States have x's dtype; the newest input is last. Sums are in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from millrace.ops.base.state_rows import StateRows, kept_from
from millrace.ops.base.version import Version
from millrace.ops.cpp.native import DTYPES, native, native_missing
from millrace.ops.triton import triton_missing


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, rows: StateRows, has_silu: bool = True
) -> Tensor:
    """The reference."""
    num_places, num_before = states.shape[1], weight.shape[1] - 1
    out = torch.empty_like(x)
    columns = (rows.query_starts.tolist(), rows.starts.tolist(), rows.table_rows.tolist())
    for first, end, start, row in zip(columns[0], columns[0][1:], columns[1], columns[2], strict=False):
        if first == end:
            continue
        before = states[row, start % num_places] if start else torch.zeros_like(states[row, 0])
        inputs = torch.cat([before, x[first:end].T], 1)
        windows = inputs.unfold(1, num_before + 1, 1).float()  # [C, tokens, K]
        sums = (windows * weight[:, None]).sum(2)
        sums = sums if bias is None else sums + bias[:, None]
        out[first:end] = (torch.nn.functional.silu(sums) if has_silu else sums).T.to(x.dtype)
        for at in range(kept_from(start, end - first, num_places) + 1, end - first + 1):
            states[row, (start + at) % num_places] = inputs[:, at : at + num_before]
    return out


def native_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, rows: StateRows, has_silu: bool = True
) -> Tensor:
    """C++ (cpp/recurrent.cpp)."""
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    native().without_gil.causal_conv(
        DTYPES[x.dtype],
        *(x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), states.data_ptr(), out.data_ptr()),
        *(rows.query_starts.data_ptr(), rows.starts.data_ptr(), rows.table_rows.data_ptr()),
        *(len(rows.starts), x.shape[1], weight.shape[1], states.shape[1], has_silu),
    )
    return out


def _make_triton(has_silu: bool = True) -> Callable[..., Tensor]:
    from millrace.ops.triton.recurrent.conv import causal_conv as triton_conv  # local: imports Triton

    return partial(triton_conv, has_silu=has_silu)


VERSIONS = (
    Version(
        op="causal_conv",
        name="triton",
        make=_make_triton,
        when="one program per row and block of channels; the best on a GPU",
        devices=("cuda",),
        invariant_on=("cuda",),
        missing=triton_missing,
    ),
    Version(
        op="causal_conv",
        name="native",
        make=lambda has_silu=True: partial(native_conv, has_silu=has_silu),
        when="C++ over rows and channels; the best on a CPU",
        devices=("cpu",),
        dtypes=tuple(DTYPES),
        invariant_on=("cpu",),
        missing=native_missing,
    ),
    Version(
        op="causal_conv",
        name="torch",
        make=lambda has_silu=True: partial(causal_conv, has_silu=has_silu),
        when="the reference, row by row",
        devices=("cpu",),
        invariant_on=("cpu",),
    ),
)
