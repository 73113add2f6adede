"""`ops/recurrent/conv.py` on a GPU: one program per row and block of channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.base.state_rows import StateRows

CHANNELS = 128


@triton.jit
def _input(x, states, at, first, start, place, channel, inside, channels, BEFORE: tl.constexpr):
    """The inputs of token `at` of the row, which may lie before this step."""
    at, begun = at + tl.zeros_like(channel), start + tl.zeros_like(channel) > 0
    now = tl.load(x + (first + at) * channels + channel, mask=inside & (at >= 0), other=0.0)
    kept = states + (place * channels + channel) * BEFORE + BEFORE + at
    return tl.where(at >= 0, now, tl.load(kept, mask=inside & (at < 0) & begun, other=0.0))


@triton.jit
def _conv_kernel(
    x, weight, bias, states, out, query_starts, starts, table_rows, channels,
    PLACES: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    BEFORE: tl.constexpr = WIDTH - 1
    first = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - first
    start = tl.load(starts + row)
    states += tl.load(table_rows + row).to(tl.int64) * PLACES * channels * BEFORE
    place = start % PLACES
    for at in range(count):
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(WIDTH):
            own = _input(x, states, at - BEFORE + tap, first, start, place, channel, inside, channels, BEFORE)
            total += own.to(tl.float32) * tl.load(weight + channel * WIDTH + tap, mask=inside, other=0.0)
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=inside, other=0.0)
        if HAS_SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(out + (first + at) * channels + channel, total.to(out.dtype.element_ty), mask=inside)
    # The place that is read may be written too. Each program has its own channels, and newer states take nothing from
    # it once they hold the row's last inputs only; so the one written last to that place is written at the end.
    for back in range(tl.minimum(count, PLACES)):
        at = count - tl.minimum(count, PLACES) + 1 + back
        if (start + at) % PLACES != place:
            _keep(x, states, at, first, start, place, channel, inside, channels, BEFORE, PLACES)
    for back in range(tl.minimum(count, PLACES)):
        at = count - tl.minimum(count, PLACES) + 1 + back
        if (start + at) % PLACES == place:
            _keep(x, states, at, first, start, place, channel, inside, channels, BEFORE, PLACES)


@triton.jit
def _keep(
    x, states, at, first, start, place, channel, inside, channels, BEFORE: tl.constexpr, PLACES: tl.constexpr
):  # fmt: skip
    """Write the state after `at` of the row's tokens. A channel's inputs move towards older ones, so each is read
    before it is overwritten, by the same thread."""
    target = states + (((start + at) % PLACES) * channels + channel) * BEFORE
    for tap in tl.static_range(BEFORE):
        own = _input(x, states, at - BEFORE + tap, first, start, place, channel, inside, channels, BEFORE)
        tl.store(target + tap, own, mask=inside)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, rows: StateRows, has_silu: bool = True
) -> Tensor:
    x, channels = x.contiguous(), x.shape[1]
    out = torch.empty_like(x)
    _conv_kernel[len(rows.starts), triton.cdiv(channels, CHANNELS)](
        x, weight, weight if bias is None else bias, states, out, rows.query_starts, rows.starts, rows.table_rows,
        channels, PLACES=states.shape[1], WIDTH=weight.shape[1], HAS_BIAS=bias is not None, HAS_SILU=has_silu,
        BLOCK=CHANNELS, num_warps=4,
    )  # fmt: skip
    return out
