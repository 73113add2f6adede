"""Lookup tables of a GPU step's first kernel: embeddings by token and rotary angles by position."""

from __future__ import annotations

import torch

from millrace.models.decoder import Decoder
from millrace.ops.triton.step_inputs import TokenTables

ANGLE_BYTES = 1 << 28
"""Memory limit of the angle table."""


def token_tables(decoder: Decoder, num_positions: int) -> TokenTables:
    """Without an angle table if the ropes differ in width or the table would be too large; each step then computes its
    angles."""
    ropes = decoder.spec.ropes
    width = {rope.rotary_dim for rope in ropes}
    angles = None
    if len(width) == 1 and 4 * len(ropes) * num_positions * max(width) <= ANGLE_BYTES:
        tables = decoder.angles.upto(num_positions)
        angles = tables[0][None] if len(tables) == 1 else torch.stack(tables)
    return TokenTables(decoder.embedding_matrix, decoder.embedding_scale, angles)
