"""Sums over the processes of a model that is split, through host memory that the GPUs of all of them see.

Every number travels with the number of its exchange in one word of 8 bytes, which is written and read whole: whoever
finds the number of the exchange beside it has the right one, and no other order of memory is needed. A launch may be
captured: what differs between replays, the number of the exchange, is counted on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
"""Numbers of a program."""
LOOKS = 1024
"""How often a program looks for numbers before it looks whether a rank is lost."""


@triton.jit
def _word(value, turn):
    """The number's bits below those of the turn."""
    return (turn.to(tl.int64) << 32) | (value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _late(words, turn, real):
    """How many numbers of this turn are not there yet."""
    return tl.sum(((words >> 32) != turn).to(tl.int32) & real.to(tl.int32), 0)


@triton.jit(do_not_specialize=["count"])
def exchange_kernel(
    x,
    out,
    slots,
    turns,
    lost,
    count,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SLOT: tl.constexpr,
    CHUNK: tl.constexpr,
    LOOKS: tl.constexpr,
):
    """out = the sum of x over the ranks, in their order. A program meets the same program of the other ranks only.

    `slots` [2, SIZE, SLOT]: this turn's words of each rank, and those of the turn before, which a slower rank may still
    read. `turns`: how many exchanges each program has had. `lost` becomes 1 when a rank is lost: then nobody waits, and
    the sums are wrong."""
    program = tl.program_id(0)
    at = program * CHUNK + tl.arange(0, CHUNK)
    real = at < count
    turn = tl.load(turns + program) + 1
    own = tl.load(x + at, mask=real, other=0.0)
    part = slots + (turn & 1) * SIZE * SLOT + at
    tl.store(part + RANK * SLOT, _word(own, turn), mask=real, cache_modifier=".wt")
    total = tl.zeros((CHUNK,), tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += own
        else:
            words = tl.load(part + rank * SLOT, mask=real, other=0, volatile=True)
            late = _late(words, turn, real)
            looks = 0
            while late > 0:
                words = tl.load(part + rank * SLOT, mask=real, other=0, volatile=True)
                late = _late(words, turn, real)
                looks += 1
                if looks == LOOKS:
                    looks = 0
                    late = tl.where(tl.load(lost, volatile=True) != 0, 0, late)
            total += (words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(out + at, total, mask=real)
    tl.store(turns + program, turn)


def num_programs(slot: int) -> int:
    """Of the largest exchange."""
    return slot // CHUNK


def exchange(x: Tensor, out: Tensor, slots: Tensor, turns: Tensor, lost: Tensor, rank: int) -> None:
    """`x` and `out`: float32 [n], at most as many as a slot has; `slots`: int64 [2, ranks, slot], a multiple of CHUNK;
    `turns`: int32 [num_programs], zeros before the first exchange; `lost`: int32 [1]."""
    _, size, slot = slots.shape
    grid = (triton.cdiv(len(x), CHUNK),)
    sizes = {"RANK": rank, "SIZE": size, "SLOT": slot, "CHUNK": CHUNK, "LOOKS": LOOKS}
    exchange_kernel[grid](x, out, slots, turns, lost, len(x), **sizes, num_warps=8)


def new_turns(slot: int, device: torch.device) -> Tensor:
    return torch.zeros(num_programs(slot), dtype=torch.int32, device=device)
