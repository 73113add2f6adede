"""The contents of KV blocks as bytes, for prefixes that move between replicas.

Reading and writing take their turn among the steps: after those launched so far and before all later ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from millrace.ops.kv.whole_blocks import block_parts, buffer_shape, gather_blocks, scatter_blocks
from millrace.plan.step import Int32s
from millrace.run.device.device import Device, Pending


class BlockContents:
    """The same blocks of several pools: those of a model and of its drafter, if it has one."""

    def __init__(self, pools: Sequence[Sequence[Tensor]], device: Device, kv_dtype: str) -> None:
        self._device = device
        self._parts = [block_parts(kv) for kv in pools if kv]
        self._shapes = [buffer_shape(parts) for parts in self._parts]
        self._sizes = [
            layers * both * words * parts[0].dtype.itemsize
            for parts, (layers, both, words) in zip(self._parts, self._shapes, strict=True)
        ]
        self.block_bytes = sum(self._sizes)
        shown = [f"{len(kv)}x{tuple(kv[0].shape[2:])}x{str(kv[0].dtype).removeprefix('torch.')}" for kv in pools if kv]
        self.layout = f"{device.kind} {kv_dtype} {' '.join(shown)}"

    def read(self, blocks: Int32s) -> Pending[bytes]:
        """Pool after pool: in each, block after block."""
        ids = self._device.upload(blocks)

        def work() -> list[Tensor]:
            buffers = []
            for parts, shape in zip(self._parts, self._shapes, strict=True):
                buffer = parts[0].new_empty((len(ids), *shape))
                gather_blocks(parts, ids.long(), buffer)
                buffers.append(buffer)
            return buffers

        pending = self._device.launch(work, lambda buffers: [buffer.cpu() for buffer in buffers])
        return _Joined(pending)

    def write(self, blocks: Int32s, contents: bytes) -> Pending[None]:
        """`contents`: as `read` gives them."""
        if len(contents) != len(blocks) * self.block_bytes:
            raise ValueError(f"{len(blocks)} blocks have {len(blocks) * self.block_bytes} bytes, not {len(contents)}")
        pieces, at = [], 0
        for size in self._sizes:
            pieces.append(self._device.upload(np.frombuffer(contents, np.uint8, len(blocks) * size, at)))
            at += len(blocks) * size
        ids = self._device.upload(blocks)

        def work() -> None:
            for parts, shape, piece in zip(self._parts, self._shapes, pieces, strict=True):
                scatter_blocks(parts, ids.long(), piece.view(parts[0].dtype).view(len(ids), *shape))

        return self._device.launch(work, lambda done: done)


class _Joined:
    def __init__(self, pending: Pending[list[Tensor]]) -> None:
        self._pending = pending

    def done(self) -> bool:
        return self._pending.done()

    def wait(self) -> bytes:
        return b"".join(buffer.view(torch.uint8).numpy().tobytes() for buffer in self._pending.wait())
