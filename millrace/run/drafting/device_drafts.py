"""Steps with drafts on a GPU: what the device knows of each row, from its admission on.

The kernels of `ops/triton/drafts.py` read and advance these columns, so that the host may plan a step before it knows
how many tokens the steps in flight give. Of rows under a grammar the host learns the drafts when the step's forward
pass begins, in time for a mask for each of their places.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millrace.config import Speculation
from millrace.ops.triton.drafts import UNUSED, DraftColumns, PredictedColumns
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
        vocab_size: int,
        speculate: Speculation = "ngram",
        holds_drafts: bool = False,
    ) -> None:
        """`max_rows`: table rows, padding's included. `holds_drafts`: see `DraftColumns`. Replayed drafts are written
        there when a request is admitted."""
        place = device.torch_device
        known, limit, sources, lengths, num_prompt = torch.zeros((5, max_rows), dtype=torch.int32, device=place)
        history = torch.zeros((max_rows, max_context + 1), dtype=torch.int32, device=place)
        self._device = device
        self._replays = speculate == "replay"
        self._vocab_size = vocab_size
        self._predictions: dict[int, Tensor] = {}
        """By row, kept until the row is given away."""
        holds_drafts = holds_drafts or self._replays
        is_ngram = speculate == "ngram" or holds_drafts
        self.columns = DraftColumns(
            known,
            limit,
            history,
            holds_drafts,
            max_match=MAX_NGRAM if is_ngram else MAX_SUFFIX,
            repeats=not is_ngram,
            predicted=PredictedColumns(torch.zeros(max_rows, dtype=torch.int64, device=place), lengths, num_prompt),
            sources=sources,
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
        if not self._replays:
            self._admit_predictions([(one, self._prediction(one)) for one in admitted])

    def _prediction(self, admission: Admission) -> Int32s:
        """Up to a token that the model does not have."""
        tokens = np.array(admission.row_params.params.prediction, np.int64)
        unknown = np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))
        return tokens[: unknown[0] if len(unknown) else None].astype(np.int32)

    def _admit_predictions(self, admitted: list[tuple[Admission, Int32s]]) -> None:
        """Rows that had a prediction before, or have one now."""
        due = [(one, tokens) for one, tokens in admitted if len(tokens) or one.row in self._predictions]
        if not due:
            return
        for one, tokens in due:
            self._predictions.pop(one.row, None)
            if len(tokens):
                self._predictions[one.row] = self._device.upload(tokens)
        assert self.columns.predicted is not None
        predicted, at = self.columns.predicted, self._device.upload(np.array([one.row for one, _ in due], np.int64))
        texts = [self._predictions.get(one.row) for one, _ in due]
        addresses = np.array([0 if text is None else text.data_ptr() for text in texts], np.int64)
        numbers = np.array([(len(tokens), one.num_prompt) for one, tokens in due], np.int32)
        predicted.addresses[at] = self._device.upload(addresses)
        lengths, num_prompt = self._device.upload(numbers.T.copy())
        predicted.lengths[at], predicted.num_prompt[at] = lengths, num_prompt

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


def drafts_of(plan: StepPlan, placed: Int32s | None) -> tuple[Int32s, ...]:
    """The drafts of each drawing row. `placed`: the tokens at all places of the plan's rows; None if none has any."""
    if placed is None:
        return (plan.rows[:0],) * int(plan.samples.sum())
    drafts = placed.reshape(len(plan.rows), plan.shape.places)[plan.samples, 1:]
    return tuple(own[own != UNUSED] for own in drafts)
