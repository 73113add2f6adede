"""Kernels that start while the one before still runs: how they wait for it, and let the next one start.

A kernel that has waited may read whatever any kernel before it wrote: the one just before has ended, and had itself
waited before this one was let start. Before it has waited it may read what earlier kernels than that one wrote.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    """Nothing where EARLY is false: then the kernel was not started before its time."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
