"""Top-k, top-p and min-p without sorting: find the lowest logit that they keep.

It is found by search over the ordered bits of a float, three thresholds per pass. Passes read a short list of
candidates where the peaks of token groups prove that it holds every kept token, and the whole row otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from millrace.ops.triton.kernel_keys import settle_keys
from millrace.ops.triton.sampling.values import _key, _read, _unkey, _weight

_KEY_OF_MINUS_INFINITY = tl.constexpr(-2139095041)


@triton.jit
def _count(logits, line, length, raw_end, a, b, c, ALIGN: tl.constexpr, TILE: tl.constexpr):
    """Number of values that are at least a, b and c."""
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
    """Total weight, and number, of the values that are at least a, b and c."""
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
    """A threshold that keeps the `wanted` greatest values: the `wanted`-th greatest, or less but above the next. No
    value is below `lowest`.

    Search over keys: `low` keeps enough, `high` too few.
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
    """The greatest threshold such that the values at or above it weigh `wanted`, or less but above the next value; at
    least `floor`."""
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
    """The `wanted`-th greatest value of a block."""
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
    """List every value of the `chosen` groups that is at least `floor`, with its token, in token order. Returns their
    number, which may exceed CAPACITY."""
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
    """List all values that are at least the `wanted`-th greatest group peak, hence `wanted` or more. Returns (that
    peak, their number)."""
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
    """The lowest value that min-p keeps; meaningless without min-p."""
    return peak + tl.log(tl.where(min_p > 0, min_p, 1.0)) / scale


@triton.jit
def _filter(logits, line, length, raw_end, peak, scale, total, top_k, top_p, min_p, lowest, shift,
            ALIGN: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """The lowest value that top-k, min-p and top-p keep. The source has no value below `lowest`; `total` is the weight
    of the whole row."""
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


settle_keys(globals())
