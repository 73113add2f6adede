"""Dry run of a step: finds out which Triton kernels it will launch, before any is compiled.

Triton compiles a kernel and a small C launcher for it at the first launch, one after the other: ten seconds for a
model's first step. In a dry run launches are recorded instead, and each goes as a build request to `build_server.py`,
which compiles in parallel what the cache on disk does not hold.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def dry_run(on_kernel: Callable[[str], None]) -> Iterator[None]:
    """Inside, Triton launches nothing. `on_kernel` is called once for each kernel that is not loaded yet, with Triton's
    own description of the launch (JSON)."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    run, hook, known = JITFunction.run, knobs.runtime.jit_cache_hook, set[str]()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def record(*, compile: dict[str, Any], **_: Any) -> bool:
        """Triton calls this before it compiles; True tells it not to."""
        description = compile["specialization_data"]
        if description not in known:
            known.add(description)
            on_kernel(description)
        return True

    JITFunction.run = compile_only
    knobs.runtime.jit_cache_hook = record
    try:
        yield
    finally:
        JITFunction.run = run
        knobs.runtime.jit_cache_hook = hook


def source_of(description: str, function: Any) -> tuple[Any, dict[str, Any]]:
    """(compiler input, compiler options) from Triton's description of a launch."""
    import triton.language as tl

    fields = json.loads(description)
    constants = {
        tuple(key): _constant(value, tl)
        for key, value in zip(fields["constant_keys"], fields["constant_vals"], strict=True)
    }
    attributes = {tuple(key): value for key, value in zip(fields["attrs_keys"], fields["attrs_vals"], strict=True)}
    signature = {name: _as_tuple(value) for name, value in fields["signature"].items()}
    options = {name: _as_tuple(value) for name, value in fields["options"].items()}
    return _source_type(function)(function, signature, constants, attributes), options


def _source_type(function: Any) -> Any:
    if hasattr(function, "is_gluon") and function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _constant(value: Any, tl: Any) -> Any:
    if isinstance(value, str) and tl.dtype.is_dtype(value):
        return tl.dtype(value)
    if isinstance(value, dict) and "constexpr" in value:
        return tl.constexpr(value["constexpr"])
    return value


def _as_tuple(value: Any) -> Any:
    """JSON has no tuples; signatures and options have no lists."""
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


def current_target() -> Any:
    from triton.runtime import driver

    return driver.active.get_current_target()


def prepare_triton_key() -> None:
    """Compute Triton's own hash, part of every key of its cache, in a background thread: it takes most of a second."""

    def compute() -> None:
        with contextlib.suppress(Exception):
            from triton.runtime.cache import triton_key

            triton_key()

    threading.Thread(target=compute, name="triton-key", daemon=True).start()
