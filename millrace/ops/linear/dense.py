"""A linear layer: y = x W^T + b, with the weight [N, K] in whatever form its version likes to read.

make(weight, bias) -> Linear. The weight is plain, contiguous and in the model's dtype; a version that repacks it keeps
no reference to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.ops.head.drawing_head import DrawnTokens
from millrace.ops.linear import cublaslt_table
from millrace.ops.native import DTYPES, LinearDesc, LinearPart, native, native_missing
from millrace.ops.triton import hopper_missing, triton_missing
from millrace.ops.version import Shape, Version

if TYPE_CHECKING:
    from millrace.ops.triton.gemm.choice import TilesByRows

PACK_ROWS_HINT = 16
"""Rows of x that the packed layout is laid out for; measured to be good from 1 to 512."""
PANELS = 32
"""The C++ kernels pack outputs in pairs of panels of 16, the last pair padded."""
TILE_ROWS = 32
"""Fixed number of rows where a library's result depends on how many there are."""
ADDS_FROM = 1024
"""Rows from which it pays that a product adds to the residual, instead of the norm after it: 0 to 0.7% of a step of
1,024 tokens, 0.7 to 1% of one of 8,192, nothing that could be told apart of one of 512 (8B and 0.6B, H200)."""


class Linear(Protocol):
    num_bytes: int
    """Bytes held by weight, scales and bias; counters and other scratch of a few KiB are left out."""

    @property
    def takes_fp8(self) -> bool:
        """Whether it would rather have its input as `Quantised`."""
        ...

    def __call__(self, x: Any) -> Tensor:
        """[T, K] -> [T, N]. The input is a Tensor or, only where it says so, `Quantised`."""
        ...


