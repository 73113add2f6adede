"""PTX: planes of codes to operands of the matrix instruction, as `ops/triton/grouped/instructions.py` does for words of
four bits alone."""

from __future__ import annotations

import functools
import struct

from millrace.ops.triton.blocks.planes import PlaneKind

_MAGIC = {"bf16": 128, "f16": 1024}
"""Four bits, put into the low bits of this number, are added to it."""
REGISTERS = {0: ",".join(["=&r"] * 16 + ["r"] * 8), 1: ",".join(["=&r"] * 16 + ["r"] * 12)}
"""Constraints of `numbers_code`, without and with an upper plane."""


def _twice(number: float, kind: str) -> str:
    """A number twice in a register."""
    if kind == "f16":
        bits = struct.unpack("<H", struct.pack("<e", number))[0]
    else:
        whole = struct.unpack("<I", struct.pack("<f", number))[0]
        assert whole & 0xFFFF == 0, "no number of bfloat16"
        bits = whole >> 16
    return f"0x{bits * 0x10001:08X}"


@functools.cache
def numbers_code(made: PlaneKind, kind: str) -> str:
    """Outputs: 16 registers of two numbers each, register i of word j at 4 i + j. Inputs: four lower words, four upper
    ones if there is an upper plane (bits of e = 0 in the lower half, of e = 1 in the upper), then four records of
    (scale, minimum): of (lower 32 inputs, g), (lower, g + 8), (upper, g), (upper, g + 8)."""
    magic = _MAGIC[kind]
    places = {"one": 1.0, "sixteen": 16.0, "zero": -magic - made.offset, "low_zero": -magic, "high_zero": -magic - 8}
    lines = ["{", ".reg .b32 bits, high;"]
    lines += [f".reg .b32 {name}; mov.b32 {name}, {_twice(value, kind)};" for name, value in places.items()]
    first = 24 if made.upper else 20
    for record in range(4):
        lines.append(f".reg .b32 scale{record}, least{record};")
        lines.append(f"prmt.b32 scale{record}, ${first + record}, 0, 0x1010;")
        lines.append(f"prmt.b32 least{record}, ${first + record}, 0, 0x3232;")
    for j in range(4):
        for i in range(4):
            out = f"${4 * i + j}"
            lines += _codes(out, f"${16 + j}", f"${20 + j}", i, made.upper, _twice(magic, kind))
            if made.upper == 4:
                lines.append(f"fma.rn.{kind}x2 high, high, one, high_zero;")
                lines.append(f"fma.rn.{kind}x2 {out}, {out}, one, low_zero;")
                lines.append(f"fma.rn.{kind}x2 {out}, high, sixteen, {out};")
            else:
                lines.append(f"fma.rn.{kind}x2 {out}, {out}, one, zero;")
            record = 2 * (j // 2) + i % 2
            lines.append(f"fma.rn.{kind}x2 {out}, {out}, scale{record}, least{record};")
    return "\n".join([*lines, "}"])


def _codes(out: str, lower: str, upper: str, i: int, upper_bits: int, magic: str) -> list[str]:
    """`out`: codes plus the magic number. Of eight bits `out` has the lower four and `high` the upper four."""
    lines = _field("bits", lower, 4 * i)
    lines.append(f"lop3.b32 {out}, bits, 0x000F000F, {magic}, 0xEA;")  # (a and b) or c
    if upper_bits == 4:
        lines += [*_field("bits", upper, 4 * i), f"lop3.b32 high, bits, 0x000F000F, {magic}, 0xEA;"]
    elif upper_bits:
        mask = ((1 << upper_bits) - 1) << 4
        lines += _field("bits", upper, upper_bits * i - 4)
        lines.append(f"lop3.b32 {out}, bits, 0x{mask * 0x10001:08X}, {out}, 0xEA;")
    return lines


def _field(out: str, word: str, right: int) -> list[str]:
    if right == 0:
        return [f"mov.b32 {out}, {word};"]
    return [f"shr.b32 {out}, {word}, {right};" if right > 0 else f"shl.b32 {out}, {word}, {-right};"]
