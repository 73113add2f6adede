"""The forward pass of an encoder over packed texts: the tokens of all texts one after another, without padding.

Linears and norms run over all tokens at once, attention over all texts at once where there is a kernel for it, else
over all texts of one length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from millrace.errors import ModelError
from millrace.models.encoders.layers import EncoderLayer, Linear, Mixer, Norm, fused_layers
from millrace.models.encoders.spec import EncoderSpec
from millrace.ops.attention.texts import TextSpans
from millrace.ops.registry import choose

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    words: Tensor
    embedding_norm: Norm
    layers: tuple[EncoderLayer, ...]
    positions: Tensor | None = None
    types: Tensor | None = None
    final_norm: Norm | None = None
    relative_bias: Tensor | None = None
    """[buckets, heads]"""
    project: Linear | None = None
    """From the embeddings' width to that of the layers, if they differ."""


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Texts of one length, which stand one after another."""

    first: int
    """Index of their first token."""
    num_texts: int
    length: int
    num_keys: int
    """Tokens at the beginning of each text that are attended to."""

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.first + self.num_texts * self.length)


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Tokens of several texts, ordered by length, in host memory."""

    token_ids: Tensor
    """int64 [tokens]"""
    type_ids: Tensor | None
    """int64 [tokens]: 1 for tokens of the second of two texts. None: all are 0."""
    lengths: tuple[int, ...]
    """Ascending."""
    pooled_from: tuple[int, ...] = ()
    """Of each text: tokens at its beginning that are not pooled. (): none."""
    attended: tuple[int, ...] = ()
    """Of each text: tokens at its beginning that are attended to; 0 for all. (): all of every text."""

    @property
    def groups(self) -> list[LengthGroup]:
        groups, first = [], 0
        attended = self.attended or (0,) * len(self.lengths)
        for (length, num_keys), same in groupby(zip(self.lengths, attended, strict=True)):
            group = LengthGroup(first, len(list(same)), length, num_keys or length)
            groups.append(group)
            first = group.tokens.stop
        return groups

    @property
    def spans(self) -> TextSpans:
        seen = [most or length for length, most in zip(self.lengths, self.attended or self.lengths, strict=True)]
        return TextSpans(torch.tensor([*self.starts, sum(self.lengths)]), torch.tensor(seen))

    @property
    def starts(self) -> list[int]:
        starts, first = [], 0
        for length in self.lengths:
            starts.append(first)
            first += length
        return starts

    @property
    def positions(self) -> Tensor:
        """int64 [tokens]: of each token in its text."""
        return torch.cat([torch.arange(length) for length in self.lengths])


def pack(
    texts: Sequence[Sequence[int] | npt.NDArray[np.int32]],
    second_from: Sequence[int],
    pooled_from: Sequence[int],
    attended: Sequence[int] = (),
) -> tuple[PackedTexts, list[int]]:
    """The texts in order of length, and for each of them its index among those given. `second_from`: index of the first
    token of the second of two texts; 0 for one text. `attended`: as in `PackedTexts`."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    seen = tuple(attended[index] for index in order) if any(attended) else ()
    ids = torch.from_numpy(np.concatenate([np.asarray(texts[index], np.int64) for index in order]))
    types = None
    if any(second_from):
        parts = [torch.arange(len(texts[index])) >= (second_from[index] or len(texts[index])) for index in order]
        types = torch.cat(parts).to(torch.int64)
    skipped = tuple(pooled_from[index] for index in order) if any(pooled_from) else ()
    lengths = tuple(len(texts[index]) for index in order)
    return PackedTexts(ids, types, lengths, skipped, seen), order


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Attention within each text by one kernel, which a GPU has for 16-bit types."""

    starts: Tensor
    """int32 [texts + 1]"""
    longest: int

    def __call__(self, qkv: Tensor, window: int) -> Tensor:
        """`qkv`: [tokens, 3, heads, head]."""
        from torch.nn.attention.varlen import varlen_attn  # slow to import, and imports Triton

        query, key, value = qkv.unbind(1)
        reach = (window, window) if 0 < window < self.longest else (-1, -1)
        given = (self.starts, self.starts, self.longest, self.longest)
        out = varlen_attn(query, key, value, *given, window_size=reach)
        assert isinstance(out, Tensor)
        return out


