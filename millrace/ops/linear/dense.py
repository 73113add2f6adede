"""A linear layer: y = x W^T + b.

make(weight, bias) -> Linear. The weight [N, K] is contiguous and in the model's dtype; a version that repacks it keeps
no reference to it.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.ops.base.greedy_head import DrawnTokens
from millrace.ops.base.version import FLOATS, Shape, Version
from millrace.ops.cpp.native import DTYPES, LinearDesc, LinearPart, native, native_missing
from millrace.ops.linear.cublaslt import measured_product
from millrace.ops.triton import hopper_missing, triton_missing

if TYPE_CHECKING:
    from millrace.ops.triton.gemm.choice import TilesByRows

PACK_ROWS_HINT = 16
"""Number of rows that oneDNN lays the packed weight out for; measured to be good from 1 to 512 rows."""
PANEL_PAIR = 32
"""Outputs are padded to a multiple of this: the C++ kernels read panels of 16 outputs in pairs."""
TILE_ROWS = 32
"""Rows per call of a kernel whose result depends on the number of rows."""
MIN_ROWS_TO_ADD = 1024
"""From this many rows on, the matrix product adds to the residual, instead of the norm after it. Saves 0 to 0.7% of a
step of 1,024 tokens, 0.7 to 1% at 8,192, nothing measurable at 512 (8B and 0.6B models, H200)."""


class Linear(ABC):
    """Base of all versions, which declare here what they can do beyond a plain product."""

    num_bytes: int
    """Bytes of weight, scales and bias, without a few KiB of counters and scratch."""
    takes_fp8: bool = False
    """True if the input should be `Quantised`."""
    has_decode_kernel: bool = False
    """True if `decode` uses another kernel than a call; its results then differ."""

    @abstractmethod
    def __call__(self, x: Any) -> Tensor:
        """[T, K] -> [T, N]. The input is a Tensor or, if `takes_fp8`, `Quantised`."""
        ...

    def decode(self, x: Any) -> Tensor:
        """The product for decode rows."""
        return self(x)

    @property
    def own_part(self) -> Linear:
        """The product of this rank, before `total` sums over the ranks of a mesh."""
        return self

    def total(self, own: Tensor) -> Tensor:
        return own

    def adds(self, rows: int) -> bool:
        """True if `add_to` is faster for this number of rows than leaving the addition to the norm after it."""
        return False

    def add_to(self, x: Any, total: Tensor) -> None:
        """total [T, N] += self(x), added in float32 and rounded once. Only if `adds` returned true."""
        raise NotImplementedError

    def plus(self, x: Any, total: Tensor) -> Tensor:
        """self(x) + total [T, N], which may be overwritten."""
        if self.adds(total.shape[0]):
            self.add_to(x, total)
            return total
        return self(x) + total


class Head(Linear):
    """A linear that can be the LM head. Its logits are float32: rounding to the model's dtype could make different ones
    equal."""

    @abstractmethod
    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        """Same as a call, or as `decode`, but in float32, without rounding to the model's dtype where the version can
        avoid it. A version may write to `out`, float32 [T, N], or ignore it; use the returned tensor."""
        ...

    def draws(self, rows: int) -> bool:
        """True if `draw` is faster for this number of rows than computing logits and argmax."""
        return False

    def draw(self, x: Tensor, vocab_size: int, to: DrawnTokens) -> None:
        """Draw the first token with the highest logit, among the first `vocab_size`, for each row of x, without writing
        logits. Only if `draws` returned true."""
        raise NotImplementedError


class PlainLinear(Head):
    """The reference: torch's own linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        return linear_float32(x, self.weight, self.bias, out)


