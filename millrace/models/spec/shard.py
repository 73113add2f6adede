"""The part of a model that one rank has: which heads, inner units and tokens, and which cut of every tensor.

Attention and recurrent layers are split by heads, MLPs and experts by their inner size, embedding and LM head by the
vocabulary. Norms, routers and the projections to latents are on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from millrace.errors import ConfigError
from millrace.models.spec.layout import (
    EMBEDDING,
    HEAD,
    HEAD_BIAS,
    AttentionLayout,
    ConvLayout,
    LatentLayout,
    LayerLayout,
    Matrix,
    ModelLayout,
    MoeLayout,
    RecurrentLayout,
    TensorSpec,
    head_of,
    layout_of,
)
from millrace.models.spec.model_spec import ModelSpec, RecurrentSpec

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
    more_rows: tuple[range, ...] = ()
    """Rows that follow, which the tensor has elsewhere. A source of weights is asked for one range at a time."""

    def ranges(self) -> Iterator[Cut]:
        for rows in (self.rows, *self.more_rows):
            yield replace(self, rows=rows, more_rows=())

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        rows = whole[0] if self.rows is None else len(self.rows) + sum(map(len, self.more_rows))
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
    counts_keys: bool
    """False if a rank before this one has the same KV head: a sum over all KV heads takes each once."""
    inner: range
    expert_inner: range
    shared_inner: range
    """Of the MLP that every token takes beside its experts."""
    recurrent_heads: range
    recurrent_groups: range
    """Ranks have the same group where there are fewer groups than ranks."""
    vocabularies: tuple[range, ...]
    """The tokens of every rank."""

    @property
    def vocabulary(self) -> range:
        return self.vocabularies[self.rank]

    @property
    def spec(self) -> ModelSpec:
        """With this rank's heads and inner sizes. The vocabulary is whole: every rank gets all logits."""
        moe, recurrent = self.whole.moe, self.whole.recurrent
        if moe is not None:
            moe = replace(moe, inner_size=len(self.expert_inner), shared_size=len(self.shared_inner))
        if recurrent is not None:
            recurrent = replace(recurrent, heads=len(self.recurrent_heads), groups=len(self.recurrent_groups))
        return replace(
            self.whole,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            inner_size=len(self.inner),
            moe=moe,
            recurrent=recurrent,
        )

    @property
    def layout(self) -> ModelLayout:
        """The tensors as this rank has them."""
        layout, shape = layout_of(self.spec), (len(self.vocabulary), self.whole.hidden_size)
        return replace(
            layout,
            embedding=TensorSpec(EMBEDDING, shape),
            head=None if layout.head is None else head_of(self.whole, shape[0]),
        )

    def cuts(self) -> dict[str, Cut]:
        """By name of the tensor; those that are not named are whole."""
        layout = layout_of(self.whole)
        found = {name: Cut(rows=self.vocabulary) for name in (EMBEDDING, HEAD, HEAD_BIAS)}
        for layer in layout.layers:
            found.update(self._layer_cuts(layer))
        return found

    def _layer_cuts(self, layer: LayerLayout) -> Iterator[tuple[str, Cut]]:
        mixer = layer.mixer
        if isinstance(mixer, AttentionLayout):
            yield from self._attention_cuts(mixer)
        elif isinstance(mixer, LatentLayout):
            yield from self._latent_cuts(mixer)
        elif isinstance(mixer, ConvLayout):
            yield from self._conv_cuts(mixer)
        else:
            yield from self._recurrent_cuts(mixer)
        if isinstance(layer.mlp, MoeLayout):
            pairs = [(pair, self.expert_inner) for pair in layer.mlp.experts]
            pairs += [] if layer.mlp.shared is None else [(layer.mlp.shared, self.shared_inner)]
        else:
            pairs = [] if layer.mlp is None else [(layer.mlp, self.inner)]
        for (gate_up, down), inner in pairs:
            cut = Cut(rows=inner)
            if len(gate_up.parts) == 1 and self.whole.gated_mlp:  # gates, then ups
                half = gate_up.shape[0] // 2
                cut = Cut(rows=inner, more_rows=(_shifted(inner, half),))
            for part in gate_up.all_tensors():
                yield part.name, cut
            yield from self._column_cuts(down, inner)

    def _attention_cuts(self, mixer: AttentionLayout) -> Iterator[tuple[str, Cut]]:
        size = self.whole.head_dim
        # Of gated attention, a head's query and gate.
        per_head = mixer.qkv.parts[0].shape[0] // self.whole.num_heads
        queries, keys = _scaled(self.heads, per_head), _scaled(self.kv_heads, size)
        cuts = [Cut(rows=queries), Cut(rows=keys), Cut(rows=keys)]
        whole = self.whole
        if whole.qkv_by_group:
            cuts = [self._group_rows(size)]
        elif len(mixer.qkv.parts) == 1:  # all queries, all keys, all values
            queries = _scaled(self.heads, size)
            values = tuple(_shifted(keys, whole.q_size + index * whole.kv_size) for index in (0, 1))
            cuts = [Cut(rows=queries, more_rows=values)]
        for parts in (mixer.qkv.parts, mixer.qkv.biases):
            for part, cut in zip(parts, cuts, strict=bool(parts)):
                yield part.name, cut
        yield from self._column_cuts(mixer.out, _scaled(self.heads, size))
        if self.whole.qk_norm_span == "projection" and mixer.q_norm is not None and mixer.k_norm is not None:
            yield mixer.q_norm.name, Cut(rows=queries)
            yield mixer.k_norm.name, Cut(rows=keys)
        if mixer.sinks is not None:
            yield mixer.sinks.name, Cut(rows=self.heads)

    def _group_rows(self, size: int) -> Cut:
        """Of one tensor that has, for each KV head, its queries, its key and its value."""
        shared = self.whole.num_heads // self.whole.num_kv_heads
        rows: list[range] = []
        for group in self.kv_heads:
            first, last = (min(max(at - group * shared, 0), shared) for at in (self.heads.start, self.heads.stop))
            own = (range(first, last), range(shared, shared + 2))
            rows += [_shifted(_scaled(part, size), group * (shared + 2) * size) for part in own]
        return _cut_of(*rows)

    def _latent_cuts(self, mixer: LatentLayout) -> Iterator[tuple[str, Cut]]:
        own = self.whole.latent
        assert own is not None
        queries = mixer.inputs if mixer.query_up is None else mixer.query_up
        yield queries.parts[0].name, Cut(rows=_scaled(self.heads, own.key_dim + own.rope_dim))
        yield mixer.up.name, Cut(rows=_scaled(self.heads, own.key_dim + own.value_dim))
        yield from self._column_cuts(mixer.out, _scaled(self.heads, own.value_dim))

    def _conv_cuts(self, mixer: ConvLayout) -> Iterator[tuple[str, Cut]]:
        own, channels = self.whole.recurrent, self.recurrent_heads
        assert own is not None
        for part in mixer.inputs.all_tensors():
            yield part.name, _cut_of(*(_shifted(channels, index * own.heads) for index in range(3)))
        for channel in mixer.norms():
            yield channel.name, Cut(rows=channels)
        yield from self._column_cuts(mixer.out, channels)

    def _recurrent_cuts(self, mixer: RecurrentLayout) -> Iterator[tuple[str, Cut]]:
        own, heads = self.whole.recurrent, self.recurrent_heads
        assert own is not None
        keys, values = _scaled(self.recurrent_groups, own.key_dim), _scaled(heads, own.value_dim)
        if mixer.skip is None:
            channels = _cut_of(keys, _shifted(keys, own.key_size), _shifted(values, 2 * own.key_size))
            plain = [channels, Cut(rows=values), Cut(rows=heads), Cut(rows=heads)]
            inputs = self._delta_rows(own) if own.by_group else plain
        else:  # Mamba2: gates, values, keys, queries, times
            mixed = (values, *(_shifted(keys, own.value_size + at) for at in (0, own.key_size)))
            after = own.value_size + own.conv_channels
            inputs = [_cut_of(values, *(_shifted(rows, own.value_size) for rows in mixed), _shifted(heads, after))]
            channels = _cut_of(*mixed)
            yield mixer.skip.name, Cut(rows=heads)
            yield mixer.gate_norm.name, Cut(rows=values)
        for tensors in (mixer.inputs.parts, mixer.inputs.biases):
            for part, cut in zip(tensors, inputs, strict=bool(tensors)):
                yield part.name, cut
        for channel in (mixer.conv, mixer.conv_bias):
            if channel is not None:
                yield channel.name, channels
        yield mixer.decay.name, Cut(rows=heads)
        yield mixer.time_bias.name, Cut(rows=heads)
        yield from self._column_cuts(mixer.out, values)

    def _delta_rows(self, own: RecurrentSpec) -> list[Cut]:
        """Each group has a query, a key, values and gates of its heads; then betas and times of its heads."""
        wide: list[range] = []
        narrow: list[range] = []
        shared = own.heads // own.groups
        values, both = shared * own.value_dim, 2 * own.key_dim
        for group in self.recurrent_groups:
            first = max(self.recurrent_heads.start - group * shared, 0)
            last = min(self.recurrent_heads.stop - group * shared, shared)
            heads = range(first, last)
            rows = _shifted(_scaled(heads, own.value_dim), both)
            at = group * (both + 2 * values)
            wide += [_shifted(part, at) for part in (range(both), rows, _shifted(rows, values))]
            narrow += [_shifted(heads, 2 * shared * group), _shifted(heads, 2 * shared * group + shared)]
        return [_cut_of(*wide), _cut_of(*narrow)]

    def _column_cuts(self, matrix: Matrix, columns: range) -> Iterator[tuple[str, Cut]]:
        for part in matrix.parts:
            yield part.name, Cut(columns=columns)
        for bias in matrix.biases:
            yield bias.name, Cut(is_zero=self.rank > 0)