class Encoder:
    def __init__(self, spec: EncoderSpec, weights: EncoderWeights) -> None:
        self.spec, self._weights = spec, weights
        self._activation = activation_of(spec.activation)
        self._slopes = _slopes(spec.num_heads).to(self.device, self.dtype) if spec.has_alibi else None
        self._fused = fused_layers(spec, weights.layers, self.device)
        chosen = choose("text_attention", self.device, self.dtype, head_dim=spec.head_size)
        self._attend_texts = chosen.make() if chosen.version.name == "native" and not self._has_bias else None

    @property
    def device(self) -> torch.device:
        return self._weights.words.device

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.words.dtype

    @torch.inference_mode()
    def __call__(self, texts: PackedTexts) -> Tensor:
        """The states of all tokens after the last layer, [tokens, hidden]."""
        device = self.device
        types = None if texts.type_ids is None else texts.type_ids.to(device)
        return self.states(texts.token_ids.to(device), types, texts.positions.to(device), self._mixers(texts))

    def packed_states(
        self, token_ids: Tensor, type_ids: Tensor, positions: Tensor, starts: Tensor, longest: int
    ) -> Tensor:
        """The same where `packs` is true, from tensors alone, so that it can be captured. `longest`: no text is longer.
        States of tokens after the last text mean nothing."""
        attention = PackedAttention(starts, longest)
        mixers: dict[int, Mixer] = {window: partial(attention, window=window) for window in self._windows}
        return self.states(token_ids, type_ids, positions, mixers)

    def states(
        self, token_ids: Tensor, type_ids: Tensor | None, positions: Tensor, mixers: Mapping[int, Mixer]
    ) -> Tensor:
        spec, weights = self.spec, self._weights
        x = weights.embedding_norm(self._embed(token_ids, type_ids, positions))
        x = x if weights.project is None else weights.project(x)
        angles = {theta: _angles(positions, spec.head_size, theta) for theta in set(spec.thetas)}
        for index, layer in enumerate(weights.layers):
            rotary = angles[spec.thetas[index]] if spec.thetas else None
            mix = mixers[spec.windows[index] if spec.windows else 0]
            x = (self._pre_norm_layer if spec.is_pre_norm else self._post_norm_layer)(x, layer, mix, rotary)
        return x if weights.final_norm is None else weights.final_norm(x)

    def _embed(self, token_ids: Tensor, type_ids: Tensor | None, positions: Tensor) -> Tensor:
        weights = self._weights
        x = F.embedding(token_ids, weights.words)
        if weights.types is not None:
            # A model with one type only has no second one.
            types = type_ids if weights.types.shape[0] > 1 else None
            x = x + (weights.types[0] if types is None else F.embedding(types, weights.types))
        if weights.positions is not None:
            x = x + F.embedding(positions + self.spec.position_offset, weights.positions)
        return x

    def _post_norm_layer(self, x: Tensor, layer: EncoderLayer, mix: Mixer, rotary: _Angles | None) -> Tensor:
        if self._fused is not None and rotary is None:
            return self._fused(x, layer, mix)
        assert layer.attention_norm is not None
        x = layer.attention_norm(x + self._attend(x, layer, mix, rotary))
        return layer.mlp_norm(x + self._mlp(x, layer))

    def _pre_norm_layer(self, x: Tensor, layer: EncoderLayer, mix: Mixer, rotary: _Angles | None) -> Tensor:
        normed = x if layer.attention_norm is None else layer.attention_norm(x)
        x = x + self._attend(normed, layer, mix, rotary)
        return x + self._mlp(layer.mlp_norm(x), layer)

    def _attend(self, x: Tensor, layer: EncoderLayer, mix: Mixer, rotary: _Angles | None) -> Tensor:
        spec = self.spec
        qkv = layer.qkv(x).view(-1, 3, spec.num_heads, spec.head_size)
        if rotary is not None:
            _rotate(qkv[:, :2], rotary)
        return layer.out(mix(qkv).reshape(x.shape))

    def _mixers(self, texts: PackedTexts) -> dict[int, Mixer]:
        """Attention by window."""
        if self.packs and not texts.attended:
            starts = torch.tensor([*texts.starts, sum(texts.lengths)], dtype=torch.int32).to(self.device)
            packed = PackedAttention(starts, texts.lengths[-1])
            return {window: partial(packed, window=window) for window in self._windows}
        if self._attend_texts is not None:
            attend, spans = self._attend_texts, texts.spans
            return {window: partial(attend, spans=spans, window=window) for window in self._windows}
        groups = texts.groups
        return {window: partial(_attend_by_length, groups, self._masks(groups, window)) for window in self._windows}

    @property
    def _windows(self) -> set[int]:
        return set(self.spec.windows) or {0}

    @property
    def _has_bias(self) -> bool:
        """Something is added to scores."""
        return self._slopes is not None or self._weights.relative_bias is not None

    @property
    def packs(self) -> bool:
        """True if one kernel can attend within all texts: no bias is added to scores, and the GPU has the kernel."""
        if self.device.type != "cuda" or self.dtype not in (torch.float16, torch.bfloat16):
            return False
        return (
            not self._has_bias
            and self.spec.head_size % 8 == 0
            and torch.cuda.get_device_capability(self.device) >= (8, 0)
        )

    def _mlp(self, x: Tensor, layer: EncoderLayer) -> Tensor:
        wide = layer.up(x)
        if not self.spec.is_gated:
            return layer.down(self._activation(wide))
        gate, up = wide.chunk(2, dim=-1)
        return layer.down(self._activation(gate) * up)

    def _masks(self, groups: list[LengthGroup], window: int) -> list[Tensor | None]:
        """What attention adds to the scores of each group, or where it may look; None: nothing, everywhere."""
        masks = [self._mask(group.length, window) for group in groups]
        return [
            None if mask is None else mask[..., : group.num_keys] for group, mask in zip(groups, masks, strict=True)
        ]

    def _mask(self, length: int, window: int) -> Tensor | None:
        bias, slopes = self._weights.relative_bias, self._slopes
        if bias is None and slopes is None and (window == 0 or length <= window + 1):
            return None
        at = torch.arange(length, device=self.device)
        distance = at[None, :] - at[:, None]
        if slopes is not None:
            return -slopes * distance.abs()
        if bias is None:
            return distance.abs() <= window
        return bias[_buckets(distance, self.spec.relative_buckets)].permute(2, 0, 1)