class Head(Linear, Protocol):
    """A linear whose outputs are scores: two that differ must not become equal by being rounded."""

    def wide(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """As a call, in float32: the sums themselves, where the version can, not rounded to the model's dtype.
        `out`, float32 [T, N], is written where the version can write it; what is returned counts."""
        ...


@runtime_checkable
class Adding(Protocol):
    """What can add its result to what is there already, instead of leaving that to the norm after it."""

    def adds(self, rows: int) -> bool:
        """Whether that takes less time for so many rows."""
        ...

    def add_to(self, x: Any, total: Tensor) -> None:
        """total [T, N] += the result of a call, where `adds` says yes: in float32, rounded once."""
        ...


class PlainLinear:
    """The reference: the library's own linear over the plain weight."""

    takes_fp8 = False

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def wide(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return multiply_wide(x, self.weight, self.bias, out)


def multiply_wide(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """The library's product in float32. On a CPU it can only be rounded first, or else it takes ten times as long."""
    if not x.is_cuda or x.dtype == torch.float32:
        return F.linear(x, weight, bias).float()
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    return out if bias is None else out.add_(bias)


class NativeParts:
    """Parts that are packed for the C++ kernels, one below the other, as one linear layer: each weight is read once per
    call, and each output is summed in one order whatever the number of rows."""

    takes_fp8 = False

    def __init__(
        self, parts: Sequence[tuple[int, int, Tensor]], in_features: int, dtype: torch.dtype, bias: Tensor | None
    ) -> None:
        """`parts`: (format, outputs, packed) each, with the formats of cpp/linear/linear.h."""
        library = native()
        self._linear, self._take_rows = library.slow.linear, library.quick.take_rows
        self.in_features, self.out_features = in_features, sum(count for _, count, _ in parts)
        self.dtype = dtype
        self._held = [packed for _, _, packed in parts]
        self._bias = None if bias is None else bias.float()
        self._parts = (LinearPart * len(parts))(
            *(LinearPart(packed.data_ptr(), count, number) for number, count, packed in parts)
        )
        self.native = LinearDesc(
            parts=self._parts,
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_parts=len(parts),
            n=self.out_features,
            k=in_features,
            dtype=DTYPES[dtype],
        )
        """What the kernels read; valid as long as this object lives."""
        self._native_at = ctypes.addressof(self.native)
        self.num_bytes = sum(packed.nbytes for packed in self._held) + (0 if bias is None else bias.nbytes)
        self.decodes_apart = bool(library.quick.decodes_apart(self._native_at))
        """Whether `decode` has results of its own."""

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.dtype, False)

    def decode(self, x: Tensor) -> Tensor:
        """The same for rows that decode: they are multiplied with quantised weights as in linear_decode.h, faster
        where they are few, and with less rounding, so with results that are not those of a call."""
        return self._multiply(x, self.dtype, True)

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        return self._multiply(x, torch.float32, decode)

    def _multiply(self, x: Tensor, dtype: torch.dtype, decode: bool) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty((rows, self.out_features), dtype=dtype)
        is_wide = dtype is torch.float32
        self._linear(self._native_at, x.data_ptr(), x.stride(0), out.data_ptr(), rows, is_wide, decode)
        return out

    def take_rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight, by index."""
        ids = ids.contiguous()
        out = torch.empty((ids.shape[0], self.in_features), dtype=self.dtype)
        wrong = self._take_rows(self._native_at, out.data_ptr(), ids.data_ptr(), ids.shape[0])
        if wrong >= 0:
            raise IndexError(f"token id {int(ids[wrong])} is outside the vocabulary of {self.out_features}")
        return out


class NativeLinear(NativeParts):
    """One plain weight in the model's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        outputs, inputs = weight.shape
        number = DTYPES[weight.dtype]
        packed = pack_plain(weight)
        super().__init__([(number, outputs, packed)], inputs, weight.dtype, bias)


def pack_plain(weight: Tensor) -> Tensor:
    """The weight in panels for the C++ kernels."""
    outputs, inputs = weight.shape
    number = DTYPES[weight.dtype]
    library = native()
    padded = library.quick.padded_inputs(number, inputs)
    packed = torch.empty(-(-outputs // PANELS) * PANELS * padded, dtype=weight.dtype)
    library.slow.pack(number, weight.contiguous().data_ptr(), packed.data_ptr(), outputs, inputs)
    return packed


class PackedLinear:
    """oneDNN over a weight in its own blocked layout: no reordering per call, about twice as fast for few rows."""

    takes_fp8 = False

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS_HINT)
        self.bias = bias
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return result

    def wide(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self(x).float()


class TiledLinear:
    """Another linear, always called with exactly `TILE_ROWS` rows, so that a row's sum never changes its order."""

    takes_fp8 = False

    def __init__(self, inner: Linear) -> None:
        self.inner = inner
        self.num_bytes = inner.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -rows % TILE_ROWS))
        tiles = [self.inner(tile) for tile in torch.split(padded, TILE_ROWS)]
        return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:rows]

    def wide(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self(x).float()


class TunedLinear:
    """For each number of rows what was measured to be fastest for this size: a kernel of ours and its tiles, or the
    library, with an algorithm that was measured or with its own choice."""

    takes_fp8 = False

    def __init__(self, weight: Tensor, bias: Tensor | None = None, tiles: TilesByRows | None = None) -> None:
        from millrace.ops.triton.gemm import choice as gemm_choice
        from millrace.ops.triton.gemm import product as gemm
        from millrace.ops.triton.gemm import table as gemm_table

        self.weight = weight
        self.bias = bias
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._multiply = gemm.multiply
        self._tiles = tiles or gemm_choice.measured(gemm_table.BF16, weight)
        self._counters = self._tiles.counters(weight.shape[0], weight.device)
        self._chosen = cublaslt_table.measured(weight, bias)
        self._chosen_wide = cublaslt_table.measured(weight, bias, wide=True)
        self._head_tiles = gemm_choice.measured_head(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        tiles = self._tiles.of(x.shape[0])
        if tiles is not None:
            return self._multiply(x, self.weight, tiles, bias=self.bias, counters=self._counters)
        out = self._chosen(x)
        return F.linear(x, self.weight, self.bias) if out is None else out

    def adds(self, rows: int) -> bool:
        return rows >= ADDS_FROM and self.bias is None and self._tiles.of(rows) is None

    def add_to(self, x: Tensor, total: Tensor) -> None:
        if not self._chosen.add_to(x, total):
            total.addmm_(x, self.weight.t())

    def wide(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        tiles = self._tiles.of(x.shape[0])
        if tiles is not None:
            return self._multiply(
                x, self.weight, tiles, bias=self.bias, counters=self._counters, out_dtype=torch.float32, out=out
            )
        made = self._chosen_wide(x, out)
        return multiply_wide(x, self.weight, self.bias, out) if made is None else made

    def draws(self, rows: int) -> bool:
        return self._head_tiles.of(rows) is not None

    def draw(self, x: Tensor, vocab_size: int, to: DrawnTokens) -> None:
        from millrace.ops.triton.gemm.greedy_head import HeadTile, greedy_head  # what it needs takes a while to import

        tile = self._head_tiles.of(x.shape[0])
        assert tile is not None
        greedy_head(x, self.weight, HeadTile(*tile), to, vocab_size)


class InvariantLinear:
    """A kernel whose sums are cut by the weight's size alone, so that a row's result does not depend on the others."""

    takes_fp8 = False

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

    def wide(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        tiles, wide = self._choose(x.shape[0], self.weight), torch.float32
        return self._multiply(x, self.weight, tiles, bias=self.bias, counters=self._counters, out_dtype=wide, out=out)


def make_packed_tiles(weight: Tensor, bias: Tensor | None = None) -> TiledLinear:
    return TiledLinear(PackedLinear(weight, bias))


def _can_pack(device: torch.device) -> str:
    has_ops = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not (has_ops and torch._C._has_mkldnn):
        return "needs a torch built with oneDNN"
    has_kernels = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "" if has_kernels else "needs a processor for which oneDNN has kernels of bfloat16"


def _whole_blocks(shape: Shape) -> bool:
    """oneDNN pads to whole blocks of 64; sizes that are whole blocks take exactly the plain weight's bytes."""
    return bool(shape["in_features"] % 64 == 0 and shape["out_features"] % 64 == 0)


VERSIONS = (
    Version(
        op="linear",
        name="native",
        make=NativeLinear,
        when="C++ over a packed weight, with AMX where there is one: fast at few rows and many, one order of summation",
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
        fits=_whole_blocks,
        missing=_can_pack,
    ),
    Version(
        op="linear",
        name="packed_tiles",
        make=make_packed_tiles,
        when=f"as packed in fixed tiles of {TILE_ROWS} rows: the same sums whatever the batch, slower at many rows",
        devices=("cpu",),
        invariant_on=("cpu",),
        fits=_whole_blocks,
        missing=_can_pack,
    ),
    Version(
        op="linear",
        name="tuned",
        make=TunedLinear,
        when="by tables measured for each size and number of rows: Triton kernels made for few rows, or the library, "
        "with the algorithm that was fastest",
        devices=("cuda",),
        dtypes=(torch.bfloat16,),
        missing=hopper_missing,
    ),
    Version(
        op="linear",
        name="reference",
        make=PlainLinear,
        when="defines the meaning; the library chooses its kernel by the number of rows",
    ),
    Version(
        op="linear",
        name="tiles",
        make=lambda weight, bias=None: TiledLinear(PlainLinear(weight, bias)),
        when=f"the reference in fixed tiles of {TILE_ROWS} rows: the same sums whatever the batch",
        devices=("cpu",),
        invariant_on=("cpu",),
    ),
    Version(
        op="linear",
        name="invariant",
        make=InvariantLinear,
        when="Triton with sums cut by the weight's size alone: the same whatever the batch, slower at many rows",
        devices=("cuda",),
        invariant_on=("cuda",),
        missing=triton_missing,
    ),
)
