"""Host memory for KV blocks: one contiguous piece per block, with all its layers.

For a GPU the memory is pinned, so that copies run beside everything else. Pinning takes about a second per GiB and
happens in a thread of its own; until a piece is pinned, copies to and from it work, but make the host wait.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.plan.step import Int32s

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 20
"""Size of a pinned piece of memory. A transfer never crosses from one to the next."""


class HostBlocks:
    """`chunks` hold `chunk_slots` blocks each, in the order of their slots. Unpinned memory is one chunk."""

    def __init__(
        self, num_slots: int, block_shape: tuple[int, ...], dtype: torch.dtype, pinned_for: torch.device | None = None
    ) -> None:
        """`pinned_for`: the GPU that copies to and from this memory."""
        block_bytes = math.prod(block_shape) * dtype.itemsize
        self.chunk_slots = max(1, CHUNK_BYTES // block_bytes) if pinned_for is not None else num_slots
        self.chunks: list[Tensor] = []
        memory: list[npt.NDArray[np.uint8]] = []
        for first in range(0, num_slots, self.chunk_slots):
            count = min(self.chunk_slots, num_slots - first)
            memory.append(_reserve(count * block_bytes))
            self.chunks.append(torch.from_numpy(memory[-1]).view(dtype).view(count, *block_shape))
        if pinned_for is not None:
            threading.Thread(target=_pin, args=(memory, pinned_for), name="pin-host-blocks", daemon=True).start()

    def run(self, slot: int, count: int) -> Tensor:
        """The blocks in consecutive slots of one chunk."""
        first = slot % self.chunk_slots
        return self.chunks[slot // self.chunk_slots][first : first + count]

    def bytes_of(self, slot: int) -> memoryview:
        """The memory of one block."""
        return self.run(slot, 1).view(torch.uint8).numpy().data.cast("B")

    def runs_of(self, slots: Int32s) -> Iterator[tuple[int, int, int]]:
        """(index, slot, count) of each run of consecutive slots of one chunk: one transfer copies a run."""
        first, numbers = 0, slots.tolist()
        for at in range(1, len(numbers) + 1):
            is_end = at == len(numbers) or numbers[at] != numbers[at - 1] + 1 or numbers[at] % self.chunk_slots == 0
            if is_end:
                yield first, numbers[first], at - first
                first = at


def _pin(chunks: list[npt.NDArray[np.uint8]], device: torch.device) -> None:
    torch.cuda.set_device(device)  # of this thread
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for number, chunk in enumerate(chunks):
        error = int(cudart.cudaHostRegister(chunk.ctypes.data, chunk.nbytes, 0))
        if error:
            log.warning(
                "could pin only %d of %d pieces of host memory for KV blocks (CUDA error %d); the rest is copied"
                " more slowly. Raise the limit of locked memory (ulimit -l) or lower --kv-host-gib.",
                number,
                len(chunks),
                error,
            )
            return
        # Otherwise CUDA would take the next memory at this address for the old one, and copy from and to lost pages.
        weakref.finalize(chunk, cudart.cudaHostUnregister, chunk.ctypes.data).atexit = False


def _reserve(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory from the operating system, whose pages become resident when first written or pinned."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a Linux kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