def _attend_by_length(groups: list[LengthGroup], masks: list[Tensor | None], qkv: Tensor) -> Tensor:
    """Texts of one length are one batch. `qkv`: [tokens, 3, heads, head]."""
    num_tokens, _, num_heads, head_size = qkv.shape
    out = qkv.new_empty(num_tokens, num_heads, head_size)
    for group, mask in zip(groups, masks, strict=True):
        own = qkv[group.tokens].view(group.num_texts, group.length, 3, num_heads, head_size)
        query, key, value = own.permute(2, 0, 3, 1, 4).unbind(0)
        seen = slice(0, group.num_keys)
        attended = F.scaled_dot_product_attention(query, key[:, :, seen], value[:, :, seen], attn_mask=mask)
        out[group.tokens].view(group.num_texts, group.length, num_heads, head_size).copy_(attended.transpose(1, 2))
    return out


_Angles = tuple[Tensor, Tensor]


def _angles(positions: Tensor, head_size: int, theta: float) -> _Angles:
    """Cosines and sines, float32 [tokens, 1, 1, half of a head]."""
    half = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions.device)
    turns = positions.float()[:, None, None, None] / theta ** (half / head_size)
    return turns.cos(), turns.sin()


def _rotate(heads: Tensor, angles: _Angles) -> None:
    """Rotate queries and keys [tokens, 2, heads, head] in place."""
    cos, sin = angles
    first, second = heads.float().chunk(2, dim=-1)
    heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def _slopes(num_heads: int) -> Tensor:
    """ALiBi: rates of heads, [heads, 1, 1]. Heads beyond a power of two take every other rate of the next power."""
    power = 1 << (num_heads.bit_length() - 1)
    rates = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    rates += [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * (num_heads - power), 2)]
    return torch.tensor(rates)[:, None, None]


def _buckets(distance: Tensor, num_buckets: int, max_distance: int = 128) -> Tensor:
    """T5's buckets of relative positions: half for each direction, exact when near, logarithmic when far."""
    half = num_buckets // 2
    exact = half // 2
    apart = distance.abs()
    far = torch.log(apart.clamp(min=1).float() / exact) / torch.log(torch.tensor(max_distance / exact))
    far = (exact + (far * (half - exact)).long()).clamp(max=half - 1)
    return (distance > 0).long() * half + torch.where(apart < exact, apart, far)


def activation_of(name: str) -> Activation:
    known: dict[str, Activation] = {
        "gelu": F.gelu,
        "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
        "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "silu": F.silu,
        "swish": F.silu,
        "tanh": torch.tanh,
        "identity": lambda x: x,
    }
    if name not in known:
        raise ModelError(f"The activation {name!r} is not known; known are {', '.join(known)}.")
    return known[name]
