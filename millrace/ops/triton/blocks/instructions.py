"""PTX: planes of codes to operands of the matrix instruction, as `ops/triton/grouped/instructions.py` does for words of
four bits alone."""

from __future__ import annotations

import functools

import torch

from millrace.ops.triton.blocks.planes import PlaneKind

_MAGIC = {"bf16": 128, "f16": 1024}
"""Four bits, put into the low bits of this number, are added to it."""
REGISTERS = {0: ",".join(["=&r"] * 16 + ["r"] * 8), 1: ",".join(["=&r"] * 16 + ["r"] * 12)}
"""Constraints of `numbers_code`, without and with an upper plane."""


def _bits(number: float, kind: str) -> int:
    """Of the nearest number of 16 bits."""
    dtype = torch.float16 if kind == "f16" else torch.bfloat16
    return int(torch.tensor(number).to(dtype).view(torch.int16)) & 0xFFFF


def _twice(number: float, kind: str) -> str:
    """A number twice in a register."""
    return f"0x{_bits(number, kind) * 0x10001:08X}"


@functools.cache
def numbers_code(made: PlaneKind, kind: str) -> str:
    """Outputs: 16 registers of two numbers each, register i of word j at 4 i + j. Inputs: four lower words, four upper
    ones if there is an upper plane (bits of e = 0 in the lower half, of e = 1 in the upper), then four records of
    (scale, minimum): of (lower 32 inputs, g), (lower, g + 8), (upper, g), (upper, g + 8)."""
    if made.levels is not None:
        return _levels_code(made.levels, kind)
    magic = _MAGIC[kind]
    places = {"one": 1.0, "sixteen": 16.0, "zero": -magic - made.offset, "low_zero": -magic, "high_zero": -magic - 8}
    lines = ["{", ".reg .b32 bits, high;"]
    lines += [f".reg .b32 {name}; mov.b32 {name}, {_twice(value, kind)};" for name, value in places.items()]
    lines += _records(24 if made.upper else 20)
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


def _records(first: int) -> list[str]:
    lines = []
    for record in range(4):
        lines.append(f".reg .b32 scale{record}, least{record};")
        lines.append(f"prmt.b32 scale{record}, ${first + record}, 0, 0x1010;")
        lines.append(f"prmt.b32 least{record}, ${first + record}, 0, 0x3232;")
    return lines


def _levels_code(levels: tuple[float, ...], kind: str) -> str:
    """As `numbers_code`, for codes that are places among 16 levels. The levels' lower and upper bytes are eight
    registers; an instruction picks four bytes of two registers by three bits each."""
    halves = [_bits(level, kind) for level in levels]
    lines = ["{", ".reg .b32 code, pick, mask, one, other, p0, p1, q0, q1;"]
    for name, shift in (("low", 0), ("high", 8)):
        lines.append(f".reg .b32 {name}_0, {name}_1;")
        for part in range(4):
            word = sum(((halves[4 * part + at] >> shift) & 255) << (8 * at) for at in range(4))
            lines.append(f".reg .b32 {name}{part}; mov.b32 {name}{part}, 0x{word:08X};")
    lines += _records(20)
    for j in range(4):
        for e in range(2):
            lines.append(f"shr.b32 code, ${16 + j}, {16 * e};")
            lines.append("and.b32 pick, code, 0x7777; shr.b32 mask, code, 3; and.b32 mask, mask, 0x1111;")
            lines.append("prmt.b32 mask, 0xFF00, 0, mask;")  # 0xFF for the upper eight levels
            for name in ("low", "high"):
                lines.append(f"prmt.b32 one, {name}0, {name}1, pick; prmt.b32 other, {name}2, {name}3, pick;")
                lines.append(f"lop3.b32 {name}_{e}, mask, other, one, 0xCA;")  # mask ? other : one
        for name, e in (("p", 0), ("q", 1)):
            lines.append(f"prmt.b32 {name}0, low_{e}, high_{e}, 0x5140; prmt.b32 {name}1, low_{e}, high_{e}, 0x7362;")
        for i in range(4):
            out, record = f"${4 * i + j}", 2 * (j // 2) + i % 2
            lines.append(f"prmt.b32 {out}, p{i // 2}, q{i // 2}, {'0x7632' if i % 2 else '0x5410'};")
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
