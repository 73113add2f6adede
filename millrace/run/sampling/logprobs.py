"""Log-probabilities of the chosen tokens and of the top tokens, from raw logits, before bias, penalties or sampling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PROMPT_SLICE = 256
"""Prompt positions scored at once: limits the logits held in memory to this many rows."""


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """One entry per position. Ranks start at 1."""

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def to_host(self) -> LogprobColumns:
        return LogprobColumns(
            *(
                part.to("cpu", non_blocking=True)
                for part in (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
            )
        )


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobColumns:
    """Score the token chosen at each of n positions; `logits` [n, vocab]."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=1) + 1
    top = logprobs.topk(num_top, dim=1)
    return LogprobColumns(token_ids, chosen[:, 0], ranks, top.indices, top.values)


def concatenate(parts: list[LogprobColumns]) -> LogprobColumns:
    return LogprobColumns(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.ranks for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_logprobs for part in parts]),
    )
