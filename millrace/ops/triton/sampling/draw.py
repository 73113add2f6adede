"""Sampled draws in two kernels, without sorting and without waiting for the host.

The first (`measure.py`), many programs per row, applies mask, bias, minimum length and penalties and stores for every
tile its peak, the sum of its weights and the peaks of its groups. The second, one program per row, finds the lowest
logit that top-k, min-p and top-p keep (`filter.py`) and inverts the cumulative distribution in token order.

How a row is cut does not depend on the number of rows, so neither does the token it draws. A row whose table row is
negative is padding: nothing is read or written for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.kernel_keys import settle_keys
from millrace.ops.triton.row_records import (
    _ADJUSTED,
    _MARKS,
    _MIN_P,
    _SEED,
    _TEMPERATURE,
    _TOP_K,
    _TOP_P,
    _WORDS,
    _address,
    _field,
)
from millrace.ops.triton.sampling.filter import _bound, _candidates, _filter, _weigh_one
from millrace.ops.triton.sampling.measure import _measure_kernel
from millrace.ops.triton.sampling.values import _NO_TOKEN, _greatest, _read, _token_of, _uniform, _weight

_EXACT_LOW_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Low bits of a float32 that are always zero if the value came from this dtype."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a row is cut into tiles and groups, in powers of two. The same for every launch: draws depend on it."""

    tile: int = 4096
    """Tokens per program of the first kernel, and per iteration of the second."""
    group: int = 64
    """Neighbouring tokens whose peak is stored."""
    capacity: int = 4096
    """Maximum candidates of a row."""
    groups_wanted: int = 256
    """Without top-k: candidates come from this many groups, those with the greatest peaks."""
    measure_warps: int = 4
    draw_warps: int = 16


@dataclass(frozen=True, slots=True)
class MaskLines:
    """Where the grammar masks of a draw are; both tensors are read on the device."""

    lines: Tensor
    """int32 [n]: line of each row's mask, -1 for none."""
    address: Tensor
    """int64 [1]: address of the lines, uint32 [lines, words]: bit t % 32 of word t // 32 is 1 if token t is allowed."""


