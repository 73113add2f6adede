"""Which kernels a step will launch, before any is compiled.

Triton compiles a kernel, and a small C launcher for it, when it is first launched: one after the other, ten seconds for
a model's first step. A step can be rehearsed instead: its launches are noted and not done, and what the cache on disk
does not hold is handed to `build_server.py`, which compiles it side by side.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from typing import Any


class Rehearsal:
    """Launches that were noted, each kernel once."""

    def __init__(self) -> None:
        self.kernels: dict[str, Any] = {}
        """From Triton's own description, JSON, to the jitted function."""

    def note(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """What Triton asks before it compiles; yes means that it shall not."""
        self.kernels[compile["specialization_data"]] = fn.jit_function
        return True


@contextlib.contextmanager
def rehearsal() -> Iterator[Rehearsal]:
    """Inside, nothing of Triton's is launched: kernels that were compiled before are passed over, others are noted."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    noted, run, hook = Rehearsal(), JITFunction.run, knobs.runtime.jit_cache_hook

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only
    knobs.runtime.jit_cache_hook = noted.note
    try:
        yield noted
    finally:
        JITFunction.run = run
        knobs.runtime.jit_cache_hook = hook


def source_of(description: str, function: Any) -> tuple[Any, dict[str, Any]]:
    """What the compiler takes, and its options, from Triton's description of a launch."""
    import triton.language as tl
    from triton.compiler import ASTSource

    told = json.loads(description)
    constants = {
        tuple(key): _constant(value, tl)
        for key, value in zip(told["constant_keys"], told["constant_vals"], strict=True)
    }
    attributes = {tuple(key): value for key, value in zip(told["attrs_keys"], told["attrs_vals"], strict=True)}
    signature = {name: _as_tuple(value) for name, value in told["signature"].items()}
    options = {name: _as_tuple(value) for name, value in told["options"].items()}
    return ASTSource(function, signature, constants, attributes), options


def _constant(value: Any, tl: Any) -> Any:
    if isinstance(value, str) and tl.dtype.is_dtype(value):
        return tl.dtype(value)
    if isinstance(value, dict) and "constexpr" in value:
        return tl.constexpr(value["constexpr"])
    return value


def _as_tuple(value: Any) -> Any:
    """JSON knows no tuples, and neither signatures nor options have lists."""
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


def is_cached(description: str, function: Any, target: Any) -> bool:
    """Whether Triton's cache on disk holds the kernel for this target."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import make_backend
    from triton.runtime.cache import get_cache_key, get_cache_manager

    backend = make_backend(target)
    source, options = source_of(description, function)
    key = get_cache_key(source, backend, backend.parse_options(options), get_cache_invalidating_env_vars())
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return bool(manager.get_group(f"{source.name[:150]}.json"))


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
