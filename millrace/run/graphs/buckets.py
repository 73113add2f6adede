"""The sizes that GPU steps are padded to, so that a captured graph serves every step of its size."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from millrace.ops.attention.context_rule import context_parts
from millrace.ops.tuning.load import H200_MULTIPROCESSORS
from millrace.run.packet.step_packet import Bucket

DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
"""Then in steps of 32 up to 512 and of 64 beyond."""
MIXED_TOKENS = (
    16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1408, 1664, 1792, 2048,
    2560, 3072, 4096, 5120, 6144, 8192,
)  # fmt: skip
"""Up to 2,048 the sizes before which a step's time jumps (8B, H200): 1,344 tokens take 30.0 ms and 1,280 of them 25.9,
but 1,152 take as long as 1,280."""
FEW_ROWS, FEW_ROWS_TOKENS = 4, 2048
"""A few prompts with nothing beside them, up to so many tokens, have buckets without the kernel of single queries."""
SPLIT_TOKENS, SPLIT_CONTEXT = 256, 512
"""Up to so many tokens of a few prompts, with at least so many known ones before those of one of them, have buckets in
which the keys are shared out among more programs: one more launch a layer, but a full chip."""
MIXED_ROWS = (32,)
"""Then the most rows there are. Rows that a step does not have cost next to nothing; a bucket that is met for the first
time costs a capture."""
BESIDE = (128, 256, 384)
"""Rows that decode beside as many tokens of prompts as the budget allows; then the most rows there are. Products are
computed in tiles of 128 tokens, so that finer sizes would save next to nothing."""
PRUNED_SHARE = 2
"""Tokens per row from which most of the last layer is computed for each row's last token alone."""
MOST_CHUNKS = 16
"""Whole chunks of one prompt that are captured ahead of need; further ones when they are met for the second time."""
SPARE_TILES = 256
"""Tiles beyond what full ones would need, for rows that end in the middle of one."""


class Buckets:
    def __init__(
        self,
        *,
        max_rows: int,
        token_budget: int,
        queries_per_tile: int,
        tile_singles: bool,
        split_heads: int = 0,
        num_multiprocessors: int = H200_MULTIPROCESSORS,
    ) -> None:
        """`split_heads`: KV heads, where keys may be shared out among programs; 0 where not."""
        self._queries_per_tile = queries_per_tile
        self._num_multiprocessors = num_multiprocessors
        self._tile_singles = tile_singles
        self._token_budget = token_budget
        self.decode_sizes = _capped([*DECODE_SIZES, *range(160, 513, 32), *range(576, max_rows + 64, 64)], max_rows)
        self._decode = {size: self._decode_bucket(size) for size in self.decode_sizes}
        self._sharing = {size: replace(bucket, shares=True) for size, bucket in self._decode.items()}
        within = _capped(MIXED_TOKENS, token_budget)
        self.mixed_tokens = [*within, *(token_budget + rows for rows in _capped(BESIDE, max_rows))]
        # One row more than there can be, for the padding.
        self.mixed_rows = _capped(MIXED_ROWS, max_rows + 1)
        self._few = {size: self._few_bucket(size) for size in within if self._has_few(size)}
        split = [self._split_bucket(size, split_heads) for size in self._few]
        self._split = {bucket.tokens: bucket for bucket in split if bucket.parts > 1}
        few, most = self.mixed_rows[:-1], self.mixed_rows[-1]
        self._mixed = {(size, rows): self._mixed_bucket(size, rows) for rows in few for size in within}
        self._mixed |= {(size, most): self._mixed_bucket(size, most) for size in self.mixed_tokens}

    def decode(self, rows: int, *, shares: bool = False) -> Bucket:
        size = self.decode_sizes[bisect_left(self.decode_sizes, rows)]
        return self._sharing[size] if shares else self._decode[size]

    def _decode_bucket(self, size: int) -> Bucket:
        return Bucket(size, size, size if self._tile_singles else 0, is_decode=True)

    def all_mixed(self) -> list[Bucket]:
        """Few rows first, each from the least to the most tokens."""
        return list(dict.fromkeys([*self._few.values(), *self._mixed.values()]))

    def all_split(self) -> list[Bucket]:
        """Those of few prompts after many known tokens, from the least to the most of their own."""
        return list(self._split.values())

    def mixed(self, tokens: int, rows: int, tiles: int, *, has_singles: bool = True, context: int = 0) -> Bucket | None:
        """The least bucket that holds the step and a row of padding; None when no bucket does. `context`: the most
        tokens that a row has from earlier steps."""
        at, place = bisect_left(self.mixed_tokens, tokens), bisect_left(self.mixed_rows, rows + 1)
        if at == len(self.mixed_tokens) or place == len(self.mixed_rows):
            return None
        size = self.mixed_tokens[at]
        few = self._few.get(size) if not has_singles and rows < FEW_ROWS else None
        if few is not None and context >= SPLIT_CONTEXT:
            few = self._split.get(size, few)
        bucket = few or self._mixed.get((size, self.mixed_rows[place])) or self._mixed[size, self.mixed_rows[-1]]
        padding = -(-(bucket.tokens - tokens) // self._queries_per_tile)
        return bucket if tiles + padding <= bucket.tiles else None

    def chunk(self, context: int) -> Bucket:
        """As many tokens of one prompt as the budget allows, to which the library attends: no padding, no tiles."""
        budget = self._token_budget
        last_only = self.last_only(budget, 1)
        return Bucket(
            budget, 1, 0, is_decode=False, long_from=budget, has_singles=False, context=context, last_only=last_only
        )

    def chunks(self, most_tokens: int) -> list[Bucket]:
        """Those of prompts of up to so many tokens, the first chunk first."""
        contexts = range(0, most_tokens - self._token_budget + 1, self._token_budget)
        return [self.chunk(context) for context in contexts[:MOST_CHUNKS]]

    def last_only(self, tokens: int, rows: int) -> bool:
        """Whether most of the last layer is left out in a step of this size. Where nothing may depend on how a prompt
        was cut into steps, never."""
        return not self._tile_singles and tokens >= PRUNED_SHARE * rows

    def _has_few(self, tokens: int) -> bool:
        return not self._tile_singles and FEW_ROWS < tokens <= FEW_ROWS_TOKENS

    def _few_bucket(self, tokens: int) -> Bucket:
        tiles = self._most_tiles(tokens, FEW_ROWS)
        last_only = self.last_only(tokens, FEW_ROWS)
        return Bucket(tokens, FEW_ROWS, tiles, is_decode=False, has_singles=False, last_only=last_only)

    def _split_bucket(self, tokens: int, heads: int) -> Bucket:
        tiles = -(-tokens // self._queries_per_tile)
        parts = context_parts(tiles, heads, self._num_multiprocessors) if heads and tokens <= SPLIT_TOKENS else 1
        return replace(self._few[tokens], parts=parts)

    def _mixed_bucket(self, tokens: int, rows: int) -> Bucket:
        rows = min(rows, tokens + 1)
        tiles = self._most_tiles(tokens, rows)
        return Bucket(tokens, rows, tiles, is_decode=False, last_only=self.last_only(tokens, rows))

    def _most_tiles(self, tokens: int, rows: int) -> int:
        spare = min(rows, tokens) if self._tile_singles else min(rows, tokens, SPARE_TILES)
        return tokens // self._queries_per_tile + spare + 1


def _capped(sizes: list[int] | tuple[int, ...], most: int) -> list[int]:
    """The sizes below `most`, and `most`."""
    return [*(size for size in sizes if size < most), most]
