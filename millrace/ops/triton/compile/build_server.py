"""A process that compiles kernels into Triton's cache: `python -m millrace.ops.triton.compile.build_server`.

Each line on standard input is a build request in JSON: the GPU's target, Triton's description of a launch, and its turn
(0: build at once; 1: build when no request of turn 0 is open). The reply, one digit, repeats the turn once the kernel
is compiled or has failed. The server first imports everything, while its client loads a model, then forks one child per
kernel; a fork is cheap for a process that has never touched a GPU. It exits when its input has ended and all builds are
done.
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
from millrace.ops.triton.compile.dry_run import source_of

BUILD_LIMIT_S = 60.0
"""A build that takes longer is killed."""
RARE_MODULES = tuple(f"millrace.ops.triton.gemm.{name}" for name in ("gated_many", "greedy_head", "operand_ring"))
"""Modules that no first step needs; the child that needs one imports it."""
NICE = 10
"""Builds of turn 1 run at low priority: the engine may already be serving."""
_POLL_S = 0.005
_READ_BYTES = 1 << 20


def main() -> None:
    import triton.compiler  # noqa: F401

    driver = threading.Thread(target=_build_driver)
    driver.start()
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if module.name not in RARE_MODULES and module.name != __spec__.name:
            importlib.import_module(module.name)
    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()
    driver.join()
    BuildServer(sys.stdin.fileno(), sys.stdout.fileno()).run()


def _build_driver() -> None:
    """Compile Triton's own driver utilities, which it otherwise does at the first launch."""
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


class BuildServer:
    """One child process per kernel, as many at a time as there are cores. Requests of turn 0 go first, longest source
    first; then those of turn 1 in order of arrival."""

    def __init__(self, requests: int, replies: int) -> None:
        """File descriptors of the two pipes."""
        self._requests, self._replies = requests, replies
        self._is_open, self._unread = True, b""
        self._urgent: list[tuple[int, dict[str, Any]]] = []
        """(length of its source, request) of turn 0; the next one is last."""
        self._others: deque[dict[str, Any]] = deque()
        self._children: dict[int, tuple[float, int]] = {}
        """Process id -> (deadline, turn)."""

    def run(self) -> None:
        max_children = len(os.sched_getaffinity(0))
        while self._is_open or self._has_requests or self._children:
            self._read_requests()
            while self._has_requests and len(self._children) < max_children:
                request = self._urgent.pop()[1] if self._urgent else self._others.popleft()
                self._children[_fork(request)] = time.monotonic() + BUILD_LIMIT_S, request["turn"]
            self._reap()

    @property
    def _has_requests(self) -> bool:
        return bool(self._urgent or self._others)

    def _read_requests(self) -> None:
        """Take what has arrived; wait for a request only if there is nothing else to do."""
        is_busy = bool(self._has_requests or self._children)
        if not self._is_open:
            time.sleep(_POLL_S)
        elif select.select([self._requests], [], [], _POLL_S if is_busy else None)[0]:
            data = os.read(self._requests, _READ_BYTES)
            self._is_open = bool(data)
            *lines, self._unread = (self._unread + data).split(b"\n")
            requests = [json.loads(line) for line in lines]
            self._urgent += [(len(_function(new["kernel"]).src), new) for new in requests if not new["turn"]]
            self._urgent.sort(key=lambda item: item[0])
            self._others += [new for new in requests if new["turn"]]

    def _reap(self) -> None:
        now = time.monotonic()
        for child, (deadline, turn) in list(self._children.items()):
            is_late = deadline < now
            if is_late:
                os.kill(child, signal.SIGKILL)
            if os.waitpid(child, 0 if is_late else os.WNOHANG)[0]:
                del self._children[child]
                os.write(self._replies, b"%d" % turn)


def _function(kernel: str) -> Any:
    module, _, attribute = json.loads(kernel)["name"].rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _fork(request: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        if request["turn"]:
            os.nice(NICE)
        _compile(request["kernel"], _function(request["kernel"]), request["target"])
    except BaseException:  # the engine compiles it again at the launch and reports the error
        os._exit(1)
    os._exit(0)


def _compile(kernel: str, function: Any, target: list[Any]) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compile_kernel
    from triton.compiler import make_backend

    gpu = GPUTarget(*target)
    source, options = source_of(kernel, function)
    compiled = compile_kernel(source, target=gpu, options=make_backend(gpu).parse_options(options).__dict__)
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(compiled.src, compiled.metadata)


if __name__ == "__main__":
    main()
