"""The GPU library's matrix product with an algorithm of our choice.

Left alone, the library guesses an algorithm from a product's size. The guess is the fastest of its hundreds of kernels
for some sizes and 5 to 20% off for many others, once by half. Here a product names the kernel's tile, its cluster of
programs and its variant; `cublaslt_table` holds what was measured. Only what is needed of the library's C interface is
bound. It is the copy that torch has loaded, so the kernels are the ones that torch could have taken, and where it does
not know an algorithm, or does not take it for a size, torch is asked instead.
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

log = logging.getLogger(__name__)

Choice = tuple[int, int, int, int, int] | None
"""The fields of `Algorithm`. None: the library's own choice."""
ChoicesByRows = Mapping[int, Choice]
"""An entry serves every number of rows up to it that has no smaller entry; more than the last go to the library."""

MEASURED_MAJOR = 13
"""The major version whose numbers of algorithms were measured; they mean nothing in another."""
ALIGNED_BYTES = 16
"""Where rows must begin."""
WORKSPACE_BYTES = 1024
"""What an algorithm may use: some keep a counter there. Each product has its own, since products of two streams must
not count in one place."""

_SUCCESS = 0
_FLOAT32, _BFLOAT16, _COMPUTE_FLOAT32 = 0, 14, 68  # cudaDataType_t, cublasComputeType_t
_TRANSPOSE_A = 3  # cublasLtMatmulDescAttributes_t
_TILE, _SPLIT, _REDUCTION, _SWIZZLE, _OPTION, _STAGES, _INNER, _CLUSTER = range(1, 9)  # …AlgoConfigAttributes_t
_HOPPER_ALGORITHM, _STAGES_AUTO = 66, 35

CLUSTERS: Mapping[tuple[int, int], int] = {
    (1, 1): 2, (2, 1): 3, (4, 1): 4, (1, 2): 5, (2, 2): 6, (4, 2): 7, (1, 4): 8, (2, 4): 9, (4, 4): 10,
}  # fmt: skip
"""(outputs, rows) in programs -> cublasLtClusterShape_t"""
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
"""(outputs, rows) -> cublasLtMatmulTile_t; those that `cublaslt_table` names."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One of the library's kernels for Hopper, and the order it takes its tiles in."""

    tile_outputs: int
    tile_rows: int
    cluster_outputs: int
    cluster_rows: int
    option: int
    """The library's number of a variant. By the names of its kernels: 1, rows are the left operand; 2, tiles go along
    the other side first; 4, two groups of warps share a tile instead of taking turns."""

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


class LibraryError(Exception):
    """A call that the library refused. Never leaves this module."""


class Library:
    """The library that torch has loaded, with a handle of its own for one device."""

    def __init__(self) -> None:
        name = f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}"
        self.functions = ctypes.CDLL(name)  # Found by its name, since it is loaded already.
        self.functions.cublasLtGetVersion.restype = c_size_t
        self.version = int(self.functions.cublasLtGetVersion())
        for function, arguments in _SIGNATURES.items():
            getattr(self.functions, function).argtypes = arguments
        self.handle = self.make("cublasLtCreate")

    def call(self, function: str, *arguments: Any) -> None:
        status = getattr(self.functions, function)(*arguments)
        if status != _SUCCESS:
            raise LibraryError(f"{function} answered {status}")

    def make(self, function: str, *arguments: Any) -> c_void_p:
        made = c_void_p()
        self.call(function, byref(made), *arguments)
        return made


@functools.cache
def open_library(device: torch.device) -> Library | None:
    """None, with the reason in the log, where there is none or not the one that was measured."""
    try:
        with torch.cuda.device(device):
            library = Library()
    except (OSError, AttributeError, LibraryError) as error:
        log.warning("The library's algorithms cannot be chosen (%s); it chooses them itself.", error)
        return None
    if library.version // 10000 != MEASURED_MAJOR:
        log.info("Algorithms were measured with cuBLAS %d, not with %d.", MEASURED_MAJOR, library.version)
        return None
    return library


