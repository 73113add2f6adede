"""How a layer mixes the tokens of a row: one file per kind of mixer, and `base.py`, what all of them have in common.

To add a mixer: name it in `MixerKind` and describe its sizes in `ModelSpec` (models/spec/model_spec.py); list its
tensors in `MIXER_LAYOUTS` (models/spec/layout.py); write its file here, a class that fits the `Mixer` protocol and a
function that builds it from a `MixerSite`; add that function to `MIXERS`. Taps, the residual and the output projection
are not its business. A native stack refuses layers whose mixer it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from millrace.models.mixers.attention import AttentionMixer, build_attention
from millrace.models.mixers.base import Mixer, MixerBuilder, MixerSite, MixerStep
from millrace.models.mixers.gated_attention import build_gated_attention
from millrace.models.mixers.latent import build_latent_attention
from millrace.models.mixers.recurrent import build_gated_delta, build_mamba2
from millrace.models.mixers.short_conv import build_short_conv
from millrace.models.spec.model_spec import MixerKind

__all__ = ["MIXERS", "AttentionMixer", "Mixer", "MixerBuilder", "MixerSite", "MixerStep"]

MIXERS: Mapping[MixerKind, Callable[[MixerBuilder, MixerSite], Mixer]] = {
    "attention": build_attention,
    "gated_attention": build_gated_attention,
    "latent_attention": build_latent_attention,
    "gated_delta": build_gated_delta,
    "mamba2": build_mamba2,
    "short_conv": build_short_conv,
}
