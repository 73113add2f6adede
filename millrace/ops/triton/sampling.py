"""Drawing tokens on the GPU, without sorting and without waiting for the host.

`draw_greedy` is one kernel: programs over parts of the vocabulary race for the row's greatest value, and the one that
arrives last writes the token. `draw_full` is two. `_measure_kernel`, many programs to a row, applies bias, minimum
length and penalties and leaves of every tile its peak, the sum of its weights and the peaks of its groups.
`_draw_kernel`, one program to a row, finds the lowest logit that top-k, min-p and top-p keep, and inverts the
cumulative distribution in token order. The lowest logit is found by search over the ordered bits of a float, four ways
a pass. Passes go over a short list of candidates where the peaks of the groups prove that it holds all kept tokens;
over the whole row otherwise.

How a row is cut does not depend on how many rows there are, so neither does the token it draws. A row whose table row
is negative is padding: nothing is read or written for it.
"""

# Triton gives its kernels no types: parameters are pointers, integers and compile-time constants.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel

ROW_DTYPE = np.dtype(
    {
        "names": [
            "temperature", "top_k", "top_p", "min_p", "seed", "ends_from", "num_ends",
            "repetition", "presence", "frequency", "row", "adjusted", "marks", "bias",
        ],
        "formats": ["f4", "i4", "f4", "f4", "u8", "i4", "i4", "f4", "f4", "f4", "i4", "i8", "i8", "i8"],
        "offsets": [0, 4, 8, 12, 16, 24, 28, 32, 36, 40, 44, 48, 56, 64],
        "itemsize": 128,
    }
)  # fmt: skip
"""What the kernels read of a table row. The last three are addresses of lines of one word per token, 0 for none."""
ROW_WORDS = ROW_DTYPE.itemsize // 4
ROW_STRUCT = struct.Struct("<fiffQiifffiqqq56x")
"""The same for one record made of Python's own numbers."""
ROW_WORD = 11
"""Which word of a record names its table row."""
MAX_ENDS = 128
"""End tokens one row can have."""
IN_PROMPT = 1 << 30
"""In a word of a line of marks: the token occurs in the prompt. The bits below count its occurrences in the output."""

RACE_START = -0x7FFFFFFFFFFFFFFF
"""Below every bid for a row's greatest value."""

_RACE_START = tl.constexpr(RACE_START)
_WORDS = tl.constexpr(ROW_WORDS)
_ENDS = tl.constexpr(MAX_ENDS)
_IN_PROMPT = tl.constexpr(IN_PROMPT)
_TEMPERATURE = tl.constexpr(0)
_TOP_K = tl.constexpr(1)
_TOP_P = tl.constexpr(2)
_MIN_P = tl.constexpr(3)
_ENDS_FROM = tl.constexpr(6)
_NUM_ENDS = tl.constexpr(7)
_REPETITION = tl.constexpr(8)
_PRESENCE = tl.constexpr(9)
_FREQUENCY = tl.constexpr(10)
_ROW = tl.constexpr(ROW_WORD)
# In words of eight bytes.
_SEED = tl.constexpr(2)
_ADJUSTED = tl.constexpr(6)
_MARKS = tl.constexpr(7)
_BIAS = tl.constexpr(8)

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)
_KEY_OF_MINUS_INFINITY = tl.constexpr(-2139095041)

