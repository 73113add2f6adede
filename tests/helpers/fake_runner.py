"""A runner and a device that compute nothing, for tests of what drives them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from millrace.engine.loop import Engine
from millrace.plan.shapes.choice import ShapeChoice
from millrace.plan.step import BlockCopies, CapturePlan, StepInputs, StepPlan
from millrace.run.facts import RunnerFacts
from millrace.run.protocol import StepResult
from millrace.run.sampling.masks import Masks, Uint32s, allowed_tokens, new_masks
from millrace.run.sampling.prompt_scores import PromptLogprobs
from millrace.run.shapes.padded import PaddedShapes
from millrace.run.shapes.table import ShapeFacts


def step_result(
    plan: StepPlan,
    tokens: np.ndarray,
    *,
    counts: np.ndarray | None = None,
    prompt_logprobs: tuple[PromptLogprobs, ...] = (),
) -> StepResult:
    none = np.zeros(0, np.int64)
    drawn = torch.from_numpy(tokens)
    return StepResult(plan.step_no, drawn, None, none, none.astype(np.int32), prompt_logprobs, counts=counts)


def waiting_shapes(max_rows: int, token_budget: int, block_size: int) -> ShapeChoice:
    """Those of a device that can wait for masks, in steps of any number of rows."""
    facts = ShapeFacts(max_rows, token_budget, 4, block_size, can_capture=True, waits_above=0)
    shapes = ShapeChoice(PaddedShapes(facts))
    while shapes.captures.next() is not None:
        pass
    return shapes


class FakeDevice:
    def __init__(self, poll_s: float = 0.0) -> None:
        self.poll_s = poll_s

    def probe(self) -> None: ...

    def close(self) -> None: ...


class FakeStep:
    """A step whose result is made when somebody waits for it."""

    def __init__(self, wait: Callable[[], StepResult]) -> None:
        self.wait = wait

    def done(self) -> bool:
        return True


class FakeCopy:
    """Copies that end when a test says so."""

    def __init__(self) -> None:
        self.is_done = False
        self.error: Exception | None = None

    def done(self) -> bool:
        return self.is_done

    def wait(self) -> float:
        assert self.is_done, "nothing waits without a bound"
        if self.error is not None:
            raise self.error
        return 0.5


class FakeRunner:
    """Draws a token that depends on the row's position alone, or the same choice among the allowed ones."""

    facts = RunnerFacts()
    shapes: Any = None
    is_built = True

    def __init__(
        self, vocab_size: int = 300, *, draws_ahead: bool = False, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        """`draws_ahead`: draws are queued before their masks are known. `on_wait`: called when a step is waited for."""
        self.vocab_size, self.draws_ahead, self.on_wait = vocab_size, draws_ahead, on_wait
        self.order: list[str] = []
        """"forward", "draw" and "draw ahead", as they were queued."""
        self.has_masks = threading.Event()
        """Set when the masks of the step launched last are in its memory."""
        self.copies: dict[int, FakeCopy] = {}
        """Those started, by number."""
        self.refused_copies: set[int] = set()

    def forward(self, plan: StepPlan, given: tuple[np.ndarray, ...] | None = None) -> None:
        self.order.append("forward")

    def drafts(self) -> tuple[np.ndarray, ...]:
        return ()

    def mask_memory(self, count: int) -> Uint32s:
        self.has_masks = threading.Event()
        masks = new_masks(count, self.vocab_size)
        masks[:] = 0  # Nothing can be drawn before they are written.
        return masks

    def draw(self, plan: StepPlan, inputs: StepInputs | None = None) -> Any:
        self.order.append("draw")
        return FakeStep(lambda: self._result(plan, None if inputs is None else inputs.masks))

    def draw_ahead(self, plan: StepPlan, inputs: StepInputs) -> Any:
        assert plan.draw.waits
        if not self.draws_ahead:
            return None
        self.order.append("draw ahead")
        has_masks = self.has_masks

        def wait() -> StepResult:
            assert has_masks.is_set(), "the device would wait for ever"
            return self._result(plan, inputs.masks)

        return FakeStep(wait)

    def masks_ready(self) -> None:
        self.has_masks.set()

    def _result(self, plan: StepPlan, masks: Masks | None) -> StepResult:
        self.on_wait()
        positions = (plan.starts + plan.counts)[plan.samples]
        drawn = positions % 7
        if masks is not None:
            for index, allowed in zip(masks.index.tolist(), allowed_tokens(masks, self.vocab_size), strict=True):
                choices = np.flatnonzero(allowed)
                drawn[index] = choices[int(positions[index]) * 5 % len(choices)]
        return step_result(plan, drawn)

    def copy(self, copies: BlockCopies) -> Any:
        if copies.copies_no in self.refused_copies:
            raise RuntimeError("a copy could not be started")
        self.copies[copies.copies_no] = FakeCopy()
        return self.copies[copies.copies_no]

    def build_next(self) -> None: ...

    def capture(self, plan: CapturePlan) -> bool:
        return False


def run_engine(engine: Engine) -> None:
    """Until it is told to stop, in a thread of its own: the engine changes the priority of its thread."""
    with ThreadPoolExecutor(1, thread_name_prefix="engine") as pool:
        pool.submit(engine.run).result(timeout=240)
