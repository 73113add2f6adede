"""Drives a decoder like the engine: sequences grow in steps of any shape, over a shuffled paged cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from millrace.models.batch import ForwardBatch, States
from millrace.models.decoder import Decoder
from millrace.ops.attention.rows import PlainRows, TiledRows, plain_rows
from millrace.ops.base.state_rows import StateRows
from millrace.ops.kv.cache import write_kv


def make_batch(
    rows: Sequence[tuple[Sequence[int], int, Sequence[int]]], block_size: int, device: torch.device | None = None
) -> ForwardBatch:
    """Rows are (new token ids, tokens already in the cache, block ids)."""
    return make_grouped_batch([(tokens, computed, [blocks]) for tokens, computed, blocks in rows], block_size, device)


def make_grouped_batch(
    rows: Sequence[tuple[Sequence[int], int, Sequence[Sequence[int]]]],
    block_size: int,
    device: torch.device | None = None,
) -> ForwardBatch:
    """The same with one list of block ids per KV group."""
    token_ids, positions, starts, lens = [], [], [0], []
    num_groups = len(rows[0][2])
    block_ids: list[list[int]] = [[] for _ in range(num_groups)]
    for tokens, computed, blocks in rows:
        own = range(computed, computed + len(tokens))
        positions += own
        for group in range(num_groups):
            block_ids[group] += [blocks[group][position // block_size] for position in own]
        token_ids += tokens
        starts.append(len(token_ids))
        lens.append(computed + len(tokens))
    width = max(1, *(len(blocks[0]) for _, _, blocks in rows))
    tables = [
        [[*blocks[group], *[0] * (width - len(blocks[group]))] for _, _, blocks in rows] for group in range(num_groups)
    ]
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        block_ids=torch.tensor(block_ids, dtype=torch.int64, device=device),
        offsets=torch.tensor(positions, dtype=torch.int64, device=device) % block_size,
        rows=PlainRows(
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(lens, dtype=torch.int32, device=device),
            torch.tensor(tables, dtype=torch.int32, device=device),
            query_starts_host=starts,
            seq_lens_host=lens,
        ),
    )


def make_rows(
    rows: Sequence[tuple[Sequence[int], int, Sequence[int]]], block_size: int, device: torch.device | None = None
) -> PlainRows:
    """The same as attention takes them."""
    return plain_rows(make_batch(rows, block_size, device).rows.of_group(0))


def make_tiled(rows: PlainRows, **changes: Any) -> TiledRows:
    """The same rows as a GPU step describes them: as decode rows, unless `changes` say otherwise."""
    tables = torch.arange(len(rows.seq_lens), dtype=torch.int32, device=rows.seq_lens.device)
    fields = {"query_starts": rows.query_starts, "seq_lens": rows.seq_lens, "block_tables": rows.block_tables}
    return TiledRows(**{**fields, "table_rows": tables, **changes})


def make_attention_case(
    rows: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor, PlainRows]:
    """Rows are (queries, tokens in the cache including them). Queries are a view into a wider tensor."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    needed = [-(-length // block_size) for _, length in rows]
    free = list(range(1, sum(needed) + 3))
    draw.shuffle(free)
    blocks = [[free.pop() for _ in range(count)] for count in needed]
    batch = make_batch([([0] * q, n - q, own) for (q, n), own in zip(rows, blocks, strict=True)], block_size, device)
    kv = torch.full((2, sum(needed) + 3, kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    for (_, length), own in zip(rows, blocks, strict=True):
        for position in range(length):
            kv[:, own[position // block_size], :, position % block_size] = torch.randn(2, kv_heads, head_dim)
    queries = torch.randn(sum(q for q, _ in rows), heads + 2 * kv_heads, head_dim).to(dtype)[:, :heads]
    return queries.to(device), kv.to(device), plain_rows(batch.rows.of_group(0))


def rewritten(kv: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """`cache`, of another format, with the same tokens written; unwritten entries stay unwritten."""
    _, blocks, _, block_size, _ = kv.shape
    tokens = kv.permute(1, 3, 0, 2, 4).flatten(0, 1)
    slots = torch.arange(blocks * block_size, device=kv.device)[~tokens.isnan().flatten(1).any(1)]
    write_kv(tokens[slots], cache, slots // block_size, slots % block_size)
    return cache


def random_states(
    decoder: Decoder, num_rows: int, num_places: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """State tensors of all recurrent layers, whose content nobody may read; None if there is no such layer."""
    spec = decoder.spec.recurrent
    if spec is None:
        return None
    inputs = (num_rows, num_places, spec.conv_channels, spec.conv_width - 1)
    matrices = (num_rows, num_places, spec.heads, spec.key_dim, spec.value_dim)
    layers, nan = range(decoder.spec.num_recurrent), float("nan")
    return (
        [torch.full(inputs, nan, dtype=decoder.dtype, device=decoder.device) for _ in layers],
        [torch.full(matrices, nan, device=decoder.device) for _ in layers],
    )


def state_rows(batch: ForwardBatch, starts: Sequence[int], table_rows: Sequence[int]) -> StateRows:
    device = batch.positions.device
    columns = (torch.tensor(column, dtype=torch.int32, device=device) for column in (starts, table_rows))
    return StateRows(batch.rows.query_starts, *columns)


class PagedDriver:
    """Unwritten cache entries are NaN, so that reading one is noticed. Blocks behind a group's window are filled with
    zeros and given to whoever needs one next; their table entries stay, as in the engine."""

    def __init__(self, decoder: Decoder, block_size: int = 4, num_blocks: int = 256, seed: int = 0) -> None:
        self.decoder = decoder
        self.block_size = block_size
        shape = decoder.spec.kv_shape(num_blocks, block_size)
        self.kv = [
            torch.full(shape, float("nan"), dtype=decoder.dtype, device=decoder.device)
            for _ in range(decoder.spec.kv_groups.page_layers)
        ]
        self._windows = decoder.spec.kv_groups.windows
        self._states = random_states(decoder, num_rows=16, num_places=1)
        self._free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self._free)
        self._computed: dict[int, int] = {}
        self._blocks: dict[int, list[list[int]]] = {}
        self._num_dropped: dict[tuple[int, int], int] = {}

    def step(self, rows: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """Append tokens to sequences; per row the logits [tokens, vocab] of the new tokens."""
        batch_rows = []
        for sequence, tokens in rows:
            computed = self._computed.get(sequence, 0)
            blocks = self._blocks.setdefault(sequence, [[] for _ in self._windows])
            for group, own in enumerate(blocks):
                self._drop(sequence, group, computed)
                while len(own) * self.block_size < computed + len(tokens):
                    own.append(self._free.pop())
            batch_rows.append((tokens, computed, blocks))
            self._computed[sequence] = computed + len(tokens)
        batch = make_grouped_batch(batch_rows, self.block_size, self.decoder.device)
        self.add_states(batch, [computed for _, computed, _ in batch_rows], [sequence for sequence, _ in rows])
        logits = self.decoder.logits(self.decoder.forward(batch, self.kv))
        return list(torch.split(logits, [len(tokens) for _, tokens in rows]))

    def add_states(self, batch: ForwardBatch, starts: Sequence[int], sequences: Sequence[int]) -> None:
        """To a batch of rows that begin at these positions, if the model has recurrent layers."""
        if self._states is not None:
            batch.states = States(state_rows(batch, starts, sequences), *self._states)

    def _drop(self, sequence: int, group: int, computed: int) -> None:
        """Free the blocks that the token at position `computed` no longer sees."""
        window = self._windows[group]
        if window is None:
            return
        dropped = self._num_dropped.get((sequence, group), 0)
        visible = max(0, computed - window + 1) // self.block_size
        for block in self._blocks[sequence][group][dropped:visible]:
            for layer in self.kv:
                layer[:, block] = 0
            self._free.append(block)
        self._num_dropped[sequence, group] = max(dropped, visible)

    @property
    def num_used(self) -> int:
        """Blocks in use, in all groups."""
        return sum(len(own) for blocks in self._blocks.values() for own in blocks) - sum(self._num_dropped.values())

    def run(self, sequence: int, tokens: Sequence[int], chunk: int) -> torch.Tensor:
        """A whole sequence in chunks; logits [tokens, vocab]."""
        parts = [self.step([(sequence, tokens[at : at + chunk])])[0] for at in range(0, len(tokens), chunk)]
        return torch.cat(parts)
