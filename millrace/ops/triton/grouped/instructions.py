"""PTX that both kernels share: words of codes to operands of the matrix instruction.

One call handles the four words that a thread holds of 64 inputs, and the four records of its two outputs for the lower
and the upper 32 inputs.
"""

from __future__ import annotations

from typing import Final

import triton.language as tl

_MAGIC: Final = {"bf16": 0x43004300, "f16": 0x64006400}
"""The numbers 128 and 1,024, twice."""
_ONE: Final = {"bf16": 0x3F803F80, "f16": 0x3C003C00}
MINUS_ZERO: Final = 0x80008000


def _unpack_unscaled(kind: str) -> str:
    """As `_unpack`, without scales: code - zero. The four records are of g, g, g + 8 and g + 8."""
    lines = ["{", ".reg .b32 shifted, one, zero0, zero1;", f"mov.b32 one, {_ONE[kind]};"]
    lines += [f"prmt.b32 zero{row}, ${20 + 2 * row}, 0, 0x3232;" for row in range(2)]
    for j in range(4):
        for i in range(4):
            lines += _number(kind, f"${4 * i + j}", f"${16 + j}", i, f"zero{i % 2}")
    return "\n".join([*lines, "}"])


def _number(kind: str, out: str, word: str, i: int, minus_zero: str) -> list[str]:
    """Two codes of a word, as numbers minus zero."""
    lines = [f"shr.b32 shifted, {word}, {4 * i};"] if i else []
    lines.append(f"lop3.b32 {out}, {'shifted' if i else word}, 0x000F000F, {_MAGIC[kind]}, 0xEA;")  # (a and b) or c
    return [*lines, f"fma.rn.{kind}x2 {out}, {out}, one, {minus_zero};"]


def _unpack(kind: str, *, in_order: bool) -> str:
    """Outputs: 16 registers of the operand, two numbers each; register i of word j is 4 i + j. Inputs: four words, then
    records of (lower half, g), (lower, g + 8), (upper, g), (upper, g + 8).

    `in_order`: a further input is the thread's t, and the operand is in the order of the instruction; its registers are
    then listed by (parity of j, i, j / 2), as tensors that hold two numbers of each of two words."""
    lines = ["{", ".reg .b32 shifted, one, negative;", f"mov.b32 one, {_ONE[kind]};"]
    lines.append(f"mov.b32 negative, {MINUS_ZERO};")
    for record in range(4):
        lines.append(f".reg .b32 scale{record}, zero{record};")
        lines.append(f"prmt.b32 scale{record}, ${20 + record}, 0, 0x1010;")
        lines.append(f"prmt.b32 zero{record}, ${20 + record}, 0, 0x3232;")
    words = [f"${16 + j}" for j in range(4)]
    if in_order:
        lines += _exchange(words, "$24")
        words = [f"word{j}" for j in range(4)]
    for j in range(4):
        for i in range(4):
            out = f"${2 * (4 * (j % 2) + i) + j // 2}" if in_order else f"${4 * i + j}"
            record = 2 * (j // 2) + i % 2
            lines += _number(kind, out, words[j], i, f"zero{record}")
            lines.append(f"fma.rn.{kind}x2 {out}, {out}, scale{record}, negative;")
    return "\n".join([*lines, "}"])


def _exchange(words: list[str], t: str) -> list[str]:
    """word0 to word3: the same codes in the instruction's order. Of 32 inputs, four threads t have four pairs p each,
    4 t + p, and want the pairs 4 q + t of every q: a transposition. Two words hold the four pairs of a thread; bytes 0
    and 2 are one, 1 and 3 the other. First threads two apart exchange a word, then neighbours exchange two pairs."""
    lines = [
        ".reg .b32 send, keep, got, low, high, pick, first, second, bits; .reg .pred far, near;",
        f"and.b32 bits, {t}, 2; setp.ne.b32 far, bits, 0; and.b32 bits, {t}, 1; setp.ne.b32 near, bits, 0;",
        # Bytes to send; bytes of the result from the own word (0 to 3) and the received one (4 to 7).
        "selp.b32 pick, 0x6420, 0x7531, near; selp.b32 first, 0x3514, 0x5240, near;",
        "selp.b32 second, 0x3716, 0x7260, near;",
        *(f".reg .b32 word{j};" for j in range(4)),
    ]
    for half in range(2):
        zero, one = words[2 * half], words[2 * half + 1]
        lines += [
            f"selp.b32 send, {zero}, {one}, far; selp.b32 keep, {one}, {zero}, far;",
            "shfl.sync.bfly.b32 got, send, 2, 0x1f, 0xffffffff;",
            "selp.b32 low, got, keep, far; selp.b32 high, keep, got, far;",
            "prmt.b32 send, low, high, pick;",
            "shfl.sync.bfly.b32 got, send, 1, 0x1f, 0xffffffff;",
            f"prmt.b32 word{2 * half}, low, got, first; prmt.b32 word{2 * half + 1}, high, got, second;",
        ]
    return lines


def _multiply(kind: str) -> str:
    """Outputs: four sums. Inputs: 16 registers of the weight (register i of word j is 4 i + j), eight of x in the order
    of its inputs, four sums."""
    lines = ["{"]
    for j in range(4):
        weight = ", ".join(f"${4 + 4 * i + j}" for i in range(4))
        sums = "$28, $29, $30, $31" if j == 0 else "$0, $1, $2, $3"
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, {{{weight}}}, "
            f"{{${20 + 2 * j}, ${21 + 2 * j}}}, {{{sums}}};"
        )
    return "\n".join([*lines, "}"])


UNPACK_BF16 = tl.constexpr(_unpack("bf16", in_order=False))
UNPACK_F16 = tl.constexpr(_unpack("f16", in_order=False))
UNPACK_UNSCALED_BF16 = tl.constexpr(_unpack_unscaled("bf16"))
UNPACK_UNSCALED_F16 = tl.constexpr(_unpack_unscaled("f16"))
UNPACK_REGISTERS = tl.constexpr(",".join(["=&r"] * 16 + ["r"] * 8))
UNPACK_IN_ORDER_BF16 = tl.constexpr(_unpack("bf16", in_order=True))
UNPACK_IN_ORDER_F16 = tl.constexpr(_unpack("f16", in_order=True))
UNPACK_IN_ORDER_REGISTERS = tl.constexpr(",".join(["=&r"] * 16 + ["r"] * 12))
MULTIPLY_BF16 = tl.constexpr(_multiply("bf16"))
MULTIPLY_F16 = tl.constexpr(_multiply("f16"))
MULTIPLY_REGISTERS = tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 24 + ["f"] * 4))
