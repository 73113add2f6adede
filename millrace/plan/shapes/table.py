"""The shapes that GPU steps are padded to, so that one captured graph serves every step of its shape."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from millrace.plan.step import StepShape

DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
"""Rows of decode shapes; continued in steps of 32 up to 512 and of 64 beyond."""
MIXED_TOKENS = (
    16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1408, 1664, 1792, 2048,
    2560, 3072, 4096, 5120, 6144, 8192,
)  # fmt: skip
"""Tokens of mixed shapes. Up to 2,048, a step's time jumps just above each size (8B, H200): 1,344 tokens take 30.0 ms
and 1,280 take 25.9, but 1,152 take as long as 1,280."""
PROMPT_ONLY_ROWS, PROMPT_ONLY_TOKENS = 4, 2048
"""Rows (one is for padding) and maximum tokens of prompt-only shapes, which do not launch the decode kernel."""
SPLIT_TOKENS, SPLIT_CONTEXT = 256, 512
"""Prompt-only steps of up to SPLIT_TOKENS tokens, in which a row has a context of at least SPLIT_CONTEXT tokens, have
shapes with split KV: one more launch per layer, but enough programs to fill the GPU."""
MIXED_ROWS = (32,)
"""Rows of mixed shapes, followed by the maximum number of rows. Padding rows cost almost nothing; each further shape
costs a capture."""
DECODE_BESIDE_BUDGET = (128, 256, 384)
"""Decode rows beside a full token budget of prompt tokens, followed by the maximum number of rows. Matrix products work
in tiles of 128 tokens, so finer sizes would save almost nothing."""
MIN_TOKENS_PER_ROW = 2
"""With at least this many tokens per row, most of the last layer is computed only for each row's last token."""
MAX_CHUNKS = 16
"""Full chunks of one prompt that are captured during warm-up; later chunks are captured on their second use."""
SPARE_TILES = 256
"""Maximum number of extra tiles, for rows whose last tile is not full."""
NO_LIMIT = 1 << 31
PLACES = (1, 2, 4, 8)
"""Places of a row in decode shapes with drafts: its last token and up to seven drafts."""


@dataclass(frozen=True, slots=True)
class ShapeFacts:
    """What the choice of shapes must know of a runner: the sizes of its buffers, and what its kernels can do."""

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
    takes_adapters: bool = False
    """Steps may have adapters: each shape has a variant with them."""


