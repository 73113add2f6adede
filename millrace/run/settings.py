"""What a runner is made with, beside its model and its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millrace.config import Speculation

KvFormat = Literal["full", "packed", "fp8", "float16", "int8", "int4"]
"""memory.kv_dtype with `auto` resolved."""
PLACES = (1, 2, 4, 8)
"""Places of a row in decode shapes with drafts: its last token and up to seven drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    num_blocks: int
    block_size: int
    max_rows: int
    max_context: int
    token_budget: int = 512
    """Of a step. Only padded shapes depend on it."""
    kv_dtype: KvFormat = "full"
    speculate: Speculation = "off"
    host_slots: int = 0
    """KV blocks that host memory holds beside the pool."""
    max_copied: int = 1
    """KV blocks copied to or from host memory in one batch."""
    adapter_slots: int = 0
    """Adapters on the device at once; 0: steps have none."""
    all_states: bool = False
    """Over ranks, whose steps must be alike: every step computes the final states of all tokens, as rank 0's drafter
    needs them."""
    state_places: int = 1
    """Places of a row's recurrent state: one for each token that it may draw in a step."""
    state_slots: int = 0
    """Checkpoints of recurrent states."""
    graphs: bool = True
    """False: nothing is captured, also on a GPU."""

    @property
    def max_tokens(self) -> int:
        """Of a step: the token budget, and one token for each decode row beside it."""
        return self.token_budget + self.max_rows

    @property
    def context_blocks(self) -> int:
        """Columns of a row's block table that its longest context needs."""
        return min(self.num_blocks, -(-self.max_context // self.block_size))
