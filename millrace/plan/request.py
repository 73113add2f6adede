"""A request as the scheduler sees it while it waits or runs. Its per-step progress lives in columns (`rows.py`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from millrace.params import DEFAULT_ROW_PARAMS, FinishReason, RowParams
from millrace.plan.step import Ended, Int32s

INTERACTIVE, STANDARD, BATCH = 0, 1, 2
NUM_CLASSES = 3

OVERTAKE = 1000
"""Among the running: how many later arrivals of the next more urgent class go before a request when a step's tokens
are given out. A bound, so nobody starves."""


@dataclass(slots=True)
class Story:
    """What happened to a request on its way, for whoever asks why."""

    num_ahead: int = 0
    """Requests that waited when it came."""
    delays_before: tuple[float, ...] = ()
    """The totals of `Delays` when it came."""
    waited_for: dict[str, float] = field(default_factory=dict)
    """Seconds by cause, until it was first seated."""
    held_steps: int = 0
    """Steps in which it was passed over because another was computing its prefix."""
    diverged_at: int = -1
    """Index of the first token that differs from what the cache holds at that place; -1 when nothing there differs."""
    preempted_for: list[str] = field(default_factory=list)
    """One sentence for each preemption, the latest few."""


@dataclass(slots=True)
class Request:
    id: int
    prompt: Int32s
    max_tokens: int
    end_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    priority: int = STANDARD
    tenant: str = ""
    weight: float = 1.0
    """The tenant's share relative to others'."""
    arrival: float = 0.0
    """Seconds on the clock that `plan` is given."""
    deadline: float = math.inf
    salt: bytes = b""
    """Part of the first block's hash: adapter and tenant salt. Equal salts may share blocks."""
    read_cache: bool = True
    """False when every prompt token must be computed, as for prompt log-probabilities."""
    row_params: RowParams = DEFAULT_ROW_PARAMS

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
    yields: int = 0
    """Preemptions in favour of a request that the policy preferred."""
    charged: float = 0.0
    """Tokens of output that its tenant has been charged for."""
    story: Story = field(default_factory=Story)

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


def end_of(
    request: Request, reason: FinishReason, num_output: int, *, message: str = "", stop_token_id: int = -1
) -> Ended:
    """The request's terminal event."""
    return Ended(
        request_id=request.id,
        reason=reason,
        message=message,
        stop_token_id=stop_token_id,
        num_prompt=request.num_prompt,
        num_output=num_output,
        cached_tokens=request.cached_tokens,
        preemptions=request.preemptions,
        story=request.story,
    )
