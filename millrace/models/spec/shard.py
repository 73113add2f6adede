"""The part of a model that one rank has: which heads, inner units and tokens, and which cut of every tensor.

Attention is split by heads, MLPs and experts by their inner size, embedding and LM head by the vocabulary. Norms and
routers are on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from millrace.errors import ConfigError
from millrace.models.spec.families import family_named
from millrace.models.spec.layout import (
    EMBEDDING,
    HEAD,
    AttentionLayout,
    LayerLayout,
    Matrix,
    ModelLayout,
    MoeLayout,
    TensorSpec,
    layout_of,
)
from millrace.models.spec.model_spec import ModelSpec

MAX_UNIT = 256
"""Inputs of the largest quantised blocks. Ranks have whole blocks where their number allows it."""
_SETTING = "run.tensor_parallel"


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank has of a tensor. None: all rows, all columns."""

    rows: range | None = None
    columns: range | None = None
    is_zero: bool = False
    """A bias that rank 0 adds."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        rows = whole[0] if self.rows is None else len(self.rows)
        if len(whole) == 1:
            return (rows,)
        return rows, whole[1] if self.columns is None else len(self.columns), *whole[2:]

    def slices(self, num_dimensions: int) -> tuple[slice, ...]:
        found = (slice(None) if part is None else slice(part.start, part.stop) for part in (self.rows, self.columns))
        return tuple(found)[:num_dimensions]


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int
    whole: ModelSpec
    heads: range
    kv_heads: range
    """Ranks have the same KV head where there are fewer KV heads than ranks."""
    inner: range
    expert_inner: range
    vocabularies: tuple[range, ...]
    """The tokens of every rank."""

    @property
    def vocabulary(self) -> range:
        return self.vocabularies[self.rank]

    @property
    def spec(self) -> ModelSpec:
        """With this rank's heads and inner sizes. The vocabulary is whole: every rank gets all logits."""
        moe = self.whole.moe
        return replace(
            self.whole,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            inner_size=len(self.inner),
            moe=None if moe is None else replace(moe, inner_size=len(self.expert_inner)),
        )

    @property
    def layout(self) -> ModelLayout:
        """The tensors as this rank has them."""
        layout, shape = layout_of(self.spec), (len(self.vocabulary), self.whole.hidden_size)
        return replace(
            layout,
            embedding=TensorSpec(EMBEDDING, shape),
            head=None if layout.head is None else Matrix((TensorSpec(HEAD, shape),)),
        )

    def cuts(self) -> dict[str, Cut]:
        """By name of the tensor; those that are not named are whole."""
        layout = layout_of(self.whole)
        found = {EMBEDDING: Cut(rows=self.vocabulary), HEAD: Cut(rows=self.vocabulary)}
        for layer in layout.layers:
            found.update(self._layer_cuts(layer))
        return found

    def _layer_cuts(self, layer: LayerLayout) -> Iterator[tuple[str, Cut]]:
        size, mixer = self.whole.head_dim, layer.mixer
        assert isinstance(mixer, AttentionLayout)
        queries, keys = (range(own.start * size, own.stop * size) for own in (self.heads, self.kv_heads))
        for parts in (mixer.qkv.parts, mixer.qkv.biases):
            for part, rows in zip(parts, (queries, keys, keys), strict=bool(parts)):
                yield part.name, Cut(rows=rows)
        yield from self._column_cuts(mixer.out, queries)
        if mixer.sinks is not None:
            yield mixer.sinks.name, Cut(rows=self.heads)
        if isinstance(layer.mlp, MoeLayout):
            pairs, inner = layer.mlp.experts, self.expert_inner
        else:
            pairs, inner = (layer.mlp,), self.inner
        for gate_up, down in pairs:
            for part in gate_up.all_tensors():
                yield part.name, Cut(rows=inner)
            yield from self._column_cuts(down, inner)

    def _column_cuts(self, matrix: Matrix, columns: range) -> Iterator[tuple[str, Cut]]:
        for part in matrix.parts:
            yield part.name, Cut(columns=columns)
        for bias in matrix.biases:
            yield bias.name, Cut(is_zero=self.rank > 0)


def shard_of(spec: ModelSpec, rank: int, size: int) -> Shard:
    """Raises a ConfigError if the model has too few heads. The first ranks have the largest parts."""
    if reason := _why_whole(spec):
        raise ConfigError(f"{_SETTING} is {size}, but {reason} so far. Leave --tensor-parallel out.", param=_SETTING)
    if size > spec.num_heads:
        raise ConfigError(
            f"{_SETTING} is {size}, but the model has {spec.num_heads} attention heads, and each rank needs one. Set"
            f" --tensor-parallel {spec.num_heads} or less.",
            param=_SETTING,
        )
    narrowest = min(spec.inner_size or size, spec.moe.inner_size if spec.moe is not None else spec.inner_size)
    if size > narrowest:
        raise ConfigError(
            f"{_SETTING} is {size}, but an MLP of the model has an inner size of {narrowest}. Set --tensor-parallel"
            f" {narrowest} or less.",
            param=_SETTING,
        )
    heads, kv_heads = _heads(spec, size)[rank]
    experts = 0 if spec.moe is None else spec.moe.inner_size
    return Shard(
        rank=rank,
        whole=spec,
        heads=heads,
        kv_heads=kv_heads,
        inner=_split(spec.inner_size, size, _unit(spec.inner_size, size))[rank],
        expert_inner=_split(experts, size, _unit(experts, size))[rank],
        vocabularies=tuple(_split(spec.vocab_size, size)),
    )


def _why_whole(spec: ModelSpec) -> str:
    """Why the model cannot be split, as a clause; empty if it can."""
    if spec.recurrent is not None:
        return "layers with a recurrent state are not split over ranks"
    if spec.latent is not None:
        return "layers with latent attention are not split over ranks"
    if spec.qk_norm and spec.qk_norm_span == "projection":
        return "norms over the heads of all ranks are not computed"
    if len(family_named(spec.family).names.mlp_gate_up) == 1:
        return "tensors that hold an MLP's gate and up matrices together are not split over ranks"
    return ""


def _heads(spec: ModelSpec, size: int) -> list[tuple[range, range]]:
    """The heads and KV heads of each rank. A rank has whole KV heads with all their queries; if there are more ranks
    than KV heads, some of the queries of one."""
    group = spec.num_heads // spec.num_kv_heads
    if size <= spec.num_kv_heads:
        return [(range(own.start * group, own.stop * group), own) for own in _split(spec.num_kv_heads, size)]
    found = []
    for kv_head, ranks in enumerate(_split(size, spec.num_kv_heads)):
        unit = max(1, MAX_UNIT // spec.head_dim)
        for own in _split(group, len(ranks), unit if group % unit == 0 and group // unit >= len(ranks) else 1):
            first = kv_head * group
            found.append((range(first + own.start, first + own.stop), range(kv_head, kv_head + 1)))
    return sorted(found, key=lambda heads: -len(heads[0]))


def _unit(total: int, size: int) -> int:
    """The largest power of two, up to a block, of which each rank can have a whole number."""
    unit = MAX_UNIT
    while unit > 1 and (total % unit or total // unit < size):
        unit //= 2
    return unit


def _split(total: int, size: int, unit: int = 1) -> list[range]:
    """Consecutive ranges of whole units, the longer ones first."""
    each, longer = divmod(total // unit, size)
    found, start = [], 0
    for index in range(size):
        stop = start + (each + (index < longer)) * unit
        found.append(range(start, stop))
        start = stop
    return found
