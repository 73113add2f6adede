"""Places tokens of documents at other positions, in all layers, at the head of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from millrace.models.decoder import Decoder
from millrace.models.spec.model_spec import ModelSpec
from millrace.ops.attention.placed import place_tokens, slots_of
from millrace.plan.step import PlacedTokens
from millrace.run.device.device import Device


class TokenPlacing:
    def __init__(self, decoder: Decoder, kv: Sequence[Tensor], block_size: int, device: Device) -> None:
        self._kv = kv
        self._angles = decoder.angles
        self._block_size = block_size
        self._device = device
        self._ropes = [layer.rope for layer in decoder.spec.layers]
        self._shifts = decoder.key_shifts
        self._tensors = [tensor for _, tensor in decoder.spec.kv_groups.places]

    def place(self, placed: tuple[PlacedTokens, ...]) -> None:
        for one in placed:
            sources, targets = (self._device.upload(blocks.astype(np.int64)) for blocks in (one.sources, one.targets))
            slots = slots_of(targets, one.target_start, one.count, self._block_size)
            angles = self._angles.turns(one.distance)
            for rope, tensor, shift in zip(self._ropes, self._tensors, self._shifts, strict=True):
                own = None if rope is None else angles[rope].expand(one.count, -1)
                place_tokens(self._kv[tensor], sources, one.source_start, slots, own, shift)


def placing_objection(spec: ModelSpec, *, has_drafter: bool) -> str:
    """Why tokens of this model cannot be placed at other positions, as a clause; empty if they can."""
    if spec.recurrent is not None:
        return "the model has recurrent states, which depend on every token before"
    if spec.latent is not None:
        return "the model's cache holds latents, which are not copied to other positions yet"
    if spec.kv_groups.num_groups > 1 or spec.kv_groups.windows != (None,):
        return "the model has layers with a window, whose blocks are not copied to other positions yet"
    if spec.qk_norm_after_rope:
        return "the model norms keys after their rotation, which cannot be turned on then"
    if has_drafter:
        return "a drafter that is a model reads every token; remove it, or use --speculate ngram"
    return ""
