"""The KV cache on the device: one tensor per layer, cut into blocks that the scheduler hands out by number.

Layout per layer: [2, num_blocks, num_kv_heads, block_size, head_dim], keys first. A head's tokens within a block lie
side by side, so attention streams them. Block 0 is scratch: padding may write there, nobody reads it.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
import torch
from torch import Tensor

from millrace.models.spec import ModelSpec


def bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    return 2 * spec.num_layers * spec.kv_size * dtype.itemsize


def allocate_kv(
    spec: ModelSpec, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Room for `num_blocks` blocks and the scratch block. On a CPU pages become resident only when written."""
    shape = spec.kv_shape(num_blocks + 1, block_size)
    if device.type == "cpu":
        return [_untouched_zeros(shape, dtype) for _ in range(spec.num_layers)]
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros straight from the operating system: torch's own would write, and so occupy, every page.

    In large pages where there are any: attention reads a few KiB here and there, and looks up an address for each."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype).reshape(shape)
