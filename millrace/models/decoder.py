"""The one decoder. Families differ in their spec, devices in the ops that are chosen for them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from millrace.models.angles import Angles
from millrace.models.batch import ForwardBatch
from millrace.models.layers import DecoderWeights
from millrace.models.native_stack import NativeStack, native_stack_missing
from millrace.models.op_program import DecoderOps, OpProgram
from millrace.models.spec.model_spec import ModelSpec
from millrace.ops.attention import Attention
from millrace.ops.base.greedy_head import DrawnTokens
from millrace.ops.base.mesh import ONE_RANK, Mesh
from millrace.ops.base.version import Choice
from millrace.ops.elementwise.softcap import softcap


class Decoder:
    """A loaded model. It keeps no state between steps; the KV tensors are passed in."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        ops: DecoderOps,
        device: torch.device,
        dtype: torch.dtype,
        choices: dict[str, Choice],
        use_decode_kernels: bool = False,
        mesh: Mesh = ONE_RANK,
    ) -> None:
        """With `use_decode_kernels`, decode rows use separate kernels where an op has them: faster, but a token's
        result then depends on whether it belongs to the prompt."""
        self.spec = spec
        """Of a rank of a mesh: with its own heads and inner sizes."""
        self.mesh = mesh
        self.device = device
        self.dtype = dtype
        self.num_bytes = weights.num_bytes
        """Bytes of all weights, tied ones counted once, without the padding of packed layouts (under 32 rows per
        matrix)."""
        self.choices = choices
        """The version chosen for each op, and why."""
        self._weights = weights
        self._use_decode_kernels = use_decode_kernels
        # Rounded to the model's dtype, as the families that scale embeddings were trained.
        self.embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=dtype))
        self.angles = Angles(spec.ropes, weights.frequencies)
        self._program = OpProgram(
            *(weights.layers, weights.final_norm, ops, self.angles, spec.norm_eps, use_decode_kernels),
            is_parallel=spec.parallel_mlp,
        )
        self.native_stack = self._make_stack()
        """All layers in one C++ call; None if the model needs something it does not support."""

    @property
    def attention(self) -> Attention:
        return self._program.ops.attention

    @property
    def embedding_matrix(self) -> Tensor | None:
        """[vocab, hidden] if the embedding is a plain matrix, else None."""
        return self._weights.embedding.matrix

    @property
    def key_shifts(self) -> list[Tensor | None]:
        """What each layer subtracts from its keys; see `PrepareQkv`."""
        return [getattr(layer.mixer, "key_shift", None) for layer in self._weights.layers]

    def with_distinct_layers(self) -> Decoder:
        """A copy with one layer of each kind and the last layer, for warm-up: its forward pass launches the same
        kernels, most of them once."""
        layers = self._weights.layers
        kinds = {layer.kind: layer for layer in layers[:-1]}
        short = copy.copy(self)
        short._program = copy.copy(self._program)
        short._program.layers = (*kinds.values(), layers[-1])
        return short

    def _make_stack(self) -> NativeStack | None:
        if self.mesh.size > 1 or native_stack_missing(self.spec, self.choices, self._weights.layers):
            return None
        tied = self.choices.get("tied_embedding")
        has_head = tied is not None and tied.version.name == "native"
        weights = self._weights
        return NativeStack(
            self.spec,
            weights.layers,
            weights.final_norm,
            weights.head if has_head else None,
            self.angles,
            self.dtype,
            embedding_scale=self.embedding_scale,
            use_decode_kernels=self._use_decode_kernels,
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: Sequence[Tensor], nanoseconds: Tensor | None = None) -> Tensor:
        """Write the tokens' keys and values into `kv`, the KV tensors of the pool, and return the hidden states after
        the final norm: [T, hidden], or [n, hidden] of the batch's `last` tokens or `drawn` states.

        A native stack adds the time of each of native_stack.KINDS to `nanoseconds`."""
        if self.native_stack is None:
            return self.run_layers(batch, kv)
        hidden = self.native_stack(self._embed(batch), batch, kv, nanoseconds)
        drawn = batch.drawn
        return hidden if drawn is None else drawn.out.copy_(hidden.index_select(0, drawn.index))

    @torch.inference_mode()
    def run_layers(self, batch: ForwardBatch, kv: Sequence[Tensor]) -> Tensor:
        """The forward pass op by op. A native stack must give the same result, bit for bit."""
        return self._program(self._embed(batch), batch, kv)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None, draws: bool = False) -> Tensor:
        """Logits, float32 [n, vocab], of hidden states [n, hidden], soft-capped if the family does so. With `draws`,
        tokens will be drawn from them, and the head treats every row as a decode row.

        Logits are not rounded to the model's dtype: in bfloat16 the top logits are often equal, and the first such
        token would be drawn instead of the best. `out` may be written and returned."""
        logits = self._weights.head.wide(hidden, out, decode=draws and self._use_decode_kernels)
        cap = self.spec.logit_softcap
        return logits if cap is None else softcap(logits, cap)

    def draws(self, rows: int) -> bool:
        """True if `draw` is faster for this many rows than drawing from their logits."""
        return self.spec.logit_softcap is None and self._weights.head.draws(rows)

    @torch.inference_mode()
    def draw(self, hidden: Tensor, to: DrawnTokens) -> None:
        """Draw the most likely token for each hidden state [n, hidden]. Only if `draws` returns True."""
        self._weights.head.draw(hidden, self.spec.vocab_size, to)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The tokens' embeddings [T, hidden], scaled if the family does so."""
        rows = self._weights.embedding(token_ids)
        return rows if self.embedding_scale == 1.0 else rows * self.embedding_scale

    def _embed(self, batch: ForwardBatch) -> Tensor:
        if batch.embedded is not None:
            return batch.embedded
        return self.embed(batch.token_ids)
