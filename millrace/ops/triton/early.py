"""Kernels that start while the one before still runs: how one lets the next start, and waits for the last.

A kernel that has waited may read whatever any kernel before it wrote: the one just before has ended, and had itself
waited. Before it has waited it may read only what no kernel of the step writes, such as weights, or what was written
before the last kernel that was not started early.

EARLY is 0 for a kernel that starts after the one before has ended; 1 for one that lets the next start when it has
waited; 2 for one that lets it start at once, so that several kernels may be waiting behind the one that runs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """The first thing a kernel does."""
    if EARLY == 2:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    if EARLY > 0:
        tl.extra.cuda.gdc_wait()
    if EARLY == 1:
        tl.extra.cuda.gdc_launch_dependents()
