"""Matrix products with few rows: y = x W^T, with W [N, K] as it is stored.

With few rows a product is nothing but reading the weight: what matters is bytes in flight and enough programs. `Tiles`
says how a product is cut; `gemm_table` holds what was measured to be best. One program computes a tile of the output,
or, split along K, a part of every sum of it. The parts go to a float32 workspace; the program that arrives last adds
them up in a fixed order, so that the result does not depend on which one that is, and sets the tile's counter back to
zero for the next launch.

Kinds:  gemv      no matrix unit: products in registers, summed along K at the end; one or two rows.
        dot       x is the left operand; the tile of rows has 16 or more.
        swap      W is the left operand: Hopper's wide instruction takes 64 rows of the left operand, and W has them.
        …_tma     operands are fetched by the tensor memory unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

Kind = Literal["gemv", "dot", "swap", "dot_tma", "swap_tma"]

PREFETCH_BYTES = 128
"""Length of a line that one prefetch brings."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one product is cut: the tile of one program in rows, outputs and inputs, and how it is run."""

    kind: Kind
    m: int
    n: int
    k: int
    split: int = 1
    """Into how many parts the sums over K are cut."""
    warps: int = 4
    stages: int = 4
    early: bool = False
    """Start while the kernel before still runs, fetch weights, and wait for it only before x is read."""
    parallel: bool = True
    """Whether the parts of the sums are programs of their own. If not, one program computes them one after the other;
    the result is the same, bit for bit."""

    def count(self, rows: int, outputs: int) -> int:
        """Tiles of the output."""
        return -(-rows // self.m) * -(-outputs // self.n)

    def takes(self, rows: int) -> bool:
        return self.kind != "gemv" or rows <= self.m


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
    acc, bias_ptr, x_scale_ptr, w_scale_ptr, rows, cols, M, columns, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr
):
    """Scales and bias of a tile whose elements belong to `rows` and `cols` of the output."""
    if SCALED:
        acc = acc * tl.load(x_scale_ptr + rows, mask=rows < M, other=0.0)
        acc = acc * tl.load(w_scale_ptr + cols, mask=cols < columns, other=0.0)
    if HAS_BIAS:
        acc = acc + tl.load(bias_ptr + cols, mask=cols < columns, other=0.0).to(tl.float32)
    return acc


@triton.jit
def _prefetch(w_ptr, n_ids, K, k_begin, DEPTH: tl.constexpr, LINE: tl.constexpr):
    """Bring the first DEPTH inputs of each weight row towards the L2 cache; LINE inputs are one line."""
    offsets = tl.arange(0, DEPTH // LINE) * LINE
    k_ids = tl.minimum(k_begin + offsets, K - 1)
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
    """`n_ids` are rows that exist: those past the end repeat the last one, and their results are not stored."""
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
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    acc = _finish(acc, bias_ptr, x_scale_ptr, w_scale_ptr, rows, cols, M, N, HAS_BIAS, SCALED)
    if ACTIVATION != "":
        up = _finish(up, bias_ptr + up_offset, x_scale_ptr, w_scale_ptr + up_offset, rows, cols, M, N, HAS_BIAS, SCALED)
        acc = _activate(acc, ACTIVATION) * up
    places = out_ptr + rows.to(tl.int64) * N + cols
    tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=(rows < M) & (cols < N))


@triton.jit
def _leave(mine, acc, up, spots, TILE: tl.constexpr, GATED: tl.constexpr):
    """Store this program's part of the sums, so that whoever sees it counted sees the part."""
    tl.store(mine + spots, acc)
    if GATED:
        tl.store(mine + TILE + spots, up)
    # All warps have stored before one of them counts this program; the counter carries their stores along.
    tl.debug_barrier()


@triton.jit
def _fetch(parts_ptr, stride, part, spots, split):
    """One part of the sums, or zeros past the last. Not a masked load: those would wait for each other."""
    found = tl.load(parts_ptr + tl.minimum(part, split - 1) * stride + spots, cache_modifier=".cg")
    return tl.where(part < split, found, 0.0)


@triton.jit
def _gather(parts_ptr, stride, like, spots, split, AHEAD: tl.constexpr):
    """All parts of the sums, added in their order. Four are fetched before the first is added, if registers allow."""
    total = tl.zeros_like(like)
    if AHEAD == 4:
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


