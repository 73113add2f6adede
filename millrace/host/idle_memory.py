"""Gives memory that the C library keeps for later back to the system, once the engine has been idle for a while.

Steps of many sizes leave the heap full of holes: what was freed stays with the process as long as something above it
is in use. It is not lost, but a machine that is shared should not have to wait for the next rush to see it used.
"""

from __future__ import annotations

import ctypes
import gc

IDLE_S = 5.0
"""After so long without work. What is given back costs page faults when it is needed again."""


def collect_young() -> None:
    """Look for garbage among what came lately, so that it is not done while somebody waits for an answer."""
    gc.collect(1)


class SettledGarbage:
    """The same for a process that is an engine and nothing else: what there is at the first call, all that the start
    has left, is kept for good after one look at it, which takes 150 ms. Later looks go only through what came since.

    The interpreter's own count of what is kept does not tell whether that has been done: it may begin above zero."""

    def __init__(self) -> None:
        self._is_settled = False

    def __call__(self) -> None:
        gc.collect()
        if not self._is_settled:
            gc.freeze()
            self._is_settled = True


def give_back() -> None:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc has it; others keep less.
        trim(0)
