"""How 4-bit codes lie in memory for the kernels, and a kernel that dequantises them.

A matrix instruction of Nvidia GPUs takes 16 outputs by 16 inputs of the weight, spread over the 32 threads of a warp:
thread (g, t), g < 8 and t < 4, holds outputs g and g + 8 and four inputs. Its 8 codes are one word. A thread's words
for 64 consecutive inputs lie next to each other, so it loads them with one instruction of 16 bytes:

    words [N / 16, K / 64, g, t, j]      j = 2 a + b
    word                                 code of input 32 a + 8 t + 4 b + 2 h + e and output g + 8 r at bit
                                         16 e + 8 h + 4 r
    records [N / 16, groups, g, r]       of output g + 8 r: its scale in the lower 16 bits, minus (zero + offset) above,
                                         both in the model's dtype

So thread t has the inputs 8 t to 8 t + 7 of each 32, and loads those of x with one instruction too. The instruction's
own order is another, but any order will do if both operands have it. Where the other operand comes from shared memory,
in the instruction's order, the codes are exchanged between neighbouring threads (`instructions.py`).

With `offset` a code needs no conversion: its bits, put into the low bits of the number 128 (bfloat16) or 1,024
(float16), make the number offset + code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

OUTPUTS = 16
INPUTS = 64
"""Outputs and inputs of one tile of words; a weight's sizes are multiples of them."""
WORDS = 128
"""Words in a tile."""
OFFSETS = {torch.bfloat16: 128, torch.float16: 1024}
MIN_GROUP = 32
_BLOCK_N, _BLOCK_K = 16, 256


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A weight [N, K] of 4-bit codes in the layout of this module."""

    words: Tensor
    """int32 [N / 16, K / 64 * 128]"""
    records: Tensor
    """int32 [N / 16, groups, 16]"""
    outputs: int
    inputs: int
    group: int
    """Inputs per record."""
    dtype: torch.dtype

    @property
    def group_shift(self) -> int:
        """Input >> shift is its group."""
        return 30 if self.group == self.inputs else self.group.bit_length() - 1

    @property
    def half_step(self) -> int:
        """Distance of the records of the lower and upper 32 of 64 inputs."""
        return OUTPUTS if self.group == MIN_GROUP else 0

    @property
    def blocks_per_record(self) -> int:
        """Neighbouring blocks of 64 inputs that always share their records: 1 or 2."""
        return 2 if self.group % (2 * INPUTS) == 0 else 1

    @property
    def num_bytes(self) -> int:
        return self.words.nbytes + self.records.nbytes


def fits(outputs: int, inputs: int, group: int) -> bool:
    """True if a weight of these sizes can be packed: whole tiles, and groups of a power of two or of all inputs."""
    whole = outputs % OUTPUTS == 0 and inputs % INPUTS == 0 and inputs % group == 0
    return whole and (group == inputs or (group >= MIN_GROUP and group & (group - 1) == 0))


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, group: int, dtype: torch.dtype) -> PackedCodes:
    """Codes [N, K / 2] with even inputs in the low halves, scales and zeros [N, K / group]."""
    outputs, inputs = codes.shape[0], 2 * codes.shape[1]
    # A byte has the codes of two inputs (e). [tile, r, g, block, a, t, b, h] -> [tile, block, g, t, a, b, h, r]
    pairs = codes.view(outputs // OUTPUTS, 2, 8, inputs // INPUTS, 2, 4, 2, 2).permute(0, 3, 2, 5, 4, 6, 7, 1).int()
    shifts = torch.tensor([[0, 4], [8, 12]], dtype=torch.int32, device=codes.device)
    words = (((pairs & 15) | ((pairs >> 4) << 16)) << shifts).sum(dim=(6, 7), dtype=torch.int32)
    halves = torch.stack((scales.to(dtype), -(zeros.to(dtype) + OFFSETS[dtype])), dim=2).view(torch.int16).int()
    records = (halves[..., 0] & 0xFFFF) | (halves[..., 1] << 16)
    records = records.view(outputs // OUTPUTS, 2, 8, -1).permute(0, 3, 2, 1)
    return PackedCodes(
        words.reshape(outputs // OUTPUTS, inputs // INPUTS * WORDS).contiguous(),
        records.reshape(outputs // OUTPUTS, -1, OUTPUTS).contiguous(),
        outputs,
        inputs,
        group,
        dtype,
    )


@triton.jit
def _dequantise_kernel(
    words_ptr, records_ptr, out_ptr, K, groups, group,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    n = tl.arange(0, BLOCK_N)[:, None]
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    g, r = n % 8, n // 8
    j, h, t, e = (k % 64) // 32 * 2 + (k % 8) // 4, (k % 4) // 2, (k % 32) // 8, k % 2
    inside = k < K
    base = tile.to(tl.int64)
    word = tl.load(words_ptr + base * (K * 2) + (k // 64) * 128 + g * 16 + t * 4 + j, mask=inside, other=0)
    record = tl.load(records_ptr + base * (groups * 16) + (k // group) * 16 + g * 2 + r, mask=inside, other=0)
    code = (word >> (16 * e + 8 * h + 4 * r)) & 15
    kind: tl.constexpr = out_ptr.dtype.element_ty
    scale = (record & 0xFFFF).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
    minus_zero = (record >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32) + OFFSET
    value = (code.to(tl.float32) + minus_zero) * scale
    tl.store(out_ptr + (base * BLOCK_N + n) * K + k, value.to(kind), mask=inside)


def dequantise(weight: PackedCodes, out: Tensor | None = None) -> Tensor:
    """[N, K] in the model's dtype."""
    if out is None:
        out = torch.empty((weight.outputs, weight.inputs), dtype=weight.dtype, device=weight.words.device)
    grid = (weight.outputs // _BLOCK_N, triton.cdiv(weight.inputs, _BLOCK_K))
    _dequantise_kernel[grid](
        weight.words, weight.records, out, weight.inputs, weight.records.shape[1], weight.group,
        BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K, OFFSET=OFFSETS[weight.dtype],
    )  # fmt: skip
    return out
