"""The KV pool on the device: tensors cut into blocks that the scheduler assigns by id. A block has a part in each of
them: what one layer of the KV group that uses the block keeps (`models/spec/kv_groups.py`). `KvSpec` says what that is,
and how large a block is.

Layout of a tensor: [2, num_blocks, num_kv_heads, block_size, head_dim], keys first; for the formats of 12, 8 and 4 bits
see `ops/kv/cache.py`. Latents: [1, num_blocks, 1, block_size, width]. The tokens of a head are contiguous within a
block, so attention reads them as a stream. Block 0 is scratch: padding may write to it and no row reads it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from millrace.config import KvDtype
from millrace.errors import ConfigError
from millrace.models.spec.model_spec import ModelSpec
from millrace.ops.kv.cache import SCALE_BYTES, SCALE_INT32, SCALE_WORDS
from millrace.ops.kv.packed import can_pack, packed_items
from millrace.ops.linear.fp8 import FP8_CAPABILITY, fp8_missing
from millrace.ops.triton import hopper_missing, triton_missing
from millrace.run.settings import KvFormat

KvKind = Literal["keys and values", "latents"]
HEAD_UNIT = 16
"""In the formats of 8 and 4 bits head_dim must be a multiple of this, so that heads are read in whole words."""
INT4_LEAST_HEAD = 32
"""On a GPU: half a head is a side of a matrix instruction."""


@dataclass(frozen=True, slots=True)
class KvSpec:
    """What the blocks of one KV group hold."""

    kind: KvKind
    window: int | None
    """For which blocks are freed; None: every block is kept."""
    layers: int
    """Places for layers in a block; the same in all groups."""
    block_size: int
    """Tokens of a block."""
    vector_shape: tuple[int, int]
    """(vectors of a token in a layer, items of a vector with its scale)."""
    heads: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        vectors, items = self.vector_shape
        return self.layers * vectors * self.heads * items * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.token_bytes

    def tensor_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Of the pool's tensor of one place."""
        vectors, items = self.vector_shape
        return vectors, num_blocks, self.heads, self.block_size, items


def kv_specs(spec: ModelSpec, block_size: int, dtype: torch.dtype, kv_dtype: KvFormat = "full") -> tuple[KvSpec, ...]:
    """Of each KV group. Their blocks have the same size."""
    groups = spec.kv_groups
    items, stored_dtype = _head_size(spec.head_dim, dtype, kv_dtype)
    vectors, _, heads, _, _ = spec.kv_shape(1, block_size)
    kind: KvKind = "keys and values" if spec.latent is None else "latents"
    return tuple(
        KvSpec(kind, window, groups.page_layers, block_size, (vectors, items), heads, stored_dtype)
        for window in groups.windows
    )


def resolve_kv_dtype(
    requested: KvDtype,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool = False,
    has_int8_products: bool = False,
) -> KvFormat:
    """Resolve `auto`; raise ConfigError for a format that this device or model does not support.

    `has_int8_products`: activations are rounded to INT8 anyway, which is coarser than float16 keys and values."""
    if spec.latent is not None and requested not in ("auto", "full", "float16"):
        raise ConfigError(
            f"memory.kv_dtype is {requested}, but the model's cache holds latents, which that format does not store."
            " Set --kv-dtype auto or full.",
            param="memory.kv_dtype",
        )
    if requested == "full":
        return requested
    if requested == "auto":
        if has_int8_products and not float16_objection(dtype, device):
            return "float16"
        pays = not _packed_objection(spec, dtype, device, deterministic) and not hopper_missing(device)
        return "packed" if pays else "full"
    if requested == "packed":
        objection = _packed_objection(spec, dtype, device, deterministic)
    elif requested == "float16":
        objection = float16_objection(dtype, device)
    else:
        objection = _few_bits_objection(requested, device, spec)
    if objection:
        raise ConfigError(f"memory.kv_dtype is {requested}, which {objection}", param="memory.kv_dtype")
    return requested


