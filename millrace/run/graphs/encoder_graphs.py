"""CUDA graphs of encoders: steps are padded to sizes that recur, and each size is captured on its second step.

A step's tensors lie in one buffer, so that a graph finds those of every step. Padding is of two kinds: tokens after the
last text, which belong to none, and texts without tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace.models.encoders.encoder import Encoder, PackedTexts
from millrace.run.device.device import Device
from millrace.run.graphs.graph_cache import GraphCache

MIN_TOKENS, MIN_LONGEST = 16, 128
MAX_GRAPHS = 64
"""Steps of further sizes run uncaptured. Chosen, not measured."""


@dataclass(frozen=True, slots=True)
class EncodeSize:
    num_tokens: int
    num_texts: int
    longest: int
    """No text has more tokens: the kernel of attention is launched for as many."""

    @staticmethod
    def of(texts: PackedTexts, max_tokens: int) -> EncodeSize:
        num_tokens = min(_token_size(sum(texts.lengths)), max_tokens)
        return EncodeSize(num_tokens, _power_of_two(len(texts.lengths)), _power_of_two(texts.lengths[-1], MIN_LONGEST))


class EncoderGraphs:
    """Only for encoders that attend by one kernel (`Encoder.packs`)."""

    def __init__(self, encoder: Encoder, device: Device, *, max_tokens: int, max_texts: int) -> None:
        self._encoder = encoder
        self._device = device
        self._max_tokens = max_tokens
        self.graphs = GraphCache(enabled=device.kind == "cuda")
        self._seen: set[EncodeSize] = set()
        """Sizes that ran uncaptured, which compiled their kernels."""
        where = device.torch_device
        self._given = torch.zeros(3 * max_tokens + _power_of_two(max_texts) + 1, dtype=torch.int32, device=where)
        """Of a step: ids, types and positions of its tokens, then the starts of its texts."""
        # Graphs share their memory, so what one returns must lie elsewhere.
        self._states = torch.zeros(max_tokens, encoder.spec.hidden_size, dtype=encoder.dtype, device=where)

    def fits(self, texts: PackedTexts) -> bool:
        return sum(texts.lengths) <= self._max_tokens and not texts.attended

    def states(self, texts: PackedTexts) -> Tensor:
        """The states of all tokens, which the next step overwrites."""
        size = EncodeSize.of(texts, self._max_tokens)
        given = self._device.upload(_step_tensors(texts, size))
        self._given[: len(given)].copy_(given)
        captures = size in self._seen and len(self.graphs.captured) < MAX_GRAPHS
        self._seen.add(size)
        return self.graphs.run(size, lambda: self._run(size), captures=captures)[: sum(texts.lengths)]

    def _run(self, size: EncodeSize) -> Tensor:
        count = size.num_tokens
        ids, types, positions = self._given[: 3 * count].view(3, count).unbind(0)
        starts = self._given[3 * count :][: size.num_texts + 1]
        states = self._encoder.packed_states(ids, types, positions, starts, size.longest)
        return self._states[:count].copy_(states)


def _step_tensors(texts: PackedTexts, size: EncodeSize) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    num_tokens, count = sum(texts.lengths), size.num_tokens
    given = np.zeros(3 * count + size.num_texts + 1, np.int32)
    parts = given[: 3 * count].reshape(3, count)
    parts[0, :num_tokens] = texts.token_ids.numpy()
    if texts.type_ids is not None:
        parts[1, :num_tokens] = texts.type_ids.numpy()
    parts[2, :num_tokens] = texts.positions.numpy()
    given[3 * count :] = num_tokens
    given[3 * count :][: len(texts.lengths)] = texts.starts
    return given


def _token_size(count: int) -> int:
    """A power of two, or three quarters of one."""
    whole = _power_of_two(count, MIN_TOKENS)
    return whole * 3 // 4 if count <= whole * 3 // 4 else whole


def _power_of_two(count: int, at_least: int = 1) -> int:
    return max(at_least, 1 << (count - 1).bit_length())
