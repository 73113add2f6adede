"""The target while a drafter is trained: its hidden states for whole sequences, its embedding and its LM head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.models.batch import ForwardBatch
from millrace.models.decoder import Decoder
from millrace.models.spec.layout import EMBEDDING, HEAD
from millrace.models.weights.source import WeightSource
from millrace.ops.attention import PlainRows
from millrace.ops.elementwise.softcap import softcap

BLOCK = 16
"""Tokens per KV block."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one optimiser step, padded to the longest."""

    token_ids: Tensor
    """int64 [B, T], 0 after the end."""
    lengths: Tensor
    """int64 [B]"""
    answer_starts: Tensor
    """int64 [B]: index of the first token that the target wrote."""
    lengths_host: tuple[int, ...]

    @classmethod
    def of(cls, sequences: Sequence[tuple[Sequence[int], int]], device: torch.device) -> Batch:
        """Sequences are (token ids, number of prompt tokens)."""
        lengths = tuple(len(ids) for ids, _ in sequences)
        token_ids = torch.zeros((len(sequences), max(lengths)), dtype=torch.int64)
        for row, (ids, _) in zip(token_ids, sequences, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        starts = torch.tensor([start for _, start in sequences])
        return cls(token_ids.to(device), torch.tensor(lengths).to(device), starts.to(device), lengths)


class Target:
    def __init__(self, decoder: Decoder, weights: WeightSource) -> None:
        self.decoder, self.spec = decoder, decoder.spec
        self._weights = weights
        self._kv: list[Tensor] = []

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    def head_matrix(self, ids: Tensor | None = None) -> Tensor:
        """The LM head [vocabulary, hidden] in the model's dtype, or its rows for these token ids."""
        name = EMBEDDING if self.spec.tied_head else HEAD
        matrix = self._weights.get(name, dtype=self.decoder.dtype)
        return (matrix if ids is None else matrix[ids.cpu()]).to(self.device)

    def weight(self, name: str) -> Tensor:
        return self._weights.get(name, dtype=torch.float32)

    def weight_names(self) -> set[str]:
        return set(self._weights.names())

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [B, T] -> float32 [B, T, hidden]"""
        with torch.inference_mode():
            rows = self.decoder.embed(token_ids.flatten())
        # A copy outside of inference mode can be saved for the backward pass.
        return rows.float().clone().view(*token_ids.shape, -1)

    def states(self, batch: Batch) -> Tensor:
        """The hidden states after the final norm, float32 [B, T, hidden], 0 after the end of a sequence."""
        counts = [-(-length // BLOCK) for length in batch.lengths_host]
        with torch.inference_mode(), torch.autocast(self.device.type, enabled=False):
            packed = self.decoder.forward(self._forward_batch(batch, counts), self._pool(sum(counts)))
        padded = torch.zeros((*batch.token_ids.shape, packed.shape[-1]), device=packed.device)
        padded[self._is_token(batch)] = packed.float().clone()
        return padded

    def soft_targets(self, states: Tensor, head: Tensor) -> Tensor:
        """Probabilities, float32 [n, tokens of the head], that the target gives after hidden states [n, hidden]."""
        logits = (states.to(head.dtype) @ head.T).float()
        cap = self.spec.logit_softcap
        return (logits if cap is None else softcap(logits, cap)).softmax(-1)

    @staticmethod
    def _is_token(batch: Batch) -> Tensor:
        places = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
        return places < batch.lengths[:, None]

    def _pool(self, blocks_per_group: int) -> list[Tensor]:
        """KV for one batch; grows with the largest batch so far. Block 0 is not used."""
        groups = self.spec.kv_groups
        num_blocks = 1 + len(groups.windows) * blocks_per_group
        if not self._kv or self._kv[0].shape[1] < num_blocks:
            self._kv = []
            shape = self.spec.kv_shape(num_blocks, BLOCK)
            self._kv = [
                torch.zeros(shape, dtype=self.decoder.dtype, device=self.device) for _ in range(groups.page_layers)
            ]
        return self._kv

    def _forward_batch(self, batch: Batch, counts: Sequence[int]) -> ForwardBatch:
        device, lengths = self.device, batch.lengths_host
        num_groups, width = len(self.spec.kv_groups.windows), max(counts)
        tables = torch.zeros((num_groups, len(lengths), width), dtype=torch.int32)
        first = 1
        for row, count in enumerate(counts):
            for group in range(num_groups):
                start = first + group * sum(counts)
                tables[group, row, :count] = torch.arange(start, start + count)
            first += count
        positions = torch.cat([torch.arange(length) for length in lengths])
        rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        plain = PlainRows(
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            tables.to(device),
            query_starts_host=starts,
            seq_lens_host=list(lengths),
        )
        return ForwardBatch(
            token_ids=batch.token_ids[self._is_token(batch)],
            positions=positions.to(device),
            block_ids=tables[:, rows, positions // BLOCK].long().to(device),
            offsets=(positions % BLOCK).to(device),
            rows=plain,
        )
