"""The device a model runs on: the few operations in which CPU and CUDA differ.

Work is launched asynchronously and waited for later. On CUDA a launch queues kernels on a stream; on the CPU a single
worker thread takes the place of the stream. Launches run in order, and the host can plan the next step meanwhile.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.config import RunConfig
from millrace.errors import ConfigError
from millrace.host.cores import memory_nodes, usable_cores
from millrace.host.device_limits import DeviceLimits, device_limits
from millrace.host.free_memory import available_bytes
from millrace.host.time_slice import request_long_slices
from millrace.ops.cpp.targets import BF16_FEATURES, processor_features
from millrace.ops.triton.compile.dry_run import prepare_triton_key
from millrace.run.device.defaults import CPU_DEFAULTS, CUDA_DEFAULTS, DeviceDefaults
from millrace.run.device.processor_limits import processor_limits
from millrace.run.device.side_stream import SideStream

MIN_CORES_TO_POLL = 4
"""With at least this many cores the host polls for the end of a step instead of sleeping."""
MESSAGE_POLL_S = 0.002
"""How long the engine keeps polling for messages after its last step."""

NUM_DONE_EVENTS = 8
"""CUDA events that mark the end of launches, reused round-robin. With more launches in flight, `wait` may wait for a
later launch on the same stream: correct, but longer than needed."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Launched work. `wait` returns its result or raises its exception."""

    def wait(self) -> T_co: ...

    def done(self) -> bool:
        """True if `wait` would return or raise at once."""


