"""The shapes that GPU steps are padded to, so that one captured graph serves every step of its shape, and what their
keys stand for."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from itertools import product

from millrace.plan.step import ALL_LINEARS, QKV_ALONE, StepShape
from millrace.run.settings import PLACES
from millrace.run.shapes.keys import ShapeKey
from millrace.run.shapes.sizes import MAX_CHUNKS, MIN_TOKENS_PER_ROW, SPARE_TILES, MeasuredSizes, measured_sizes

NO_LIMIT = 1 << 31
ADAPTED = (QKV_ALONE, ALL_LINEARS)


@dataclass(frozen=True, slots=True)
class ShapeFacts:
    """What a table of shapes is made from: the sizes of a runner's buffers, and what its kernels can do."""

    max_rows: int
    token_budget: int
    queries_per_tile: int
    block_size: int
    tile_decode_rows: bool = False
    """Deterministic mode: rows with a single token are tiled like others."""
    max_context: int = 0
    """Longest context whose full chunks are captured."""
    max_parts: tuple[int, ...] = ()
    """Split KV: parts of each context, by number of tiles, from one tile on; () if the model has none."""
    can_share_prefix: bool = False
    takes_long_rows: bool = False
    """Full chunks of a prompt can use cuDNN attention."""
    has_drafts: bool = False
    needs_all_states: bool = False
    """A drafter reads the states of all tokens after the last layer."""
    can_capture: bool = False
    min_split: float = math.inf
    """Fewest greedy rows that are worth a head of their own beside one that draws from logits."""
    greedy_heads: tuple[int, ...] = ()
    """Decode sizes for which there is a greedy head that computes no logits."""
    waits_above: int | None = None
    """In steps of more rows a draw may wait on the device for its masks; None: in no step."""
    takes_adapters: bool = False
    """Steps may have adapters: each shape has a variant with them."""
    sizes: MeasuredSizes = field(default_factory=measured_sizes)
    """By default those for devices without measurements."""


