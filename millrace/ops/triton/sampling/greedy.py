"""Greedy draws in one kernel.

Programs over parts of the vocabulary race for the row's greatest logit; the last to arrive writes the token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel
from millrace.ops.triton.kernel_keys import settle_keys
from millrace.ops.triton.sampling.values import _greatest, _token_of
from millrace.ops.tuning.load import num_multiprocessors

RACE_START = -0x7FFFFFFFFFFFFFFF
"""Initial value of a race: below every bid."""

_RACE_START = tl.constexpr(RACE_START)


@triton.jit
def _greedy_kernel(
    logits, stride, rows, out, out_start, out_index, last_tokens, races, arrivals, vocab, part,
    TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(1)
    row = tl.load(rows + at)
    if row < 0:
        return
    if out_start is not None:
        out += tl.load(out_start)
    out += tl.load(out_index + at) if out_index is not None else at
    wait_for_previous_kernel(EARLY)
    line = logits + at.to(tl.int64) * stride
    lane = tl.arange(0, TILE)
    first = tl.program_id(0) * part
    best = tl.full([TILE], float("-inf"), tl.float32)
    token = first + lane
    offsets = first + lane
    value = tl.load(line + offsets, mask=offsets < vocab, other=float("-inf"))
    for start in range(TILE, part + TILE, TILE):
        # Load the next tile while this one is compared; nothing past the part.
        ahead = first + start + lane
        following = tl.load(line + ahead, mask=ahead < tl.minimum(first + part, vocab), other=float("-inf"))
        wide = value.to(tl.float32)
        better = wide > best
        best = tl.where(better, wide, best)
        token = tl.where(better, offsets, token)
        offsets = ahead
        value = following
    # Acquire and release: the last program to arrive sees every bid.
    tl.atomic_max(races + at, _greatest(best, token))
    if tl.atomic_add(arrivals + at, 1) == tl.num_programs(0) - 1:
        winner = _token_of(tl.atomic_xchg(races + at, _RACE_START))
        tl.atomic_xchg(arrivals + at, 0)
        tl.store(out, winner.to(out.dtype.element_ty))
        tl.store(last_tokens + row, winner.to(last_tokens.dtype.element_ty))


def draw_greedy(logits: Tensor, rows: Tensor, out: Tensor, last_tokens: Tensor, races: Tensor, arrivals: Tensor,
                out_start: Tensor | None = None, out_index: Tensor | None = None, *,
                tile: int = 1024, warps: int = 4, programs: int = 0) -> None:  # fmt: skip
    """Write the token with the greatest logit of each row, the lowest token among equals, to `out` [n] and
    `last_tokens[rows]`. With `out_start` [1] int32, which is read on the device, `out` is filled from that offset on;
    with `out_index` [n] int32, row i's token goes to that index instead of i.

    `races` int64 and `arrivals` int32, each of n or more, hold RACE_START and 0 before and after. `programs`: how
    many to aim for; 0 = six per multiprocessor.
    """
    count, vocab = logits.shape
    tile = min(tile, triton.next_power_of_2(vocab))
    tiles = triton.cdiv(vocab, tile)
    # Parts of nearly equal size, about `programs` in all: enough to fill the GPU.
    programs = programs or 6 * num_multiprocessors(logits.device)
    parts = triton.cdiv(tiles, triton.cdiv(count * tiles, programs))
    part = tile * triton.cdiv(tiles, parts)
    _greedy_kernel[(triton.cdiv(vocab, part), count)](
        logits, logits.stride(0), rows, out, out_start, out_index, last_tokens, races, arrivals, vocab, part,
        TILE=tile, num_warps=warps, **pdl_options(logits.device),
    )  # fmt: skip


settle_keys(globals())
