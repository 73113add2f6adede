"""What the shapes of a GPU runner are made from: its model, its buffers and its device."""

from __future__ import annotations

import torch

from millrace.models.decoder import Decoder
from millrace.ops.attention.context_rule import context_parts
from millrace.ops.attention.long_rows import CUDNN_MIN_QUERIES, can_take_long_rows
from millrace.ops.tuning.load import num_multiprocessors
from millrace.run.drafting.device_chain import paged
from millrace.run.drafting.models import DrafterModel, kv_spec_of
from millrace.run.graphs.device_state import DeviceState
from millrace.run.settings import RunnerSettings
from millrace.run.shapes.sizes import MeasuredSizes, measured_sizes
from millrace.run.shapes.table import ShapeFacts


def shape_facts(
    decoder: Decoder, state: DeviceState, settings: RunnerSettings, drafter: DrafterModel | None
) -> ShapeFacts:
    attention, spec, device = paged(decoder.attention), decoder.spec, state.table.block_tables.device
    is_tiled, sizes = attention.tile_decode_rows, measured_sizes(device)
    drafter_spec = None if drafter is None else kv_spec_of(drafter)
    # Layers with a window read these steps in their own way, see PagedAttention.
    has_full = any(window is None for window in spec.windows)
    # Ranks may have different numbers of heads, and all must declare the same shapes.
    splits = has_full and decoder.mesh.size == 1
    takes_long_rows = (
        not is_tiled
        and settings.token_budget >= CUDNN_MIN_QUERIES
        and has_full
        and all(
            can_take_long_rows(device, decoder.dtype, own.head_dim, own.attention_softcap)
            for own in (spec, *(() if drafter_spec is None else (drafter_spec,)))
        )
    )
    return ShapeFacts(
        max_rows=settings.max_rows,
        token_budget=settings.token_budget,
        queries_per_tile=attention.queries_per_tile,
        block_size=settings.block_size,
        sizes=sizes,
        tile_decode_rows=is_tiled,
        max_context=state.table.block_tables.shape[2] * settings.block_size,
        max_parts=_max_parts(sizes, attention.queries_per_tile, spec.num_kv_heads, device) if splits else (),
        can_share_prefix=not is_tiled and has_full,
        takes_long_rows=takes_long_rows,
        has_drafts=state.drafts is not None,
        needs_all_states=state.chain is not None and state.chain.reads_states and not state.chain.taps,
        can_capture=settings.graphs and device.type == "cuda",
        min_split=spec.hidden_size / sizes.hidden_per_split_row,
        greedy_heads=tuple(rows for rows in range(1, settings.max_rows + 1) if decoder.draws(rows)),
        # Steps with drafts also learn which of them were right.
        waits_above=sizes.max_jump_rows if state.gates is not None and state.drafts is None else None,
        takes_adapters=state.slots is not None,
    )


def _max_parts(sizes: MeasuredSizes, queries_per_tile: int, num_kv_heads: int, device: torch.device) -> tuple[int, ...]:
    """Parts of a context by number of tiles, see `ShapeFacts`."""
    most_tiles, num_programs = -(-sizes.split_tokens // queries_per_tile), num_multiprocessors(device)
    return tuple(context_parts(tiles, num_kv_heads, num_programs) for tiles in range(1, most_tiles + 1))