def linear_float32(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """x W^T + b in float32. On a CPU it is rounded to x's dtype first: torch's float32 output is ten times slower."""
    if not x.is_cuda or x.dtype == torch.float32:
        return F.linear(x, weight, bias).float()
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    return out if bias is None else out.add_(bias)


class NativeParts(Head):
    """A linear layer in C++ over packed parts, consecutive along the outputs. Each weight is read once per call, and
    the order of summation does not depend on the number of rows."""

    def __init__(
        self,
        parts: Sequence[tuple[int, int, Tensor]],
        in_features: int,
        dtype: torch.dtype,
        bias: Tensor | None,
        order: int = 0,
    ) -> None:
        """`parts`: (format, number of outputs, packed weight); formats and `order` as in cpp/linear/linear.h."""
        kernels = native()
        self._linear, self._take_rows = kernels.without_gil.linear, kernels.with_gil.take_rows
        self.in_features, self.out_features = in_features, sum(count for _, count, _ in parts)
        self.dtype = dtype
        self._packed = [packed for _, _, packed in parts]  # kept alive for the addresses below
        self._bias = None if bias is None else bias.float()
        self._parts = (LinearPart * len(parts))(
            *(LinearPart(packed.data_ptr(), count, format, order) for format, count, packed in parts)
        )
        self.native = LinearDesc(
            parts=self._parts,
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_parts=len(parts),
            n=self.out_features,
            k=in_features,
            dtype=DTYPES[dtype],
        )
        """Descriptor that the kernels read; valid as long as this object lives."""
        self._address = ctypes.addressof(self.native)
        self.num_bytes = sum(packed.nbytes for packed in self._packed) + (0 if bias is None else bias.nbytes)
        self.has_decode_kernel = bool(kernels.with_gil.has_decode_kernel(self._address))

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.dtype, False)

    def decode(self, x: Tensor) -> Tensor:
        """Over quantised weights this uses the kernel of cpp/linear/linear_decode.h: faster for few rows, and it rounds
        less, so results differ from those of a call."""
        return self._multiply(x, self.dtype, True)

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        return self._multiply(x, torch.float32, decode)

    def _multiply(self, x: Tensor, dtype: torch.dtype, decode: bool) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty((rows, self.out_features), dtype=dtype)
        is_wide = dtype is torch.float32
        self._linear(self._address, x.data_ptr(), x.stride(0), out.data_ptr(), rows, is_wide, decode)
        return out

    def take_rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight by index, for an embedding lookup."""
        ids = ids.contiguous()
        out = torch.empty((ids.shape[0], self.in_features), dtype=self.dtype)
        invalid = self._take_rows(self._address, out.data_ptr(), ids.data_ptr(), ids.shape[0])
        if invalid >= 0:
            raise IndexError(f"token id {int(ids[invalid])} is outside the vocabulary of {self.out_features}")
        return out


def addresses_of(linears: Sequence[Linear]) -> ctypes.Array[ctypes.c_void_p] | None:
    """A table of their descriptors for the C++ kernels, valid as long as they live. None unless all are in C++."""
    native_parts = [linear for linear in linears if isinstance(linear, NativeParts)]
    if len(native_parts) < len(linears):
        return None
    return (ctypes.c_void_p * len(linears))(*(ctypes.addressof(linear.native) for linear in native_parts))


class NativeLinear(NativeParts):
    """A linear layer in C++ over one unquantised weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        outputs, inputs = weight.shape
        super().__init__([(DTYPES[weight.dtype], outputs, pack_plain(weight))], inputs, weight.dtype, bias)


