"""The device a model runs on, behind the few operations in which CPU and CUDA differ.

Work is launched and waited for. On CUDA launching queues kernels on a stream and returns; on the CPU a single worker
thread plays the part of the stream. Either way launches run in order, and the host is free to plan the next step.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.config import RunConfig
from millrace.errors import ConfigError
from millrace.host.cores import memory_nodes, usable_cores
from millrace.host.time_slice import ask_for_long_slices
from millrace.ops.triton.compile.prebuild import hash_ahead
from millrace.run.device.side_stream import SideStream

CORES_TO_WATCH = 4
"""From this many cores on, a thread may spend one on watching the GPU while a step runs."""
WATCH_S = 0.002
"""How long such a thread goes on watching, for messages, when its work is done."""

MARKS = 8
"""Events that stand for the ends of launches, in turn. With more launches in flight one is waited for longer than need
be: what comes later on a stream is done later."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A launched piece of work. `wait` returns its result or raises what it raised."""

    def wait(self) -> T_co: ...


class Device(Protocol):
    kind: str
    torch_device: torch.device
    watch_s: float
    """Whoever answers first is asked again at once: for so long after its last work the host had better stay awake,
    because to be woken takes time."""

    def name(self) -> str: ...

    def free_bytes(self) -> int:
        """Memory that can still be taken."""

    def upload(self, array: npt.NDArray[np.int32]) -> Tensor:
        """The array on the device, in launch order. The caller may reuse the array at once."""

    def launch(self, work: Callable[[], T], to_host: Callable[[T], T]) -> Pending[T]:
        """Run `work` after everything launched before; `to_host` brings its tensors back without waiting."""

    def probe(self) -> None:
        """Raise if the device itself is broken, as after an illegal access."""

    def close(self) -> None: ...


class CpuDevice:
    kind = "cpu"
    watch_s = 0.0

    def __init__(self, threads: int) -> None:
        self.torch_device = torch.device("cpu")
        home = memory_nodes()[0]
        self.threads = threads or min(usable_cores(), len(home))
        self._cores = home if self.threads <= len(home) else None
        """Where its threads stay: beside one memory node, unless it has more of them than that has cores."""
        torch.set_num_threads(self.threads)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="device", initializer=self._enter_worker)

    def _enter_worker(self) -> None:
        if self._cores is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self._cores)  # of this thread and those that it starts
        torch.set_num_threads(self.threads)
        ask_for_long_slices()

    def name(self) -> str:
        return f"cpu, {self.threads} threads"

    def free_bytes(self) -> int:
        return available_memory()

    def upload(self, array: npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array.copy())

    def launch(self, work: Callable[[], T], to_host: Callable[[T], T]) -> Pending[T]:
        def run() -> T:
            with torch.inference_mode():
                return work()

        return _CpuPending(self._worker.submit(run))

    def probe(self) -> None:
        pass

    def close(self) -> None:
        self._worker.shutdown(wait=True)


class _CpuPending(Generic[T]):
    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def wait(self) -> T:
        return self._future.result()


class CudaDevice:
    kind = "cuda"

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        # To be woken takes time that every token would wait; with a core to spare the host watches for the end instead.
        self._sleeps = usable_cores() < CORES_TO_WATCH
        self.watch_s = 0.0 if self._sleeps else WATCH_S
        self._way_back = SideStream()
        marks = [torch.cuda.Event(blocking=self._sleeps) for _ in range(MARKS)]  # type: ignore[no-untyped-call]
        self._marks = itertools.cycle(marks)
        hash_ahead()

    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def upload(self, array: npt.NDArray[np.int32]) -> Tensor:
        # The caching host allocator reuses a pinned buffer only after the copies that read it are done.
        return torch.from_numpy(array).pin_memory().to(self.torch_device, non_blocking=True)

    def launch(self, work: Callable[[], T], to_host: Callable[[T], T]) -> Pending[T]:
        with torch.inference_mode():
            result = work()
            # Beside the work launched next, which does not wait for it. What is copied must stay until `done`: tensors
            # of the result are held by what is returned, and whoever copies from elsewhere sees to it.
            self._way_back.follow_steps()
            with self._way_back:
                host = to_host(result)
            done = next(self._marks)
            self._way_back.record(done)
        return _CudaPending(host, result, done)

    def probe(self) -> None:
        torch.zeros(1, device=self.torch_device).add_(1).item()

    def close(self) -> None:
        torch.cuda.synchronize()


class _CudaPending(Generic[T]):
    def __init__(self, host: T, on_device: T, done: torch.cuda.Event) -> None:
        self._host, self._on_device, self._done = host, on_device, done

    def wait(self) -> T:
        self._done.synchronize()
        return self._host


def open_device(config: RunConfig) -> Device:
    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise ConfigError("run.device is cuda, but torch sees no GPU; use --device cpu.", param="run.device")
        return CudaDevice()
    return CpuDevice(config.threads)


def fast_dtype(device: Device) -> torch.dtype:
    """What `auto` means: bfloat16 where the machine multiplies it natively, float32 elsewhere."""
    if device.kind == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def available_memory() -> int:
    """Bytes this process may still take: the machine's, or what is left under a container's limit."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))