class ShapeTable:
    def __init__(self, facts: ShapeFacts) -> None:
        max_rows, token_budget = facts.max_rows, facts.token_budget
        self.facts = facts
        self._queries_per_tile = facts.queries_per_tile
        self._tile_decode_rows = facts.tile_decode_rows
        self._token_budget = token_budget
        self.decode_sizes = _capped([*DECODE_SIZES, *range(160, 513, 32), *range(576, max_rows + 64, 64)], max_rows)
        self._decode = {size: self._decode_shape(size) for size in self.decode_sizes}
        self._sharing = {size: replace(shape, shares_prefix=True) for size, shape in self._decode.items()}
        self._placed: dict[tuple[int, int], StepShape] = {}
        """Decode shapes with drafts that were asked for, by rows and places."""
        within = _capped(MIXED_TOKENS, token_budget)
        self.mixed_tokens = [*within, *(token_budget + rows for rows in _capped(DECODE_BESIDE_BUDGET, max_rows))]
        # One more row, for padding.
        self.mixed_rows = _capped(MIXED_ROWS, max_rows + 1)
        self._prompt_only = {size: self._prompt_shape(size) for size in within if self._has_prompt_shape(size)}
        split = [self._split_shape(size) for size in self._prompt_only]
        self._split = {shape.tokens: shape for shape in split if shape.parts > 1}
        fewer_rows, most_rows = self.mixed_rows[:-1], self.mixed_rows[-1]
        self._mixed = {(size, rows): self._mixed_shape(size, rows) for rows in fewer_rows for size in within}
        self._mixed |= {(size, most_rows): self._mixed_shape(size, most_rows) for size in self.mixed_tokens}

    def decode(self, rows: int, *, shares_prefix: bool = False, places: int = 0) -> StepShape:
        """`places`: 0, or the places of each row in a step with drafts."""
        size = self.decode_sizes[bisect_left(self.decode_sizes, rows)]
        if places:
            placed = self._placed.get((size, places))
            if placed is None:
                placed = replace(self._decode[size], tokens=size * places, places=places)
                self._placed[size, places] = placed
            return placed
        return self._sharing[size] if shares_prefix else self._decode[size]

    def _decode_shape(self, size: int) -> StepShape:
        return StepShape(size, size, size if self._tile_decode_rows else 0, is_decode=True)

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
        """Buckets with split KV, by tokens."""
        return list(self._split.values())

    def mixed(
        self, tokens: int, rows: int, tiles: int, *, has_decode_rows: bool = True, context: int = 0
    ) -> StepShape | None:
        """The smallest shape that fits the step and one padding row; None if there is none. `context`: the largest
        number of computed tokens of a row."""
        token_index, row_index = bisect_left(self.mixed_tokens, tokens), bisect_left(self.mixed_rows, rows + 1)
        if token_index == len(self.mixed_tokens) or row_index == len(self.mixed_rows):
            return None
        size = self.mixed_tokens[token_index]
        prompt_only = self._prompt_only.get(size) if not has_decode_rows and rows < PROMPT_ONLY_ROWS else None
        if prompt_only is not None and context >= SPLIT_CONTEXT:
            prompt_only = self._split.get(size, prompt_only)
        mixed = self._mixed.get((size, self.mixed_rows[row_index])) or self._mixed[size, self.mixed_rows[-1]]
        shape = prompt_only or mixed
        padding = -(-(shape.tokens - tokens) // self._queries_per_tile)
        return shape if tiles + padding <= shape.tiles else None

    def chunk(self, context: int) -> StepShape:
        """A full budget of tokens of one prompt, attended by cuDNN: no padding, no tiles."""
        budget = self._token_budget
        last_only = self.last_only(budget, 1)
        return StepShape(
            budget, 1, 0, is_decode=False, long_from=budget, has_decode_rows=False, context=context, last_only=last_only
        )

    def chunks(self, max_tokens: int) -> list[StepShape]:
        """The chunk shapes of a prompt of `max_tokens` tokens, in order."""
        contexts = range(0, max_tokens - self._token_budget + 1, self._token_budget)
        return [self.chunk(context) for context in contexts[:MAX_CHUNKS]]

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
        return not self._tile_decode_rows and PROMPT_ONLY_ROWS < tokens <= PROMPT_ONLY_TOKENS

    def _prompt_shape(self, tokens: int) -> StepShape:
        tiles = self._max_tiles(tokens, PROMPT_ONLY_ROWS)
        last_only = self.last_only(tokens, PROMPT_ONLY_ROWS)
        return StepShape(tokens, PROMPT_ONLY_ROWS, tiles, is_decode=False, has_decode_rows=False, last_only=last_only)

    def _split_shape(self, tokens: int) -> StepShape:
        tiles, max_parts = -(-tokens // self._queries_per_tile), self.facts.max_parts
        parts = max_parts[min(tiles, len(max_parts)) - 1] if max_parts and tokens <= SPLIT_TOKENS else 1
        return replace(self._prompt_only[tokens], parts=parts)

    def _mixed_shape(self, tokens: int, rows: int) -> StepShape:
        rows = min(rows, tokens + 1)
        tiles = self._max_tiles(tokens, rows)
        return StepShape(tokens, rows, tiles, is_decode=False, last_only=self.last_only(tokens, rows))

    def _max_tiles(self, tokens: int, rows: int) -> int:
        spare = min(rows, tokens) if self._tile_decode_rows else min(rows, tokens, SPARE_TILES)
        return tokens // self._queries_per_tile + spare + 1


def _capped(sizes: list[int] | tuple[int, ...], limit: int) -> list[int]:
    """The sizes below `limit`, and `limit`."""
    return [*(size for size in sizes if size < limit), limit]
