"""What GPU steps look tokens up in by one kernel: the matrix of embeddings, and angles of every position."""

from __future__ import annotations

import torch

from millrace.models.decoder import Decoder
from millrace.ops.triton.step_inputs import TokenTables

ANGLE_BYTES = 1 << 28
"""The most memory that the angles may take."""


def token_tables(decoder: Decoder, num_positions: int) -> TokenTables:
    """What steps look tokens up in. There are no angles where ropes differ in width, or where a table of all positions
    would be too large: then each step computes its own."""
    ropes = decoder.spec.ropes
    width = {rope.rotary_dim for rope in ropes}
    angles = None
    if len(width) == 1 and 4 * len(ropes) * num_positions * max(width) <= ANGLE_BYTES:
        tables = decoder.angles.upto(num_positions)
        angles = tables[0][None] if len(tables) == 1 else torch.stack(tables)
    return TokenTables(decoder.embedding_matrix, decoder.embedding_scale, angles)
