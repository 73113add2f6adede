"""A request as the scheduler sees it while it waits or runs. Its per-step progress lives in columns (`rows.py`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from millrace.plan.step import Int32s

OVERTAKE = 1000
"""How many later arrivals of the next more urgent class may pass a request: priority with a bound, so no starvation."""


@dataclass(slots=True)
class Request:
    id: int
    prompt: Int32s
    max_tokens: int
    end_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    priority: int = 1
    deadline: float = math.inf
    salt: bytes = b""
    """Part of the first block's hash: adapter and tenant salt. Equal salts may share blocks."""
    read_cache: bool = True
    """False when every prompt token must be computed, as for prompt log-probabilities."""
    adapter_slot: int = 0
    payload: object = None

    ticket: int = -1
    """Arrival number, given by the scheduler."""
    history: bytearray = field(default_factory=bytearray)
    """Every token known on the host, as int32 bytes, while waiting; while running, the full blocks only."""
    hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of `history`, as far as computed."""
    held_by: bytes | None = None
    """Hash of the block that another running request is about to fill for us."""
    num_output: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt found in the cache at the first admission."""
    preemptions: int = 0

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def rank(self) -> int:
        """Place in the queue; smaller goes first."""
        return self.ticket + self.priority * OVERTAKE

    @property
    def limit(self) -> int:
        """Most tokens, prompt included, that this request can come to hold."""
        return self.num_prompt + self.max_tokens
