"""Memory for recurrent states: those of all rows, and checkpoints of them. Which features such models do not have."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millrace.config import Config, Speculation
from millrace.errors import ConfigError, MemoryPlanError
from millrace.models.spec.model_spec import ModelSpec

GIB = 1 << 30
MAX_ROWS_SHARE = 1 / 4
"""Of the free memory, for the states of an automatic number of rows."""
MAX_SLOTS_SHARE = 1 / 16
MAX_AUTOMATIC_SLOTS = 256
MIN_ROWS = 4


@dataclass(frozen=True, slots=True)
class StateMemory:
    row_bytes: int = 0
    """Of all rows, at all places."""
    num_places: int = 1
    each_bytes: int = 0
    """Of one state."""
    num_slots: int = 0
    slot_bytes: int = 0
    """Of all checkpoints."""


NO_STATES = StateMemory()


def rows_with_states(
    config: Config, spec: ModelSpec, dtype: torch.dtype, num_places: int, free_bytes: int, max_running: int
) -> int:
    """An automatic number of rows, lowered if their states would take too much memory."""
    row_bytes = spec.state_bytes(dtype.itemsize) * num_places
    if not row_bytes or config.plan.max_running:
        return max_running
    return max(MIN_ROWS, min(max_running, int(free_bytes * MAX_ROWS_SHARE) // row_bytes))


def make_state_memory(
    config: Config, spec: ModelSpec, dtype: torch.dtype, num_rows: int, num_places: int, left_bytes: int
) -> StateMemory:
    """`left_bytes`: free beside the weights."""
    each = spec.state_bytes(dtype.itemsize)
    wanted = int(config.memory.kv_state_gib * GIB)
    if not each:
        if wanted:
            raise ConfigError(
                f"memory.kv_state_gib is {config.memory.kv_state_gib:g}, but the model has no recurrent state. Leave"
                " --kv-state-gib out.",
                param="memory.kv_state_gib",
            )
        return NO_STATES
    if wanted and wanted < each:
        raise MemoryPlanError(
            f"memory.kv_state_gib is {config.memory.kv_state_gib:g}, but one state of the model takes"
            f" {each / GIB:.3f} GiB. Set --kv-state-gib {each * 16 / GIB:.3f}, which holds 16, or 0 for automatic."
        )
    num_slots = 0
    if config.plan.prefix_cache:
        automatic = min(MAX_AUTOMATIC_SLOTS, max(1, int(left_bytes * MAX_SLOTS_SHARE) // each))
        num_slots = wanted // each if wanted else automatic
    return StateMemory(num_rows * num_places * each, num_places, each, num_slots, num_slots * each)


def check_states(spec: ModelSpec, speculate: Speculation, has_drafter: bool) -> None:
    """Raise a ConfigError if a drafter that is a model would draft for a model with recurrent layers."""
    if spec.recurrent is not None and has_drafter:
        raise ConfigError(
            f"plan.speculate is {speculate} with a drafter that is a model, but the model has recurrent layers, whose"
            " drafts come from text so far. Set --speculate suffix or ngram, and remove --drafter.",
            param="plan.speculate",
        )
