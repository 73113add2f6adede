"""A small model as the runners of both devices take it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from helpers.inside import program_of
from helpers.tiny_models import StateDictSource, config_of, make_reference

from millrace.models.decoder import Decoder
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.model_spec import ModelSpec
from millrace.ops.attention import PagedAttention
from millrace.ops.attention.latent import PagedLatentAttention


def decoder_for(device: torch.device, *, paged: bool, **changes: Any) -> Decoder:
    """A small Qwen3 with random weights. `paged`: with the GPU's attention, also without a GPU."""
    model = make_reference("qwen3", **changes)
    spec = spec_from_config(config_of(model))
    decoder = build_decoder(spec, StateDictSource.of(model), device=device, dtype=torch.float32)
    return with_paged_attention(decoder) if paged else decoder


def paged_attention(spec: ModelSpec) -> PagedAttention:
    if spec.latent is not None:
        return PagedLatentAttention(spec.num_heads, spec.latent.rank, spec.latent.rope_dim, spec.attention_scale)
    heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
    return PagedAttention(*heads, spec.attention_scale, spec.attention_softcap)


def with_paged_attention(decoder: Decoder) -> Decoder:
    """The decoder with the GPU's attention, also without a GPU, where its kernels are interpreted."""
    if not isinstance(decoder.attention, PagedAttention):
        # Loading chooses by device: it offers no GPU's op on a CPU.
        program = program_of(decoder)
        program.ops = dataclasses.replace(program.ops, attention=paged_attention(decoder.spec))
        decoder.native_stack = None  # It has its own attention.
    return decoder