@triton.jit(do_not_specialize=["M", "split"])
def _gemm_kernel(
    x_ptr, w_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, out_ptr, partial_ptr, counter_ptr,
    M, N, K, x_stride, up_offset, split,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SUMS: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr, LINE: tl.constexpr, COPIES: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """out [M, N] = finish(x W^T); with ACTIVATION, act(gate) * up, where up's weights are up_offset rows later.

    SUMS: "whole"; or in `split` parts, "parallel" ones by programs of their own, "serial" ones by this one.
    """
    GATED: tl.constexpr = ACTIVATION != ""
    programs = split if SUMS == "parallel" else 1
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    # Programs that share a weight tile are neighbours, so that it is read from memory once.
    m_begin = (pid % tiles_m) * BLOCK_M
    part = (pid // tiles_m) % programs
    tile_n = pid // (tiles_m * programs)
    n_begin = tile_n * BLOCK_N
    m_ids = m_begin + tl.arange(0, BLOCK_M)
    n_ids = n_begin + tl.arange(0, BLOCK_N)
    if EARLY:
        if not TMA:
            first = part * tl.cdiv(tl.cdiv(K, BLOCK_K), split) * BLOCK_K
            _prefetch(w_ptr, tl.minimum(n_ids, N - 1), K, first, BLOCK_K, LINE)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc, up = _part(
        x_ptr, w_ptr, m_begin, n_begin, part, M, N, K, x_stride, up_offset, split,
        BLOCK_M, BLOCK_N, BLOCK_K, GATED, EVEN_K, SWAP, TMA, PRECISION,
    )  # fmt: skip
    if SWAP:
        rows, cols = m_ids[None, :], n_ids[:, None]
    else:
        rows, cols = m_ids[:, None], n_ids[None, :]
    if SUMS == "parallel":
        # Parts are whole tiles, one behind the other, whatever hangs over the edge of the output.
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        SIDE: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
        spots = tl.arange(0, TILE // SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
        tile = tile_n * tiles_m + pid % tiles_m
        parts = partial_ptr + tile.to(tl.int64) * split * (TILE * COPIES)
        _leave(parts + part * (TILE * COPIES), acc, up, spots, TILE, GATED)
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == split - 1:
            tl.store(counter_ptr + tile, 0)
            acc = _gather(parts, TILE * COPIES, acc, spots, split, AHEAD)
            if GATED:
                up = _gather(parts + TILE, TILE * COPIES, up, spots, split, AHEAD)
            _write(
                acc, up, bias_ptr, x_scale_ptr, w_scale_ptr, out_ptr, rows, cols, M, N, up_offset,
                ACTIVATION, HAS_BIAS, SCALED,
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
            ACTIVATION, HAS_BIAS, SCALED,
        )  # fmt: skip


@triton.jit
def _gemv_kernel(
    x_ptr, w_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, out_ptr, N, K, x_stride, up_offset,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, EVEN_K: tl.constexpr, EARLY: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """As _gemm_kernel for one or two rows: products stay where their weights are, and are summed after the loop."""
    GATED: tl.constexpr = ACTIVATION != ""
    n_ids = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe_ids = tl.minimum(n_ids, N - 1)
    if EARLY:
        _prefetch(w_ptr, safe_ids, K, 0, BLOCK_K, LINE)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up, acc_second, acc_second_up = acc, acc, acc
    # x is addressed by the whole tile, so that each thread holds the inputs of its own weights.
    same_x = tl.zeros([BLOCK_N, BLOCK_K], tl.int32)
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
        up_offset, ACTIVATION, HAS_BIAS, SCALED,
    )  # fmt: skip
    if ROWS == 2:
        _write(
            tl.sum(acc_second, axis=1), tl.sum(acc_second_up, axis=1), bias_ptr, x_scale_ptr, w_scale_ptr, out_ptr,
            zero + 1, n_ids, ROWS, N, up_offset, ACTIVATION, HAS_BIAS, SCALED,
        )  # fmt: skip


# --- launching ---


@dataclass(frozen=True, slots=True)
class Scales:
    """What the operands were divided by: one number for each row of x, and one for each output."""

    x: Tensor
    weight: Tensor


def new_counters(count: int, device: torch.device) -> Tensor:
    """Counters for a split product: all zero between launches. Products that may run at once need their own."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def multiply(
    x: Tensor,
    weight: Tensor,
    tiles: Tiles,
    *,
    bias: Tensor | None = None,
    scales: Scales | None = None,
    activation: str = "",
    out_dtype: torch.dtype | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """[T, K] and [N, K] -> [T, N]. With an activation the weight's rows are gates, then ups: act(gate) * up [T, N / 2].

    `counters` is needed where the tiles are split and parallel: at least `tiles.count(T, outputs)` of them.
    """
    if x.stride(1) != 1 or (tiles.kind.endswith("_tma") and not _aligned(x)):
        x = x.clone(memory_format=torch.contiguous_format)
    rows, outputs = x.shape[0], weight.shape[0] // (2 if activation else 1)
    out = torch.empty((rows, outputs), dtype=out_dtype or x.dtype, device=x.device)
    if rows == 0:
        return out
    if tiles.kind == "gemv":
        _launch_gemv(x, weight, tiles, bias, scales, activation, out)
    else:
        _launch_gemm(x, weight, tiles, bias, scales, activation, out, counters)
    return out


def _shared_options(x: Tensor, weight: Tensor, tiles: Tiles, activation: str) -> dict[str, Any]:
    inputs = weight.shape[1]
    options: dict[str, Any] = {
        "BLOCK_N": tiles.n,
        "BLOCK_K": tiles.k,
        "ACTIVATION": activation,
        "EVEN_K": inputs % tiles.k == 0,
        "EARLY": tiles.early,
        "LINE": PREFETCH_BYTES // weight.element_size(),
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
    return {**options, "launch_pdl": True} if tiles.early else options


def _operands(out: Tensor, bias: Tensor | None, scales: Scales | None) -> tuple[Tensor, Tensor, Tensor]:
    """Bias and scales; where there are none, any tensor, which the kernel does not read."""
    x_scale, w_scale = (out, out) if scales is None else (scales.x, scales.weight)
    return out if bias is None else bias, x_scale, w_scale


def _launch_gemv(
    x: Tensor, weight: Tensor, tiles: Tiles, bias: Tensor | None, scales: Scales | None, activation: str, out: Tensor
) -> None:
    rows, outputs = out.shape
    if rows > 2:
        raise ValueError(f"the kind gemv takes one or two rows, not {rows}")
    _gemv_kernel[(-(-outputs // tiles.n),)](
        x,
        weight,
        *_operands(out, bias, scales),
        out,
        outputs,
        weight.shape[1],
        _row_stride(x),
        outputs,
        ROWS=rows,
        HAS_BIAS=bias is not None,
        SCALED=scales is not None,
        **_shared_options(x, weight, tiles, activation),
    )


def _launch_gemm(
    x: Tensor,
    weight: Tensor,
    tiles: Tiles,
    bias: Tensor | None,
    scales: Scales | None,
    activation: str,
    out: Tensor,
    counters: Tensor | None,
) -> None:
    rows, outputs = out.shape
    copies = 2 if activation else 1
    count = tiles.count(rows, outputs)
    partial: Tensor = out
    programs = 1
    if tiles.split > 1 and tiles.parallel:
        if counters is None or counters.shape[0] < count:
            raise ValueError(f"a product split over {count} tiles needs as many counters")
        programs = tiles.split
        partial = torch.empty(count * programs * copies * tiles.m * tiles.n, dtype=torch.float32, device=x.device)
    tma = tiles.kind.endswith("_tma")
    left, right = _descriptors(x, weight, tiles) if tma else (x, weight)
    _gemm_kernel[(count * programs,)](
        left,
        right,
        *_operands(out, bias, scales),
        out,
        partial,
        out if counters is None else counters,
        rows,
        outputs,
        weight.shape[1],
        _row_stride(x),
        outputs,
        tiles.split,
        BLOCK_M=tiles.m,
        SUMS="whole" if tiles.split == 1 else "parallel" if tiles.parallel else "serial",
        COPIES=copies,
        AHEAD=_parts_ahead(tiles),
        HAS_BIAS=bias is not None,
        SCALED=scales is not None,
        SWAP=tiles.kind.startswith("swap"),
        TMA=tma,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **_shared_options(x, weight, tiles, activation),
    )


def _parts_ahead(tiles: Tiles) -> int:
    """How many parts of a sum to fetch at a time: four, where they take at most 128 registers of a thread."""
    return 4 if tiles.m * tiles.n <= 32 * 32 * tiles.warps else 1


def _row_stride(x: Tensor) -> int:
    """Between two rows; that of a single row may be anything, and counts as its length."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def _aligned(x: Tensor) -> bool:
    """Whether the tensor memory unit can address it: rows that start at whole 16 bytes."""
    return x.data_ptr() % 16 == 0 and _row_stride(x) * x.element_size() % 16 == 0


def _descriptors(x: Tensor, weight: Tensor, tiles: Tiles) -> tuple[Any, Any]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    left = TensorDescriptor(x, list(x.shape), [_row_stride(x), 1], [tiles.m, tiles.k])
    return left, TensorDescriptor(weight, list(weight.shape), [weight.shape[1], 1], [tiles.n, tiles.k])
