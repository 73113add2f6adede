"""Compiles a step's kernels side by side, before they are needed.

Triton compiles a kernel, and a small C launcher for it, when it is first launched: one after the other, ten seconds for
a model's first step. Here the step is rehearsed instead: its launches are noted and not done. What Triton's cache on
disk does not hold is then compiled by forked children, which leave it there. They touch no GPU. Whatever goes wrong
with that only means that kernels are compiled later, one by one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

BUILD_LIMIT_S = 60.0
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel with its types, constants and options, as Triton's compiler takes them."""

    function: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]


class Rehearsal:
    """Launches that were noted, each kernel once."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    def note(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """What Triton asks before it compiles; yes means that it shall not."""
        data = compile["specialization_data"]
        if data not in self._jobs:
            options = {name: _as_tuple(value) for name, value in json.loads(data)["options"].items()}
            self._jobs[data] = Job(
                fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0], options
            )
        return True

    @property
    def jobs(self) -> list[Job]:
        return list(self._jobs.values())


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


def build(jobs: list[Job], target: Any) -> int:
    """Compile those that the cache on disk does not hold; how many those were. `target` is Triton's GPUTarget."""
    missing = [job for job in jobs if not _is_cached(job, target)]
    if missing:
        began = time.monotonic()
        _build_all(missing, target, began + BUILD_LIMIT_S)
        log.info("Compiled %d kernels side by side in %.1f s.", len(missing), time.monotonic() - began)
    return len(missing)


def hash_ahead() -> None:
    """Triton's own hash, part of every key in its cache, takes most of a second: have it counted beside other work."""

    def count() -> None:
        with contextlib.suppress(Exception):
            from triton.runtime.cache import triton_key

            triton_key()

    threading.Thread(target=count, name="triton-key", daemon=True).start()


def current_target() -> Any:
    from triton.runtime import driver

    return driver.active.get_current_target()


def _as_tuple(value: Any) -> Any:
    """JSON knows no tuples, and options have no lists."""
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


def _source(job: Job) -> Any:
    from triton.compiler import ASTSource

    return ASTSource(job.function, job.signature, job.constants, job.attributes)


@functools.cache
def _backend(target: Any) -> Any:
    from triton.compiler import make_backend

    return make_backend(target)


def _is_cached(job: Job, target: Any) -> bool:
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.runtime.cache import get_cache_key, get_cache_manager

    backend, source = _backend(target), _source(job)
    key = get_cache_key(source, backend, backend.parse_options(job.options), get_cache_invalidating_env_vars())
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return bool(manager.get_group(f"{source.name[:150]}.json"))


def _compile(job: Job, target: Any) -> None:
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import compile as compile_kernel

    options = _backend(target).parse_options(job.options)
    kernel = compile_kernel(_source(job), target=target, options=options.__dict__)
    CudaLauncher(kernel.src, kernel.metadata)


def _build_all(jobs: list[Job], target: Any, until: float) -> None:
    """A child for each job, as many at a time as there are cores, the longest sources first."""
    todo = sorted(jobs, key=lambda job: len(job.function.src))
    most, children = len(os.sched_getaffinity(0)), set[int]()
    while (todo or children) and time.monotonic() < until:
        while todo and len(children) < most:
            children.add(_fork(todo.pop(), target))
        ended = {child for child in children if os.waitpid(child, os.WNOHANG)[0]}
        children -= ended
        if not ended:
            time.sleep(_POLL_S)
    for child in children:
        log.warning("Compiling kernels ahead took more than %g s and was given up.", BUILD_LIMIT_S)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _fork(job: Job, target: Any) -> int:
    with warnings.catch_warnings():
        # The child only compiles and leaves without any clean-up, so that other threads' state does not matter to it.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    try:
        _compile(job, target)
    except BaseException:  # when it is launched it is compiled again, and says what is wrong
        os._exit(1)
    os._exit(0)