_EXACT_LOW_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Low bits of a float32 that carry nothing when the value came from this type."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a row is cut. Powers of two; the same for every launch over one vocabulary, or draws would depend on it."""

    tile: int = 4096
    """Tokens that one program of the first kernel measures, and that one pass of the second reads at once."""
    group: int = 64
    """Neighbouring tokens whose peak is noted."""
    capacity: int = 4096
    """Candidates a row can have."""
    groups_wanted: int = 256
    """Without top-k: how many of the greatest groups the candidates are sought in."""
    measure_warps: int = 4
    draw_warps: int = 16


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _read(logits, line, offsets, inside, raw_end, ALIGN: tl.constexpr):
    """Values at offsets under `raw_end` from the model's own logits, others from a line of float32. NaN reads as -inf.

    `raw_end` is a multiple of ALIGN: said in a way that the compiler sees, it lets loads be wide.
    """
    raw_end = (raw_end // ALIGN) * ALIGN
    raw = tl.load(logits + offsets, mask=offsets < raw_end, other=float("-inf")).to(tl.float32)
    other = tl.load(line + offsets, mask=inside & (offsets >= raw_end), other=float("-inf"))
    value = tl.where(offsets < raw_end, raw, other)
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def _weight(value, peak, scale):
    """The unnormalised probability. A row without any finite value weighs all tokens alike."""
    return tl.exp(tl.where(value == peak, 0.0, (value - peak) * scale))


@triton.jit
def _key(value, shift):
    """An integer that orders as the value does, without `shift` bits that carry nothing."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift).to(tl.int64)


@triton.jit
def _unkey(key, shift):
    """The lowest value with this key."""
    bits = (key << shift.to(tl.int64)).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _greatest(value, token):
    """Of a block: value and token packed so that the maximum is the greatest value with the lowest token."""
    order = _key(value, 0) << 32
    return tl.max(order | (token ^ _NO_TOKEN).to(tl.int64), 0)


@triton.jit
def _token_of(packed):
    return ((packed & 0x7FFFFFFF) ^ _NO_TOKEN).to(tl.int32)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """In [0, 1), with 53 bits: the same number as run/sampling/noise.py gives."""
    state = _mix(seed.to(tl.uint64, bitcast=True) + _GOLDEN)
    state = _mix(state ^ (position.to(tl.int64).to(tl.uint64, bitcast=True) * _GOLDEN + _MIX_1))
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _field(record, index):
    return tl.load(record + index).to(tl.float32, bitcast=True)


@triton.jit
def _address(columns, row, index):
    return tl.load(columns.to(tl.pointer_type(tl.int64)) + row.to(tl.int64) * (_WORDS // 2) + index)


# ── the table ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _scatter_kernel(packed, columns):
    word = tl.arange(0, _WORDS)
    record = packed + tl.program_id(0) * _WORDS
    row = tl.load(record + _ROW).to(tl.int64)
    tl.store(columns + row * _WORDS + word, tl.load(record + word))


def scatter_rows(packed: Tensor, columns: Tensor) -> None:
    """Write records [n, ROW_WORDS] int32 to the table rows that they name."""
    if len(packed):
        _scatter_kernel[(len(packed),)](packed, columns, num_warps=1)


# ── greedy ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _greedy_kernel(
    logits, stride, rows, out, out_start, last_tokens, races, arrivals, vocab, part,
    TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(1)
    row = tl.load(rows + at)
    if row < 0:
        return
    if out_start is not None:
        out += tl.load(out_start)
    wait_for_previous_kernel(EARLY)
    line = logits + at.to(tl.int64) * stride
    lane = tl.arange(0, TILE)
    first = tl.program_id(0) * part
    best = tl.full([TILE], float("-inf"), tl.float32)
    token = first + lane
    offsets = first + lane
    value = tl.load(line + offsets, mask=offsets < vocab, other=float("-inf"))
    for start in range(TILE, part + TILE, TILE):
        # The next tile is on its way while this one is looked at; past the part nothing is asked for.
        ahead = first + start + lane
        following = tl.load(line + ahead, mask=ahead < tl.minimum(first + part, vocab), other=float("-inf"))
        wide = value.to(tl.float32)
        better = wide > best
        best = tl.where(better, wide, best)
        token = tl.where(better, offsets, token)
        offsets = ahead
        value = following
    # Acquire and release: whoever sees the last arrival sees every bid.
    tl.atomic_max(races + at, _greatest(best, token))
    if tl.atomic_add(arrivals + at, 1) == tl.num_programs(0) - 1:
        winner = _token_of(tl.atomic_xchg(races + at, _RACE_START))
        tl.atomic_xchg(arrivals + at, 0)
        tl.store(out + at, winner.to(out.dtype.element_ty))
        tl.store(last_tokens + row, winner.to(last_tokens.dtype.element_ty))


def draw_greedy(logits: Tensor, rows: Tensor, out: Tensor, last_tokens: Tensor, races: Tensor, arrivals: Tensor,
                out_start: Tensor | None = None, *,
                tile: int = 1024, warps: int = 4, programs: int = 132 * 6) -> None:  # fmt: skip
    """The greatest logit of each row, the lowest token among equals; `out` [n] and `last_tokens[rows]`. With
    `out_start` [1] int32, which is read on the device, `out` is filled from that place on.

    `races` int64 and `arrivals` int32, each of n or more, hold RACE_START and 0 before and after.
    """
    count, vocab = logits.shape
    tile = min(tile, triton.next_power_of_2(vocab))
    tiles = triton.cdiv(vocab, tile)
    # Parts of nearly equal size, about `programs` in all: enough to fill the chip.
    parts = triton.cdiv(tiles, triton.cdiv(count * tiles, programs))
    part = tile * triton.cdiv(tiles, parts)
    _greedy_kernel[(triton.cdiv(vocab, part), count)](
        logits, logits.stride(0), rows, out, out_start, last_tokens, races, arrivals, vocab, part,
        TILE=tile, num_warps=warps, **pdl_options(logits.device),
    )  # fmt: skip


# ── the first kernel: constrain and measure ───────────────────────────────────────────────────────────────────────────


@triton.jit
def _penalise(value, marks, offsets, inside, record):
    """Repetition over prompt and output first, then presence and frequency over the output."""
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
def _constrain(value, logits, offsets, inside, columns, row, position, ends):
    """Bias, minimum length, penalties. What changed goes to the row's line of adjusted logits. A row without one has
    at most end tokens to hide, and these are hidden in the logits themselves."""
    record = columns + row.to(tl.int64) * _WORDS
    adjusted = _address(columns, row, _ADJUSTED)
    bias = _address(columns, row, _BIAS)
    marks = _address(columns, row, _MARKS)
    if bias != 0:
        value += tl.load(bias.to(tl.pointer_type(tl.float32)) + offsets, mask=inside, other=0.0)
    if position < tl.load(record + _ENDS_FROM):
        before = value
        value = _mask_ends(value, offsets, ends + row.to(tl.int64) * _ENDS, tl.load(record + _NUM_ENDS))
        if adjusted == 0:
            tl.store(logits + offsets, value.to(logits.dtype.element_ty), mask=inside & (value != before))
    if marks != 0:
        value = _penalise(value, marks, offsets, inside, record)
    if adjusted != 0:
        tl.store(adjusted.to(tl.pointer_type(tl.float32)) + offsets, value, mask=inside)
    return value


@triton.jit
def _measure_kernel(logits, stride, rows, positions, columns, ends, peaks, bests, sums, group_peaks, vocab,
                    tiles, groups, TILE: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    at = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    row = tl.load(rows + at)
    if row < 0:
        return
    line = logits + at * stride
    offsets = tile * TILE + tl.arange(0, TILE)
    inside = offsets < vocab
    value = tl.load(line + offsets, mask=inside, other=float("-inf")).to(tl.float32)
    value = _constrain(value, line, offsets, inside, columns, row, tl.load(positions + at), ends)
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


# ── the second kernel: filter and draw ────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _count(logits, line, length, raw_end, a, b, c, ALIGN: tl.constexpr, TILE: tl.constexpr):
    """How many values reach a, b and c."""
    lane = tl.arange(0, TILE)
    count_a = tl.zeros([TILE], tl.int32)
    count_b = tl.zeros([TILE], tl.int32)
    count_c = tl.zeros([TILE], tl.int32)
    for start in range(0, length, TILE):
        inside = start + lane < length
        value = _read(logits, line, start + lane, inside, raw_end, ALIGN)
        count_a += ((value >= a) & inside).to(tl.int32)
        count_b += ((value >= b) & inside).to(tl.int32)
        count_c += ((value >= c) & inside).to(tl.int32)
    return tl.sum(count_a, 0), tl.sum(count_b, 0), tl.sum(count_c, 0)


@triton.jit
def _weigh(logits, line, length, raw_end, peak, scale, a, b, c, ALIGN: tl.constexpr, TILE: tl.constexpr):
    """The weights of the values that reach a, b and c, and how many they are."""
    lane = tl.arange(0, TILE)
    sum_a = tl.zeros([TILE], tl.float32)
    sum_b = tl.zeros([TILE], tl.float32)
    sum_c = tl.zeros([TILE], tl.float32)
    count_a = tl.zeros([TILE], tl.int32)
    count_b = tl.zeros([TILE], tl.int32)
    count_c = tl.zeros([TILE], tl.int32)
    for start in range(0, length, TILE):
        inside = start + lane < length
        value = _read(logits, line, start + lane, inside, raw_end, ALIGN)
        weight = _weight(value, peak, scale)
        in_a = (value >= a) & inside
        in_b = (value >= b) & inside
        in_c = (value >= c) & inside
        sum_a += tl.where(in_a, weight, 0.0)
        sum_b += tl.where(in_b, weight, 0.0)
        sum_c += tl.where(in_c, weight, 0.0)
        count_a += in_a.to(tl.int32)
        count_b += in_b.to(tl.int32)
        count_c += in_c.to(tl.int32)
    return (
        tl.sum(sum_a, 0), tl.sum(sum_b, 0), tl.sum(sum_c, 0),
        tl.sum(count_a, 0), tl.sum(count_b, 0), tl.sum(count_c, 0),
    )  # fmt: skip


@triton.jit
def _weigh_one(logits, line, length, raw_end, peak, scale, floor, ALIGN: tl.constexpr, TILE: tl.constexpr):
    lane = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, length, TILE):
        inside = start + lane < length
        value = _read(logits, line, start + lane, inside, raw_end, ALIGN)
        total += tl.where((value >= floor) & inside, _weight(value, peak, scale), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _kth_greatest(logits, line, length, raw_end, peak, lowest, wanted, shift, ALIGN: tl.constexpr, TILE: tl.constexpr):
    """The `wanted`-th greatest value, or a lower one above the next: what it keeps is the same. None is under `lowest`.

    Keys: `low` keeps enough, `high` too few.
    """
    low = _key(lowest, shift)
    high = _key(peak, shift) + 1
    kept = tl.full([], 0x7FFFFFFF, tl.int32)
    while (high - low > 1) & (kept > wanted):
        span = high - low
        a = low + span // 4
        b = low + span // 2
        c = low + (3 * span) // 4
        n_a, n_b, n_c = _count(
            logits, line, length, raw_end, _unkey(a, shift), _unkey(b, shift), _unkey(c, shift), ALIGN, TILE
        )  # fmt: skip
        high = tl.where(n_c >= wanted, high, tl.where(n_b >= wanted, c, tl.where(n_a >= wanted, b, a)))
        kept = tl.where(n_c >= wanted, n_c, tl.where(n_b >= wanted, n_b, tl.where(n_a >= wanted, n_a, kept)))
        low = tl.where(n_c >= wanted, c, tl.where(n_b >= wanted, b, tl.where(n_a >= wanted, a, low)))
    return _unkey(low, shift)


@triton.jit
def _nucleus(logits, line, length, raw_end, peak, scale, floor, wanted, shift, ALIGN: tl.constexpr, TILE: tl.constexpr):
    """The greatest value such that all at or over it weigh `wanted`, or a lower one above the next; `floor` if none."""
    low = _key(floor, shift)
    high = _key(peak, shift) + 1
    kept = tl.full([], 0x7FFFFFFF, tl.int32)
    above = tl.full([], 0, tl.int32)
    while (high - low > 1) & (kept - above > 1):
        span = high - low
        a = low + span // 4
        b = low + span // 2
        c = low + (3 * span) // 4
        w_a, w_b, w_c, n_a, n_b, n_c = _weigh(
            logits, line, length, raw_end, peak, scale,
            _unkey(a, shift), _unkey(b, shift), _unkey(c, shift), ALIGN, TILE,
        )  # fmt: skip
        high = tl.where(w_c >= wanted, high, tl.where(w_b >= wanted, c, tl.where(w_a >= wanted, b, a)))
        above = tl.where(w_c >= wanted, above, tl.where(w_b >= wanted, n_c, tl.where(w_a >= wanted, n_b, n_a)))
        kept = tl.where(w_c >= wanted, n_c, tl.where(w_b >= wanted, n_b, tl.where(w_a >= wanted, n_a, kept)))
        low = tl.where(w_c >= wanted, c, tl.where(w_b >= wanted, b, tl.where(w_a >= wanted, a, low)))
    return tl.maximum(floor, _unkey(low, shift))


@triton.jit
def _nth_peak(tops, wanted, shift):
    """The `wanted`-th greatest of a block."""
    low = tl.full([], _KEY_OF_MINUS_INFINITY, tl.int64) >> shift.to(tl.int64)
    high = _key(tl.max(tops, 0), shift) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((tops >= _unkey(middle, shift)).to(tl.int32), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return _unkey(low, shift)


@triton.jit
def _gather(logits, line, raw_end, vocab, floor, chosen, group_list, values, ids,
            GROUP: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr):  # fmt: skip
    """Every value of the `chosen` listed groups that reaches `floor`, with its token, in token order. How many there
    are, which may be more than there was room for."""
    lane = tl.arange(0, TILE)
    count = tl.full([], 0, tl.int32)
    for start in range(0, chosen, TILE // GROUP):
        slot = start + lane // GROUP
        group = tl.load(group_list + slot, mask=slot < chosen, other=0)
        token = group * GROUP + lane % GROUP
        inside = (slot < chosen) & (token < vocab)
        value = _read(logits, line, token, inside, raw_end, 1)
        taken = (value >= floor) & inside
        place = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        room = taken & (place < CAPACITY)
        tl.store(values + place, value, mask=room)
        tl.store(ids + place, token, mask=room)
        count += tl.sum(taken.to(tl.int32), 0)
    return count


@triton.jit
def _candidates(logits, line, raw_end, vocab, wanted, shift, group_peaks, group_list, groups, values, ids,
                GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr):  # fmt: skip
    """List all values that reach the `wanted`-th greatest peak of a group, `wanted` or more: that peak, how many."""
    which = tl.arange(0, GROUPS)
    tops = tl.load(group_peaks + which, mask=which < groups, other=float("-inf"))
    floor = _nth_peak(tops, wanted, shift)
    listed = (tops >= floor) & (which < groups)
    place = tl.cumsum(listed.to(tl.int32), 0) - 1
    tl.store(group_list + place, which, mask=listed)
    tl.debug_barrier()
    chosen = tl.sum(listed.to(tl.int32), 0)
    count = _gather(logits, line, raw_end, vocab, floor, chosen, group_list, values, ids, GROUP, TILE, CAPACITY)
    tl.debug_barrier()
    return floor, count


@triton.jit
def _bound(peak, scale, min_p):
    """The lowest value that min-p keeps; without min-p, something."""
    return peak + tl.log(tl.where(min_p > 0, min_p, 1.0)) / scale


@triton.jit
def _filter(logits, line, length, raw_end, peak, scale, total, top_k, top_p, min_p, lowest, shift,
            ALIGN: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """The lowest value that top-k, min-p and top-p keep. The source holds none under `lowest`; `total` weighs the whole
    row."""
    floor = lowest
    if min_p > 0:
        floor = tl.maximum(floor, _bound(peak, scale, min_p))
    if top_k > 0:
        floor = tl.maximum(floor, _kth_greatest(logits, line, length, raw_end, peak, lowest, top_k, shift, ALIGN, TILE))
    if top_p < 1.0:
        if (min_p > 0) | (top_k > 0):
            total = _weigh_one(logits, line, length, raw_end, peak, scale, floor, ALIGN, TILE)
        floor = _nucleus(logits, line, length, raw_end, peak, scale, floor, top_p * total, shift, ALIGN, TILE)
    return floor


@triton.jit
def _weigh_tiles(logits, line, length, raw_end, peak, scale, floor, masses, ALIGN: tl.constexpr, TILE: tl.constexpr):
    """Per tile, the weight of what is kept."""
    lane = tl.arange(0, TILE)
    for start in range(0, length, TILE):
        inside = start + lane < length
        value = _read(logits, line, start + lane, inside, raw_end, ALIGN)
        weight = tl.where((value >= floor) & inside, _weight(value, peak, scale), 0.0)
        tl.store(masses + start // TILE, tl.sum(weight, 0))
    tl.debug_barrier()


@triton.jit
def _first_over(cumulative, weight, target):
    """The first place where the cumulative weight passes the target; the last of any weight if rounding hides it."""
    place = tl.arange(0, cumulative.shape[0])
    first = tl.min(tl.where((cumulative > target) & (weight > 0), place, _NO_TOKEN), 0)
    last = tl.max(tl.where(weight > 0, place, 0), 0)
    return tl.where(first == _NO_TOKEN, last, first)


@triton.jit
def _invert(logits, line, length, raw_end, peak, scale, floor, masses, noise,
            TILE: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """The place in the source where the cumulative distribution of what is kept passes `noise`."""
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
                    # All that is kept is listed: by number, by the bound of min-p, or by weight.
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
                 values, ids, out, out_start, last_tokens, vocab, tiles, groups,
                 SHIFT: tl.constexpr, ALIGN: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr,
                 GROUPS: tl.constexpr, CAPACITY: tl.constexpr, WANTED: tl.constexpr,
                 LISTS: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at)
    if row < 0:
        return
    if out_start is not None:
        out += tl.load(out_start)
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
    tl.store(out + at, token.to(out.dtype.element_ty))
    tl.store(last_tokens + row, token.to(last_tokens.dtype.element_ty))
    marks = _address(columns, row, _MARKS)
    if marks != 0:
        mark = marks.to(tl.pointer_type(tl.int32)) + token
        tl.store(mark, tl.load(mark) + 1)


def draw_full(logits: Tensor, rows: Tensor, positions: Tensor, columns: Tensor, ends: Tensor, out: Tensor,
              last_tokens: Tensor, cut: Cut | None = None, out_start: Tensor | None = None) -> None:  # fmt: skip
    """One token per row as its record in `columns` says; `out` [n] and `last_tokens[rows]`, and its line of marks. With
    `out_start` [1] int32, which is read on the device, `out` is filled from that place on.

    In `logits` the end tokens of rows short of their minimum length are hidden where the row has no line of adjusted
    logits; nothing else in them is changed.
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
    _measure_kernel[(tiles, count)](
        logits, logits.stride(0), rows, positions, columns, ends, peaks[0], bests, peaks[1], group_peaks, vocab,
        tiles, groups, TILE=tile, GROUP=cut.group, num_warps=cut.measure_warps,
    )  # fmt: skip
    _draw_kernel[(count,)](
        logits, logits.stride(0), rows, positions, columns, peaks[0], bests, peaks[1], peaks[2], group_peaks,
        group_lists, values, ids, out, out_start, last_tokens, vocab, tiles, groups,
        SHIFT=_EXACT_LOW_BITS[logits.dtype], ALIGN=16 if vocab % 16 == 0 else 1, TILE=tile,
        TILES=max(2, triton.next_power_of_2(tiles)), GROUP=cut.group,
        GROUPS=triton.next_power_of_2(groups), CAPACITY=cut.capacity, WANTED=cut.groups_wanted,
        LISTS=vocab > 2 * cut.capacity, num_warps=cut.draw_warps,
    )  # fmt: skip


def _settle_keys() -> None:
    """A kernel's key, its name in the cache on disk, is made from the constants above, in Triton 3.6 only from those of
    helpers whose own keys had been asked for before. Asked for as they are defined, helpers first, every process finds
    the same, and none compiles again what another has."""
    for found in list(globals().values()):
        if isinstance(found, triton.JITFunction):
            hash(found)


_settle_keys()
