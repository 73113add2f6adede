"""The runner of encoders: one forward pass over the packed texts of a step, and a result per text.

There is no table on the device and no draw: a row's tokens arrive with the plan that computes them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from millrace.models.encoders.encoder import pack
from millrace.models.encoders.load import LoadedEncoder
from millrace.plan.shapes.declared import DeclaredShapes
from millrace.plan.step import Admission, BlockCopies, CapturePlan, Int32s, StepInputs, StepPlan
from millrace.run.device.device import Device, Pending
from millrace.run.facts import RunnerFacts
from millrace.run.graphs.encoder_graphs import EncoderGraphs
from millrace.run.protocol import StepResult
from millrace.run.sampling.masks import Uint32s
from millrace.run.sampling.pooling import PooledPart

_NO_TOKENS = torch.zeros(0, dtype=torch.int32)


class EncoderRunner:
    facts = RunnerFacts()
    shapes: DeclaredShapes = facts.shapes
    is_built = True

    def __init__(self, model: LoadedEncoder, device: Device, graphs: EncoderGraphs | None = None) -> None:
        self._model = model
        self._device = device
        self._graphs = graphs

    def forward(self, plan: StepPlan, given: tuple[Int32s, ...] | None = None) -> None:
        """All work is one launch, which `draw` queues."""

    def draw(self, plan: StepPlan, inputs: StepInputs | None = None) -> Pending[StepResult]:
        step_no, admitted = plan.step_no, plan.admitted
        return self._device.launch(lambda: self._result(step_no, self._encode(admitted)), _to_host)

    def _encode(self, admitted: tuple[Admission, ...]) -> tuple[PooledPart, ...]:
        params = [admission.row_params.params for admission in admitted]
        texts, order = pack(
            [admission.tokens for admission in admitted],
            [one.second_from for one in params],
            [one.pooled_from for one in params],
            [one.attended for one in params],
        )
        graphs = self._graphs
        states = graphs.states(texts) if graphs is not None and graphs.fits(texts) else self._model.encoder(texts)
        results = self._model.head(states, texts)
        return tuple(
            PooledPart(admitted[index].request_id, 0, vector, is_finished=True)
            for index, vector in zip(order, results, strict=True)
        )

    @staticmethod
    def _result(step_no: int, pooled: tuple[PooledPart, ...]) -> StepResult:
        no_index, no_counts = np.zeros(0, np.int64), np.zeros(0, np.int32)
        return StepResult(step_no, _NO_TOKENS, None, no_index, no_counts, (), pooled=pooled)

    # -- what encoders have none of ----------------------------------------------------------------------------------

    def drafts(self) -> tuple[Int32s, ...]:
        raise AssertionError("encoders have no drafts")

    def mask_memory(self, count: int) -> Uint32s:
        raise AssertionError("encoders have no masks")

    def draw_ahead(self, plan: StepPlan, inputs: StepInputs) -> Pending[StepResult] | None:
        return None

    def masks_ready(self) -> None: ...

    def copy(self, copies: BlockCopies) -> Pending[float]:
        raise AssertionError("encoders have no blocks")

    def build_next(self) -> None: ...

    def capture(self, plan: CapturePlan) -> bool:
        return False


def _to_host(result: StepResult) -> StepResult:
    """Vectors of one width are copied together."""
    parts = result.pooled
    if len({part.vector.shape for part in parts}) != 1 or not parts[0].vector.is_cuda:
        return replace(result, pooled=tuple(part.to_host() for part in parts))
    vectors = torch.stack([part.vector for part in parts]).to("cpu", non_blocking=True)
    copied = (replace(part, vector=vector) for part, vector in zip(parts, vectors.unbind(0), strict=True))
    return replace(result, pooled=tuple(copied))
