"""A request as the scheduler sees it. While it runs, its progress is kept in the columns of `rows.py`."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field

from millrace.params.classes import FinishReason
from millrace.params.keeping import Documents, Retain
from millrace.params.rows import DEFAULT_ROW_PARAMS, RowParams
from millrace.plan.divergence import Diverged, Divergence
from millrace.plan.step import ALL_LINEARS, Ended, Int32s

INTERACTIVE, STANDARD, BATCH = 0, 1, 2
NUM_CLASSES = 3

MAX_OVERTAKES = 1000
"""How many later arrivals of the next more urgent class may precede a running request when a step's tokens are
distributed. The bound prevents starvation."""


@dataclass(slots=True)
class Diagnostics:
    """What delayed a request and what it found in the prefix cache, for `/explain`."""

    num_ahead: int = 0
    """Waiting requests on arrival."""
    delays_before: tuple[float, ...] = ()
    """Totals of `Delays` on arrival."""
    waited_for: dict[str, float] = field(default_factory=dict)
    """Seconds by cause, until the first admission."""
    divergence: Divergence | None = None
    """From what was cached after the prefix that it found; None if nothing was."""
    handle: str = ""
    """Name of the handle that retains its prefix."""
    retained_tokens: int = 0
    resident_tokens: int = 0
    """Of a request with a handle: prompt tokens that were on the device when it arrived."""
    refused: str = ""
    """Why its prefix is not retained, although that was asked for."""
    has_cache: bool = True
    """False if the model computes every text whole."""
    adapter: str = ""
    """Name of its adapter."""
    adapter_wait_s: float = 0.0
    """How long it waited for its adapter to be on the device."""
    loaded_tokens: int = 0
    """Tokens whose blocks returned from host memory for it."""
    read_tokens: int = 0
    """Tokens whose blocks returned from the disk for it."""
    preempted_for: list[str] = field(default_factory=list)
    """One sentence per preemption, for the first few."""

    @property
    def diverged(self) -> Diverged | None:
        """None if no cached block differs from its prompt."""
        return None if self.divergence is None else self.divergence.found()


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
    """Weight of the holder's fair share."""
    share_of: str | None = None
    """Whose fair share it takes, in place of its tenant's."""
    arrival: float = 0.0
    """Seconds on the clock that `plan` is given."""
    deadline: float = math.inf
    salt: bytes = b""
    """Part of the first block's hash: requests share blocks only if their salts are equal."""
    adapter: int = 0
    """Slot of its adapter on the device; 0 for the base model."""
    adapter_changes: int = ALL_LINEARS
    """If it has an adapter, see `StepSizes.adapters`."""
    read_cache: bool = True
    """False if every prompt token must be computed, as for prompt log-probabilities."""
    constrained: bool = False
    """True if a grammar restricts its tokens."""
    can_draft: bool = True
    """False if its tokens must be drawn one by one."""
    can_jump: bool = True
    """False if every token must be drawn, also where the grammar allows only one."""
    retain: Retain | None = None
    """Keep its prompt cached after its end."""
    documents: Documents | None = None
    """Parts of its prompt whose cached keys and values may be used at other positions."""
    row_params: RowParams = DEFAULT_ROW_PARAMS
    output: bytes = b""
    """Tokens that another engine generated, as int32 bytes. They are computed again, as after a preemption."""

    ticket: int = -1
    """Arrival number, assigned by the scheduler."""
    history: bytearray = field(default_factory=bytearray)
    """Tokens as int32 bytes: all that the host knows while waiting, those of full blocks, or fewer, while running."""
    hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of `history`, computed as needed."""
    block_tokens: list[bytes] = field(default_factory=list)
    """The tokens of the blocks in `hashes`."""
    text_blocks: dict[int, list[tuple[bytes, bytes]]] = field(default_factory=dict)
    """By start of a document: hashes and tokens of its blocks alone, computed as needed."""
    head_start_s: float | None = None
    """Of the policy `prefix`, once it is known."""
    held_by: bytes | None = None
    """Hash of the block it waits for, which a running request is computing."""
    loads: int = 0
    """Times that blocks of its prefix were loaded from host memory for it since it began to wait."""
    returns: int = 0
    """Times that blocks of its prefix were read from the disk for it since it began to wait."""
    exact_end: int = sys.maxsize
    """While it runs: keys and values from this position on are approximate, and never enter the prefix cache."""
    num_output: int = field(init=False)
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    placed_tokens: int = 0
    """Prompt tokens whose keys and values were those of a document at other positions, at the first admission."""
    num_computed: int = 0
    """Tokens whose KV had been computed or found when it last left its row, or its engine."""
    preemptions: int = 0
    yields: int = 0
    """Preemptions in favour of a more urgent request (not for lack of blocks)."""
    charged: float = 0.0
    """Output tokens already charged to the holder of its share."""
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    def __post_init__(self) -> None:
        self.num_output = len(self.output) // 4
        if self.num_output:
            self.num_computed = self.num_prompt + self.num_output - 1

    @property
    def holder(self) -> str:
        """Of the fair share that it takes."""
        return self.tenant if self.share_of is None else self.share_of

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def scores_prompt(self) -> bool:
        """True if its prompt tokens get log-probabilities."""
        return self.row_params.params.prompt_logprobs is not None

    @property
    def pools(self) -> bool:
        """True if its result is a pooled hidden state."""
        return bool(self.row_params.params.pooling)

    @property
    def draws(self) -> bool:
        """False if its results are those of its prompt alone: it ends when that is computed."""
        return self.max_tokens > 0

    @property
    def beyond_head(self) -> bool:
        """True if its draws are more than a head of the model: shaped, or with log-probabilities."""
        params = self.row_params.params
        return params.is_shaped or params.logprobs is not None

    @property
    def rank(self) -> int:
        """Order among running requests; lower goes first."""
        return self.ticket + self.priority * MAX_OVERTAKES

    @property
    def limit(self) -> int:
        """Maximum number of tokens, prompt included."""
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
        placed_tokens=request.placed_tokens,
    )
