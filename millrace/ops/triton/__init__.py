"""Kernels in Triton, one file per subject: the jitted functions and the thin wrappers that launch them.

Op files import these modules only when a version is made, so that a machine without Triton loses nothing but them.
"""

from __future__ import annotations

import functools
import importlib.util

import torch


def triton_missing(device: torch.device) -> str:
    """What this machine lacks to run Triton kernels, as a clause; empty when nothing is missing."""
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton"
    return ""


def hopper_missing(device: torch.device) -> str:
    """As triton_missing, for kernels whose sizes were measured on Hopper."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "was measured on compute capability 9.0 only"
    return triton_missing(device)


def gluon_missing(device: torch.device) -> str:
    """As hopper_missing, for kernels in Triton's lower level, which came with version 3.5."""
    missing = hopper_missing(device)
    if not missing and importlib.util.find_spec("triton.experimental.gluon") is None:
        return "needs a newer triton, with Gluon"
    return missing


@functools.cache
def early_start(device: torch.device) -> dict[str, bool]:
    """Options of a kernel that may be started while the one before it still runs. It waits for that one's end before
    it reads anything, so what is saved is the time of a launch: about a microsecond each."""
    early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
