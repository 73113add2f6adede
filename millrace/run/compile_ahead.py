"""Compiles the Triton kernels of a first step side by side, instead of one after the other as they are launched.

A dry run goes through the step's own code while every kernel that is not compiled yet is only noted and not launched.
So it must come before anything has been launched: a kernel that runs on what a skipped one should have written could
read anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

log = logging.getLogger(__name__)

THREADS = 8
"""Compilers at once. Each spends most of its time outside the interpreter."""


def compile_ahead(dry_runs: Iterable[Callable[[], object]]) -> int:
    """How many kernels were compiled."""
    noted = _note_kernels(dry_runs)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="compile") as pool:
        list(pool.map(_compile, noted.values()))
    return len(noted)


def _note_kernels(dry_runs: Iterable[Callable[[], object]]) -> dict[str, tuple[Any, str]]:
    from triton import knobs

    noted: dict[str, tuple[Any, str]] = {}

    def note(**kernel: Any) -> bool:
        data = kernel["compile"]["specialization_data"]
        noted[data] = (kernel["fn"].jit_function, data)
        return True  # do not compile, do not launch

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        for run in dry_runs:
            run()
    finally:
        knobs.runtime.jit_cache_hook = before
    return noted


def _compile(noted: tuple[Any, str]) -> None:
    function, data = noted
    try:
        function.preload(data)
    except Exception:  # the launch itself will compile it, or say what is wrong
        log.debug("a kernel was not compiled ahead", exc_info=True)
