"""Gates that work on a CUDA stream waits at until the host opens them.

So work whose input the host still computes can be queued already, and starts the moment that input is there. Whoever
queues a wait must make sure that the gate is opened, whatever fails: until then nothing behind it runs. And nothing
that waits for the whole device may be called meanwhile, such as loading a kernel or freeing memory, by a thread that
holds the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools

import torch

WAIT_UNTIL_EQUAL = 1


class HostGates:
    """One gate for each turn of a ring."""

    def __init__(self, size: int) -> None:
        self._numbers = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self._on_host = self._numbers.numpy()
        # Short calls: giving up the interpreter's lock would take longer.
        self._driver = ctypes.PyDLL("libcuda.so.1")
        self._wait = self._driver.cuStreamWaitValue32_v2
        self._wait.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        self._next_number = itertools.count(1)

    def close(self, turn: int) -> int:
        """Close the turn's gate. Returns the number that opens it."""
        number = next(self._next_number) & 0x7FFFFFFF
        self._on_host[turn] = 0
        return number

    def open(self, turn: int, number: int) -> None:
        """Everything that the host wrote before is seen by the work behind the gate."""
        self._on_host[turn] = number

    def queue_wait(self, stream: torch.cuda.Stream, turn: int, number: int) -> None:
        """Let further work on the stream wait until the gate is opened with this number."""
        address = self._numbers.data_ptr() + turn * self._numbers.element_size()
        status = self._wait(stream.cuda_stream, address, number, WAIT_UNTIL_EQUAL)
        if status:
            raise RuntimeError(f"A stream cannot wait for the host: CUDA error {status}.")


def open_gates(size: int) -> HostGates | None:
    """None where the driver has no such waits."""
    with contextlib.suppress(OSError, AttributeError, RuntimeError):
        gates = HostGates(size)
        number = gates.close(0)
        gates.open(0, number)
        gates.queue_wait(torch.cuda.current_stream(), 0, number)
        return gates
    return None
