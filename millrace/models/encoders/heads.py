"""From the states of tokens to one result per text: pooled vectors, logits of a class, logits of each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace.models.encoders.encoder import Activation, PackedTexts
from millrace.models.encoders.layers import Linear, Norm
from millrace.sources.encoders.encoder_files import PoolingMode
from millrace.sources.encoders.retrieval_files import SparseForm


class Head(Protocol):
    @property
    def width(self) -> int:
        """Numbers per result."""

    def __call__(self, hidden: Tensor, texts: PackedTexts) -> list[Tensor]:
        """One float32 tensor per text: [width], [tokens, width] for results of tokens, or packed sparse weights
        (`link.vectors.sparse_of`)."""


@dataclass(frozen=True, slots=True)
class PooledVectors:
    modes: tuple[PoolingMode, ...]
    dense: tuple[tuple[Linear, Activation], ...]
    normalises: bool
    width: int

    def __call__(self, hidden: Tensor, texts: PackedTexts) -> list[Tensor]:
        pooled = torch.cat([_pool(mode, hidden, texts) for mode in self.modes], dim=-1)
        for linear, activation in self.dense:
            pooled = activation(linear(pooled))
        pooled = pooled.float()
        return list((F.normalize(pooled, dim=-1) if self.normalises else pooled).unbind(0))


@dataclass(frozen=True, slots=True)
class TextLogits:
    """A classifier, with a hidden layer in most families."""

    pooling: PoolingMode
    dense: Linear | None
    activation: Activation
    norm: Norm | None
    classifier: Linear
    width: int

    def __call__(self, hidden: Tensor, texts: PackedTexts) -> list[Tensor]:
        x = _pool(self.pooling, hidden, texts)
        return list(_classify(x, self.dense, self.activation, self.norm, self.classifier).unbind(0))


@dataclass(frozen=True, slots=True)
class TokenLogits:
    dense: Linear | None
    activation: Activation
    norm: Norm | None
    classifier: Linear
    width: int

    def __call__(self, hidden: Tensor, texts: PackedTexts) -> list[Tensor]:
        logits = _classify(hidden, self.dense, self.activation, self.norm, self.classifier)
        return list(torch.split(logits, list(texts.lengths)))


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """A vector per token, for comparison token by token."""

    dense: tuple[tuple[Linear, Activation], ...]
    normalises: bool
    width: int

    def __call__(self, hidden: Tensor, texts: PackedTexts) -> list[Tensor]:
        for linear, activation in self.dense:
            hidden = activation(linear(hidden))
        vectors = hidden.float()
        return list(torch.split(F.normalize(vectors, dim=-1) if self.normalises else vectors, list(texts.lengths)))


@dataclass(frozen=True, slots=True)
class SparseWeights:
    """SPLADE: from the logits of a masked language model at each token, one weight per token of the vocabulary."""

    dense: Linear
    activation: Activation
    norm: Norm
    vocabulary: Linear
    form: SparseForm
    width: int

    def __call__(self, hidden: Tensor, texts: PackedTexts) -> list[Tensor]:
        states = self.norm(self.activation(self.dense(hidden)))
        return [self._packed(own) for own in torch.split(states, list(texts.lengths))]

    def _packed(self, states: Tensor) -> Tensor:
        """One text at a time: logits of all texts of a step would be large."""
        weights = self.vocabulary(states).float().relu()
        for _ in range(self.form.num_logs):
            weights = weights.log1p()
        pooled = weights.amax(dim=0) if self.form.pooling == "max" else weights.sum(dim=0)
        (ids,) = pooled.nonzero(as_tuple=True)
        count = torch.tensor([len(ids)], dtype=torch.int32, device=ids.device)
        return torch.cat((torch.cat((count, ids.int())).view(torch.float32), pooled[ids]))


def _classify(x: Tensor, dense: Linear | None, activation: Activation, norm: Norm | None, classifier: Linear) -> Tensor:
    if dense is not None:
        x = activation(dense(x))
    return classifier(x if norm is None else norm(x)).float()


def _pool(mode: PoolingMode, hidden: Tensor, texts: PackedTexts) -> Tensor:
    """[texts, hidden]"""
    skipped = texts.pooled_from or (0,) * len(texts.lengths)
    ends = [start + length for start, length in zip(texts.starts, texts.lengths, strict=True)]
    firsts = [min(start + skip, end - 1) for start, skip, end in zip(texts.starts, skipped, ends, strict=True)]
    if mode == "cls":
        return hidden[torch.tensor(firsts, device=hidden.device)]
    if mode == "lasttoken":
        return hidden[torch.tensor(ends, device=hidden.device) - 1]
    if hidden.is_cuda and mode in ("mean", "max") and not texts.pooled_from:
        # One kernel for all texts.
        lengths = torch.tensor(texts.lengths).to(hidden.device)
        return torch.segment_reduce(hidden.float(), mode, lengths=lengths).to(hidden.dtype)
    rows = [
        _reduce(mode, hidden[first:end].float(), first - start)
        for start, first, end in zip(texts.starts, firsts, ends, strict=True)
    ]
    return torch.stack(rows).to(hidden.dtype)


def _reduce(mode: PoolingMode, states: Tensor, num_skipped: int) -> Tensor:
    if mode == "max":
        return states.amax(dim=0)
    if mode == "weightedmean":
        weights = torch.arange(num_skipped + 1, num_skipped + len(states) + 1, device=states.device).float()
        return (states * weights[:, None]).sum(dim=0) / weights.sum()
    total = states.sum(dim=0)
    return total / (len(states) if mode == "mean" else len(states) ** 0.5)
