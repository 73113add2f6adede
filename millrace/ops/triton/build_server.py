"""A process that compiles kernels into Triton's cache: `python -m millrace.ops.triton.build_server`.

Each line on standard input is one order, JSON: the GPU's target and Triton's descriptions of kernels; each is answered
by a line. It imports everything first, while its client loads a model, and then forks a child per kernel, which is
cheap for a process that has never touched a GPU. It ends when its input does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from millrace.ops.triton.prebuild import source_of

KERNEL_LIMIT_S = 60.0
_POLL_S = 0.005


def main() -> None:
    import triton.compiler  # noqa: F401

    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem not in ("__init__", Path(__file__).stem):
            importlib.import_module(f"{__package__}.{path.stem}")
    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()
    for line in sys.stdin.buffer:
        order = json.loads(line)
        compile_all(order["kernels"], order["target"])
        print("done", flush=True)


def compile_all(kernels: list[str], target: list[Any]) -> None:
    """A child for each kernel, as many at a time as there are cores, the longest sources first."""
    functions = {kernel: _function(json.loads(kernel)["name"]) for kernel in kernels}
    todo = sorted(functions.items(), key=lambda item: len(item[1].src))
    most, children, until = len(os.sched_getaffinity(0)), set[int](), time.monotonic() + KERNEL_LIMIT_S
    while (todo or children) and time.monotonic() < until:
        while todo and len(children) < most:
            children.add(_fork(*todo.pop(), target))
        ended = {child for child in children if os.waitpid(child, os.WNOHANG)[0]}
        children -= ended
        if not ended:
            time.sleep(_POLL_S)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _function(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _fork(kernel: str, function: Any, target: list[Any]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        _compile(kernel, function, target)
    except BaseException:  # when it is launched it is compiled again, and says what is wrong
        os._exit(1)
    os._exit(0)


def _compile(kernel: str, function: Any, target: list[Any]) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compile_kernel
    from triton.compiler import make_backend

    place = GPUTarget(*target)
    source, options = source_of(kernel, function)
    compiled = compile_kernel(source, target=place, options=make_backend(place).parse_options(options).__dict__)
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(compiled.src, compiled.metadata)


if __name__ == "__main__":
    main()
