"""Buckets: the sizes that GPU steps are padded to, so that one captured graph serves every step of its bucket."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from millrace.ops.attention.context_rule import context_parts
from millrace.ops.tuning.load import H200_MULTIPROCESSORS
from millrace.run.packet.step_packet import Bucket

DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
"""Rows of decode buckets; continued in steps of 32 up to 512 and of 64 beyond."""
MIXED_TOKENS = (
    16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1408, 1664, 1792, 2048,
    2560, 3072, 4096, 5120, 6144, 8192,
)  # fmt: skip
"""Tokens of mixed buckets. Up to 2,048, a step's time jumps just above each size (8B, H200): 1,344 tokens take 30.0 ms
and 1,280 take 25.9, but 1,152 take as long as 1,280."""
PROMPT_ONLY_ROWS, PROMPT_ONLY_TOKENS = 4, 2048
"""Rows (one is for padding) and maximum tokens of prompt-only buckets, which do not launch the decode kernel."""
SPLIT_TOKENS, SPLIT_CONTEXT = 256, 512
"""Prompt-only steps of up to SPLIT_TOKENS tokens, in which a row has a context of at least SPLIT_CONTEXT tokens, have
buckets with split KV: one more launch per layer, but enough programs to fill the GPU."""
MIXED_ROWS = (32,)
"""Rows of mixed buckets, followed by the maximum number of rows. Padding rows cost almost nothing; each further bucket
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


