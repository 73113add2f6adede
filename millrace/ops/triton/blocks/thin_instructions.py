"""PTX: planes of two or three bits to operands of the matrix instruction, as `instructions.py` does for more bits."""

from __future__ import annotations

import functools

REGISTERS = {upper: ",".join(["=&r"] * 16 + ["r"] * (12 if upper else 8)) for upper in (False, True)}
"""Constraints of `numbers_code`, without and with an upper plane."""


@functools.cache
def numbers_code(has_upper: bool, is_half: bool) -> str:
    """Outputs: 16 registers of two numbers each, register i of field j at 4 i + j. Inputs: four lower fields, four
    upper ones if there is an upper plane (bits of e = 0 in the lower half, of e = 1 in the upper), then four records of
    (scale, minimum): of (lower 32 inputs, g), (lower, g + 8), (upper, g), (upper, g + 8)."""
    kind = "f16x2" if is_half else "bf16x2"
    # Codes in the low bits of a large number are added to it.
    magic, one, zero = (0x6400, 0x3C00, 0xE404) if is_half else (0x4300, 0x3F80, 0xC304)
    if not has_upper:
        zero -= 2  # offset 2 instead of 4
    lines = ["{", ".reg .b32 bits, one, zero;"]
    lines += [f"mov.b32 one, 0x{one * 0x10001:08X};", f"mov.b32 zero, 0x{zero * 0x10001:08X};"]
    first = 24 if has_upper else 20
    for record in range(4):
        lines.append(f".reg .b32 scale{record}, least{record};")
        lines.append(f"prmt.b32 scale{record}, ${first + record}, 0, 0x1010;")
        lines.append(f"prmt.b32 least{record}, ${first + record}, 0, 0x3232;")
    for j in range(4):
        for i in range(4):
            out, record = f"${4 * i + j}", 2 * (j // 2) + i % 2
            lines.append(f"shr.b32 bits, ${16 + j}, {2 * i};")
            lines.append(f"lop3.b32 {out}, bits, 0x00030003, 0x{magic * 0x10001:08X}, 0xEA;")  # (a and b) or c
            if has_upper:
                shift = f"shl.b32 bits, ${20 + j}, {2 - i};" if i < 2 else f"shr.b32 bits, ${20 + j}, {i - 2};"
                lines.append(shift)
                lines.append(f"lop3.b32 {out}, bits, 0x00040004, {out}, 0xEA;")
            lines.append(f"fma.rn.{kind} {out}, {out}, one, zero;")
            lines.append(f"fma.rn.{kind} {out}, {out}, scale{record}, least{record};")
    return "\n".join([*lines, "}"])
