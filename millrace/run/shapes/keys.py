"""What the key of a step shape stands for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShapeKey:
    """How a step runs, beside its sizes. Rank 0 chooses the key; every rank runs the step as it says."""

    is_tiled: bool = False
    """Queries are attended in tiles. Decode shapes have tiles only in deterministic mode."""
    parts: int = 1
    """Split KV, only without decode rows: number of parts of each tile's context."""
    long_from: int = 0
    """Rows at least this long use cuDNN attention instead of tiles; 0 for none."""
    context: int = 0
    """Shapes of one long row: its tokens computed before this step."""
    shares_prefix: bool = False
    """Decode shapes: all rows begin with the same blocks, whose keys are read once for many rows."""
    has_decode_rows: bool = True
    """True if there may be rows with a single query; if not, padding is tiled even if it is one token."""
    last_only: bool = False
    """The last layer computes only each row's last token; hidden states are then indexed by row."""
    adapters: int = 0
    """What adapters of the rows change, see `StepSizes.adapters`: these linears add what they add."""
