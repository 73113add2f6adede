"""Steps with drafts on a GPU: what the device knows of each row, from its admission on.

The kernels of `ops/triton/drafts.py` read and advance these columns, so that the host may plan a step before it knows
how many tokens the steps in flight give. Of rows under a grammar the host learns the drafts when the step's forward
pass begins, in time for a mask for each of their places.
"""

from __future__ import annotations

import numpy as np
import torch

from millrace.config import Speculation
from millrace.ops.triton.drafts import UNUSED, DraftColumns
from millrace.plan.step import Admission, Int32s, StepPlan
from millrace.run.device.device import Device
from millrace.run.drafting.ngram import MAX_NGRAM

MAX_SUFFIX = 16
"""Tokens that suffix drafts compare. More seldom choose another place, and each takes time."""


class DeviceDrafts:
    def __init__(
        self,
        device: Device,
        *,
        max_rows: int,
        max_context: int,
        speculate: Speculation = "ngram",
        holds_drafts: bool = False,
    ) -> None:
        """`max_rows`: table rows, padding's included. `holds_drafts`: see `DraftColumns`. Replayed drafts are written
        there when a request is admitted."""
        place = device.torch_device
        known, limit = torch.zeros((2, max_rows), dtype=torch.int32, device=place)
        history = torch.zeros((max_rows, max_context + 1), dtype=torch.int32, device=place)
        self._device, self._replays = device, speculate == "replay"
        holds_drafts = holds_drafts or self._replays
        is_ngram = speculate == "ngram" or holds_drafts
        self.columns = DraftColumns(
            known,
            limit,
            history,
            holds_drafts,
            max_match=MAX_NGRAM if is_ngram else MAX_SUFFIX,
            repeats=not is_ngram,
        )

    def admit(self, plan: StepPlan) -> None:
        for appended in plan.appended:
            end = appended.start + len(appended.tokens)
            self.columns.history[appended.row, appended.start : end] = self._device.upload(appended.tokens)
            self.columns.known[appended.row] = end
        if not plan.admitted:
            return
        columns, admitted = self.columns, plan.admitted
        for admission in admitted:
            tokens = self._with_replayed(admission) if self._replays else admission.tokens
            columns.history[admission.row, : len(tokens)] = self._device.upload(tokens)
        numbers = [(admission.row, len(admission.tokens), admission.limit) for admission in admitted]
        rows, known, limit = self._device.upload(np.array(numbers, np.int32).T.copy())
        columns.known[rows.long()], columns.limit[rows.long()] = known, limit

    def _with_replayed(self, admission: Admission) -> Int32s:
        """The known tokens, and what is drafted after them; up to the limit."""
        num_output = len(admission.tokens) - admission.num_prompt
        recorded = np.array(admission.row_params.params.prediction[num_output:], np.int32)
        return np.concatenate([admission.tokens, recorded])[: max(admission.limit, len(admission.tokens))]


def masks_drafts(plan: StepPlan) -> bool:
    """True if masked rows may have drafts: their masks depend on them."""
    if plan.masked is None or plan.draft_places is None or plan.shape.places <= 1:
        return False
    return bool(plan.draft_places[plan.masked].any())


def drafts_of_masked(plan: StepPlan, placed: Int32s | None) -> list[Int32s]:
    """The drafts of each masked row. `placed`: the tokens at all places of the plan's rows; None if none has drafts."""
    assert plan.masked is not None
    if placed is None:
        return [plan.rows[:0]] * int(plan.masked.sum())
    drafts = placed.reshape(len(plan.rows), plan.shape.places)[plan.masked, 1:]
    return [own[own != UNUSED] for own in drafts]
