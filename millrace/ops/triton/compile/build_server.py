"""A process that compiles kernels into Triton's cache: `python -m millrace.ops.triton.compile.build_server`.

Each line on standard input is one kernel, JSON: the GPU's target, Triton's description of a launch, and its turn, 0 for
at once, 1 for when nothing else is to be done. When it is there, or cannot be had, the answer is its turn, one digit.
The server imports everything first, while its client loads a model, and then forks a child per kernel, which is cheap
for a process that has never touched a GPU. It ends when its input has ended and the last kernel is done.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import select
import signal
import sys
import threading
import time
from collections import deque
from typing import Any

from millrace.ops import triton as kernels
from millrace.ops.triton.compile.prebuild import source_of

KERNEL_LIMIT_S = 60.0
LATER = tuple(f"millrace.ops.triton.gemm.{name}" for name in ("gated_many", "greedy_head", "operand_ring"))
"""Modules that no first step needs; a child imports them itself."""
NICE = 10
"""What has the later turn is compiled behind the engine, which may already serve."""
_POLL_S = 0.005
_READ_BYTES = 1 << 20


def main() -> None:
    import triton.compiler  # noqa: F401

    driver = threading.Thread(target=_build_driver)
    driver.start()
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if module.name not in LATER and module.name != __spec__.name:
            importlib.import_module(module.name)
    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()
    driver.join()
    Workshop(sys.stdin.fileno(), sys.stdout.fileno()).run()


def _build_driver() -> None:
    """What Triton itself needs before it can launch anything is compiled as well, at its first use."""
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


class Workshop:
    """A child for each kernel, as many at a time as there are cores. Of those that somebody waits for, the longest
    source first; then the others as they came."""

    def __init__(self, orders: int, answers: int) -> None:
        self._orders, self._answers = orders, answers
        self._is_open, self._unread = True, b""
        self._urgent: list[tuple[int, dict[str, Any]]] = []
        """With the length of their source; the next one is at the end."""
        self._others: deque[dict[str, Any]] = deque()
        self._children: dict[int, tuple[float, int]] = {}
        """When each has to be done, and its turn."""

    def run(self) -> None:
        most = len(os.sched_getaffinity(0))
        while self._is_open or self._has_orders or self._children:
            self._take_orders()
            while self._has_orders and len(self._children) < most:
                order = self._urgent.pop()[1] if self._urgent else self._others.popleft()
                self._children[_fork(order)] = time.monotonic() + KERNEL_LIMIT_S, order["turn"]
            self._reap()

    @property
    def _has_orders(self) -> bool:
        return bool(self._urgent or self._others)

    def _take_orders(self) -> None:
        """Whatever has come; the next one only if there is nothing else to do."""
        is_busy = bool(self._has_orders or self._children)
        if not self._is_open:
            time.sleep(_POLL_S)
        elif select.select([self._orders], [], [], _POLL_S if is_busy else None)[0]:
            told = os.read(self._orders, _READ_BYTES)
            self._is_open = bool(told)
            *lines, self._unread = (self._unread + told).split(b"\n")
            orders = [json.loads(line) for line in lines]
            self._urgent += [(len(_function(order["kernel"]).src), order) for order in orders if not order["turn"]]
            self._urgent.sort(key=lambda item: item[0])
            self._others += [order for order in orders if order["turn"]]

    def _reap(self) -> None:
        now = time.monotonic()
        for child, (until, turn) in list(self._children.items()):
            is_late = until < now
            if is_late:
                os.kill(child, signal.SIGKILL)
            if os.waitpid(child, 0 if is_late else os.WNOHANG)[0]:
                del self._children[child]
                os.write(self._answers, b"%d" % turn)


def _function(kernel: str) -> Any:
    module, _, attribute = json.loads(kernel)["name"].rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _fork(order: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        if order["turn"]:
            os.nice(NICE)
        _compile(order["kernel"], _function(order["kernel"]), order["target"])
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
