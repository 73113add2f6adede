"""Processors for which a wheel contains compiled kernels. Imports nothing heavy: `setup.py` reads it too."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PREBUILT: Final = Path(__file__).parent / "prebuilt"
"""Exists only in a wheel; a checkout compiles for its own processor."""


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    machine: str
    flags: tuple[str, ...]
    """For the compiler."""
    features: frozenset[str]
    """What the processor must have, as /proc/cpuinfo names it."""

    @property
    def path(self) -> Path:
        return PREBUILT / f"kernels-{self.machine}-{self.name}.so"


_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _V4 | {"avx512_vnni", "avx512_bf16"}
_AMX = _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
_ARM = frozenset({"asimddp", "asimdhp"})
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")

BF16_FEATURES: Final = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""Each of them means instructions for products in bfloat16, as /proc/cpuinfo names it on x86-64 or ARM."""

AMX_FEATURES: Final = frozenset({"amx_bf16"})
"""The processor has a matrix unit for bfloat16."""

TARGETS: Final = (
    Target("amx", "x86_64", (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), _AMX),
    Target("avx512-bf16", "x86_64", _BF16_FLAGS, _BF16),
    Target("avx512-vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}),
    Target("avx512", "x86_64", ("-march=x86-64-v4",), _V4),
    Target("avx2-vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}),
    Target("avx2", "x86_64", ("-march=x86-64-v3",), _V3),
    Target("armv8.6", "aarch64", ("-march=armv8.2-a+fp16+dotprod+i8mm+bf16",), _ARM | {"i8mm", "bf16"}),
    Target("armv8.2", "aarch64", ("-march=armv8.2-a+fp16+dotprod",), _ARM),
)
"""The best first."""


def processor_features() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())


def prebuilt_target(features: frozenset[str], machine: str = platform.machine()) -> Target | None:
    """The best target of this wheel that the processor can run; None if there is none."""
    for target in TARGETS:
        if target.machine == machine and target.features <= features and target.path.is_file():
            return target
    return None
