"""Matrix products by cuBLASLt with algorithms chosen from measured tables, not by its heuristic.

For some sizes the heuristic picks the fastest of cuBLASLt's hundreds of kernels; for many others its pick is 5 to 20%
slower, and for one 50%. Here a product names the kernel's tile, thread block cluster and variant, as measured in
`ops/tuning/<device>/cublaslt.json`. The bindings cover only the calls used here and
use the copy of cuBLASLt that torch has loaded, so both have the same kernels. If cuBLASLt does not
know an algorithm, or rejects it for a size, torch computes the product.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from bisect import bisect_left
from collections.abc import Mapping
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from millrace.ops.tuning.load import EntriesByRows, product_table, rule_table

log = logging.getLogger(__name__)

ALIGNED_BYTES = 16
"""Rows must start at multiples of this."""
WORKSPACE_BYTES = 1024
"""Limit on an algorithm's workspace; some keep a counter there. Each product has its own, because products on two
streams must not share a counter."""

_SUCCESS = 0
_FLOAT32, _BFLOAT16, _COMPUTE_FLOAT32 = 0, 14, 68  # cudaDataType_t, cublasComputeType_t
_TRANSPOSE_A = 3  # cublasLtMatmulDescAttributes_t
_TILE, _SPLIT, _REDUCTION, _SWIZZLE, _OPTION, _STAGES, _INNER, _CLUSTER = range(1, 9)  # …AlgoConfigAttributes_t
_HOPPER_ALGORITHM, _STAGES_AUTO = 66, 35

CLUSTERS: Mapping[tuple[int, int], int] = {
    (1, 1): 2, (2, 1): 3, (4, 1): 4, (1, 2): 5, (2, 2): 6, (4, 2): 7, (1, 4): 8, (2, 4): 9, (4, 4): 10,
}  # fmt: skip
"""(outputs, rows) in thread blocks -> cublasLtClusterShape_t"""
TILES: Mapping[tuple[int, int], int] = {
    (32, 64): 12, (64, 32): 13, (64, 64): 15, (64, 80): 318, (64, 96): 26, (64, 112): 321, (64, 128): 17,
    (64, 208): 331, (96, 64): 27, (96, 128): 28, (96, 192): 151, (112, 128): 165, (112, 192): 166, (112, 320): 168,
    (128, 48): 397, (128, 56): 398, (128, 64): 18, (128, 72): 399, (128, 80): 400, (128, 88): 401, (128, 96): 33,
    (128, 104): 402, (128, 112): 403, (128, 128): 20, (128, 144): 406, (128, 152): 407, (128, 160): 29,
    (128, 168): 408, (128, 192): 32, (128, 208): 412, (128, 224): 414, (128, 320): 176, (144, 64): 183,
    (144, 128): 184, (152, 128): 189, (160, 128): 30, (168, 128): 197, (176, 128): 201, (192, 48): 453, (192, 56): 454,
    (192, 72): 455, (192, 80): 456, (192, 88): 457, (192, 104): 459, (192, 112): 460, (192, 160): 465, (216, 64): 217,
    (224, 128): 221, (240, 128): 227, (256, 64): 21, (256, 128): 24,
}  # fmt: skip
"""(outputs, rows) -> cublasLtMatmulTile_t; only tiles that the tables name."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One of cuBLASLt's Hopper kernels, and the order in which it walks its tiles."""

    tile_outputs: int
    tile_rows: int
    cluster_outputs: int
    cluster_rows: int
    option: int
    """cuBLASLt's custom option, a sum of flags. By its kernel names: 1, rows are the left operand; 2, tiles are walked
    along the other side first; 4, two warpgroups share a tile (cooperative) instead of alternating (ping-pong)."""

    @property
    def tile_number(self) -> int:
        return TILES[self.tile_outputs, self.tile_rows]

    @property
    def cluster_number(self) -> int:
        return CLUSTERS[self.cluster_outputs, self.cluster_rows]


