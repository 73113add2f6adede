"""What depends on a row's earlier tokens: penalties over the last tokens, and DRY. Torch ops that never wait for the
device, on one row of logits. Meaning: docs/api/samplers.md."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.params.draws import DrawParams

MAX_MATCH = 64
"""Longest repetition that DRY tells from a longer one: with the usual base its penalty exceeds any logit by far."""
MAX_PENALTY = 1e30


def penalise_recent(logits: Tensor, tokens: Tensor, num_prompt: int, params: DrawParams) -> None:
    """Apply the three penalties over the last `repeat_last_n` of `tokens` (prompt, then output) to logits [vocab], in
    place: repetition over all of them, presence and frequency over those that are output."""
    first = 0 if params.repeat_last_n < 0 else max(0, len(tokens) - params.repeat_last_n)
    recent, output = tokens[first:], tokens[max(first, num_prompt) :]
    if params.repetition_penalty != 1.0:
        values = logits[recent]
        penalty = params.repetition_penalty
        logits[recent] = torch.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        counts = torch.zeros_like(logits).index_add_(0, output, logits.new_ones(len(output)))
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


def penalise_repeats(logits: Tensor, tokens: Tensor, is_breaker: Tensor, params: DrawParams) -> None:
    """DRY: lower the logit of each token that would continue a repetition of at least `dry_allowed_length` tokens, by
    dry_multiplier * dry_base ** (length - dry_allowed_length). `is_breaker`: bool [vocab]."""
    if params.dry_range >= 0:
        tokens = tokens[max(0, len(tokens) - params.dry_range) :]
    if len(tokens) < 2:
        return
    lengths = match_lengths(tokens, is_breaker[tokens])
    exponent = (lengths - params.dry_allowed_length).to(torch.float32)
    penalty = (params.dry_multiplier * torch.pow(params.dry_base, exponent)).clamp(max=MAX_PENALTY)
    penalty = torch.where(lengths >= max(1, params.dry_allowed_length), penalty, 0.0)
    logits -= torch.zeros_like(logits).scatter_reduce_(0, tokens[1:], penalty, "amax")


def match_lengths(tokens: Tensor, breaks: Tensor) -> Tensor:
    """int64 [n - 1]: how many tokens up to and including token i equal as many at the end. A match does not reach
    beyond the last breaker, nor beyond MAX_MATCH tokens."""
    depth = min(MAX_MATCH, len(tokens) - 1)
    padded = torch.nn.functional.pad(tokens[:-1], (depth - 1, 0), value=-1)
    # Line i has the tokens before and including token i, the newest last.
    before = padded.unfold(0, depth, 1)
    ending = tokens[-depth:]
    is_equal = (before == ending) & ~breaks[-depth:]
    return is_equal.flip(1).to(torch.int64).cumprod(dim=1).sum(dim=1)
