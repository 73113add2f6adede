"""What a GPU can do, by its compute capability."""

from __future__ import annotations

import functools

import torch

from millrace.config.environment import cuda_capability_limit

MATRICES_IN_BFLOAT16, FP8, WARPGROUPS = (8, 0), (8, 9), (9, 0)
"""First capabilities with matrix instructions for bfloat16, for FP8, and for groups of four warps."""


@functools.cache
def highest_assumed() -> tuple[int, int] | None:
    return cuda_capability_limit()


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU, or a lower one that the environment sets as a limit."""
    own = torch.cuda.get_device_capability(device)
    limit = highest_assumed()
    return own if limit is None else min(own, limit)


def has_large_shared_memory(found: tuple[int, int]) -> bool:
    """True if a program has at least 163 KiB of shared memory; other GPUs since Ampere give it 99 (8.6, 8.9, 12.0)."""
    return found in ((8, 0), (8, 7)) or WARPGROUPS <= found < (12, 0)


def gpu_notes(device: torch.device) -> tuple[str, ...]:
    """For the start's message: nothing on a CPU."""
    return (f"GPU kernels for {gpu_paths(device)}.",) if device.type == "cuda" else ()


def gpu_paths(device: torch.device) -> str:
    """Which kernels a GPU takes, for people."""
    found = capability(device)
    parts = []
    if found < MATRICES_IN_BFLOAT16:
        parts.append("no matrix instructions for bfloat16")
    elif found < WARPGROUPS:
        parts.append("Triton's kernels with tiles chosen by rules, no warpgroup instructions")
    elif found == WARPGROUPS:
        parts.append("warpgroup instructions and measured tiles")
    else:
        parts.append("Triton's kernels with tiles chosen by rules")
    parts.append("FP8 products" if found >= FP8 else "FP8 weights are dequantised in registers")
    if found >= WARPGROUPS:
        parts.append("kernels start while the previous one ends")
    own = torch.cuda.get_device_capability(device)
    limited = f" (limited; the GPU has {own[0]}.{own[1]})" if own != found else ""
    return f"compute capability {found[0]}.{found[1]}{limited}: {', '.join(parts)}"
