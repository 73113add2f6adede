"""Triton kernels and the thin functions that launch them: attention, gemm, moe, sampling, norms and step inputs.

Op files import these modules only when they make a version that needs them, so everything else works without Triton.
Imports `ops/base`, `ops/kv` and `ops/tuning`, but no op. Start with `norm.py`, the shortest kernel;
`dependent_launch.py` explains what most kernels begin with.
"""

from __future__ import annotations

import importlib.util

import torch

from millrace.ops.tuning.load import measured_on


def triton_missing(device: torch.device) -> str:
    """What this machine lacks to run Triton kernels, as a clause; empty if nothing is missing."""
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton"
    return ""


def hopper_missing(device: torch.device) -> str:
    """As triton_missing, for kernels that need measured tile sizes; so far these exist for Hopper only."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    if measured_on(device) is None:
        return "was measured on compute capability 9.0 only"
    return triton_missing(device)


def gluon_missing(device: torch.device) -> str:
    """As hopper_missing, for kernels in Gluon, Triton's lower level, which came with version 3.5."""
    missing = hopper_missing(device)
    if not missing and importlib.util.find_spec("triton.experimental.gluon") is None:
        return "needs a newer triton, with Gluon"
    return missing
