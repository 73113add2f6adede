"""Which kernels a step will launch, before any is compiled.

Triton compiles a kernel, and a small C launcher for it, when it is first launched: one after the other, ten seconds for
a model's first step. A step can be rehearsed instead: its launches are noted and not done, and each goes to
`build_server.py`, which compiles side by side what the cache on disk does not hold.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def dry_run(met: Callable[[str], None]) -> Iterator[None]:
    """Inside, nothing of Triton's is launched: kernels that were loaded before are passed over, others are `met`, each
    once, with Triton's own description of the launch, JSON."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    run, hook, known = JITFunction.run, knobs.runtime.jit_cache_hook, set[str]()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def note(*, compile: dict[str, Any], **_: Any) -> bool:
        """What Triton asks before it compiles; yes means that it shall not."""
        description = compile["specialization_data"]
        if description not in known:
            known.add(description)
            met(description)
        return True

    JITFunction.run = compile_only
    knobs.runtime.jit_cache_hook = note
    try:
        yield
    finally:
        JITFunction.run = run
        knobs.runtime.jit_cache_hook = hook


def source_of(description: str, function: Any) -> tuple[Any, dict[str, Any]]:
    """What the compiler takes, and its options, from Triton's description of a launch."""
    import triton.language as tl

    told = json.loads(description)
    constants = {
        tuple(key): _constant(value, tl)
        for key, value in zip(told["constant_keys"], told["constant_vals"], strict=True)
    }
    attributes = {tuple(key): value for key, value in zip(told["attrs_keys"], told["attrs_vals"], strict=True)}
    signature = {name: _as_tuple(value) for name, value in told["signature"].items()}
    options = {name: _as_tuple(value) for name, value in told["options"].items()}
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
    """JSON knows no tuples, and neither signatures nor options have lists."""
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


def current_target() -> Any:
    from triton.runtime import driver

    return driver.active.get_current_target()


def hash_ahead() -> None:
    """Triton's own hash, part of every key in its cache, takes most of a second: have it counted beside other work."""

    def count() -> None:
        with contextlib.suppress(Exception):
            from triton.runtime.cache import triton_key

            triton_key()

    threading.Thread(target=count, name="triton-key", daemon=True).start()