def pack_plain(weight: Tensor) -> Tensor:
    """Pack an unquantised weight into panels for the C++ kernels."""
    outputs, inputs = weight.shape
    code, kernels = DTYPES[weight.dtype], native()
    padded = kernels.with_gil.padded_inputs(code, inputs)
    packed = torch.empty(-(-outputs // PANEL_PAIR) * PANEL_PAIR * padded, dtype=weight.dtype)
    kernels.without_gil.pack(code, weight.contiguous().data_ptr(), packed.data_ptr(), outputs, inputs)
    return packed


class PackedLinear(Head):
    """oneDNN over a weight in oneDNN's blocked layout: no reordering per call, about twice as fast for few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS_HINT)
        self.bias = bias
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return result

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        return self(x).float()


class TiledLinear(Head):
    """Calls another linear with exactly `TILE_ROWS` rows at a time, so that the order of summation never changes."""

    def __init__(self, inner: Linear) -> None:
        self.inner = inner
        self.num_bytes = inner.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -rows % TILE_ROWS))
        tiles = [self.inner(tile) for tile in torch.split(padded, TILE_ROWS)]
        return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:rows]

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        return self(x).float()


class TunedLinear(Head):
    """Uses what was measured fastest for this weight size and number of rows: a Triton kernel with given tiles, or
    cuBLASLt with a given algorithm. Falls back to torch's linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, tiles: TilesByRows | None = None) -> None:
        from millrace.ops.triton.gemm import choice as gemm_choice
        from millrace.ops.triton.gemm import product as gemm

        self.weight = weight
        self.bias = bias
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._multiply = gemm.multiply
        self._tiles = tiles or gemm_choice.measured("bf16", weight)
        self._counters = self._tiles.counters(weight.shape[0], weight.device)
        self._chosen = measured_product(weight, bias)
        self._chosen_wide = measured_product(weight, bias, wide=True)
        self._head_tiles = gemm_choice.measured_head(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        tiles = self._tiles.of(x.shape[0])
        if tiles is not None:
            return self._multiply(x, self.weight, tiles, bias=self.bias, counters=self._counters)
        out = self._chosen(x)
        return F.linear(x, self.weight, self.bias) if out is None else out

    def adds(self, rows: int) -> bool:
        return rows >= MIN_ROWS_TO_ADD and self.bias is None and self._tiles.of(rows) is None

    def add_to(self, x: Tensor, total: Tensor) -> None:
        if not self._chosen.add_to(x, total):
            total.addmm_(x, self.weight.t())

    def plus(self, x: Tensor, total: Tensor) -> Tensor:
        tiles = self._tiles.of(x.shape[0])
        if x.shape[0] == 1 and tiles is not None and self.bias is None:
            return self._multiply(x, self.weight, tiles, bias=total[0], counters=self._counters)
        return super().plus(x, total)

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        tiles = self._tiles.of(x.shape[0])
        if tiles is not None:
            return self._multiply(
                x, self.weight, tiles, bias=self.bias, counters=self._counters, out_dtype=torch.float32, out=out
            )
        made = self._chosen_wide(x, out)
        return linear_float32(x, self.weight, self.bias, out) if made is None else made

    def draws(self, rows: int) -> bool:
        return self._head_tiles.of(rows) is not None

    def draw(self, x: Tensor, vocab_size: int, to: DrawnTokens) -> None:
        from millrace.ops.triton.gemm.greedy_head import HeadTile, greedy_head  # slow to import

        tile = self._head_tiles.of(x.shape[0])
        assert tile is not None
        greedy_head(x, self.weight, HeadTile(*tile), to, vocab_size)


class InvariantLinear(Head):
    """A Triton kernel that splits sums by the weight's size only, so that a row's result does not depend on the
    batch."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        from millrace.ops.triton.gemm import choice as gemm_choice
        from millrace.ops.triton.gemm import product as gemm

        self.weight = weight
        self.bias = bias
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._multiply, self._choose = gemm.multiply, gemm_choice.invariant
        self._counters = gemm_choice.invariant_counters(weight.shape[0], weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        tiles = self._choose(x.shape[0], self.weight)
        return self._multiply(x, self.weight, tiles, bias=self.bias, counters=self._counters)

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        tiles, wide = self._choose(x.shape[0], self.weight), torch.float32
        return self._multiply(x, self.weight, tiles, bias=self.bias, counters=self._counters, out_dtype=wide, out=out)


def make_packed_tiles(weight: Tensor, bias: Tensor | None = None) -> TiledLinear:
    return TiledLinear(PackedLinear(weight, bias))


def _packed_dtypes() -> tuple[torch.dtype, ...]:
    """oneDNN raises an error for float16 weights on processors without float16 instructions."""
    has_check = hasattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported")
    has_float16 = has_check and torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return FLOATS if has_float16 else (torch.float32, torch.bfloat16)


def _onednn_missing(device: torch.device) -> str:
    has_ops = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not (has_ops and torch._C._has_mkldnn):
        return "needs a torch built with oneDNN"
    has_kernels = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "" if has_kernels else "needs a processor for which oneDNN has bfloat16 kernels"


def _whole_blocks(shape: Shape) -> bool:
    """oneDNN pads to blocks of 64: only multiples of 64 need no more memory than the plain weight."""
    return bool(shape["in_features"] % 64 == 0 and shape["out_features"] % 64 == 0)


VERSIONS = (
    Version(
        op="linear",
        name="native",
        make=NativeLinear,
        when="C++ over a packed weight, using AMX if available: fast for few rows and many, fixed order of summation",
        devices=("cpu",),
        dtypes=tuple(DTYPES),
        invariant_on=("cpu",),
        missing=native_missing,
    ),
    Version(
        op="linear",
        name="packed",
        make=PackedLinear,
        when="oneDNN with a prepacked weight; its order of summation changes with the number of rows",
        devices=("cpu",),
        dtypes=_packed_dtypes(),
        fits=_whole_blocks,
        missing=_onednn_missing,
    ),
    Version(
        op="linear",
        name="packed_tiles",
        make=make_packed_tiles,
        when=f"packed, in fixed tiles of {TILE_ROWS} rows: same sums whatever the batch, slower for many rows",
        devices=("cpu",),
        dtypes=_packed_dtypes(),
        invariant_on=("cpu",),
        fits=_whole_blocks,
        missing=_onednn_missing,
    ),
    Version(
        op="linear",
        name="tuned",
        make=TunedLinear,
        when="by tables measured for each size and number of rows: Triton kernels for few rows, or cuBLASLt with the "
        "fastest algorithm",
        devices=("cuda",),
        dtypes=(torch.bfloat16,),
        missing=hopper_missing,
    ),
    Version(
        op="linear",
        name="reference",
        make=PlainLinear,
        when="the reference; torch chooses its kernel by the number of rows",
    ),
    Version(
        op="linear",
        name="tiles",
        make=lambda weight, bias=None: TiledLinear(PlainLinear(weight, bias)),
        when=f"the reference in fixed tiles of {TILE_ROWS} rows: same sums whatever the batch",
        devices=("cpu",),
        invariant_on=("cpu",),
    ),
    Version(
        op="linear",
        name="invariant",
        make=InvariantLinear,
        when="Triton, sums split by the weight's size only: same sums whatever the batch, slower for many rows",
        devices=("cuda",),
        invariant_on=("cuda",),
        missing=triton_missing,
    ),
)
