"""The KV cache on the device: one tensor per layer, cut into blocks that the scheduler hands out by number.

Layout per layer: [2, num_blocks, num_kv_heads, block_size, head_dim], keys first; with eight bits as `ops/kv_cache.py`
says. A head's tokens within a block lie side by side, so attention streams them. Block 0 is scratch: padding may write
there, nobody reads it.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
import torch
from torch import Tensor

from millrace.config import KvDtype
from millrace.errors import ConfigError
from millrace.models.spec import ModelSpec
from millrace.ops.fp8_linear import FP8_CAPABILITY, fp8_missing
from millrace.ops.kv_cache import SCALE_BYTES
from millrace.ops.triton import triton_missing

HEAD_UNIT = 16
"""Heads in eight bits are multiples of this many items, so that they are read in whole words."""


NARROW = {"fp8": torch.uint8, "int8": torch.int8}
"""What the bytes of a cache in eight bits are."""


def check_kv_dtype(kv_dtype: KvDtype, device: torch.device, head_dim: int) -> None:
    """Refuse what this device or model cannot do."""
    if kv_dtype == "auto":
        return
    objection = _fp8_objection(device) if kv_dtype == "fp8" else _int8_objection(device)
    if not objection and head_dim % HEAD_UNIT:
        objection = (
            f"needs heads in multiples of {HEAD_UNIT} items, but the model's have {head_dim}. Set --kv-dtype auto."
        )
    if objection:
        raise ConfigError(f"memory.kv_dtype is {kv_dtype}, which {objection}", param="memory.kv_dtype")


def _fp8_objection(device: torch.device) -> str:
    if fp8_missing(device):
        where = "the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
        needed = ".".join(map(str, FP8_CAPABILITY))
        instead = "int8, which takes as little there, or auto" if device.type == "cpu" else "auto"
        return (
            f"needs a GPU of compute capability {needed} or later, but the model would run on {where}. Set --kv-dtype"
            f" {instead}, or run on such a GPU."
        )
    missing = triton_missing(device)
    return f"{missing}. Install it, or set --kv-dtype auto." if missing else ""


def _int8_objection(device: torch.device) -> str:
    if device.type == "cpu":
        return ""
    return (
        f"is for a CPU, but the model would run on {torch.cuda.get_device_name(device)}. Set --kv-dtype fp8, which"
        " takes as little there, or auto."
    )


def bytes_per_token(spec: ModelSpec, dtype: torch.dtype, kv_dtype: KvDtype = "auto") -> int:
    head_bytes = spec.head_dim * dtype.itemsize if kv_dtype == "auto" else spec.head_dim + SCALE_BYTES
    return 2 * spec.num_layers * spec.num_kv_heads * head_bytes


def allocate_kv(
    spec: ModelSpec,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: KvDtype = "auto",
) -> list[Tensor]:
    """Room for `num_blocks` blocks and the scratch block. On a CPU pages become resident only when written."""
    shape = spec.kv_shape(num_blocks + 1, block_size)
    if kv_dtype != "auto":
        shape, dtype = (*shape[:4], shape[4] + SCALE_BYTES), NARROW[kv_dtype]
    if device.type == "cpu":
        return [_untouched_zeros(shape, dtype) for _ in range(spec.num_layers)]
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros straight from the operating system: torch's own would write, and so occupy, every page. In large pages
    where it has them: attention reads a few KiB here and there, and would wait for the address of each small one."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype).reshape(shape)
