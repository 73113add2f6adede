"""Log-probabilities of prompt tokens, for rows that request them: position p of a chunk scores prompt token p + 1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace.models.decoder import Decoder
from millrace.plan.step import Int32s
from millrace.run.sampling.logprobs import PROMPT_SLICE, LogprobColumns, concatenate, score
from millrace.run.table.batch import StepRows
from millrace.run.table.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Scores of one request's prompt tokens from `first` on, from the chunk of one step."""

    request_id: int
    first: int
    num_top: int
    columns: LogprobColumns


def score_prompts(
    step: StepRows, query_starts: Int32s, table: RequestTable, decoder: Decoder, hidden: Tensor
) -> tuple[PromptLogprobs, ...]:
    if step.scored is None:
        return ()
    scored = []
    for index in np.flatnonzero(step.scored).tolist():
        row = int(step.rows[index])
        num_top = table.params[row].params.prompt_logprobs or 0
        start = int(step.starts[index])
        end = min(start + int(step.counts[index]), int(table.num_prompt[row]) - 1)
        first = int(query_starts[index])
        targets = torch.from_numpy(table.tokens[row][start + 1 : end + 1].astype(np.int64))
        columns = _score(decoder, hidden[first : first + end - start], targets.to(hidden.device), max(1, num_top))
        scored.append(PromptLogprobs(int(table.request_ids[row]), start + 1, num_top, columns))
    return tuple(scored)


def _score(decoder: Decoder, hidden: Tensor, targets: Tensor, num_top: int) -> LogprobColumns:
    parts = [
        score(decoder.logits(hidden[at : at + PROMPT_SLICE]), targets[at : at + PROMPT_SLICE], num_top)
        for at in range(0, len(targets), PROMPT_SLICE)
    ]
    return concatenate(parts)
