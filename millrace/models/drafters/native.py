"""A feature drafter in C++: its layers as a native stack whose input is made of tokens and the target's states."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.models.angles import Angles
from millrace.models.decoder import Decoder
from millrace.models.drafters.program import EagleWeights
from millrace.models.drafters.spec import DrafterSpec
from millrace.models.native_stack import NativeStack, PairedInput, native_stack_missing
from millrace.ops.base.version import Choice
from millrace.ops.linear.dense import NativeParts


def native_drafter(
    spec: DrafterSpec, weights: EagleWeights, angles: Angles, choices: Mapping[str, Choice], target: Decoder
) -> NativeStack | None:
    """None if a part has no C++ version. Drafters with an embedding of their own run op by op."""
    decoder, stack = spec.decoder, target.native_stack
    assert decoder is not None
    if stack is None or stack.head is None or not stack.can_run_whole_steps or weights.embed != target.embed:
        return None
    head, fc = weights.head or stack.head, weights.fc if spec.kind == "eagle" else None
    if decoder.kv_groups.num_groups > 1 or native_stack_missing(decoder, choices):
        return None
    if not isinstance(head, NativeParts) or not (fc is None or isinstance(fc, NativeParts)):
        return None
    paired = PairedInput(
        embedding=stack.head,
        fc=fc,
        embedding_norm=weights.embedding_norm,
        hidden_norm=weights.hidden_norm,
        has_input_norm=spec.has_input_norm,
        normed_residual=spec.norm_before_residual,
        embedding_scale=target.embedding_scale,
    )
    return NativeStack(decoder, weights.layers, weights.final_norm, head, angles, target.dtype, paired=paired)