class Plan:
    """y [rows, outputs] = x [rows, inputs] · weight [outputs, inputs]^T with one algorithm: everything but addresses,
    and whether it is added to what is in y.

    The library thinks in columns: what lies in memory as y is to it an outputs × rows matrix, the product of the
    weight, transposed, with x. Raises LibraryError where the algorithm does not take this size.
    """

    def __init__(self, library: Library, rows: int, outputs: int, inputs: int, choice: Algorithm, wide: bool) -> None:
        self._library = library
        out_type = _FLOAT32 if wide else _BFLOAT16
        self._product = library.make("cublasLtMatmulDescCreate", _COMPUTE_FLOAT32, _FLOAT32)
        yes = c_int32(1)
        library.call("cublasLtMatmulDescSetAttribute", self._product, _TRANSPOSE_A, byref(yes), 4)
        self._weight = library.make("cublasLtMatrixLayoutCreate", _BFLOAT16, inputs, outputs, inputs)
        self._x = library.make("cublasLtMatrixLayoutCreate", _BFLOAT16, inputs, rows, inputs)
        self._out = library.make("cublasLtMatrixLayoutCreate", out_type, outputs, rows, outputs)
        self._algo = _AlgoData()
        self._set_algorithm(choice, out_type)
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self._launch = library.functions.cublasLtMatmul

    def _set_algorithm(self, choice: Algorithm, out_type: int) -> None:
        library, algo = self._library, byref(self._algo)
        types = (_COMPUTE_FLOAT32, _FLOAT32, _BFLOAT16, _BFLOAT16, out_type, out_type)
        library.call("cublasLtMatmulAlgoInit", library.handle, *types, _HOPPER_ALGORITHM, algo)
        values = {
            _TILE: c_uint32(choice.tile_number), _STAGES: c_uint32(_STAGES_AUTO), _SPLIT: c_int32(1),
            _REDUCTION: c_uint32(0), _SWIZZLE: c_uint32(0), _OPTION: c_uint32(choice.option),
            _INNER: c_uint16(0), _CLUSTER: c_uint16(choice.cluster_number),
        }  # fmt: skip
        for attribute, value in values.items():
            library.call("cublasLtMatmulAlgoConfigSetAttribute", algo, attribute, byref(value), ctypes.sizeof(value))
        found = _CheckResult()
        sides = (self._product, self._weight, self._x, self._out, self._out)
        library.call("cublasLtMatmulAlgoCheck", library.handle, *sides, algo, byref(found))
        if found.state != _SUCCESS or found.workspace_bytes > WORKSPACE_BYTES:
            raise LibraryError(f"{choice} wants {found.workspace_bytes} bytes, state {found.state}")

    def launch(self, x: Tensor, weight: Tensor, out: Tensor, workspace: Tensor, *, adds: bool = False) -> int:
        """On the current stream. 0, or the library's refusal."""
        at, kept = out.data_ptr(), self._one if adds else self._zero
        status: int = self._launch(
            self._library.handle, self._product, byref(self._one), weight.data_ptr(), self._weight,
            x.data_ptr(), self._x, byref(kept), at, self._out, at, self._out, byref(self._algo),
            workspace.data_ptr(), WORKSPACE_BYTES, torch._C._cuda_getCurrentRawStream(out.get_device()),
        )  # fmt: skip
        return status


class ChosenProduct:
    """x · weight^T for a plain bf16 weight, with the algorithm chosen for the number of rows, if there is one."""

    def __init__(self, weight: Tensor, choices: ChoicesByRows, *, wide: bool = False) -> None:
        """`wide`: results are in float32, the sums themselves."""
        self.weight = weight
        self._wide = wide
        self._limits = sorted(choices)
        self._choices = [choices[limit] for limit in self._limits]
        self._plans: dict[int, Plan | None] = {}
        self._library = open_library(weight.device) if choices and weight.is_cuda else None
        if self._library is not None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=weight.device)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor | None:
        """[T, K] -> [T, N], in `out` if that is given; None, and nothing done, where the library should choose."""
        rows = x.shape[0]
        plan = self._plan_of(rows)
        if plan is None or not self._is_plain(x) or (out is not None and not out.is_contiguous()):
            return None
        if out is None:
            dtype = torch.float32 if self._wide else x.dtype
            out = torch.empty((rows, self.weight.shape[0]), dtype=dtype, device=x.device)
        return out if self._launch(plan, x, out, adds=False) else None

    def add_to(self, x: Tensor, total: Tensor) -> bool:
        """total [T, N] += x · weight^T, summed in float32 and rounded once. False, and nothing done, where the library
        should choose."""
        plan = self._plan_of(x.shape[0])
        if plan is None or not self._is_plain(x) or not total.is_contiguous():
            return False
        return self._launch(plan, x, total, adds=True)

    def _launch(self, plan: Plan, x: Tensor, out: Tensor, *, adds: bool) -> bool:
        rows, status = x.shape[0], plan.launch(x, self.weight, out, self._workspace, adds=adds)
        if status == _SUCCESS:
            return True
        log.warning("The library refused a product of %d rows (%d); it chooses for them itself.", rows, status)
        self._plans[rows] = None
        return False

    def _is_plain(self, x: Tensor) -> bool:
        is_whole = x.stride() == (self.weight.shape[1], 1)
        return is_whole and x.dtype == self.weight.dtype and x.data_ptr() % ALIGNED_BYTES == 0

    def _plan_of(self, rows: int) -> Plan | None:
        if rows not in self._plans:
            self._plans[rows] = self._make(rows)
        return self._plans[rows]

    def _make(self, rows: int) -> Plan | None:
        at = bisect_left(self._limits, rows)
        choice = self._choices[at] if at < len(self._choices) else None
        if choice is None or self._library is None:
            return None
        outputs, inputs = self.weight.shape
        return plan_for(self._library, rows, outputs, inputs, Algorithm(*choice), self._wide)


@functools.cache
def plan_for(library: Library, rows: int, outputs: int, inputs: int, choice: Algorithm, wide: bool) -> Plan | None:
    """Shared by the products of one size, of which a model has one per layer. None where the library refuses."""
    try:
        return Plan(library, rows, outputs, inputs, choice, wide)
    except LibraryError as error:
        log.info("%d rows to %d outputs: %s; the library chooses for them.", rows, outputs, error)
        return None
