"""`ops/kv/whole_blocks.py` on a GPU: all layers of all blocks in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS_PER_PROGRAM = 2048


@triton.jit(do_not_specialize=["num_blocks"])
def _copy_kernel(
    tensors, blocks, buffer, num_blocks, words,
    LAYERS: tl.constexpr, PARTS: tl.constexpr, TO_BUFFER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program copies a piece of one part of one block. `tensors`: addresses of the layers' tensors."""
    at, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = tl.load(blocks + at).to(tl.int64)
    layer = tl.load(tensors + part // PARTS).to(tl.pointer_type(buffer.dtype.element_ty))
    layer = tl.multiple_of(layer, 16)
    offset = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < words
    in_pool = layer + ((part % PARTS).to(tl.int64) * num_blocks + block) * words + offset
    in_buffer = buffer + (at * (PARTS * LAYERS) + part) * words + offset
    if TO_BUFFER:
        tl.store(in_buffer, tl.load(in_pool, mask=inside), mask=inside)
    else:
        tl.store(in_pool, tl.load(in_buffer, mask=inside), mask=inside)


def addresses_of(parts: Sequence[Tensor]) -> Tensor:
    """The table of tensors that `copy_blocks` reads. The tensors must outlive it."""
    return torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=parts[0].device)


def copy_blocks(addresses: Tensor, part: Tensor, blocks: Tensor, buffer: Tensor, *, to_buffer: bool) -> None:
    """Copy blocks (int32 ids) of the pool to the first places of the buffer [n, layers, parts, words], or back.
    `part` is any of the pool's views [parts, blocks, words]: all have the same shape."""
    (parts, _, words), layers = part.shape, len(addresses)
    grid = (len(blocks), parts * layers, triton.cdiv(words, WORDS_PER_PROGRAM))
    _copy_kernel[grid](
        addresses, blocks, buffer, part.shape[1], words,
        LAYERS=layers, PARTS=parts, TO_BUFFER=to_buffer, BLOCK=WORDS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
