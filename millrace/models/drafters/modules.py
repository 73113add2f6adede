"""Drafters in plain torch: the meaning of `program.py`, and what training optimises. Parameters have the names of
`checkpoint.py`.

Chains are computed for every position of a sequence at once. The first step sees the target's true states: ordinary
causal attention. In step j, position i continues the chain that starts at i: it attends to the true states up to i and
to the states of its own chain, never to those of other chains. With true tokens as input this is what the engine
computes for a chain whose drafts are all accepted so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from millrace.models.drafters.spec import DrafterSpec
from millrace.models.spec.model_spec import ModelSpec
from millrace.models.spec.rope import inverse_frequencies
from millrace.ops.elementwise.rope import rope, rope_angles


@dataclass(slots=True)
class ChainKv:
    """Keys and values of one layer, [B, kv heads, T, head_dim] each: first those of the true states, then those of
    each later step of the chains."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ModuleStates:
    hidden: Tensor
    """[B, T, hidden]: the hidden states of the next step."""
    for_head: Tensor


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (wide * self.weight.float()).to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, spec: ModelSpec, in_features: int) -> None:
        super().__init__()
        self._spec = spec
        self.q_proj = nn.Linear(in_features, spec.q_size, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(in_features, spec.kv_size, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(in_features, spec.kv_size, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(spec.q_size, spec.hidden_size, bias=spec.out_bias)
        self.q_norm = _Norm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = _Norm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None

    def forward(self, x: Tensor, angles: Tensor, kv: ChainKv, window: int | None) -> Tensor:
        """x [B, T, in], angles [B · T, rotary_dim]. Appends this step's keys and values to `kv`."""
        spec, (batch, length, _) = self._spec, x.shape
        kv.keys.append(self._heads(self.k_proj(x), self.k_norm, angles))
        kv.values.append(self._heads(self.v_proj(x), None, None))
        queries = self._heads(self.q_proj(x), self.q_norm, angles)
        queries = queries.view(batch, spec.num_kv_heads, -1, length, spec.head_dim)
        mixed = _attend(queries, kv, spec.attention_scale, window)
        mixed = mixed.view(batch, spec.num_heads, length, spec.head_dim).transpose(1, 2)
        out: Tensor = self.o_proj(mixed.reshape(batch, length, spec.q_size))
        return out

    def _heads(self, x: Tensor, norm: _Norm | None, angles: Tensor | None) -> Tensor:
        """[B, T, heads · head_dim] -> [B, heads, T, head_dim], normalised and rotated if asked."""
        batch, length, _ = x.shape
        heads = x.view(batch * length, -1, self._spec.head_dim)
        heads = heads if norm is None else norm(heads)
        heads = heads if angles is None else rope(heads, angles)
        return heads.view(batch, length, -1, self._spec.head_dim).transpose(1, 2)


def _attend(queries: Tensor, kv: ChainKv, scale: float, window: int | None) -> Tensor:
    """queries [B, kv heads, group, T, D] of the newest step -> the same shape."""
    length, depth = queries.shape[3], len(kv.keys) - 1
    places = torch.arange(length, device=queries.device)
    distance = places[:, None] - places[None, :]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance + depth < window)
    if depth == 0:
        keys, values = kv.keys[0].unsqueeze(2).expand_as(queries), kv.values[0].unsqueeze(2).expand_as(queries)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scale)
    scores = [(queries @ kv.keys[0].unsqueeze(2).transpose(-1, -2)).masked_fill(~seen, float("-inf"))]
    scores += [(queries * keys.unsqueeze(2)).sum(-1, keepdim=True) for keys in kv.keys[1:]]
    weights = (torch.cat(scores, dim=-1).float() * scale).softmax(-1).to(queries.dtype)
    mixed = weights[..., :length] @ kv.values[0].unsqueeze(2)
    for step, values in enumerate(kv.values[1:]):
        mixed = mixed + weights[..., length + step : length + step + 1] * values.unsqueeze(2)
    return mixed


class _Mlp(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        if spec.activation != "silu":
            raise ValueError(f"drafters have SiLU MLPs, not {spec.activation}")
        self.gate_proj = nn.Linear(spec.hidden_size, spec.inner_size, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.hidden_size, spec.inner_size, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.inner_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, spec: ModelSpec, index: int, in_features: int, has_input_norm: bool, is_fusing: bool) -> None:
        super().__init__()
        self.window = spec.layers[index].window
        self.input_layernorm = _Norm(spec.hidden_size, spec.norm_eps) if has_input_norm else None
        self.hidden_norm = _Norm(spec.hidden_size, spec.norm_eps) if is_fusing else None
        self.self_attn = _Attention(spec, in_features)
        self.post_attention_layernorm = _Norm(spec.hidden_size, spec.norm_eps)
        self.mlp = _Mlp(spec)

    def normed(self, x: Tensor) -> Tensor:
        """x, normalised if the layer does so."""
        out: Tensor = x if self.input_layernorm is None else self.input_layernorm(x)
        return out

    def forward(self, x: Tensor, residual: Tensor, angles: Tensor, kv: ChainKv) -> Tensor:
        residual = residual + self.self_attn(x, angles, kv, self.window)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class _Layers(nn.Module):
    def __init__(self, layers: list[_Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class _Decoder(_Layers):
    def __init__(self, spec: ModelSpec, layers: list[_Layer]) -> None:
        super().__init__(layers)
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.norm = _Norm(spec.hidden_size, spec.norm_eps)


class EagleModule(nn.Module):
    """EAGLE and EAGLE-3. Embeddings are given, and so is the LM head unless the drafter has its own."""

    inverse_frequencies: Tensor

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        assert spec.decoder is not None
        self.spec, decoder, hidden = spec, spec.decoder, spec.hidden_size
        eps, is_fusing = decoder.norm_eps, spec.kind == "eagle3"
        columns = len(spec.target_layers) * spec.target_hidden_size if is_fusing else 2 * hidden
        self.fc = nn.Linear(columns, hidden, bias=spec.fc_bias)
        in_features = 2 * hidden if is_fusing else hidden
        first = _Layer(decoder, 0, in_features, is_fusing or spec.has_input_norm, is_fusing)
        later = [_Layer(decoder, index, hidden, True, False) for index in range(1, decoder.num_layers)]
        self.model = _Layers([first, *later])
        self._layers = (first, *later)
        self.embedding_norm = _Norm(hidden, eps) if spec.has_embedding_norm else None
        self.input_norm = _Norm(columns, eps) if spec.norm_before_fc else None
        self.fc_norm = nn.ModuleList(
            _Norm(spec.target_hidden_size, eps) for _ in spec.target_layers if spec.norm_each_state
        )
        self.norm = _Norm(hidden, eps) if spec.has_final_norm else None
        self.embed_tokens = nn.Embedding(spec.vocab_size, hidden) if spec.has_own_embedding else None
        self.lm_head = nn.Linear(hidden, spec.draft_vocab_size, bias=False) if spec.has_own_head else None
        self.register_buffer("inverse_frequencies", inverse_frequencies(decoder.ropes[0]), persistent=False)

    def fuse(self, states: Tensor) -> Tensor:
        """The target's states [B, T, states · hidden] as the hidden states of the first step."""
        if self.spec.kind == "eagle":
            return states
        if self.input_norm is not None:
            states = self.input_norm(states)
        elif len(self.fc_norm):
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(states)
        return fused

    def new_kv(self) -> list[ChainKv]:
        return [ChainKv() for _ in self._layers]

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, kv: list[ChainKv]) -> ModuleStates:
        """One step for embeddings and hidden states [B, T, hidden] at positions [B, T], which grow by one per step."""
        assert self.spec.decoder is not None
        factor = self.spec.decoder.ropes[0].attention_factor
        angles = rope_angles(positions.flatten(), self.inverse_frequencies, factor)
        x, residual = self._first_input(embedded, hidden)
        for index, layer in enumerate(self._layers):
            if index:
                x = layer.normed(residual)
            residual = layer(x, residual, angles, kv[index])
        if self.norm is None:
            return ModuleStates(residual, residual)
        normed = self.norm(residual)
        return ModuleStates(normed if self.spec.returns_normed else residual, normed)

    def _first_input(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        first = self._layers[0]
        if first.hidden_norm is not None:
            normed = first.hidden_norm(hidden)
            x = torch.cat((first.normed(embedded), normed), dim=-1)
            return x, normed if self.spec.norm_before_residual else hidden
        if self.embedding_norm is not None:
            embedded = self.embedding_norm(embedded)
        residual = self.fc(torch.cat((embedded, hidden), dim=-1))
        return first.normed(residual), residual


class _Block(nn.Module):
    def __init__(self, size: int, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, size))
        self.bias = nn.Parameter(torch.zeros(size)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(F.linear(x, self.weight, self.bias))


class _MedusaHead(nn.Module):
    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(spec.hidden_size, spec.medusa_bias) for _ in range(spec.num_medusa_blocks))
        self.head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False) if spec.has_own_head else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class MedusaModule(nn.Module):
    """Medusa heads. A block starts as the identity, so each head starts as the target's own next-token head."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.spec = spec
        self.heads = nn.ModuleList(_MedusaHead(spec) for _ in range(spec.num_medusa_heads))
        self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False) if spec.has_shared_head else None

    def forward(self, hidden: Tensor) -> list[Tensor]:
        """The target's hidden states [..., hidden] -> one state per head, for that head's LM head."""
        return [head(hidden) for head in self.heads]


def can_train(spec: ModelSpec) -> bool:
    """Whether `DraftModule` computes this model: Llama-like, with nothing that its layers lack."""
    is_plain = spec.moe is None and not spec.sandwich_norms and not spec.attention_sinks
    is_plain = is_plain and spec.norm_kind == "rms" and not spec.parallel_mlp and spec.gated_mlp and not spec.head_bias
    has_no_caps = spec.attention_softcap is None and spec.logit_softcap is None
    has_no_scales = not spec.norm_offset and spec.embedding_scale == 1.0 and spec.hidden_scale == 1.0
    has_one_rope = all(layer.rope == 0 and layer.mixer == "attention" for layer in spec.layers)
    return is_plain and has_no_caps and has_no_scales and has_one_rope and spec.activation == "silu"


class DraftModule(nn.Module):
    """A small decoder of Llama layers, with the names of a Hugging Face checkpoint."""

    inverse_frequencies: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        layers = [_Layer(spec, index, spec.hidden_size, True, False) for index in range(spec.num_layers)]
        self.model = _Decoder(spec, layers)
        self.lm_head = None if spec.tied_head else nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self._layers = tuple(layers)
        self.register_buffer("inverse_frequencies", inverse_frequencies(spec.ropes[0]), persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [B, T] -> hidden states after the final norm [B, T, hidden]."""
        length = token_ids.shape[1]
        positions = torch.arange(length, device=token_ids.device).repeat(token_ids.shape[0])
        angles = rope_angles(positions, self.inverse_frequencies, self.spec.ropes[0].attention_factor)
        residual = F.embedding(token_ids, self.embedding)
        for layer in self._layers:
            residual = layer(layer.normed(residual), residual, angles, ChainKv())
        out: Tensor = self.model.norm(residual)
        return out

    @property
    def embedding(self) -> Tensor:
        return self.model.embed_tokens.weight

    @property
    def head(self) -> Tensor:
        """[vocabulary, hidden]"""
        return self.embedding if self.lm_head is None else self.lm_head.weight
