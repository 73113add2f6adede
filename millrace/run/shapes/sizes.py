"""The sizes of GPU steps, and from which sizes on a step runs in another way. Measured on an H200, where it says so."""

from __future__ import annotations

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
HOT_DECODE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Decode sizes captured first; the others follow when the engine is idle, or on their second use."""
MIN_SHARING_ROWS, MIN_SHARED_TOKENS = 16, 256
"""Minimum rows, and minimum tokens of their shared prefix, for which the shared-prefix kernels are worth their extra
launch."""
PLACES = (1, 2, 4, 8)
"""Places of a row in decode shapes with drafts: its last token and up to seven drafts."""
