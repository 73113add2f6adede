"""The record of a row on the device: sampling parameters and addresses of vocabulary buffers, 128 bytes."""

from __future__ import annotations

import struct

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.kernel_keys import settle_keys

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
"""Layout of a record. The last three are addresses of vocabulary buffers (one word per token), 0 = none."""
ROW_WORDS = ROW_DTYPE.itemsize // 4
ROW_STRUCT = struct.Struct("<fiffQiifffiqqq56x")
"""The same layout, for packing one record from Python numbers."""
ROW_WORD = 11
"""Index of the word that holds the table row."""
ENDS_WORDS, ADDRESS_WORDS = slice(6, 8), slice(12, 18)
"""Words of the minimum length, and of the addresses."""
MAX_ENDS = 128
"""Maximum number of end tokens of a row."""
IN_PROMPT = 1 << 30
"""Bit of a `marks` word: the token occurs in the prompt. The lower bits count its occurrences in the output."""
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
# Indices of 8-byte words.
_SEED = tl.constexpr(2)
_ADJUSTED = tl.constexpr(6)
_MARKS = tl.constexpr(7)
_BIAS = tl.constexpr(8)


@triton.jit
def _field(record, index):
    return tl.load(record + index).to(tl.float32, bitcast=True)


@triton.jit
def _address(columns, row, index):
    return tl.load(columns.to(tl.pointer_type(tl.int64)) + row.to(tl.int64) * (_WORDS // 2) + index)


@triton.jit
def _scatter_kernel(packed, columns):
    word = tl.arange(0, _WORDS)
    record = packed + tl.program_id(0) * _WORDS
    row = tl.load(record + _ROW).to(tl.int64)
    tl.store(columns + row * _WORDS + word, tl.load(record + word))


def scatter_rows(packed: Tensor, columns: Tensor) -> None:
    """Write records [n, ROW_WORDS] int32 to their table rows."""
    if len(packed):
        _scatter_kernel[(len(packed),)](packed, columns, num_warps=1)


settle_keys(globals())
