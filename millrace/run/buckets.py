"""The sizes that GPU steps are padded to, so that a captured graph serves every step of its size."""

from __future__ import annotations

from bisect import bisect_left

from millrace.run.step_packet import Bucket

DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
"""Then in steps of 32 up to 512 and of 64 beyond."""
MIXED_TOKENS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 4096, 5120, 6144, 8192)
MIXED_ROWS = (32,)
"""Then the most rows there are. Rows that a step does not have cost next to nothing; a bucket that is met for the first
time costs a capture."""
SPARE_TILES = 256
"""Tiles beyond what full ones would need, for rows that end in the middle of one."""


class Buckets:
    def __init__(self, *, max_rows: int, token_budget: int, queries_per_tile: int, tile_singles: bool) -> None:
        self._queries_per_tile = queries_per_tile
        self._tile_singles = tile_singles
        self.decode_sizes = _capped([*DECODE_SIZES, *range(160, 513, 32), *range(576, max_rows + 64, 64)], max_rows)
        self.mixed_tokens = _capped(MIXED_TOKENS, token_budget)
        # One row more than there can be, for the padding.
        self.mixed_rows = _capped(MIXED_ROWS, max_rows + 1)
        self._mixed = {
            (size, rows): self._mixed_bucket(size, rows) for rows in self.mixed_rows for size in self.mixed_tokens
        }

    def decode(self, rows: int) -> Bucket:
        size = self.decode_sizes[bisect_left(self.decode_sizes, rows)]
        return Bucket(size, size, size if self._tile_singles else 0, is_decode=True)

    def all_mixed(self) -> list[Bucket]:
        """Few rows first, each from the least to the most tokens."""
        return list(dict.fromkeys(self._mixed.values()))

    def mixed(self, tokens: int, rows: int, tiles: int) -> Bucket | None:
        """The least bucket that holds the step and a row of padding; None when no bucket does."""
        at, place = bisect_left(self.mixed_tokens, tokens), bisect_left(self.mixed_rows, rows + 1)
        if at == len(self.mixed_tokens) or place == len(self.mixed_rows):
            return None
        bucket = self._mixed[self.mixed_tokens[at], self.mixed_rows[place]]
        padding = -(-(bucket.tokens - tokens) // self._queries_per_tile)
        return bucket if tiles + padding <= bucket.tiles else None

    def _mixed_bucket(self, tokens: int, rows: int) -> Bucket:
        rows = min(rows, tokens + 1)
        return Bucket(tokens, rows, self._most_tiles(tokens, rows), is_decode=False)

    def _most_tiles(self, tokens: int, rows: int) -> int:
        spare = min(rows, tokens) if self._tile_singles else min(rows, tokens, SPARE_TILES)
        return tokens // self._queries_per_tile + spare + 1


def _capped(sizes: list[int] | tuple[int, ...], most: int) -> list[int]:
    """The sizes below `most`, and `most`."""
    return [*(size for size in sizes if size < most), most]
