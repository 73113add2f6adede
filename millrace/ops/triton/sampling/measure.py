"""First kernel of a sampled draw: apply mask, bias, minimum length and penalties, and measure each tile of the
vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl

from millrace.ops.triton.kernel_keys import settle_keys
from millrace.ops.triton.row_records import (
    _ADJUSTED,
    _BIAS,
    _ENDS,
    _ENDS_FROM,
    _FREQUENCY,
    _IN_PROMPT,
    _MARKS,
    _MIN_P,
    _NUM_ENDS,
    _PRESENCE,
    _REPETITION,
    _TEMPERATURE,
    _TOP_K,
    _TOP_P,
    _WORDS,
    _address,
    _field,
)
from millrace.ops.triton.sampling.values import _greatest, _token_of, _weight


@triton.jit
def _penalise(value, marks, offsets, inside, record):
    """Repetition penalty over prompt and output first, then presence and frequency penalties over the output."""
    word = tl.load(marks.to(tl.pointer_type(tl.int32)) + offsets, mask=inside, other=0)
    times = word & (_IN_PROMPT - 1)
    repetition = _field(record, _REPETITION)
    weaker = tl.where(value > 0, tl.div_rn(value, tl.where(value > 0, repetition, 1.0)), value * repetition)
    value = tl.where(word != 0, weaker, value)
    produced = tl.where(times > 0, _field(record, _PRESENCE), 0.0)
    return value - (_field(record, _FREQUENCY) * times.to(tl.float32) + produced)


@triton.jit
def _mask_ends(value, offsets, ends, count):
    for index in range(count):
        value = tl.where(offsets == tl.load(ends + index), float("-inf"), value)
    return value


@triton.jit
def _mask_tokens(value, offsets, inside, line, mask_address, vocab):
    """Tokens whose bit is 0 in this line of the masks cannot be drawn."""
    words = line.to(tl.int64) * tl.cdiv(vocab, 32) + offsets // 32
    word = tl.load(tl.load(mask_address).to(tl.pointer_type(tl.int32)) + words, mask=inside, other=0)
    return tl.where(((word >> (offsets % 32)) & 1) != 0, value, float("-inf"))


@triton.jit
def _constrain(value, logits, offsets, inside, columns, row, position, ends, line, mask_address, vocab):
    """Apply the mask in `line` (negative for none), bias, minimum length and penalties. The result goes to the row's
    buffer of adjusted logits. A row without one has at most tokens to mask, which are masked in the logits themselves.
    """
    record = columns + row.to(tl.int64) * _WORDS
    adjusted = _address(columns, row, _ADJUSTED)
    bias = _address(columns, row, _BIAS)
    marks = _address(columns, row, _MARKS)
    is_early = position < tl.load(record + _ENDS_FROM)
    before = value
    if mask_address is not None:  # noqa: SIM102 - known at compile time, unlike the other condition
        if line >= 0:
            value = _mask_tokens(value, offsets, inside, line, mask_address, vocab)
    if bias != 0:
        value += tl.load(bias.to(tl.pointer_type(tl.float32)) + offsets, mask=inside, other=0.0)
    if is_early:
        value = _mask_ends(value, offsets, ends + row.to(tl.int64) * _ENDS, tl.load(record + _NUM_ENDS))
    if marks != 0:
        value = _penalise(value, marks, offsets, inside, record)
    if adjusted != 0:
        tl.store(adjusted.to(tl.pointer_type(tl.float32)) + offsets, value, mask=inside)
    elif is_early | (line >= 0):
        tl.store(logits + offsets, value.to(logits.dtype.element_ty), mask=inside & (value != before))
    return value


@triton.jit
def _measure_kernel(logits, stride, rows, positions, columns, ends, mask_lines, mask_address, peaks, bests, sums,
                    group_peaks, vocab, tiles, groups, TILE: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    at = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    row = tl.load(rows + at)
    if row < 0:
        return
    line = logits + at * stride
    offsets = tile * TILE + tl.arange(0, TILE)
    inside = offsets < vocab
    value = tl.load(line + offsets, mask=inside, other=float("-inf")).to(tl.float32)
    mask_line = tl.full([], -1, tl.int32)
    if mask_lines is not None:
        mask_line = tl.load(mask_lines + at)
    position = tl.load(positions + at)
    value = _constrain(
        value, line, offsets, inside, columns, row, position, ends, mask_line, mask_address, vocab
    )  # fmt: skip
    value = tl.where(inside & (value == value), value, float("-inf"))
    peak = tl.max(value, 0)
    tl.store(peaks + at * tiles + tile, peak)
    record = columns + row.to(tl.int64) * _WORDS
    temperature = _field(record, _TEMPERATURE)
    if temperature > 0:
        weight = tl.where(inside, _weight(value, peak, 1.0 / temperature), 0.0)
        tl.store(sums + at * tiles + tile, tl.sum(weight, 0))
        if (tl.load(record + _TOP_K) > 0) | (_field(record, _TOP_P) < 1.0) | (_field(record, _MIN_P) > 0.0):
            tops = tl.max(tl.reshape(value, [TILE // GROUP, GROUP]), 1)
            group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
            tl.store(group_peaks + at * groups + group, tops, mask=group < groups)
    else:
        tl.store(bests + at * tiles + tile, _token_of(_greatest(value, offsets)))


settle_keys(globals())
