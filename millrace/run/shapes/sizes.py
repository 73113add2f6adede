"""The sizes of GPU steps, and from which sizes on a step runs in another way."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import msgspec
import torch

from millrace.ops.tuning.load import FALLBACK, read, rule_table

MIN_TOKENS_PER_ROW = 2
"""With at least this many tokens per row, most of the last layer is computed only for each row's last token."""
MAX_CHUNKS = 16
"""Full chunks of one prompt that are captured during warm-up; later chunks are captured on their second use."""
SPARE_TILES = 256
"""Maximum number of extra tiles, for rows whose last tile is not full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSizes:
    """Sizes that were measured: `ops/tuning/*/steps.json` says on what, and what each of them means."""

    decode: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    mixed_rows: tuple[int, ...]
    decode_beside_budget: tuple[int, ...]
    prompt_only_rows: int
    prompt_only_tokens: int
    split_tokens: int
    split_context: int
    hot_decode: tuple[int, ...]
    min_sharing_rows: int
    min_shared_tokens: int
    hidden_per_split_row: int
    min_jump: int
    max_jump_rows: int


@functools.cache
def measured_sizes(device: torch.device | None = None) -> MeasuredSizes:
    """Those of this kind of device; without one, or if it was not measured, those of the fallback."""
    table = read(FALLBACK, "steps") if device is None else rule_table(device, "steps")
    return msgspec.convert(table["sizes"], MeasuredSizes)