def format_or_full(kv_dtype: KvFormat, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> KvFormat:
    """The target's format for a drafter too, if the drafter's heads allow it."""
    try:
        return resolve_kv_dtype(kv_dtype, spec, dtype=dtype, device=device)
    except ConfigError:
        return "full"


def _packed_objection(spec: ModelSpec, dtype: torch.dtype, device: torch.device, deterministic: bool) -> str:
    if device.type != "cuda":
        return "is for a GPU, but the model would run on the CPU. Set --kv-dtype auto, or int8, which is smaller."
    missing = triton_missing(device)
    if missing:
        return f"{missing}. Install it, or set --kv-dtype auto."
    if deterministic:
        return (
            "rounds very small numbers, so results could depend on how a prompt was cut into steps, but"
            " run.deterministic is on. Set --kv-dtype auto, which rounds nothing, or remove --deterministic."
        )
    if dtype != torch.bfloat16:
        named = str(dtype).removeprefix("torch.")
        return f"holds bfloat16, but the model would run in {named}. Set --kv-dtype auto, or --dtype bfloat16."
    if not can_pack(spec.head_dim):
        return f"needs heads of 64, 128 or 256 items, but the model's have {spec.head_dim}. Set --kv-dtype auto."
    if not spec.rotates_whole_heads:
        return "needs heads that are rotated fully or not at all, but the model rotates a part. Set --kv-dtype auto."
    return ""


def float16_objection(dtype: torch.dtype, device: torch.device) -> str:
    """Why a cache cannot hold float16, as a clause; empty if it can."""
    if device.type != "cpu":
        return "is for a CPU, but the model would run on a GPU. Set --kv-dtype auto."
    if dtype != torch.float32:
        named = str(dtype).removeprefix("torch.")
        return f"is for float32 models, but the model would run in {named}, which is as small. Set --kv-dtype auto."
    return ""


def _few_bits_objection(requested: Literal["fp8", "int8", "int4"], device: torch.device, spec: ModelSpec) -> str:
    head_dim = spec.head_dim
    objection = {"fp8": _fp8_objection, "int8": _int8_objection, "int4": _int4_objection}[requested](device)
    if not objection and head_dim % HEAD_UNIT:
        return f"needs heads in multiples of {HEAD_UNIT} items, but the model's have {head_dim}. Set --kv-dtype auto."
    if not objection and requested == "int4" and device.type != "cpu" and head_dim < INT4_LEAST_HEAD:
        return (
            f"needs heads of at least {INT4_LEAST_HEAD} items on a GPU, but the model's have {head_dim}. Set --kv-dtype"
            " auto."
        )
    if not objection and requested == "int4" and not shifts_keys(spec):
        instead = "int8" if device.type == "cpu" else "fp8"
        return (
            "would round away the keys of this model: they have biases, which can be a hundred times larger than what"
            " tells keys apart, and its norms, sinks or softcap do not allow to subtract them. Set --kv-dtype"
            f" {instead} or auto."
        )
    return objection


def shifts_keys(spec: ModelSpec) -> bool:
    """Whether four bits can do without the biases of keys: there are none, or the same number may be added to all
    scores of a query."""
    if not spec.qkv_bias:
        return True
    return not spec.qk_norm and not spec.attention_sinks and spec.attention_softcap is None


def _fp8_objection(device: torch.device) -> str:
    if fp8_missing(device):
        where = "the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
        needed = ".".join(map(str, FP8_CAPABILITY))
        instead = "int8, which needs as little memory there, or auto" if device.type == "cpu" else "auto"
        return (
            f"needs a GPU of compute capability {needed} or later, but the model would run on {where}. Set --kv-dtype"
            f" {instead}, or use such a GPU."
        )
    missing = triton_missing(device)
    return f"{missing}. Install it, or set --kv-dtype auto." if missing else ""


def _int8_objection(device: torch.device) -> str:
    if device.type == "cpu":
        return ""
    return (
        f"is for a CPU, but the model would run on {torch.cuda.get_device_name(device)}. Set --kv-dtype fp8, which"
        " needs as little memory there, or auto."
    )


def _int4_objection(device: torch.device) -> str:
    missing = "" if device.type == "cpu" else triton_missing(device)
    return f"{missing}. Install it, or set --kv-dtype auto." if missing else ""


def bytes_per_token(spec: ModelSpec, dtype: torch.dtype, kv_dtype: KvFormat = "full") -> int:
    """Bytes of a block per token in it. With several KV groups a token is in one block of each."""
    return kv_specs(spec, 1, dtype, kv_dtype)[0].token_bytes


def _head_size(head_dim: int, dtype: torch.dtype, kv_dtype: KvFormat) -> tuple[int, torch.dtype]:
    """(items, dtype) of one key or value in the cache, its scale included."""
    if kv_dtype == "packed":
        return packed_items(head_dim) + SCALE_WORDS, torch.int16
    if kv_dtype == "fp8":
        return head_dim + SCALE_BYTES, torch.uint8
    if kv_dtype == "int8":
        return head_dim + SCALE_BYTES, torch.int8
    if kv_dtype == "int4":
        return head_dim // 8 + SCALE_INT32, torch.int32
    if kv_dtype == "float16":
        return head_dim, torch.float16
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
    """Allocate `num_blocks` blocks and the scratch block. On a CPU, pages become resident when first written."""
    own = kv_specs(spec, block_size, dtype, kv_dtype)[0]
    shape = own.tensor_shape(num_blocks + 1)
    if device.type == "cpu":
        return [untouched_zeros(shape, own.dtype) for _ in range(own.layers)]
    return [torch.zeros(shape, dtype=own.dtype, device=device) for _ in range(own.layers)]


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zero pages from the operating system: torch.zeros would write to every page and make it resident. Huge pages
    where available: attention reads a few KiB at scattered addresses, and small pages would miss the TLB each time."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a Linux kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype).reshape(shape)