class Buckets:
    def __init__(
        self,
        *,
        max_rows: int,
        token_budget: int,
        queries_per_tile: int,
        tile_decode_rows: bool,
        split_heads: int = 0,
        num_multiprocessors: int = H200_MULTIPROCESSORS,
    ) -> None:
        """`split_heads`: number of KV heads if the model allows split KV, else 0."""
        self._queries_per_tile = queries_per_tile
        self._num_multiprocessors = num_multiprocessors
        self._tile_decode_rows = tile_decode_rows
        self._token_budget = token_budget
        self.decode_sizes = _capped([*DECODE_SIZES, *range(160, 513, 32), *range(576, max_rows + 64, 64)], max_rows)
        self._decode = {size: self._decode_bucket(size) for size in self.decode_sizes}
        self._sharing = {size: replace(bucket, shares_prefix=True) for size, bucket in self._decode.items()}
        within = _capped(MIXED_TOKENS, token_budget)
        self.mixed_tokens = [*within, *(token_budget + rows for rows in _capped(DECODE_BESIDE_BUDGET, max_rows))]
        # One more row, for padding.
        self.mixed_rows = _capped(MIXED_ROWS, max_rows + 1)
        self._prompt_only = {size: self._prompt_bucket(size) for size in within if self._has_prompt_bucket(size)}
        split = [self._split_bucket(size, split_heads) for size in self._prompt_only]
        self._split = {bucket.tokens: bucket for bucket in split if bucket.parts > 1}
        fewer_rows, most_rows = self.mixed_rows[:-1], self.mixed_rows[-1]
        self._mixed = {(size, rows): self._mixed_bucket(size, rows) for rows in fewer_rows for size in within}
        self._mixed |= {(size, most_rows): self._mixed_bucket(size, most_rows) for size in self.mixed_tokens}

    def decode(self, rows: int, *, shares_prefix: bool = False, places: int = 0) -> Bucket:
        """`places`: 0, or the places of each row in a step with drafts."""
        size = self.decode_sizes[bisect_left(self.decode_sizes, rows)]
        if places:
            return replace(self._decode[size], tokens=size * places, places=places)
        return self._sharing[size] if shares_prefix else self._decode[size]

    def _decode_bucket(self, size: int) -> Bucket:
        return Bucket(size, size, size if self._tile_decode_rows else 0, is_decode=True)

    def all_mixed(self) -> list[Bucket]:
        """Mixed buckets without split KV: fewest rows first, then by tokens."""
        return list(dict.fromkeys([*self._prompt_only.values(), *self._mixed.values()]))

    def all_split(self) -> list[Bucket]:
        """Buckets with split KV, by tokens."""
        return list(self._split.values())

    def mixed(
        self, tokens: int, rows: int, tiles: int, *, has_decode_rows: bool = True, context: int = 0
    ) -> Bucket | None:
        """The smallest bucket that fits the step and one padding row; None if there is none. `context`: the largest
        number of computed tokens of a row."""
        token_index, row_index = bisect_left(self.mixed_tokens, tokens), bisect_left(self.mixed_rows, rows + 1)
        if token_index == len(self.mixed_tokens) or row_index == len(self.mixed_rows):
            return None
        size = self.mixed_tokens[token_index]
        prompt_only = self._prompt_only.get(size) if not has_decode_rows and rows < PROMPT_ONLY_ROWS else None
        if prompt_only is not None and context >= SPLIT_CONTEXT:
            prompt_only = self._split.get(size, prompt_only)
        mixed = self._mixed.get((size, self.mixed_rows[row_index])) or self._mixed[size, self.mixed_rows[-1]]
        bucket = prompt_only or mixed
        padding = -(-(bucket.tokens - tokens) // self._queries_per_tile)
        return bucket if tiles + padding <= bucket.tiles else None

    def chunk(self, context: int) -> Bucket:
        """A full budget of tokens of one prompt, attended by cuDNN: no padding, no tiles."""
        budget = self._token_budget
        last_only = self.last_only(budget, 1)
        return Bucket(
            budget, 1, 0, is_decode=False, long_from=budget, has_decode_rows=False, context=context, last_only=last_only
        )

    def chunks(self, max_tokens: int) -> list[Bucket]:
        """The chunk buckets of a prompt of `max_tokens` tokens, in order."""
        contexts = range(0, max_tokens - self._token_budget + 1, self._token_budget)
        return [self.chunk(context) for context in contexts[:MAX_CHUNKS]]

    def last_only(self, tokens: int, rows: int) -> bool:
        """True if the last layer computes only each row's last token. Never in deterministic mode, where results must
        not depend on how a prompt was cut into steps."""
        return not self._tile_decode_rows and tokens >= MIN_TOKENS_PER_ROW * rows

    def _has_prompt_bucket(self, tokens: int) -> bool:
        return not self._tile_decode_rows and PROMPT_ONLY_ROWS < tokens <= PROMPT_ONLY_TOKENS

    def _prompt_bucket(self, tokens: int) -> Bucket:
        tiles = self._max_tiles(tokens, PROMPT_ONLY_ROWS)
        last_only = self.last_only(tokens, PROMPT_ONLY_ROWS)
        return Bucket(tokens, PROMPT_ONLY_ROWS, tiles, is_decode=False, has_decode_rows=False, last_only=last_only)

    def _split_bucket(self, tokens: int, heads: int) -> Bucket:
        tiles = -(-tokens // self._queries_per_tile)
        parts = context_parts(tiles, heads, self._num_multiprocessors) if heads and tokens <= SPLIT_TOKENS else 1
        return replace(self._prompt_only[tokens], parts=parts)

    def _mixed_bucket(self, tokens: int, rows: int) -> Bucket:
        rows = min(rows, tokens + 1)
        tiles = self._max_tiles(tokens, rows)
        return Bucket(tokens, rows, tiles, is_decode=False, last_only=self.last_only(tokens, rows))

    def _max_tiles(self, tokens: int, rows: int) -> int:
        spare = min(rows, tokens) if self._tile_decode_rows else min(rows, tokens, SPARE_TILES)
        return tokens // self._queries_per_tile + spare + 1


def _capped(sizes: list[int] | tuple[int, ...], limit: int) -> list[int]:
    """The sizes below `limit`, and `limit`."""
    return [*(size for size in sizes if size < limit), limit]