class _AlgoData(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _CheckResult(ctypes.Structure):
    _fields_ = [
        ("algo", _AlgoData),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


_SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "cublasLtCreate": (c_void_p,),
    "cublasLtMatmulDescCreate": (c_void_p, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutCreate": (c_void_p, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatmulAlgoInit": (c_void_p, c_int, c_int, c_int, c_int, c_int, c_int, c_int, c_void_p),
    "cublasLtMatmulAlgoConfigSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulAlgoCheck": (c_void_p,) * 8,
    "cublasLtMatmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
}


class CublasltError(Exception):
    """A cuBLASLt call failed. Never leaves this module."""


class Cublaslt:
    """The cuBLASLt that torch has loaded, with its own handle for one device."""

    def __init__(self) -> None:
        name = f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}"
        self.functions = ctypes.CDLL(name)  # Found by name: torch has already loaded it.
        self.functions.cublasLtGetVersion.restype = c_size_t
        self.version = int(self.functions.cublasLtGetVersion())
        for function, arguments in _SIGNATURES.items():
            getattr(self.functions, function).argtypes = arguments
        self.handle = self.make("cublasLtCreate")

    def call(self, function: str, *arguments: Any) -> None:
        status = getattr(self.functions, function)(*arguments)
        if status != _SUCCESS:
            raise CublasltError(f"{function} returned {status}")

    def make(self, function: str, *arguments: Any) -> c_void_p:
        made = c_void_p()
        self.call(function, byref(made), *arguments)
        return made


@functools.cache
def open_cublaslt(device: torch.device) -> Cublaslt | None:
    """None, with the reason in the log, if it cannot be loaded or is not the version that was measured."""
    try:
        with torch.cuda.device(device):
            found = Cublaslt()
    except (OSError, AttributeError, CublasltError) as error:
        log.warning("Cannot choose cuBLASLt algorithms (%s); its heuristic chooses them.", error)
        return None
    measured_major = rule_table(device, "cublaslt")["cublas_major"]
    if found.version // 10000 != measured_major:
        log.info(
            "cuBLASLt algorithms were measured with cuBLAS %d, found version %d; its heuristic chooses them.",
            measured_major,
            found.version,
        )
        return None
    return found


class Matmul:
    """y [rows, outputs] = x [rows, inputs] · weight [outputs, inputs]^T with one algorithm, ready to launch. Addresses,
    and whether the product is added to y, are given at the launch.

    cuBLASLt is column-major: it sees y as an outputs × rows matrix, the product of the transposed weight and x. Raises
    CublasltError if the algorithm does not accept this size.
    """

    def __init__(self, lib: Cublaslt, rows: int, outputs: int, inputs: int, algorithm: Algorithm, wide: bool) -> None:
        self._lib = lib
        out_type = _FLOAT32 if wide else _BFLOAT16
        self._product = lib.make("cublasLtMatmulDescCreate", _COMPUTE_FLOAT32, _FLOAT32)
        yes = c_int32(1)
        lib.call("cublasLtMatmulDescSetAttribute", self._product, _TRANSPOSE_A, byref(yes), 4)
        self._weight = lib.make("cublasLtMatrixLayoutCreate", _BFLOAT16, inputs, outputs, inputs)
        self._x = lib.make("cublasLtMatrixLayoutCreate", _BFLOAT16, inputs, rows, inputs)
        self._out = lib.make("cublasLtMatrixLayoutCreate", out_type, outputs, rows, outputs)
        self._algo = _AlgoData()
        self._set_algorithm(algorithm, out_type)
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self._launch = lib.functions.cublasLtMatmul

    def _set_algorithm(self, algorithm: Algorithm, out_type: int) -> None:
        lib, algo = self._lib, byref(self._algo)
        types = (_COMPUTE_FLOAT32, _FLOAT32, _BFLOAT16, _BFLOAT16, out_type, out_type)
        lib.call("cublasLtMatmulAlgoInit", lib.handle, *types, _HOPPER_ALGORITHM, algo)
        values = {
            _TILE: c_uint32(algorithm.tile_number), _STAGES: c_uint32(_STAGES_AUTO), _SPLIT: c_int32(1),
            _REDUCTION: c_uint32(0), _SWIZZLE: c_uint32(0), _OPTION: c_uint32(algorithm.option),
            _INNER: c_uint16(0), _CLUSTER: c_uint16(algorithm.cluster_number),
        }  # fmt: skip
        for attribute, value in values.items():
            lib.call("cublasLtMatmulAlgoConfigSetAttribute", algo, attribute, byref(value), ctypes.sizeof(value))
        found = _CheckResult()
        sides = (self._product, self._weight, self._x, self._out, self._out)
        lib.call("cublasLtMatmulAlgoCheck", lib.handle, *sides, algo, byref(found))
        if found.state != _SUCCESS or found.workspace_bytes > WORKSPACE_BYTES:
            raise CublasltError(f"{algorithm} needs {found.workspace_bytes} bytes of workspace, state {found.state}")

    def launch(self, x: Tensor, weight: Tensor, out: Tensor, workspace: Tensor, *, adds: bool = False) -> int:
        """Launch on the current stream; returns cuBLASLt's status, 0 for success."""
        at, kept = out.data_ptr(), self._one if adds else self._zero
        status: int = self._launch(
            self._lib.handle, self._product, byref(self._one), weight.data_ptr(), self._weight,
            x.data_ptr(), self._x, byref(kept), at, self._out, at, self._out, byref(self._algo),
            workspace.data_ptr(), WORKSPACE_BYTES, torch._C._cuda_getCurrentRawStream(out.get_device()),
        )  # fmt: skip
        return status


class CublasltProduct:
    """x · weight^T for a plain bf16 weight, with the algorithm measured for the number of rows, if there is one."""

    def __init__(self, weight: Tensor, entries: EntriesByRows, *, wide: bool = False) -> None:
        """`wide`: results are the float32 sums, not rounded."""
        self.weight = weight
        self._wide = wide
        self.limits = sorted(entries)
        self.entries = [entries[limit] for limit in self.limits]
        self._matmuls: dict[int, Matmul | None] = {}
        self._lib = open_cublaslt(weight.device) if entries and weight.is_cuda else None
        if self._lib is not None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=weight.device)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor | None:
        """[T, K] -> [T, N], into `out` if given. Returns None and does nothing if no algorithm was measured."""
        rows = x.shape[0]
        matmul = self._matmul_for(rows)
        if matmul is None or not self._is_plain(x) or (out is not None and not out.is_contiguous()):
            return None
        if out is None:
            dtype = torch.float32 if self._wide else x.dtype
            out = torch.empty((rows, self.weight.shape[0]), dtype=dtype, device=x.device)
        return out if self._launch(matmul, x, out, adds=False) else None

    def add_to(self, x: Tensor, total: Tensor) -> bool:
        """total [T, N] += x · weight^T, summed in float32 and rounded once. Returns False and does nothing if no
        algorithm was measured."""
        matmul = self._matmul_for(x.shape[0])
        if matmul is None or not self._is_plain(x) or not total.is_contiguous():
            return False
        return self._launch(matmul, x, total, adds=True)

    def _launch(self, matmul: Matmul, x: Tensor, out: Tensor, *, adds: bool) -> bool:
        rows, status = x.shape[0], matmul.launch(x, self.weight, out, self._workspace, adds=adds)
        if status == _SUCCESS:
            return True
        log.warning("cuBLASLt failed a product of %d rows (status %d); torch computes these from now on.", rows, status)
        self._matmuls[rows] = None
        return False

    def _is_plain(self, x: Tensor) -> bool:
        is_whole = x.stride() == (self.weight.shape[1], 1)
        return is_whole and x.dtype == self.weight.dtype and x.data_ptr() % ALIGNED_BYTES == 0

    def _matmul_for(self, rows: int) -> Matmul | None:
        if rows not in self._matmuls:
            self._matmuls[rows] = self._make(rows)
        return self._matmuls[rows]

    def _make(self, rows: int) -> Matmul | None:
        at = bisect_left(self.limits, rows)
        entry = self.entries[at] if at < len(self.entries) else None
        if entry is None or self._lib is None:
            return None
        outputs, inputs = self.weight.shape
        return shared_matmul(self._lib, rows, outputs, inputs, Algorithm(*entry), self._wide)


@functools.cache
def shared_matmul(
    lib: Cublaslt, rows: int, outputs: int, inputs: int, algorithm: Algorithm, wide: bool
) -> Matmul | None:
    """Shared by all products of one size, of which a model has one per layer. None if cuBLASLt rejects it."""
    try:
        return Matmul(lib, rows, outputs, inputs, algorithm, wide)
    except CublasltError as error:
        log.info("cuBLASLt product of %d rows and %d outputs: %s; torch computes it.", rows, outputs, error)
        return None


def measured_product(weight: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> CublasltProduct:
    """The product with this weight, with the algorithms measured for its size on this kind of GPU. Products with a bias
    were not measured: cuBLASLt would add it in the same kernel."""
    is_plain = bias is None and weight.dtype == torch.bfloat16 and weight.is_contiguous()
    table = product_table(weight.device, "cublaslt", "float32" if wide else "bf16") if is_plain else {}
    outputs, inputs = weight.shape
    return CublasltProduct(weight, table.get((outputs, inputs), {}), wide=wide)