@triton.jit
def _weigh_tiles(logits, line, length, raw_end, peak, scale, floor, masses, ALIGN: tl.constexpr, TILE: tl.constexpr):
    """Store the weight of the kept values of each tile."""
    lane = tl.arange(0, TILE)
    for start in range(0, length, TILE):
        inside = start + lane < length
        value = _read(logits, line, start + lane, inside, raw_end, ALIGN)
        weight = tl.where((value >= floor) & inside, _weight(value, peak, scale), 0.0)
        tl.store(masses + start // TILE, tl.sum(weight, 0))
    tl.debug_barrier()


@triton.jit
def _first_over(cumulative, weight, target):
    """The first index where the cumulative weight exceeds the target; the last with any weight if rounding hides it."""
    place = tl.arange(0, cumulative.shape[0])
    first = tl.min(tl.where((cumulative > target) & (weight > 0), place, _NO_TOKEN), 0)
    last = tl.max(tl.where(weight > 0, place, 0), 0)
    return tl.where(first == _NO_TOKEN, last, first)


@triton.jit
def _invert(logits, line, length, raw_end, peak, scale, floor, masses, noise,
            TILE: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """The index in the source where the cumulative distribution of the kept values exceeds `noise`."""
    wide = masses.to(tl.float64)
    through = tl.cumsum(wide, 0)
    target = noise * tl.sum(wide, 0)
    tile = _first_over(through, wide, target)
    before = tl.sum(tl.where(tl.arange(0, TILES) < tile, wide, 0.0), 0)
    offsets = tile * TILE + tl.arange(0, TILE)
    inside = offsets < length
    value = _read(logits, line, offsets, inside, raw_end, 1)
    weight = tl.where((value >= floor) & inside, _weight(value, peak, scale), 0.0).to(tl.float64)
    return tile * TILE + _first_over(before + tl.cumsum(weight, 0), weight, target)


@triton.jit
def _random_token(logits, columns, row, position, vocab, peaks, sums, masses, group_peaks, group_list, groups, values,
                  ids, tiles, SHIFT: tl.constexpr, ALIGN: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
                  GROUP: tl.constexpr, GROUPS: tl.constexpr, CAPACITY: tl.constexpr, WANTED: tl.constexpr,
                  LISTS: tl.constexpr):  # fmt: skip
    record = columns + row.to(tl.int64) * _WORDS
    scale = 1.0 / _field(record, _TEMPERATURE)
    top_k = tl.load(record + _TOP_K)
    top_p = _field(record, _TOP_P)
    min_p = _field(record, _MIN_P)
    adjusted = _address(columns, row, _ADJUSTED)
    line = adjusted.to(tl.pointer_type(tl.float32))
    raw_end = tl.where(adjusted == 0, vocab, 0)
    shift = tl.where(adjusted == 0, SHIFT, 0)
    length = vocab
    listed = tl.full([], 0, tl.int32)
    which = tl.arange(0, TILES)
    tile_peaks = tl.load(peaks + which, mask=which < tiles, other=float("-inf"))
    peak = tl.max(tile_peaks, 0)
    tile_masses = tl.load(sums + which, mask=which < tiles, other=0.0) * _weight(tile_peaks, peak, scale)
    floor = tl.full([], float("-inf"), tl.float32)
    if (top_k > 0) | (top_p < 1.0) | (min_p > 0):
        total = tl.sum(tile_masses, 0)
        if LISTS:
            wanted = tl.where(top_k > 0, top_k, WANTED)
            if wanted <= tl.minimum(groups, CAPACITY // 2):
                lowest, count = _candidates(
                    logits, line, raw_end, vocab, wanted, shift, group_peaks, group_list, groups, values, ids,
                    GROUP, GROUPS, TILE, CAPACITY,
                )  # fmt: skip
                if count <= CAPACITY:
                    # True if every kept token is listed: by number, by the bound of min-p, or by weight.
                    whole = (top_k > 0) | ((min_p > 0) & (_bound(peak, scale, min_p) >= lowest))
                    if (whole == 0) & (min_p == 0):
                        weight = _weigh_one(logits, values, count, 0, peak, scale, lowest, ALIGN, TILE)
                        whole = weight > top_p * total
                    if whole:
                        listed += 1
                        raw_end = raw_end * 0
                        line = values
                        length = count
                        floor = lowest
        floor = _filter(
            logits, line, length, raw_end, peak, scale, total, top_k, top_p, min_p, floor, shift, ALIGN, TILE
        )  # fmt: skip
        _weigh_tiles(logits, line, length, raw_end, peak, scale, floor, masses, ALIGN, TILE)
        tile_masses = tl.load(masses + which, mask=which < tl.cdiv(length, TILE), other=0.0)
    noise = _uniform(_address(columns, row, _SEED), position)
    token = _invert(logits, line, length, raw_end, peak, scale, floor, tile_masses, noise, TILE, TILES)
    if listed > 0:
        token = tl.load(ids + token)
    return token


@triton.jit
def _draw_kernel(logits, stride, rows, positions, columns, peaks, bests, sums, masses, group_peaks, group_lists,
                 values, ids, out, out_start, out_index, last_tokens, vocab, tiles, groups,
                 SHIFT: tl.constexpr, ALIGN: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr,
                 GROUPS: tl.constexpr, CAPACITY: tl.constexpr, WANTED: tl.constexpr,
                 LISTS: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at)
    if row < 0:
        return
    if out_start is not None:
        out += tl.load(out_start)
    out += tl.load(out_index + at) if out_index is not None else at
    if _field(columns + row.to(tl.int64) * _WORDS, _TEMPERATURE) > 0:
        token = _random_token(
            logits + at * stride, columns, row, tl.load(positions + at), vocab, peaks + at * tiles, sums + at * tiles,
            masses + at * tiles, group_peaks + at * groups, group_lists + at * groups, groups, values + at * CAPACITY,
            ids + at * CAPACITY, tiles, SHIFT, ALIGN, TILE, TILES, GROUP, GROUPS, CAPACITY, WANTED, LISTS,
        )  # fmt: skip
    else:
        which = tl.arange(0, TILES)
        tile_peaks = tl.load(peaks + at * tiles + which, mask=which < tiles, other=float("-inf"))
        tokens = tl.load(bests + at * tiles + which, mask=which < tiles, other=_NO_TOKEN)
        token = _token_of(_greatest(tile_peaks, tokens))
    tl.store(out, token.to(out.dtype.element_ty))
    tl.store(last_tokens + row, token.to(last_tokens.dtype.element_ty))
    marks = _address(columns, row, _MARKS)
    if marks != 0:
        mark = marks.to(tl.pointer_type(tl.int32)) + token
        tl.store(mark, tl.load(mark) + 1)


def draw_full(logits: Tensor, rows: Tensor, positions: Tensor, columns: Tensor, ends: Tensor, out: Tensor,
              last_tokens: Tensor, cut: Cut | None = None, out_start: Tensor | None = None,
              out_index: Tensor | None = None, masks: MaskLines | None = None) -> None:  # fmt: skip
    """Draw one token per row by its record in `columns`, into `out` [n] and `last_tokens[rows]`, and count it in the
    row's `marks`. With `out_start` [1] int32, which is read on the device, `out` is filled from that offset on; with
    `out_index` [n] int32, row i's token goes to that index instead of i.

    For rows without a buffer of adjusted logits, masked tokens and, below the minimum length, end tokens are masked in
    `logits` itself; nothing else in it is changed.
    """
    cut = cut or Cut()
    count, vocab = logits.shape
    tile = min(cut.tile, max(cut.group, triton.next_power_of_2(vocab)))
    tiles, groups = triton.cdiv(vocab, tile), triton.cdiv(vocab, cut.group)
    place = logits.device
    peaks = torch.empty((3, count, tiles), dtype=torch.float32, device=place)
    bests = torch.empty((count, tiles), dtype=torch.int32, device=place)
    group_peaks = torch.empty((count, groups), dtype=torch.float32, device=place)
    group_lists = torch.empty((count, groups), dtype=torch.int32, device=place)
    values = torch.empty((count, cut.capacity), dtype=torch.float32, device=place)
    ids = torch.empty((count, cut.capacity), dtype=torch.int32, device=place)
    lines, address = (None, None) if masks is None else (masks.lines, masks.address)
    _measure_kernel[(tiles, count)](
        logits, logits.stride(0), rows, positions, columns, ends, lines, address, peaks[0], bests, peaks[1],
        group_peaks, vocab, tiles, groups, TILE=tile, GROUP=cut.group, num_warps=cut.measure_warps,
    )  # fmt: skip
    _draw_kernel[(count,)](
        logits, logits.stride(0), rows, positions, columns, peaks[0], bests, peaks[1], peaks[2], group_peaks,
        group_lists, values, ids, out, out_start, out_index, last_tokens, vocab, tiles, groups,
        SHIFT=_EXACT_LOW_BITS[logits.dtype], ALIGN=16 if vocab % 16 == 0 else 1, TILE=tile,
        TILES=max(2, triton.next_power_of_2(tiles)), GROUP=cut.group,
        GROUPS=triton.next_power_of_2(groups), CAPACITY=cut.capacity, WANTED=cut.groups_wanted,
        LISTS=vocab > 2 * cut.capacity, num_warps=cut.draw_warps,
    )  # fmt: skip


settle_keys(globals())
