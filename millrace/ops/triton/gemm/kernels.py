"""Kernels of the matrix products with few rows; `product.py` explains and launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from millrace.ops.triton.dependent_launch import wait_for_previous_kernel


@triton.jit
def _activate(x, KIND: tl.constexpr):
    if KIND == "silu":
        return x * tl.sigmoid(x)
    elif KIND == "gelu_tanh":
        # 0.5 (1 + tanh u) = sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _finish(
    acc, bias_ptr, x_scale_ptr, w_scale_ptr, rows, cols, M, columns, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr,
    ROW_SCALED: tl.constexpr,
):  # fmt: skip
    """Apply scales and bias to a tile whose elements are at `rows` and `cols` of the output."""
    if ROW_SCALED:
        acc = acc * tl.load(x_scale_ptr + rows, mask=rows < M, other=0.0)
    if SCALED:
        acc = acc * tl.load(w_scale_ptr + cols, mask=cols < columns, other=0.0)
    if HAS_BIAS:
        acc = acc + tl.load(bias_ptr + cols, mask=cols < columns, other=0.0).to(tl.float32)
    return acc


@triton.jit
def prefetch(w_ptr, n_ids, K, k_begin, k_end, depth, ITEM: tl.constexpr):
    """Prefetch the first `depth` inputs of each weight row's part into L2, in multiples of 16 bytes."""
    size = tl.maximum(tl.minimum(k_end - k_begin, depth) * ITEM // 16, 1) * 16
    pointers = w_ptr + n_ids.to(tl.int64) * K + tl.minimum(k_begin, K - 16 // ITEM)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [pointers, n_ids * 0 + size],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _prefetch_lines(w_ptr, n_ids, K, DEPTH: tl.constexpr, LINE: tl.constexpr):
    """Prefetch the first DEPTH inputs, one line of LINE inputs per thread. For tiles of few rows, where every thread
    would repeat the same bulk prefetch of a whole row."""
    k_ids = tl.minimum(tl.arange(0, DEPTH // LINE) * LINE, K - 1)
    pointers = w_ptr + n_ids.to(tl.int64)[:, None] * K + k_ids[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _multiply(x, w, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    if SWAP:
        return tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)


@triton.jit
def _load_x(x_ptr, m_ids, m_begin, k, M, K, x_stride, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        return x_ptr.load([m_begin, k])
    else:
        k_ids = k + tl.arange(0, BLOCK_K)
        pointers = x_ptr + m_ids.to(tl.int64)[:, None] * x_stride + k_ids[None, :]
        if EVEN_K:
            return tl.load(pointers, mask=m_ids[:, None] < M, other=0.0)
        else:
            return tl.load(pointers, mask=(m_ids[:, None] < M) & (k_ids[None, :] < K), other=0.0)


@triton.jit
def _load_w(w_ptr, n_ids, n_begin, k, K, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr):
    """`n_ids` are valid rows: those past the end repeat the last one, and their results are not stored."""
    if TMA:
        return w_ptr.load([n_begin, k])
    else:
        k_ids = k + tl.arange(0, BLOCK_K)
        pointers = w_ptr + n_ids.to(tl.int64)[:, None] * K + k_ids[None, :]
        if EVEN_K:
            return tl.load(pointers, eviction_policy="evict_first")
        else:
            return tl.load(pointers, mask=k_ids[None, :] < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _part(
    x_ptr, w_ptr, m_begin, n_begin, part, M, N, K, x_stride, up_offset, split,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of a tile over one part of K, for the weight's rows at n_begin and, if GATED, those up_offset later."""
    length = tl.cdiv(tl.cdiv(K, BLOCK_K), split) * BLOCK_K
    k_begin = part * length
    k_end = tl.minimum(k_begin + length, K)
    m_ids = m_begin + tl.arange(0, BLOCK_M)
    n_ids = tl.minimum(n_begin + tl.arange(0, BLOCK_N), N - 1)
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    for k in range(k_begin, k_end, BLOCK_K):
        x = _load_x(x_ptr, m_ids, m_begin, k, M, K, x_stride, BLOCK_K, EVEN_K, TMA)
        w = _load_w(w_ptr, n_ids, n_begin, k, K, BLOCK_K, EVEN_K, TMA)
        acc = _multiply(x, w, acc, SWAP, PRECISION)
        if GATED:
            w_up = _load_w(w_ptr, n_ids + up_offset, n_begin + up_offset, k, K, BLOCK_K, EVEN_K, TMA)
            up = _multiply(x, w_up, up, SWAP, PRECISION)
    return acc, up


@triton.jit
def _write(
    acc, up, bias_ptr, x_scale_ptr, w_scale_ptr, out_ptr, rows, cols, M, N, up_offset,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, ROW_SCALED: tl.constexpr,
):  # fmt: skip
    acc = _finish(acc, bias_ptr, x_scale_ptr, w_scale_ptr, rows, cols, M, N, HAS_BIAS, SCALED, ROW_SCALED)
    if ACTIVATION != "":
        up = _finish(
            up, bias_ptr + up_offset, x_scale_ptr, w_scale_ptr + up_offset, rows, cols, M, N,
            HAS_BIAS, SCALED, ROW_SCALED,
        )  # fmt: skip
        acc = _activate(acc, ACTIVATION) * up
    places = out_ptr + rows.to(tl.int64) * N + cols
    tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=(rows < M) & (cols < N))


@triton.jit
def _leave(mine, acc, up, spots, TILE: tl.constexpr, GATED: tl.constexpr):
    """Store this program's part of the sums before the program is counted as arrived."""
    tl.store(mine + spots, acc)
    if GATED:
        tl.store(mine + TILE + spots, up)
    # All warps must have stored before one of them increments the counter, whose release makes the stores visible.
    tl.debug_barrier()


@triton.jit
def _fetch(parts_ptr, stride, part, spots, split):
    """One part of the sums, or zeros past the last. Not a masked load: those would be serialised."""
    found = tl.load(parts_ptr + tl.minimum(part, split - 1) * stride + spots, cache_modifier=".cg")
    return tl.where(part < split, found, 0.0)


@triton.jit
def _gather(parts_ptr, stride, like, spots, split, PARTS: tl.constexpr):
    """All parts of the sums, added in order. Four are loaded before the first is added, if registers allow."""
    total = tl.zeros_like(like)
    if PARTS == 4:
        for first in range(0, split, 4):
            one = _fetch(parts_ptr, stride, first, spots, split)
            two = _fetch(parts_ptr, stride, first + 1, spots, split)
            three = _fetch(parts_ptr, stride, first + 2, spots, split)
            four = _fetch(parts_ptr, stride, first + 3, spots, split)
            total = total + one + two + three + four
    else:
        for part in range(split):
            total += _fetch(parts_ptr, stride, part, spots, split)
    return total


@triton.jit(do_not_specialize=["M", "split", "ahead"])
def gemm_kernel(
    x_ptr, w_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, out_ptr, partial_ptr, counter_ptr, raw_w_ptr,
    M, N, K, x_stride, up_offset, split, ahead,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SUMS: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, ROW_SCALED: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr, ITEM: tl.constexpr, COPIES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """out [M, N] = finish(x W^T); with ACTIVATION, act(gate) * up, where up's weights are up_offset rows later.

    SUMS: "whole"; or `split` parts, "parallel" in separate programs or "serial" in this one.
    EARLY: prefetch the first `ahead` inputs (of ITEM bytes each) of the weight rows while the previous kernel runs.
    """
    GATED: tl.constexpr = ACTIVATION != ""
    programs = split if SUMS == "parallel" else 1
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    # Programs that share a weight tile are neighbours, so it is read from memory once.
    m_begin = (pid % tiles_m) * BLOCK_M
    part = (pid // tiles_m) % programs
    tile_n = pid // (tiles_m * programs)
    n_begin = tile_n * BLOCK_N
    m_ids = m_begin + tl.arange(0, BLOCK_M)
    n_ids = n_begin + tl.arange(0, BLOCK_N)
    if EARLY:
        length = tl.cdiv(tl.cdiv(K, BLOCK_K), split) * BLOCK_K
        end = tl.minimum(part * length + length, K)
        prefetch(raw_w_ptr, tl.minimum(n_ids, N - 1), K, part * length, end, ahead, ITEM)
        if GATED:
            prefetch(raw_w_ptr, tl.minimum(n_ids, N - 1) + up_offset, K, part * length, end, ahead, ITEM)
    wait_for_previous_kernel(EARLY)
    acc, up = _part(
        x_ptr, w_ptr, m_begin, n_begin, part, M, N, K, x_stride, up_offset, split,
        BLOCK_M, BLOCK_N, BLOCK_K, GATED, EVEN_K, SWAP, TMA, PRECISION,
    )  # fmt: skip
    if SWAP:
        rows, cols = m_ids[None, :], n_ids[:, None]
    else:
        rows, cols = m_ids[:, None], n_ids[None, :]
    if SUMS == "parallel":
        # Parts are stored as whole tiles, one after the other, including what lies past the edge of the output.
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        SIDE: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
        spots = tl.arange(0, TILE // SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
        tile = tile_n * tiles_m + pid % tiles_m
        parts = partial_ptr + tile.to(tl.int64) * split * (TILE * COPIES)
        _leave(parts + part * (TILE * COPIES), acc, up, spots, TILE, GATED)
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == split - 1:
            tl.store(counter_ptr + tile, 0)
            acc = _gather(parts, TILE * COPIES, acc, spots, split, PARTS)
            if GATED:
                up = _gather(parts + TILE, TILE * COPIES, up, spots, split, PARTS)
            _write(
                acc, up, bias_ptr, x_scale_ptr, w_scale_ptr, out_ptr, rows, cols, M, N, up_offset,
                ACTIVATION, HAS_BIAS, SCALED, ROW_SCALED,
            )  # fmt: skip
    else:
        if SUMS == "serial":
            for later in range(1, split):
                more, more_up = _part(
                    x_ptr, w_ptr, m_begin, n_begin, later, M, N, K, x_stride, up_offset, split,
                    BLOCK_M, BLOCK_N, BLOCK_K, GATED, EVEN_K, SWAP, TMA, PRECISION,
                )  # fmt: skip
                acc += more
                up += more_up
        _write(
            acc, up, bias_ptr, x_scale_ptr, w_scale_ptr, out_ptr, rows, cols, M, N, up_offset,
            ACTIVATION, HAS_BIAS, SCALED, ROW_SCALED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["ahead"])
def gemv_kernel(
    x_ptr, w_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, out_ptr, N, K, x_stride, up_offset, ahead,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, ROW_SCALED: tl.constexpr, EVEN_K: tl.constexpr,
    EARLY: tl.constexpr, ITEM: tl.constexpr, SHARED_X: tl.constexpr,
):  # fmt: skip
    """As gemm_kernel, for one or two rows: products stay in the registers of their weights and are summed after the
    loop.

    SHARED_X: x is loaded and converted once for all weight rows of the tile, not by every thread that needs it.
    """
    GATED: tl.constexpr = ACTIVATION != ""
    n_ids = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe_ids = tl.minimum(n_ids, N - 1)
    if EARLY:
        if ITEM == 1:
            prefetch(w_ptr, safe_ids, K, 0, K, ahead, ITEM)
        else:
            _prefetch_lines(w_ptr, safe_ids, K, BLOCK_K, 128 // ITEM)
    wait_for_previous_kernel(EARLY)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up, acc_second, acc_second_up = acc, acc, acc
    # Addressed by the whole tile, each thread loads the inputs of its own weights.
    same_x = tl.zeros([1 if SHARED_X else BLOCK_N, BLOCK_K], tl.int32)
    for k in range(0, K, BLOCK_K):
        w = _load_w(w_ptr, safe_ids, 0, k, K, BLOCK_K, EVEN_K, False).to(tl.float32)
        k_ids = k + tl.arange(0, BLOCK_K)[None, :] + same_x
        inside = k_ids < K
        x = tl.load(x_ptr + k_ids, mask=inside, other=0.0).to(tl.float32)
        acc += w * x
        if ROWS == 2:
            second = tl.load(x_ptr + x_stride + k_ids, mask=inside, other=0.0).to(tl.float32)
            acc_second += w * second
        if GATED:
            w_up = _load_w(w_ptr, safe_ids + up_offset, 0, k, K, BLOCK_K, EVEN_K, False).to(tl.float32)
            acc_up += w_up * x
            if ROWS == 2:
                acc_second_up += w_up * second
    zero = n_ids * 0
    _write(
        tl.sum(acc, axis=1), tl.sum(acc_up, axis=1), bias_ptr, x_scale_ptr, w_scale_ptr, out_ptr, zero, n_ids, ROWS, N,
        up_offset, ACTIVATION, HAS_BIAS, SCALED, ROW_SCALED,
    )  # fmt: skip
    if ROWS == 2:
        _write(
            tl.sum(acc_second, axis=1), tl.sum(acc_second_up, axis=1), bias_ptr, x_scale_ptr, w_scale_ptr, out_ptr,
            zero + 1, n_ids, ROWS, N, up_offset, ACTIVATION, HAS_BIAS, SCALED, ROW_SCALED,
        )  # fmt: skip
