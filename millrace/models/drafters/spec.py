"""DrafterSpec: everything in which drafters differ. Plain data; no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millrace.models.spec.model_spec import ModelSpec

DrafterKind = Literal["medusa", "eagle", "eagle3", "draft"]


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    kind: DrafterKind
    """`medusa`: one head per drafted position. `eagle`: a decoder layer over (embedding, hidden state). `eagle3`: the
    same over states of several layers of the target. `draft`: a small decoder that needs nothing of the target."""
    format: str
    """The checkpoint's format, for messages."""
    hidden_size: int
    """Width of the drafter's own hidden states."""
    target_hidden_size: int
    vocab_size: int
    """Size of the target's vocabulary, in which drafts are expressed."""
    draft_vocab_size: int
    """Tokens that the drafter can propose; below `vocab_size` it has a map from draft ids to token ids."""
    decoder: ModelSpec | None = None
    """Its decoder layers; for `draft` the whole model; None for Medusa."""
    target_layers: tuple[int, ...] = ()
    """The drafter reads the target's residual after this many layers, one number per state that is fused. Empty: the
    target's hidden states after the final norm."""

    num_medusa_heads: int = 0
    num_medusa_blocks: int = 0
    """Residual SiLU blocks per Medusa head."""
    medusa_bias: bool = True

    has_own_embedding: bool = False
    """False: uses the target's embedding."""
    has_own_head: bool = False
    """False: uses the target's LM head. Medusa: True if every head has a matrix of its own."""
    has_shared_head: bool = False
    """Medusa: one LM head of its own for all heads."""

    fc_bias: bool = False
    has_embedding_norm: bool = False
    """EAGLE: embeddings are normalised before `fc`."""
    has_input_norm: bool = False
    """EAGLE: the first layer normalises its input, as later layers always do. EAGLE-3 always normalises the embedding
    and the hidden state, each on its own."""
    has_final_norm: bool = False
    """The state is normalised before the LM head."""
    returns_normed: bool = False
    """The normalised state, not the one before the final norm, is the hidden state of the next step."""
    norm_before_residual: bool = False
    """EAGLE-3: the normalised hidden state, not the one before its norm, is the residual of the first layer."""
    norm_before_fc: bool = False
    """EAGLE-3: the joined states of the target are normalised before `fc`."""
    norm_each_state: bool = False
    """EAGLE-3: each state of the target is normalised on its own before `fc`."""

    @property
    def has_token_map(self) -> bool:
        return self.draft_vocab_size != self.vocab_size

    @property
    def num_kv_layers(self) -> int:
        """KV tensors that the drafter needs beside the target's."""
        return 0 if self.decoder is None else self.decoder.num_layers

    @property
    def max_drafts(self) -> int | None:
        """Positions that one step can draft; None: any number, as a chain."""
        return self.num_medusa_heads if self.kind == "medusa" else None