class Device(Protocol):
    kind: str
    torch_device: torch.device
    defaults: DeviceDefaults
    poll_s: float
    """How long the host should poll for messages after its last step before it sleeps: waking up adds latency."""

    def name(self) -> str: ...

    def free_bytes(self) -> int:
        """Memory that can still be allocated."""

    def limits(self) -> DeviceLimits:
        """Its speed as far as it is known without measuring; zeros where it is not."""

    def measured_limits(self, dtype: torch.dtype) -> DeviceLimits:
        """Its speed, measured if that is the only way to know."""

    def upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Copy the array to the device, in launch order. The caller may reuse the array at once."""

    def launch(self, work: Callable[[], T], to_host: Callable[[T], T]) -> Pending[T]:
        """Run `work` after all earlier launches; `to_host` starts copying its tensors back without waiting."""

    def queue(self, work: Callable[[], T]) -> Callable[[], T]:
        """Run `work` after all earlier launches and before all later ones. The returned function gives its result or
        raises its exception, without waiting if called by a later launch."""

    def probe(self) -> None:
        """Raise if the device itself is unusable, for example after an illegal memory access."""

    def close(self) -> None: ...


class CpuDevice:
    kind = "cpu"
    poll_s = 0.0

    def __init__(self, threads: int, num_processes: int = 1) -> None:
        """`threads`: 0 shares the cores with the other processes of the model."""
        self.torch_device = torch.device("cpu")
        # bfloat16 where the processor has instructions for it: emulated, it has half of float32's speed.
        dtype = torch.bfloat16 if processor_features() & BF16_FEATURES else torch.float32
        self.defaults = replace(CPU_DEFAULTS, dtype=dtype)
        node_cores = memory_nodes()[0]
        self.threads = threads or max(1, min(usable_cores(), len(node_cores)) // num_processes)
        self._cores = node_cores if self.threads <= len(node_cores) else None
        """Cores its threads are pinned to: those of one NUMA node, or None if there are more threads than cores."""
        torch.set_num_threads(self.threads)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="device", initializer=self._enter_worker)

    def _enter_worker(self) -> None:
        if self._cores is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self._cores)  # this thread and those it starts
        torch.set_num_threads(self.threads)
        request_long_slices()

    def name(self) -> str:
        return f"cpu, {self.threads} threads"

    def free_bytes(self) -> int:
        return available_bytes()

    def limits(self) -> DeviceLimits:
        return DeviceLimits(0.0, 0.0, 0.0)

    def measured_limits(self, dtype: torch.dtype) -> DeviceLimits:
        measured = processor_limits(dtype)
        return DeviceLimits(measured.flops, measured.bytes_per_s, 0.0)

    def upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array.copy())

    def launch(self, work: Callable[[], T], to_host: Callable[[T], T]) -> Pending[T]:
        return _CpuPending(self._submit(work))

    def queue(self, work: Callable[[], T]) -> Callable[[], T]:
        return self._submit(work).result

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        def run() -> T:
            with torch.inference_mode():
                return work()

        return self._worker.submit(run)

    def probe(self) -> None:
        pass

    def close(self) -> None:
        self._worker.shutdown(wait=True)


class _CpuPending(Generic[T]):
    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def wait(self) -> T:
        return self._future.result()

    def done(self) -> bool:
        return self._future.done()


class CudaDevice:
    kind = "cuda"
    defaults = CUDA_DEFAULTS

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        # Waking up adds latency to every token, so with enough cores the host polls for the end of a step.
        self._sleeps = usable_cores() < MIN_CORES_TO_POLL
        self.poll_s = 0.0 if self._sleeps else MESSAGE_POLL_S
        self._copy_stream = SideStream()
        events = [torch.cuda.Event(blocking=self._sleeps) for _ in range(NUM_DONE_EVENTS)]  # type: ignore[no-untyped-call]
        self._done_events = itertools.cycle(events)
        prepare_triton_key()

    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def limits(self) -> DeviceLimits:
        return device_limits(self.name(), self.torch_device.index or 0)

    def measured_limits(self, dtype: torch.dtype) -> DeviceLimits:
        return self.limits()

    def upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        # The caching host allocator reuses a pinned buffer only after the copies that read it are done.
        array = array if array.flags.writeable else array.copy()  # PyTorch warns of arrays that are not writable
        return torch.from_numpy(array).pin_memory().to(self.torch_device, non_blocking=True)

    def launch(self, work: Callable[[], T], to_host: Callable[[T], T]) -> Pending[T]:
        with torch.inference_mode():
            result = work()
            # On its own stream, so that the next launch does not wait for it. The source must live until `done`: the
            # returned object holds the result's tensors; a `to_host` that copies other memory must keep that alive.
            self._copy_stream.follow_steps()
            with self._copy_stream:
                host = to_host(result)
            done = next(self._done_events)
            self._copy_stream.record(done)
        return _CudaPending(host, result, done)

    def queue(self, work: Callable[[], T]) -> Callable[[], T]:
        with torch.inference_mode():
            result = work()
        return lambda: result

    def probe(self) -> None:
        torch.zeros(1, device=self.torch_device).add_(1).item()

    def close(self) -> None:
        torch.cuda.synchronize()


class _CudaPending(Generic[T]):
    def __init__(self, host: T, on_device: T, done: torch.cuda.Event) -> None:
        self._host = host
        self._on_device = on_device
        self._done = done

    def wait(self) -> T:
        self._done.synchronize()
        return self._host

    def done(self) -> bool:
        return bool(self._done.query())  # type: ignore[no-untyped-call]


def ranks_per_device(device: Device, num_ranks: int) -> int:
    """How many ranks of a model share a device and its memory, at most."""
    return num_ranks if device.kind != "cuda" else -(-num_ranks // torch.cuda.device_count())


def open_device(config: RunConfig, rank: int = 0) -> Device:
    """`rank`: of a model that is split over processes. Each has a GPU of its own while there are enough."""
    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise ConfigError("run.device is cuda, but torch sees no GPU; use --device cpu.", param="run.device")
        if config.tensor_parallel > 1:
            torch.cuda.set_device(rank % torch.cuda.device_count())
        return CudaDevice()
    return CpuDevice(config.threads, config.tensor_parallel)
