"""What a runner gives, and what the engine needs of one, whatever device it runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from millrace.plan.shapes.declared import DeclaredShapes
from millrace.plan.step import BlockCopies, CapturePlan, Int32s, Int64s, StepInputs, StepPlan, TrainedDrafts
from millrace.run.device.device import Pending
from millrace.run.sampling.logprobs import LogprobColumns
from millrace.run.sampling.masks import Uint32s
from millrace.run.sampling.pooling import PooledPart
from millrace.run.sampling.prompt_scores import PromptLogprobs

TellDrafts = Callable[[StepInputs], None]


@dataclass(slots=True)  # Never modified, but a frozen dataclass takes several times as long to create.
class StepResult:
    step_no: int
    tokens: Tensor
    """Tokens drawn by the rows that draw, in plan order."""
    logprobs: LogprobColumns | None
    logprob_index: Int64s
    """Indices, among the drawing rows, of those with log-probabilities; `logprob_counts` has the number of top tokens
    for each."""
    logprob_counts: Int32s
    prompt_logprobs: tuple[PromptLogprobs, ...]
    logprob_places: Int64s | None = None
    """Which of its row's tokens each of `logprob_index` is, also those not accepted. None: all are the first."""
    view: Int32s | None = None
    """The host memory of `tokens` as an array, if it exists already."""
    counts: Int32s | None = None
    """With draft places: how many of the tokens each drawing row has. None: one each."""

    places: int = 0
    """If set, each drawing row has so many of the tokens, of which the first `counts` are its own."""
    num_drafts: Int32s | None = None
    """With draft places: how many drafts each drawing row had. None: only the device knows."""
    sources: Int32s | None = None
    """With draft places: where each drawing row's drafts came from, see `SOURCES`."""
    proposed: tuple[Int32s, ...] = ()
    """On a CPU: the drafts of each drawing row. Empty: none had any."""
    trained: TrainedDrafts | None = None
    """The drafts of a trained drafter beside drafts from text."""
    pooled: tuple[PooledPart, ...] = ()

    def drawn(self) -> Int32s:
        """All tokens, row after row."""
        tokens = self.tokens.numpy() if self.view is None else self.view
        if self.places and self.counts is not None:
            tokens = tokens.reshape(-1, self.places)[np.arange(self.places) < self.counts[:, None]]
        return tokens.astype(np.int32)


class AnyRunner(Protocol):
    """What the engine needs from a runner."""

    def forward(self, plan: StepPlan, given: tuple[Int32s, ...] | None = None) -> None:
        """Queue the forward pass of a step. Its draw must be queued before the next forward pass. `given`: what rank 0
        proposed, see `StepInputs.drafts`; None on rank 0. Where the device proposes, every rank's device does."""

    def drafts(self) -> tuple[Int32s, ...]:
        """The drafts of each drawing row of the step whose forward pass was queued last, which its masks must cover.
        Waits until they are proposed. Only for masked steps with places; a device that proposes names those of masked
        rows alone."""

    def mask_memory(self, count: int) -> Uint32s:
        """Memory for the masks of the step whose forward pass was queued last: [count, words], not initialised."""

    def draw(self, plan: StepPlan, inputs: StepInputs | None = None) -> Pending[StepResult]:
        """Queue the draw of the step whose forward pass was queued last. `inputs`: None if no row has a mask."""

    def draw_ahead(self, plan: StepPlan, inputs: StepInputs) -> Pending[StepResult] | None:
        """Queue that draw before its masks are known, for plans that say so: they will be in `mask_memory`, and
        `masks_ready` must be called, whatever fails. None if a head has no graph here: then it is queued after them."""

    def masks_ready(self) -> None:
        """The masks of that draw are computed: it may begin."""

    def copy(self, copies: BlockCopies) -> Pending[float]:
        """Start copies between the KV pool and host memory. The result is the number of seconds that they took."""

    @property
    def shapes(self) -> DeclaredShapes:
        """See `RunnerFacts`."""

    @property
    def is_built(self) -> bool:
        """True once all kernels are compiled that are compiled in advance."""

    def build_next(self) -> None:
        """Have one more kernel compiled. Call it when idle."""

    def capture(self, plan: CapturePlan) -> bool:
        """Capture a graph: some tens of milliseconds, when idle. False if no graph can be captured."""


def copy_to_host(result: StepResult, into: Tensor | None = None, view: Int32s | None = None) -> StepResult:
    """Start copying the result's tensors to the host. Tokens go to `into`, if given, whose memory is `view`."""
    drawn = result.tokens
    return StepResult(
        step_no=result.step_no,
        tokens=drawn.to("cpu", non_blocking=True) if into is None else into.copy_(drawn, non_blocking=True),
        logprobs=result.logprobs.to_host() if result.logprobs is not None else None,
        logprob_index=result.logprob_index,
        logprob_counts=result.logprob_counts,
        prompt_logprobs=tuple(replace(part, columns=part.columns.to_host()) for part in result.prompt_logprobs),
        logprob_places=result.logprob_places,
        view=view,
        counts=result.counts,
        places=result.places,
        num_drafts=result.num_drafts,
        sources=result.sources,
        proposed=result.proposed,
        trained=result.trained,
        pooled=tuple(part.to_host() for part in result.pooled),
    )