class ShapeTable:
    def __init__(self, facts: ShapeFacts) -> None:
        max_rows, token_budget, sizes = facts.max_rows, facts.token_budget, facts.sizes
        self.facts = facts
        self._sizes = sizes
        self.keys: list[ShapeKey] = []
        """What each key stands for. The same facts give the same keys, on every rank."""
        self._numbers: dict[ShapeKey, int] = {}
        self._queries_per_tile = facts.queries_per_tile
        self._tile_decode_rows = facts.tile_decode_rows
        self._token_budget = token_budget
        self.decode_sizes = _capped([*sizes.decode, *range(160, 513, 32), *range(576, max_rows + 64, 64)], max_rows)
        self.plain = self._declare(ShapeKey(is_tiled=self._tile_decode_rows))
        """Key of decode shapes."""
        self.sharing = self._declare(replace(self.keys[self.plain], shares_prefix=True))
        """Key of decode shapes whose rows share a prefix."""
        self._decode: dict[tuple[int, int, int], StepShape] = {}
        """Decode shapes that were asked for, by rows, key and places."""
        within = _capped(sizes.mixed_tokens, token_budget)
        self.mixed_tokens = [*within, *(token_budget + rows for rows in _capped(sizes.decode_beside_budget, max_rows))]
        # One more row, for padding.
        self.mixed_rows = _capped(sizes.mixed_rows, max_rows + 1)
        self._prompt_only = {size: self._prompt_shape(size) for size in within if self._has_prompt_shape(size)}
        split = [self._split_shape(size) for size in self._prompt_only]
        self._split = {shape.tokens: shape for shape in split if self.key_of(shape).parts > 1}
        fewer_rows, most_rows = self.mixed_rows[:-1], self.mixed_rows[-1]
        self._mixed = {(size, rows): self._mixed_shape(size, rows) for rows in fewer_rows for size in within}
        self._mixed |= {(size, most_rows): self._mixed_shape(size, most_rows) for size in self.mixed_tokens}
        contexts = range(0, facts.max_context - token_budget + 1, token_budget) if facts.takes_long_rows else ()
        self._chunks = {context: self._chunk_shape(context) for context in contexts}
        self._exact = {key: self._declare(key) for key in _exact_keys(token_budget if self._chunks else 0)}
        plain = list(enumerate(self.keys)) if facts.takes_adapters else []
        self.adapted = {
            (number, changes): self._declare(replace(key, adapters=changes))
            for changes in ADAPTED
            for number, key in plain
        }
        """Key of the same shape with adapters that change as much."""

    def _declare(self, key: ShapeKey) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.keys)
            self.keys.append(key)
        return self._numbers[key]

    def key_of(self, shape: StepShape) -> ShapeKey:
        return self.keys[shape.key]

    def tiles(self, shape: StepShape) -> int:
        """Tiles of queries for attention: at least as many as a step of this shape can have."""
        if not self.keys[shape.key].is_tiled:
            return 0
        if shape.kind == "decode":
            return shape.rows
        if shape.kind == "exact":
            return shape.tokens // self._queries_per_tile + shape.rows
        return self._max_tiles(shape.tokens, shape.rows)

    def decode(self, rows: int, *, key: int = 0, places: int = 0) -> StepShape:
        """`places`: 0, or the places of each row in a step with drafts."""
        size = self.decode_sizes[bisect_left(self.decode_sizes, rows)]
        shape = self._decode.get((size, key, places))
        if shape is None:
            shape = StepShape("decode", size * max(1, places), size, places, key)
            self._decode[size, key, places] = shape
        return shape

    def with_adapters(self, shape: StepShape, changes: int) -> StepShape:
        """The same for a step with adapters, whose graphs are others: steps without any do not pay for them, nor do
        those whose adapters change queries, keys and values alone for other linears."""
        key = self.adapted[shape.key, changes]
        if shape.kind == "decode":
            return self.decode(shape.rows, key=key, places=shape.places)
        return replace(shape, key=key)

    def places(self, wanted: int, rows: int) -> int:
        """Places of each row in a step with drafts: enough for `wanted` tokens of each, or as many as the step may draw
        from. One in deterministic mode."""
        size = self.decode_sizes[bisect_left(self.decode_sizes, rows)]
        fitting = [places for places in PLACES if self.has_places(size, places)]
        return next((places for places in fitting if places >= wanted), fitting[-1])

    def has_places(self, size: int, places: int) -> bool:
        """True if a step of `size` rows, padding included, may have this many places for each."""
        return places == 1 or (not self._tile_decode_rows and size * places <= self.facts.max_rows)

    def all_mixed(self) -> list[StepShape]:
        """Mixed shapes without split KV: fewest rows first, then by tokens."""
        return list(dict.fromkeys([*self._prompt_only.values(), *self._mixed.values()]))

    def all_split(self) -> list[StepShape]:
        """Mixed shapes with split KV, by tokens."""
        return list(self._split.values())

    def mixed(self, tokens: int, rows: int, tiles: int, *, has_decode_rows: bool = True) -> StepShape | None:
        """The smallest shape that fits the step and one padding row; None if there is none."""
        token_index, row_index = bisect_left(self.mixed_tokens, tokens), bisect_left(self.mixed_rows, rows + 1)
        if token_index == len(self.mixed_tokens) or row_index == len(self.mixed_rows):
            return None
        size = self.mixed_tokens[token_index]
        prompt_only = (
            self._prompt_only.get(size) if not has_decode_rows and rows < self._sizes.prompt_only_rows else None
        )
        mixed = self._mixed.get((size, self.mixed_rows[row_index])) or self._mixed[size, self.mixed_rows[-1]]
        shape = prompt_only or mixed
        padding = -(-(shape.tokens - tokens) // self._queries_per_tile)
        return shape if tiles + padding <= self.tiles(shape) else None

    def may_split(self, shape: StepShape) -> bool:
        """False if a mixed shape has no split KV whatever the context."""
        return shape.rows == self._sizes.prompt_only_rows

    def split(self, shape: StepShape, context: int) -> StepShape | None:
        """The same mixed shape with split KV, if it has one. `context`: most computed tokens of a row."""
        if context < self._sizes.split_context or not self.may_split(shape):
            return None
        return self._split.get(shape.tokens) if shape is self._prompt_only.get(shape.tokens) else None

    def chunk(self, context: int) -> StepShape | None:
        """A full budget of tokens of one prompt, attended by cuDNN: no padding, no tiles. Only after full chunks."""
        return self._chunks.get(context)

    def first_chunks(self) -> list[StepShape]:
        """The chunk shapes that are captured in advance, in order."""
        return list(self._chunks.values())[:MAX_CHUNKS]

    def exact(
        self, tokens: int, rows: int, *, is_tiled: bool, long_from: int = 0, last_only: bool = False
    ) -> StepShape:
        """A step's own size."""
        return StepShape("exact", tokens, rows, key=self._exact[_exact_key(is_tiled, long_from, last_only)])

    def num_tiles(self, counts: list[int], num_singles: int = 0, long_from: int = 0) -> int:
        """Tiles of `num_singles` rows of one token and of rows with these counts. Rows from `long_from` tokens on have
        none, if it is set."""
        least, most, size = 1 if self._tile_decode_rows else 2, long_from or NO_LIMIT, self._queries_per_tile
        tiles = sum(-(-count // size) for count in counts if least <= count < most)
        return tiles + num_singles if self._tile_decode_rows else tiles

    def last_only(self, tokens: int, rows: int) -> bool:
        """True if the last layer computes only each row's last token. Never in deterministic mode, where results must
        not depend on how a prompt was cut into steps."""
        if self.facts.needs_all_states:
            return False
        return not self._tile_decode_rows and tokens >= MIN_TOKENS_PER_ROW * rows

    def _has_prompt_shape(self, tokens: int) -> bool:
        return not self._tile_decode_rows and self._sizes.prompt_only_rows < tokens <= self._sizes.prompt_only_tokens

    def _prompt_shape(self, tokens: int, parts: int = 1) -> StepShape:
        last_only = self.last_only(tokens, self._sizes.prompt_only_rows)
        key = self._declare(ShapeKey(is_tiled=True, parts=parts, has_decode_rows=False, last_only=last_only))
        return StepShape("mixed", tokens, self._sizes.prompt_only_rows, key=key)

    def _split_shape(self, tokens: int) -> StepShape:
        tiles, max_parts = -(-tokens // self._queries_per_tile), self.facts.max_parts
        parts = max_parts[min(tiles, len(max_parts)) - 1] if max_parts and tokens <= self._sizes.split_tokens else 1
        return self._prompt_shape(tokens, parts)

    def _mixed_shape(self, tokens: int, rows: int) -> StepShape:
        rows = min(rows, tokens + 1)
        key = self._declare(ShapeKey(is_tiled=True, last_only=self.last_only(tokens, rows)))
        return StepShape("mixed", tokens, rows, key=key)

    def _chunk_shape(self, context: int) -> StepShape:
        budget = self._token_budget
        last_only = self.last_only(budget, 1)
        key = ShapeKey(long_from=budget, context=context, has_decode_rows=False, last_only=last_only)
        return StepShape("mixed", budget, 1, key=self._declare(key))

    def _max_tiles(self, tokens: int, rows: int) -> int:
        spare = min(rows, tokens) if self._tile_decode_rows else min(rows, tokens, SPARE_TILES)
        return tokens // self._queries_per_tile + spare + 1


def _exact_key(is_tiled: bool, long_from: int, last_only: bool) -> ShapeKey:
    return ShapeKey(is_tiled=is_tiled, long_from=long_from, last_only=last_only)


def _exact_keys(budget: int) -> list[ShapeKey]:
    yes_or_no = (False, True)
    return [_exact_key(*key) for key in product(yes_or_no, (0, budget) if budget else (0,), yes_or_no)]


def _capped(sizes: list[int] | tuple[int, ...], limit: int) -> list[int]:
    """The sizes below `limit`, and `limit`."""
    return [*(size for size in sizes if size < limit), limit]
