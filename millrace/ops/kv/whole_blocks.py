"""Copies whole blocks between the KV pool and a buffer that holds each block as one piece: the reference.

The pool has one tensor per layer, [2, blocks, ...] with keys first, in any format of `cache.py`. A block has two parts
in each of them; of latents, [1, blocks, ...], one. The buffer is [n, layers, parts, words].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ids = npt.NDArray[np.int32]
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def block_parts(kv: Sequence[Tensor]) -> list[Tensor]:
    """Views [parts, blocks, words] of the pool's tensors, in the largest words that a part consists of."""
    part_bytes = math.prod(kv[0].shape[2:]) * kv[0].dtype.itemsize
    word = next(word for word in _WORDS if part_bytes % word.itemsize == 0)
    return [layer.flatten(2).view(word) for layer in kv]


def buffer_shape(parts: Sequence[Tensor]) -> tuple[int, int, int]:
    """Shape of one block in the buffer."""
    return len(parts), parts[0].shape[0], parts[0].shape[2]


def gather_blocks(parts: Sequence[Tensor], blocks: Tensor, buffer: Tensor) -> None:
    """Copy blocks (integer ids) from the pool to the first places of the buffer."""
    for layer, part in enumerate(parts):
        buffer[: len(blocks), layer] = part[:, blocks].transpose(0, 1)


def scatter_blocks(parts: Sequence[Tensor], blocks: Tensor, buffer: Tensor) -> None:
    """Copy blocks from the first places of the buffer to the pool."""
    for layer, part in enumerate(parts):
        part[:, blocks] = buffer[: len(blocks), layer].transpose(0, 1)


class CpuBlocks:
    """The same on a CPU, to and from any places. NumPy copies a part as one item; torch would take several times as
    long, word by word."""

    def __init__(self, parts: Sequence[Tensor], buffer: Tensor) -> None:
        self._parts, self._buffer = [_as_items(part) for part in parts], _as_items(buffer)

    def gather(self, blocks: Ids, places: Ids) -> None:
        for layer, part in enumerate(self._parts):
            self._buffer[places, layer] = part[:, blocks].T

    def scatter(self, blocks: Ids, places: Ids) -> None:
        for layer, part in enumerate(self._parts):
            part[:, blocks] = self._buffer[places, layer].T


def _as_items(words: Tensor) -> npt.NDArray[np.void]:
    """The tensor without its last dimension: each row of words is one item."""
    array = words.numpy()
    return array.view(np.dtype((np.void, array.shape[-1] * array.itemsize)))[..., 0]