def shard_of(spec: ModelSpec, rank: int, size: int) -> Shard:
    """Raises a ConfigError if the model has too few heads. The first ranks have the largest parts."""
    if size > spec.num_heads:
        raise ConfigError(
            f"{_SETTING} is {size}, but the model has {spec.num_heads} attention heads, and each rank needs one. Set"
            f" --tensor-parallel {spec.num_heads} or less.",
            param=_SETTING,
        )
    sizes = [spec.inner_size, *((spec.moe.inner_size, spec.moe.shared_size) if spec.moe is not None else ())]
    narrowest = min((own for own in sizes if own), default=size)
    if size > narrowest:
        raise ConfigError(
            f"{_SETTING} is {size}, but an MLP of the model has an inner size of {narrowest}. Set --tensor-parallel"
            f" {narrowest} or less.",
            param=_SETTING,
        )
    if spec.recurrent is not None and size > spec.recurrent.heads:
        raise ConfigError(
            f"{_SETTING} is {size}, but recurrent layers of the model have {spec.recurrent.heads} heads. Set"
            f" --tensor-parallel {spec.recurrent.heads} or less.",
            param=_SETTING,
        )
    if spec.recurrent is not None and spec.recurrent.norm_by_group and size > spec.recurrent.groups:
        raise ConfigError(
            f"{_SETTING} is {size}, but recurrent layers of the model have norms over {spec.recurrent.groups} groups of"
            f" heads, which are not split. Set --tensor-parallel {spec.recurrent.groups} or less.",
            param=_SETTING,
        )
    out_dim = spec.head_dim if spec.latent is None else spec.latent.value_dim
    all_heads = _heads(spec.num_heads, spec.num_kv_heads, out_dim, size)
    heads, kv_heads = all_heads[rank]
    experts, shared = (0, 0) if spec.moe is None else (spec.moe.inner_size, spec.moe.shared_size)
    states, groups = range(0), range(0)
    if spec.recurrent is not None:
        states, groups = _heads(spec.recurrent.heads, spec.recurrent.groups, spec.recurrent.value_dim, size)[rank]
    return Shard(
        rank=rank,
        whole=spec,
        heads=heads,
        kv_heads=kv_heads,
        counts_keys=kv_heads not in [other for _, other in all_heads[:rank]],
        inner=_split(spec.inner_size, size, _unit(spec.inner_size, size))[rank],
        expert_inner=_split(experts, size, _unit(experts, size))[rank],
        shared_inner=_split(shared, size, _unit(shared, size))[rank],
        recurrent_heads=states,
        recurrent_groups=groups,
        vocabularies=tuple(_split(spec.vocab_size, size)),
    )


def _heads(num_heads: int, num_groups: int, head_dim: int, size: int) -> list[tuple[range, range]]:
    """The heads and the KV heads, or other groups of heads, of each rank. A rank has whole groups; if there are more
    ranks than groups, some of the heads of one."""
    shared = num_heads // num_groups
    if size <= num_groups:
        return [(_scaled(own, shared), own) for own in _split(num_groups, size)]
    found = []
    for group, ranks in enumerate(_split(size, num_groups)):
        unit = max(1, MAX_UNIT // head_dim)
        unit = unit if shared % unit == 0 and shared // unit >= len(ranks) else 1
        own = range(group, group + 1)
        found += [(_shifted(heads, group * shared), own) for heads in _split(shared, len(ranks), unit)]
    return sorted(found, key=lambda heads: -len(heads[0]))


def _scaled(own: range, by: int) -> range:
    return range(own.start * by, own.stop * by)


def _shifted(own: range, by: int) -> range:
    return range(own.start + by, own.stop + by)


def _cut_of(*rows: range) -> Cut:
    return Cut(rows=rows[0], more_rows=rows[1:])


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
