"""What a device declares before a runner exists: default budgets and times, and what its runner will hold in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millrace.config import DEFAULT_MAX_RUNNING
from millrace.run.settings import PLACES


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    dtype: torch.dtype
    """What `auto` means without INT8 products (`precision.py`)."""
    step_ms: float
    """Target time of a step that decodes."""
    max_running: int
    token_budget: int
    encode_budget: int
    """Token budget of an encoder's step. Chosen, not measured."""
    encode_dtype: torch.dtype
    """What `auto` means for an encoder: its vectors differ little from each other."""
    min_mixed_budget: int
    """Lowest default mixed budget. A device whose FLOP/s are known may have more, up to the token budget."""
    kv_fraction: float
    """Largest share of the free memory for the KV pool."""
    max_kv_tokens: int | None
    """Largest KV pool, unless the model's context is longer. None: the share alone limits it."""
    copy_batch_bytes: int
    """Bytes of KV blocks copied to or from host memory at once."""
    has_own_memory: bool = False
    """False: KV blocks in host memory come out of the same memory, and need no buffers for copies."""
    num_activations: int = 1
    """How often a step's activations are held."""
    graphs_bytes: int = 0
    """Memory reserved for captured graphs."""
    padding_rows: int = 0
    """Rows of the request table beside those of requests."""
    kept_places: int | None = None
    """States of the target that a row keeps for a feature drafter. None: those of a block and one more."""
    keeps_history: bool = False
    """Drafts come from a column on the device with all tokens of every row."""
    max_drafts: int | None = None
    """Drafts of one row that a step verifies. None: as many as are ever planned."""
    pads_drafts: bool = False
    """Every row of a step is computed with all its places, and one drafter fills them."""
    shares_cores: bool = False
    """Steps compute on the cores that other models' steps need too."""


CPU_DEFAULTS = DeviceDefaults(
    dtype=torch.float32,
    step_ms=200.0,
    max_running=256,
    token_budget=512,
    encode_budget=2048,
    encode_dtype=torch.float32,
    min_mixed_budget=512,
    kv_fraction=0.25,
    # 64 requests of 1,024 tokens. The machine keeps the rest of its memory for other programs.
    max_kv_tokens=1 << 16,
    # Steps wait for a batch.
    copy_batch_bytes=4 << 20,
    shares_cores=True,
)
CUDA_DEFAULTS = DeviceDefaults(
    dtype=torch.bfloat16,
    # The mixed budget usually keeps steps at about half of it.
    step_ms=90.0,
    max_running=DEFAULT_MAX_RUNNING,
    token_budget=8192,
    encode_budget=16384,
    encode_dtype=torch.float16,
    min_mixed_budget=2048,
    kv_fraction=0.9,
    max_kv_tokens=None,
    # Only its size in device memory matters.
    copy_batch_bytes=32 << 20,
    has_own_memory=True,
    num_activations=2,  # for captured and for uncaptured steps
    graphs_bytes=1 << 30,
    padding_rows=1,
    kept_places=PLACES[-1],
    keeps_history=True,
    max_drafts=PLACES[-1] - 1,
    pads_drafts=True,
)
