"""The KV cache on the device: one tensor per layer, cut into blocks that the scheduler hands out by number.

Layout per layer: [2, num_blocks, num_kv_heads, block_size, head_dim], keys first; packed and in eight bits as
`ops/kv/cache.py` says. A head's tokens within a block lie side by side, so attention streams them. Block 0 is scratch:
padding may write there, nobody reads it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from millrace.config import KvDtype
from millrace.errors import ConfigError
from millrace.models.spec.model_spec import ModelSpec
from millrace.ops.kv.cache import SCALE_BYTES, SCALE_WORDS
from millrace.ops.kv.packed import can_pack, packed_items
from millrace.ops.linear.fp8 import FP8_CAPABILITY, fp8_missing
from millrace.ops.triton import hopper_missing, triton_missing

KvFormat = Literal["full", "packed", "fp8", "int8"]
"""What memory.kv_dtype comes to on a device: all but `auto`."""
HEAD_UNIT = 16
"""Heads in eight bits are multiples of this many items, so that they are read in whole words."""


def resolve_kv_dtype(
    asked: KvDtype, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, deterministic: bool = False
) -> KvFormat:
    """What `auto` takes, or what was asked for; refuses what this device or model cannot do."""
    if asked == "full":
        return asked
    if asked == "auto":
        pays = not _packed_objection(spec, dtype, device, deterministic) and not hopper_missing(device)
        return "packed" if pays else "full"
    if asked == "packed":
        objection = _packed_objection(spec, dtype, device, deterministic)
    else:
        objection = _eight_bits_objection(asked, device, spec.head_dim)
    if objection:
        raise ConfigError(f"memory.kv_dtype is {asked}, which {objection}", param="memory.kv_dtype")
    return asked


def _packed_objection(spec: ModelSpec, dtype: torch.dtype, device: torch.device, deterministic: bool) -> str:
    if device.type != "cuda":
        return "is for a GPU, but the model would run on the CPU. Set --kv-dtype auto, or int8, which takes less."
    missing = triton_missing(device)
    if missing:
        return f"{missing}. Install it, or set --kv-dtype auto."
    if deterministic:
        return (
            "changes tiny numbers, so that results could show how a prompt was cut into steps, but run.deterministic is"
            " on. Set --kv-dtype auto, which changes none there, or leave out --deterministic."
        )
    if dtype != torch.bfloat16:
        named = str(dtype).removeprefix("torch.")
        return f"holds bfloat16, but the model would run in {named}. Set --kv-dtype auto, or --dtype bfloat16."
    if not can_pack(spec.head_dim):
        return f"needs heads of 64, 128 or 256 items, but the model's have {spec.head_dim}. Set --kv-dtype auto."
    if not spec.rotates_whole_heads:
        return "needs heads that are rotated whole or not at all, but the model rotates a part. Set --kv-dtype auto."
    return ""


def _eight_bits_objection(asked: Literal["fp8", "int8"], device: torch.device, head_dim: int) -> str:
    objection = _fp8_objection(device) if asked == "fp8" else _int8_objection(device)
    if not objection and head_dim % HEAD_UNIT:
        return f"needs heads in multiples of {HEAD_UNIT} items, but the model's have {head_dim}. Set --kv-dtype auto."
    return objection


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


def bytes_per_token(spec: ModelSpec, dtype: torch.dtype, kv_dtype: KvFormat = "full") -> int:
    width, held_in = _head_of(spec.head_dim, dtype, kv_dtype)
    return 2 * spec.num_layers * spec.num_kv_heads * width * held_in.itemsize


def _head_of(head_dim: int, dtype: torch.dtype, kv_dtype: KvFormat) -> tuple[int, torch.dtype]:
    """A key or a value in the cache, with its scale: how many items of which dtype."""
    if kv_dtype == "packed":
        return packed_items(head_dim) + SCALE_WORDS, torch.int16
    if kv_dtype == "fp8":
        return head_dim + SCALE_BYTES, torch.uint8
    if kv_dtype == "int8":
        return head_dim + SCALE_BYTES, torch.int8
    return head_dim, dtype


def allocate_kv(
    spec: ModelSpec,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: KvFormat = "full",
) -> list[Tensor]:
    """Room for `num_blocks` blocks and the scratch block. On a CPU pages become resident only when written."""
    width, held_in = _head_of(spec.head_dim, dtype, kv_dtype)
    shape = (*spec.kv_shape(num_blocks + 1, block_size)[:4], width)
    if device.type == "cpu":
        return [_untouched_zeros(shape, held_in) for _ in range(spec.num_layers)]
    return [torch.zeros(shape, dtype=held_in, device=device) for _ in range(spec.num_layers)]


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros straight from the operating system: torch's own would write, and so occupy, every page. In large pages
    where it has them: attention reads a few KiB here and there, and would wait for the address of each small one."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype).reshape(shape)
